// The files that a command writes: the one that it is told with -o, and temporary ones.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>

#include "journal/base/file.h"
#include "journal/base/no_copies.h"
#include "statemachine/types.h"

namespace amem {

// A regular file is replaced once the new one is whole, also where a link leads to it, so that nobody finds half a file. What
// is none, such as a device or a pipe, is written to. "-" is standard output.
class OutputFile {
 public:
  // Permissions of a file that is made; the user's mask takes its part.
  static constexpr unsigned kPrivate = 0600, kShared = 0666;
  static Result<OutputFile> Open(const std::filesystem::path& path, unsigned mode = kShared);
  OutputFile(OutputFile&&) noexcept = default;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();  // without Commit: what was there before stays

  void Write(std::string_view bytes);  // a failure is told by Commit
  Status Commit();
  // Then what a command has to say besides belongs on stderr.
  [[nodiscard]] bool is_standard_output() const { return standard_output_; }
  [[nodiscard]] Bytes bytes() const { return bytes_; }  // written so far

 private:
  OutputFile() = default;
  void Flush();

  std::filesystem::path path_, unfinished_;  // empty: it is not to be renamed
  File file_;
  bool standard_output_ = false;
  std::string buffer_;
  Bytes bytes_ = 0;
  Status failure_;
};

// A directory for temporary files: made when it is first asked for, removed with the object.
class ScratchDirectory : NoCopies {
 public:
  ScratchDirectory() = default;
  ~ScratchDirectory() { Remove(path_); }
  // Below TMPDIR, with mode 0700.
  Result<std::filesystem::path> Get() {
    if (path_.empty()) {
      std::string name = std::filesystem::temp_directory_path() / "amem-replay-XXXXXX";
      if (::mkdtemp(name.data()) == nullptr)
        return Status{Code::kIo, "make a directory " + name + ": " + std::strerror(errno) + "; name another place in TMPDIR"};
      path_ = name;
    }
    return path_;
  }
  // A path in it that nothing else has.
  Result<std::filesystem::path> New() {
    const Result<std::filesystem::path> directory = Get();
    return directory ? *directory / std::to_string(++paths_) : directory;
  }
  // Also while other threads make files in the directory, or remove it too: a file in its place leaves them nothing to make any
  // in.
  static void Remove(const std::filesystem::path& directory) {
    namespace fs = std::filesystem;
    if (directory.empty()) return;
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    std::error_code ignored;
    const fs::path gone = directory.string() + ".gone";
    fs::rename(directory, gone, ignored);
    std::ofstream{directory};
    for (int tries = 0; tries < 10 && fs::exists(gone, ignored); ++tries) fs::remove_all(gone, ignored);
    fs::remove_all(directory, ignored);  // the file, or the directory if it could not be renamed
  }

 private:
  std::filesystem::path path_;
  int paths_ = 0;
};

}  // namespace amem
