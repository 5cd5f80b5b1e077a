// Pinned host memory for contents: one supply for a session, and what a backup has taken from it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
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

// All backups of a session take buffers from here and give them back, so that what one scope does not use just now serves
// another. Buffers are kept from one cycle to the next, and pinned ahead by a thread of its own. Thread-safe; outlives the
// backups.
class PinnedSupply {
 public:
  struct Options {
    Bytes chunk = Bytes{32} << 20;       // of all buffers; large enough to keep a copy engine busy
    std::chrono::milliseconds quiet{0};  // the driver is called ahead when it was not called, nor Busy, for so long
    Bytes nccl_limit = Bytes{4} << 30;   // no more is pinned ahead for NCCL's memory; a Take pins what it needs nevertheless
    Bytes pools_limit = Bytes{4} << 30;  // the same for all pools together
    std::size_t prepare_threads = 1;     // that make the system provide memory ahead
    std::filesystem::path claims;        // HostClaims
  };
  struct Statistics {
    Bytes pinned_bytes = 0;    // held, used or not
    std::string not_prepared;  // not empty: why preparing stopped early
  };
  struct Taken {
    std::unique_ptr<PinnedBuffer> buffer;
    bool pinned_now = false;  // it was not idle
  };
  using Buffers = std::vector<std::unique_ptr<PinnedBuffer>>;

  PinnedSupply(Copier& copier, Options options);
  ~PinnedSupply();  // in a forked child it touches nothing
  PinnedSupply(const PinnedSupply&) = delete;
  PinnedSupply& operator=(const PinnedSupply&) = delete;
  [[nodiscard]] Bytes chunk() const { return options_.chunk; }

  Result<Taken> Take(Deadline until);  // an idle buffer, or one that is pinned now
  void Give(Buffers buffers);
  // So much more, or less, will be taken soon, all of it checked before any of it is pinned: what is not idle is claimed from
  // the host, and made ready by several threads. kOutOfMemory: nothing is promised.
  Status Promise(Bytes bytes);
  void Unpromise(Bytes bytes);

  // What the next pause of a pool, or of NCCL's memory (zero), is expected to take. Begins to pin what is missing in the
  // background, within the limits. Returns at once; replaces what was wanted for that scope before. What the thread does
  // neither waits for kernels that run nor holds them up; it is never begun in a forked child.
  void Want(PoolId scope, Bytes bytes);
  void Busy() { busy_ns_.store(MonotonicNs(), std::memory_order_relaxed); }  // the program calls the driver: the thread waits
  void Rest(bool resting);  // until as many calls say false as said true, the thread pins nothing
  // Waits for the piece that is being pinned, some 10 ms. False: the driver has not come back from it.
  bool StopPreparing();
  // Gives idle buffers back that were promised to nobody, until no more than `keep` is left; stops preparing. CUDA waits there
  // for all kernels that run: for quiet times, such as the end of a pause.
  void Trim(Bytes keep);
  // In such a time: gives back what was not wanted since the call before the last, because what is held has shrunk for
  // good.
  void GiveSpareBack();
  void GiveBack(Bytes bytes);  // in such a time: idle buffers of that size, and what was made ready
  [[nodiscard]] Statistics Count() const;

 private:
  Status ClaimPiece();
  Result<std::unique_ptr<PinnedBuffer>> Pin(std::unique_ptr<HostPages> pages);  // null: none are ready
  void Drop(Bytes keep);
  void PinInBackground();
  void AwaitQuiet();
  void WantPages();
  [[nodiscard]] Bytes IdleBytes() const { return idle_.size() * options_.chunk; }
  [[nodiscard]] Bytes Missing(Bytes promised) const;
  [[nodiscard]] Bytes Wanted() const;
  [[nodiscard]] Bytes Target() const;

  Copier& copier_;
  const Options options_;
  const ForkGuard fork_;
  HostClaims claims_;
  std::atomic<std::uint64_t> busy_ns_{0};

  std::mutex thread_mutex_;  // over thread_; taken before the other
  std::unique_ptr<std::thread> thread_;

  mutable std::mutex mutex_;  // over all below
  std::condition_variable changed_;
  Buffers idle_;
  Bytes promised_ = 0;
  Bytes reserved_ = 0;  // claimed for what is promised, and not touched yet
  Statistics statistics_;
  std::map<PoolId, Bytes> wanted_;
  Bytes most_wanted_ = 0, most_before_ = 0;  // at once, since the last GiveSpareBack; and before it
  Bytes target_ = 0;                         // of preparing
  std::chrono::steady_clock::time_point asked_;
  int resting_ = 0;
  bool pinning_ = false;    // preparing is inside the driver
  bool preparing_ = false;  // the thread has not reached its end
  PageSupply pages_;        // ends first
};

// What one backup holds of the supply, handed out in rooms. For one thread at a time, but for held_bytes.
class PinnedMemory {
 public:
  struct Room {
    std::byte* at = nullptr;
    Bytes bytes = 0;
    bool joined = false;  // lies directly behind the room before, in the same pinned buffer
    bool pinned_now = false;
  };

  explicit PinnedMemory(PinnedSupply& supply) : supply_(supply) {}
  ~PinnedMemory();  // in a forked child it touches nothing
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  Status Promise(Bytes wanted);  // at least so much will be taken soon; kOutOfMemory: the host has not got that
  void Unpromise();              // no more will
  Result<Room> Take(Bytes wanted, Deadline until);  // a multiple of 4096, at most that much
  void TakeBack();                                  // all rooms at once; their memory serves others
  void Rest(bool resting);                          // the supply's thread, because copies are queued
  [[nodiscard]] Bytes held_bytes() const { return held_bytes_; }

 private:
  PinnedSupply& supply_;
  const ForkGuard fork_;
  PinnedSupply::Buffers buffers_;  // the last one has room
  Bytes filled_ = 0;               // of that
  Bytes promised_ = 0;
  std::atomic<Bytes> held_bytes_ = 0;
  bool resting_ = false;
};

}  // namespace amem
