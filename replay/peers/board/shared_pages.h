// Pages that several processes map: a sealed memfd, which is handed out as a descriptor and never shrinks under a reader.
#pragma once

#include <cstddef>
#include <utility>

#include "journal/base/no_copies.h"
#include "journal/base/unique_fd.h"
#include "statemachine/types.h"

namespace amem::board {

class SharedPages : NoCopies {
 public:
  enum class Writers : bool { kMakerOnly, kAll };

  // `name` is what one sees in /proc/PID/maps. With kMakerOnly only this mapping can ever write (F_SEAL_FUTURE_WRITE; before
  // Linux 5.1 nothing enforces it, and others just do not write). The pages are zero. The first `reserved` bytes have memory;
  // the rest gets it when touched, and if there is none the process ends (SIGBUS): call Reserve first.
  static Result<SharedPages> Make(const char* name, Bytes bytes, Writers writers, Bytes reserved);
  // kOutOfMemory: there is none.
  [[nodiscard]] Status Reserve(Bytes offset, Bytes bytes) const;
  // Of this process alone, without a descriptor.
  static Result<SharedPages> MakePrivate(Bytes bytes);
  // Maps what another process made. kCorrupt: it is not sealed, so it could shrink, or has fewer than `bytes_least`.
  static Result<SharedPages> Open(int fd, Bytes bytes_least, Writers writers);

  SharedPages(SharedPages&& other) noexcept
      : fd_(std::move(other.fd_)), at_(std::exchange(other.at_, nullptr)), bytes_(other.bytes_) {}
  SharedPages& operator=(SharedPages&&) = delete;
  ~SharedPages();

  [[nodiscard]] std::byte* data() const { return at_; }
  [[nodiscard]] Bytes bytes() const { return bytes_; }
  [[nodiscard]] int fd() const { return fd_.get(); }  // to hand out; of the maker only, -1 of the others

 private:
  SharedPages(UniqueFd fd, std::byte* at, Bytes bytes) : fd_(std::move(fd)), at_(at), bytes_(bytes) {}
  UniqueFd fd_;
  std::byte* at_;
  Bytes bytes_;
};

}  // namespace amem::board
