// Pinned host memory for contents: a session's one supply, and what a backup has taken or keeps of it.
#pragma once

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

class PinnedMemory;

// All backups of a session take buffers from here and give them back, so memory that one scope does not use serves another.
// Buffers stay pinned between cycles, and a thread pins them ahead. Thread-safe; must outlive the backups.
//
// Between its cycles a backup may leave the buffers of contents that are back where they are, because the contents may be the
// same at the next pause (Retain). They stay part of the supply. When no buffer is idle, they serve another backup, before more
// is pinned than was wanted for all scopes, and before anything fails because the host is short; those first that were kept for
// longest.
class PinnedSupply : NoCopies {
 public:
  struct Options {
    Bytes chunk = Bytes{32} << 20;  // size of each buffer; large enough to keep a copy engine busy
    // In a pause one part in so many of the time since the last one goes to unpinning; 0: as long as it takes. To unpin a GiB
    // takes a pause 60 ms longer, and the five after it 8 ms each (four ranks of one H100, driver 580).
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
  using Buffers = std::vector<std::unique_ptr<PinnedBuffer>>;

  PinnedSupply(Copier& copier, Options options);
  ~PinnedSupply();  // touches nothing in a forked child
  [[nodiscard]] Bytes chunk() const { return options_.chunk; }
  [[nodiscard]] const ContentKey* key() const { return options_.key.get(); }  // null: none could be had

  Result<Taken> Take(Deadline until);  // an idle buffer, one pinned now, or a kept one
  void Give(Buffers buffers);
  // Reclaim returns the buffers in their order, and null in place of those that serve others by now.
  void Retain(const PinnedMemory& owner, Buffers buffers);
  Buffers Reclaim(const PinnedMemory& owner);
  [[nodiscard]] Bytes KeptFor(const PinnedMemory& owner) const;
  // So much more, or less, will be taken soon. All of it is checked before any is pinned: what is not idle is claimed from the
  // host, and several threads populate it. kOutOfMemory: nothing is promised.
  Status Promise(Bytes bytes);
  void Unpromise(Bytes bytes);

  // What the next pause of a pool, or of NCCL's memory (zero), is expected to take. Pins what is missing in the background,
  // within the limits. Returns at once; replaces the scope's last call. The thread neither waits for running kernels nor delays
  // them, and never starts in a forked child.
  void Want(PoolId scope, Bytes bytes);
  // the program calls the driver, so the thread waits
  void Busy() { busy_ns_.store(MonotonicNs(), std::memory_order_relaxed); }
  void SuspendPinning(bool suspended);  // the thread pins nothing until each true has had its false
  // Waits some 10 ms for the piece that is being pinned. False: the driver did not return.
  bool StopPreparing();
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
  std::unique_ptr<PinnedBuffer> TakeKept();  // null: none is kept
  void PinInBackground();
  void AwaitQuiet(std::chrono::steady_clock::time_point not_before);
  void WantPages();
  [[nodiscard]] Bytes IdleBytes() const { return idle_.size() * options_.chunk; }
  [[nodiscard]] Bytes Coming() const { return pinning_ ? options_.chunk : 0; }  // Take waits for what the thread pins
  [[nodiscard]] Bytes Missing(Bytes promised) const;
  [[nodiscard]] Bytes Wanted() const;
  [[nodiscard]] Bytes Target() const;

  Copier& copier_;
  const Options options_;
  const ForkGuard fork_;
  HostClaims claims_;
  std::atomic<std::uint64_t> busy_ns_{0};

  std::mutex thread_mutex_;  // guards thread_; taken before mutex_
  const ForgottenInChild<std::thread> thread_{fork_};

  mutable std::mutex mutex_;  // guards all below
  const ForgottenInChild<std::condition_variable> changed_{fork_};
  Buffers idle_;
  struct Kept {
    const PinnedMemory* owner = nullptr;
    Buffers buffers;
  };
  std::vector<Kept> kept_;  // those kept for longest first
  Bytes promised_ = 0;
  Bytes reserved_ = 0;  // claimed for promises and not yet populated
  Statistics statistics_;
  std::map<PoolId, Bytes> wanted_;
  Bytes most_wanted_ = 0, most_before_ = 0;          // at once, since the last GiveSpareBack, and before that
  Bytes recently_used_ = 0;                          // at calls of GiveSpareBack; an eighth less at each
  std::atomic<std::uint64_t> unpin_ns_ = 5'000'000;  // that a buffer takes, as the last one did
  Bytes target_ = 0;                                 // of preparing
  std::chrono::steady_clock::time_point asked_;
  int suspended_ = 0;
  bool pinning_ = false;    // the thread is inside the driver
  bool preparing_ = false;  // the thread has not reached its end
  PageSupply pages_;        // destroyed first
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
  [[nodiscard]] Bytes kept_bytes() const { return supply_.KeptFor(*this); }
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
