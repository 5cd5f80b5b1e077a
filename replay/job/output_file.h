// The file that a command is told to write with -o.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "journal/base/file.h"

namespace amem {

// A regular file is replaced once the new one is whole, also where a link leads to it, so that nobody finds half a file. What
// is none, such as a device or a pipe, is written to. "-" is standard output.
class OutputFile {
 public:
  static Result<OutputFile> Open(const std::filesystem::path& path);
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

}  // namespace amem
