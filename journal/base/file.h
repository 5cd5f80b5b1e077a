// A file: its descriptor, and the few calls that the journal makes on one.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "journal/base/unique_fd.h"
#include "statemachine/types.h"

namespace amem {

class File {
 public:
  File() = default;
  explicit File(int fd) : fd_(fd) {}

  // open(2), close-on-exec; kNotFound when there is no such file, kIo otherwise.
  static Result<File> Open(const std::filesystem::path& path, int flags, unsigned mode = 0600);
  // A regular file, and without waiting for anybody; what else has the name, such as a pipe, is kInvalid. A link is followed
  // only where the user of a tool has named it: in a directory that somebody else has filled it may lead to any file of the
  // reader's.
  enum class Links : bool { kRefused, kFollowed };
  static Result<File> OpenToRead(const std::filesystem::path& path, Links links = Links::kRefused);
  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] Result<Bytes> Size() const;
  // Reads until `into` is full or the file ends; the number of bytes read.
  [[nodiscard]] Result<std::size_t> ReadAt(Bytes offset, std::span<std::byte> into) const;
  [[nodiscard]] Status Write(std::string_view text) const;  // kPeerLost: of a pipe whose reader has gone

 private:
  UniqueFd fd_;
};

std::string ErrnoText(int error);
// kNotFound for ENOENT and ESRCH, kNoDescriptors for EMFILE and ENFILE, kIo for any other errno.
Code CodeOfErrno(int error);
// "open /x/y: No space left on device (errno 28)", with what can be done about the usual ones.
Status SystemFailure(std::string_view doing, const std::filesystem::path& path, int error);
// Where a symbolic link leads, and which file a descriptor is of, as the kernel shows it; empty: that cannot be read.
std::string LinkOf(const std::filesystem::path& link);
std::string PathOf(int fd);
// Up to `limit` bytes of a small file; empty when it cannot be read, or is none that OpenToRead opens. The way to read a file
// whole: tests/tidy finds others.
std::string ReadSmallFile(const std::filesystem::path& path, std::size_t limit = 4096);
std::string FirstLineOf(const std::filesystem::path& path);  // of such a file, without what ends it

}  // namespace amem
