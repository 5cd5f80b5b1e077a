// A file descriptor with an owner, and the few calls the journal makes on one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

#include "statemachine/types.h"

namespace amem {

class File {
 public:
  File() = default;
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  // open(2), close-on-exec; kNotFound when there is no such file, kIo otherwise.
  static Result<File> Open(const std::filesystem::path& path, int flags, unsigned mode = 0600);
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] Result<Bytes> Size() const;
  // Reads until `into` is full or the file ends; the number of bytes read.
  [[nodiscard]] Result<std::size_t> ReadAt(Bytes offset, std::span<std::byte> into) const;
  [[nodiscard]] Status Write(std::string_view text) const;

 private:
  int fd_ = -1;
};

// "open /x/y: No space left on device (errno 28)", with what can be done about the usual ones.
Status SystemFailure(std::string_view doing, const std::filesystem::path& path, int error);
// Up to `limit` bytes of a small file; empty when it cannot be read.
std::string ReadSmallFile(const std::filesystem::path& path, std::size_t limit = 4096);

}  // namespace amem
