// Pinned host memory for contents: handed out in rooms, kept from one cycle to the next, and pinned ahead by a thread of its
// own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "journal/base/clock.h"
#include "journal/base/fork_guard.h"
#include "replay/cycle/page_supply.h"
#include "replay/driver/driver.h"
#include "statemachine/types.h"

namespace amem {

// Thread-safe.
class PinnedMemory {
 public:
  struct Options {
    Bytes chunk = 0;                     // is pinned at once
    std::chrono::milliseconds quiet{0};  // Prepare calls the driver when it was not called, nor Busy, for so long
    Bytes prepare_limit = 0;             // Prepare pins no more than this; a Take that needs more pins it nevertheless
    std::size_t prepare_threads = 1;     // that make the system provide memory for Prepare
  };
  struct Statistics {
    Bytes pinned_bytes = 0;    // held, used or not
    Bytes pinned_in_take = 0;  // of those, what preparing had not provided
    std::uint64_t pin_ns = 0;  // pinning in Take
    std::string not_prepared;  // not empty: why preparing stopped early
  };
  struct Room {
    std::byte* at = nullptr;
    Bytes bytes = 0;
    bool joined = false;  // lies directly behind the room before, in the same pinned buffer
  };

  PinnedMemory(Copier& copier, Options options)
      : copier_(copier), options_(options), pages_(copier, options.chunk, options.prepare_threads) {}
  ~PinnedMemory();  // in a forked child it touches nothing
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  Result<Room> Take(Bytes wanted);  // a multiple of 4096, at most that much
  // So much will be taken soon: what is not pinned yet is made ready for it by several threads.
  void Expect(Bytes wanted);
  void TakeBack();    // all rooms at once; the memory stays pinned
  void BeginCount();  // of what Take pins

  // Begins to pin memory in the background until `expected` bytes or the limit are there. A call replaces the one before.
  void Prepare(Bytes expected);
  void Rest(bool resting);  // the thread pins nothing meanwhile
  void Busy() { busy_ns_.store(MonotonicNs(), std::memory_order_relaxed); }
  // Waits for the piece that is being pinned, some 10 ms. False: the driver has not come back from it.
  bool StopPreparing();
  // Gives memory back in which there is no room taken, until no more than `keep` is left; stops preparing.
  void Trim(Bytes keep);
  [[nodiscard]] Statistics Count() const;

 private:
  void PinInBackground();
  void AwaitQuiet();
  void WantPages(Bytes more, PageSupply::Haste haste);

  Copier& copier_;
  const Options options_;
  PageSupply pages_;
  const ForkGuard fork_;
  std::atomic<std::uint64_t> busy_ns_{0};

  std::mutex thread_mutex_;  // over thread_; taken before the other
  std::unique_ptr<std::thread> thread_;

  mutable std::mutex mutex_;  // over all below
  std::condition_variable changed_;
  std::vector<std::unique_ptr<PinnedBuffer>> buffers_;  // filled in order; emptied all at once
  std::size_t filling_ = 0;
  Bytes filled_ = 0;
  Statistics statistics_;
  Bytes target_ = 0;  // of preparing
  std::chrono::steady_clock::time_point asked_;
  bool resting_ = false;    // preparing waits for Finish
  bool pinning_ = false;    // preparing is inside the driver
  bool preparing_ = false;  // the thread has not reached its end
};

}  // namespace amem
