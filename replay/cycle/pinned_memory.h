// Pinned host memory for contents: a session's one supply, and what a backup has taken from it or retains.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "journal/base/clock.h"
#include "journal/base/fork_guard.h"
#include "replay/driver/driver.h"
#include "statemachine/types.h"

namespace amem {

// Host memory that the system has provided and that only needs to be pinned. Populating takes most of the time of pinning and
// needs no driver call, so threads can do it ahead, while NCCL starts up. Thread-safe. In a forked child only Take and the
// destructor may be called, and do nothing.
class PageSupply : NoCopies {
 public:
  // `claim` says whether the host has room for another piece; `touched` is called once it exists. Several threads call them.
  struct Asking {
    std::function<bool()> claim;
    std::function<void()> touched;
  };
  PageSupply(Copier& copier, Bytes piece, std::size_t ahead, Asking asking);  // `ahead`: threads for Haste::kAhead
  ~PageSupply();                                                              // waits until each thread has finished its piece

  enum class Haste { kAhead, kNow };  // low priority; or as many threads as help
  // How many pieces are wanted, including those that exist. Returns at once; replaces the last call.
  void Want(std::size_t pieces, Haste haste);
  // Takes a piece; then one less is wanted. Waits for one under way. Null: there is none, or the driver has no use for them.
  // kTimeout: none has come until then.
  Result<std::unique_ptr<HostPages>> Take(Deadline until);
  [[nodiscard]] std::size_t Pieces() const;  // ready or under way
  void Drop();                               // frees all pieces; none are wanted any more

 private:
  struct Shared;
  const std::size_t ahead_;
  const std::shared_ptr<Shared> shared_;
  const ForkGuard fork_;
};

// The thread that pins ahead: it neither waits for running kernels nor delays them. `mutex` is the supply's, which guards the
// buffers and what the thread is to do. Never starts in a forked child. Thread-safe.
class PinningThread : NoCopies {
 public:
  using Pinned = Result<std::unique_ptr<PinnedBuffer>>;
  static constexpr std::chrono::minutes kPieceAtMost{1};  // pinning takes some 10 ms unless the driver hangs
  // Of the supply. `quiet`: returns once the driver may be called.
  struct Asking {
    std::function<bool(Bytes target)> is_short_of;                  // with the mutex: less than that is pinned
    std::function<Pinned(const std::function<void()>& quiet)> pin;  // without
    std::function<bool(Pinned pinned)> add;                         // with it; false: none was had, so that the thread ends
    std::function<void()> stops;                                    // with it
  };
  // `quiet`: pins only after the driver was left alone for so long (Busy).
  PinningThread(std::mutex& mutex, const ForkGuard& fork, std::chrono::milliseconds quiet, Asking asking);

  // Calls change(target) with the mutex, and pins until so much is pinned. Returns at once. Fails if no thread can be had.
  Status Want(const std::function<void(Bytes& target)>& change);
  void Busy() { busy_ns_.store(MonotonicNs(), std::memory_order_relaxed); }
  void Suspend(bool suspended);  // it pins nothing until each true has had its false
  // Waits some 10 ms for the piece that is being pinned. False: the driver did not return.
  bool Stop();
  void Join() { thread_->join(); }  // after Stop has failed

  // ---- with the mutex
  [[nodiscard]] Bytes target() const { return target_; }
  [[nodiscard]] bool pinning() const { return pinning_; }  // it is inside the driver
  // False: it is there still.
  bool AwaitPiece(std::unique_lock<std::mutex>& lock, Deadline until) {
    return changed_->wait_until(lock, until, [&] { return !pinning_; });
  }

 private:
  void Work();
  void AwaitQuiet(std::chrono::steady_clock::time_point not_before);

  std::mutex start_mutex_;  // guards thread_; taken before mutex_
  const ForgottenInChild<std::thread> thread_;
  const std::chrono::milliseconds quiet_;
  const Asking asking_;
  std::atomic<std::uint64_t> busy_ns_{0};

  std::mutex& mutex_;  // guards all below
  const ForgottenInChild<std::condition_variable> changed_;
  Bytes target_ = 0;
  std::chrono::steady_clock::time_point asked_;
  int suspended_ = 0;
  bool pinning_ = false;
  bool preparing_ = false;  // the thread has not reached its end
};

class PinnedMemory;

// The buffers of a supply that no save uses: idle ones, and those that are retained for an owner, in which its last contents
// are. With the supply's mutex.
class UnusedBuffers : NoCopies {
 public:
  using Buffers = std::vector<std::unique_ptr<PinnedBuffer>>;

  [[nodiscard]] std::size_t idle() const { return idle_.size(); }
  void Add(std::unique_ptr<PinnedBuffer> buffer) { idle_.push_back(std::move(buffer)); }
  std::unique_ptr<PinnedBuffer> TakeIdle();  // there is one
  [[nodiscard]] bool AnyRetained() const { return !retained_.empty(); }
  [[nodiscard]] std::size_t RetainedFor(const PinnedMemory& owner) const;
  [[nodiscard]] std::size_t Retained() const;
  void Retain(const PinnedMemory& owner, Buffers buffers) { retained_.push_back({&owner, std::move(buffers)}); }
  Buffers Reclaim(const PinnedMemory& owner);  // in their order, and null in place of those that serve others by now
  // Requires a retained buffer; the last one of the set retained for longest becomes idle.
  void FreeRetained();
  void Forget();  // in a forked child, where the driver's memory does not survive

 private:
  struct OfOwner {  // of which not all serve others
    const PinnedMemory* owner = nullptr;
    Buffers buffers;
  };
  Buffers idle_;
  std::vector<OfOwner> retained_;  // those retained for longest first
};

// What the scopes want of a supply, and have used of late; hence what of it is spare. With the supply's mutex.
class HostMemoryDemand {
 public:
  void Want(PoolId scope, Bytes bytes) {
    wanted_[scope] = bytes;
    most_wanted_ = std::max(most_wanted_, Sum());
  }
  // What is to be pinned ahead.
  [[nodiscard]] Bytes Target(Bytes nccl_limit, Bytes pools_limit) const;
  // What is above is spare: it was neither wanted since the call before the last nor used at recent ones.
  Bytes SpareAbove(Bytes used);

 private:
  [[nodiscard]] Bytes Sum() const;  // what all scopes together would take

  std::map<PoolId, Bytes> wanted_;
  Bytes most_wanted_ = 0, most_before_ = 0;  // at once, since the last SpareAbove, and before that
  Bytes recently_used_ = 0;                  // at calls of SpareAbove; an eighth less at each
};

// All backups of a session take buffers from here and give them back, so memory that one scope does not use serves another.
// Buffers stay pinned between cycles, and a thread pins them ahead. Thread-safe; must outlive the backups.
//
// Between its cycles a backup may keep restored contents in its buffers, because they may be the same at the next pause
// (Retain). These buffers stay part of the supply. When no buffer is idle, those retained for longest serve another backup,
// instead of pinning more than all scopes together wanted, or failing because the host is short.
class PinnedSupply : NoCopies {
 public:
  struct Options {
    Bytes chunk = Bytes{32} << 20;  // size of each buffer; large enough to keep a copy engine busy
    // A pause spends at most 1/unpins_for of the time since the last one on unpinning; 0: as long as it takes. Unpinning a GiB
    // lengthens that pause by 60 ms, and each of the next five by 8 ms (four ranks of one H100, driver 580).
    std::int64_t unpins_for = 1000;
    std::chrono::milliseconds quiet{0};       // pins ahead only after the driver was left alone for so long (Busy)
    Bytes nccl_limit = Bytes{4} << 30;        // for NCCL's memory no more is pinned ahead; Take pins what it needs all the same
    Bytes pools_limit = Bytes{4} << 30;       // the same for all pools together
    std::size_t prepare_threads = 1;          // threads that populate memory ahead
    std::filesystem::path claims;             // HostClaims
    std::shared_ptr<const ContentKey> key{};  // of the hashes of contents; null: a random one
  };
  struct Statistics {
    Bytes pinned_bytes = 0;    // used or idle
    std::string not_prepared;  // not empty: why preparing stopped early
  };
  struct Taken {
    std::unique_ptr<PinnedBuffer> buffer;
    bool pinned_now = false;  // was pinned just now, not idle
  };
  using Buffers = UnusedBuffers::Buffers;

  PinnedSupply(Copier& copier, Options options);
  ~PinnedSupply();  // touches nothing in a forked child
  [[nodiscard]] Bytes chunk() const { return options_.chunk; }
  [[nodiscard]] const ContentKey* key() const { return options_.key.get(); }  // null: none could be had

  Result<Taken> Take(Deadline until);  // an idle buffer, one pinned now, or a kept one
  void Give(Buffers buffers);
  // Reclaim returns the buffers in their order, and null in place of those that serve others by now.
  void Retain(const PinnedMemory& owner, Buffers buffers);
  Buffers Reclaim(const PinnedMemory& owner);
  [[nodiscard]] Bytes RetainedFor(const PinnedMemory& owner) const;
  // So much more, or less, will be taken soon. All of it is checked before any is pinned: what is not idle is claimed from the
  // host, and several threads populate it. kOutOfMemory: nothing is promised.
  Status Promise(Bytes bytes);
  void Unpromise(Bytes bytes);

  // What the next pause of a pool, or of NCCL's memory (zero), is expected to take. Pins what is missing in the background,
  // within the limits. Returns at once; replaces the scope's last call. The thread neither waits for running kernels nor delays
  // them, and never starts in a forked child.
  void Want(PoolId scope, Bytes bytes);
  void Busy() { thread_.Busy(); }  // the program calls the driver, so the thread waits
  void SuspendPinning(bool suspended) {
    if (!fork_.InChild()) thread_.Suspend(suspended);
  }
  bool StopPreparing();  // as PinningThread::Stop
  // Frees idle buffers that are not promised, then kept ones, until `keep` is left, and stops preparing. CUDA waits for all
  // running kernels, so call it in quiet times, such as the end of a pause.
  void Trim(Bytes keep);
  // While contents are saved, and in quiet times: frees what was neither wanted since the call before the last nor used at
  // recent ones, because the scopes have shrunk for good. What contents take varies from pause to pause. Takes no
  // longer than Options::unpins_for allows, as far as that can be known; the rest waits for the next call.
  void GiveSpareBack(std::chrono::nanoseconds since_last);
  void GiveBack(Bytes bytes);  // in quiet times: frees so much of idle buffers and populated pages
  [[nodiscard]] Statistics Count() const;

 private:
  Status ClaimPiece();
  Result<std::unique_ptr<PinnedBuffer>> Pin(std::unique_ptr<HostPages> pages);  // null: none are ready
  void Drop(Bytes keep);
  PinningThread::Asking ForThread();
  void WantPages();
  [[nodiscard]] Bytes IdleBytes() const { return unused_.idle() * options_.chunk; }
  [[nodiscard]] Bytes Coming() const { return thread_.pinning() ? options_.chunk : 0; }  // Take waits for what the thread pins
  [[nodiscard]] Bytes Missing(Bytes promised) const;
  [[nodiscard]] Bytes Target() const { return demand_.Target(options_.nccl_limit, options_.pools_limit); }

  Copier& copier_;
  const Options options_;
  const ForkGuard fork_;
  HostClaims claims_;
  std::atomic<std::uint64_t> unpin_ns_ = 5'000'000;  // that a buffer takes, as the last one did

  mutable std::mutex mutex_;  // guards all below, but pages_
  UnusedBuffers unused_;
  HostMemoryDemand demand_;
  struct {
    Bytes bytes = 0;
    Bytes claimed = 0;  // of these, claimed from the host and not yet populated
  } promised_;
  Statistics statistics_;
  PinningThread thread_;
  PageSupply pages_;  // destroyed first
};

// What one backup has taken from the supply: a row of buffers, whose bytes are numbered through. For one thread at a time,
// except held_bytes and kept_bytes.
class PinnedMemory : NoCopies {
 public:
  struct Room {
    Bytes at = 0;                // its place; it may reach over several buffers
    std::size_t pinned_now = 0;  // buffers
    std::uint64_t pin_ns = 0;    // getting them
  };
  struct Piece {
    std::byte* at = nullptr;
    Bytes bytes = 0;
    bool joined = false;  // lies directly behind the byte before it, in the same buffer
  };

  explicit PinnedMemory(PinnedSupply& supply) : supply_(supply) {}
  ~PinnedMemory();  // touches nothing in a forked child

  Status Promise(Bytes wanted);  // so much will be taken soon; kOutOfMemory: the host does not have it
  void Unpromise();              // withdraws Promise
  Result<Room> Take(Bytes bytes, Deadline until);
  void Free(Bytes at, Bytes bytes);                               // a room, or the end of one; a buffer without rooms goes back
  void TakeBack();                                                // all rooms at once
  void Retain();                                                  // the rooms stay until others need their memory
  void Reclaim();                                                 // before the next Take
  [[nodiscard]] bool Has(Bytes at, Bytes bytes) const;            // nobody else needed any of it
  [[nodiscard]] Piece PieceAt(Bytes at, Bytes most) const;        // the part of it that lies in one buffer
  void SuspendPinning(bool suspended);                            // the supply's thread rests, because copies are queued
  [[nodiscard]] Bytes held_bytes() const { return held_bytes_; }  // without what is kept
  [[nodiscard]] Bytes kept_bytes() const { return supply_.RetainedFor(*this); }
  [[nodiscard]] Bytes used_bytes() const { return used_bytes_; }  // of all rooms

 private:
  PinnedSupply& supply_;
  const ForkGuard fork_;
  PinnedSupply::Buffers buffers_;  // null: given back, or serves others
  std::vector<Bytes> used_;        // of each buffer
  Bytes filled_ = 0;               // where the next room begins
  Bytes promised_ = 0;
  Bytes used_bytes_ = 0;
  std::atomic<Bytes> held_bytes_ = 0;
  bool suspended_ = false;
};

}  // namespace amem
