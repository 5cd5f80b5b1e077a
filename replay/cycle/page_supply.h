// Host memory that the system has provided and that only needs to be pinned. Populating takes most of the time of pinning and
// needs no driver call, so threads can do it ahead, while NCCL starts up.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "journal/base/fork_guard.h"
#include "replay/driver/driver.h"

namespace amem {

// Thread-safe. In a forked child only Take and the destructor may be called, and do nothing.
class PageSupply {
 public:
  // `claim` says whether the host has room for another piece; `touched` is called once it exists. Several threads call them.
  struct Asking {
    std::function<bool()> claim;
    std::function<void()> touched;
  };
  PageSupply(Copier& copier, Bytes piece, std::size_t ahead, Asking asking);  // `ahead`: threads for Haste::kAhead
  ~PageSupply();                                                              // waits until each thread has finished its piece
  PageSupply(const PageSupply&) = delete;
  PageSupply& operator=(const PageSupply&) = delete;

  enum class Haste { kAhead, kNow };  // low priority; or as many threads as help
  // How many pieces are wanted, including those that exist. Returns at once; replaces the last call.
  void Want(std::size_t pieces, Haste haste);
  // Takes a piece; then one less is wanted. Waits for one under way. Null: there is none, or the driver has no use for them.
  std::unique_ptr<HostPages> Take();
  [[nodiscard]] std::size_t Pieces() const;  // ready or under way
  void Drop();                               // frees all pieces; none are wanted any more

 private:
  struct Shared;
  const std::size_t ahead_;
  const std::shared_ptr<Shared> shared_;
  const ForkGuard fork_;
};

}  // namespace amem
