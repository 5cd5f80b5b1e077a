// Host memory that is there, and only has to be pinned: threads of its own make the system provide it. That is nearly all of
// the time that pinning takes, and needs no driver call, so it can be done ahead, by several threads, and while NCCL starts up.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "journal/base/fork_guard.h"
#include "replay/driver/driver.h"

namespace amem {

// Thread-safe.
class PageSupply {
 public:
  // `claim` says whether the host has another piece, `touched` is called once it is there; by several threads at once.
  struct Asking {
    std::function<bool()> claim;
    std::function<void()> touched;
  };
  PageSupply(Copier& copier, Bytes piece, std::size_t ahead, Asking asking);  // `ahead`: so many threads for kAhead
  ~PageSupply();  // waits for the threads, each of which ends with the piece that it is at
  PageSupply(const PageSupply&) = delete;
  PageSupply& operator=(const PageSupply&) = delete;

  enum class Haste { kAhead, kNow };  // threads that give way to all others; or as many as gain by it
  // That many pieces are wanted, those counted in that are there. Returns at once; a call replaces the one before.
  void Want(std::size_t pieces, Haste haste);
  // A piece, and one less is wanted then. Waits for one that is under way; null: none is, or the driver has no use for them.
  std::unique_ptr<HostPages> Take();
  [[nodiscard]] std::size_t Pieces() const;  // that are there, or under way
  void Drop();                               // what is there goes back, and nothing is wanted

 private:
  struct Shared;
  const std::size_t ahead_;
  const std::shared_ptr<Shared> shared_;
  const ForkGuard fork_;
};

}  // namespace amem
