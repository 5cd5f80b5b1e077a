// A directory for temporary files: made when it is first asked for, removed with the object.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "statemachine/types.h"

namespace amem {

class ScratchDirectory {
 public:
  ScratchDirectory() = default;
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  ~ScratchDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
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

 private:
  std::filesystem::path path_;
  int paths_ = 0;
};

}  // namespace amem
