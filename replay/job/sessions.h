// Sessions: the directories of sessions that a command is given, whichever way they are named.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "replay/job/scratch_directory.h"

namespace amem {

class SessionFinder {
 public:
  struct Found {
    std::vector<std::filesystem::path> sessions;  // directories, each once
    std::vector<std::string> problems;            // places that hold none, or could not be read
  };
  // Each place is the directory of a session, or one that holds several, or a pack (pack.h). What is unpacked lives as long as
  // the finder.
  Found Find(std::span<const std::filesystem::path> places);

 private:
  void Unpack(const std::filesystem::path& pack, Found& found);
  static void Add(std::vector<std::filesystem::path> sessions, Found& found);

  ScratchDirectory scratch_;
  int packs_ = 0;
};

}  // namespace amem
