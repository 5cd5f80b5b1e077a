// Contents of allocations while their memory is given back: only what is not zero, in pinned host memory that is kept for the
// next cycle and can be prepared in the background before the first.
//
// What comes back is equal to the last bit: blocks that were not zero are copied, all others are cleared.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "replay/cycle/pinned_memory.h"
#include "replay/driver/driver.h"
#include "statemachine/types.h"

namespace amem {

struct BackupOptions {
  Bytes block = 4096;                    // the unit of "not zero"; a power of two from 4096
  Bytes chunk = Bytes{16} << 20;         // host memory is pinned in such pieces
  Bytes look = Bytes{1} << 30;           // is looked at in one go, while what came before is copied
  Bytes batch = Bytes{256} << 20;        // is waited for (AwaitSaved), or cleared, in one go
  std::chrono::milliseconds quiet{0};    // Prepare calls the driver when it was not called, nor Busy, for so long
  Bytes prepare_limit = Bytes{4} << 30;  // Prepare pins no more than this; a Save that needs more pins it nevertheless
  std::size_t prepare_threads = 1;       // that make the system provide memory for Prepare
  double first_guess = 0.22;             // of contents are not zero (Expected)
  // An item of which so much is not zero is copied whole, by the copy engines alone. Above 1: none is.
  double dense = 2;
};

// About the contents that were saved last, and the calls that saved and restored them.
struct BackupStatistics {
  Bytes bytes_total = 0;           // of contents
  Bytes bytes_saved = 0;           // of those, not zero and thus copied
  Bytes bytes_zero = 0;            // the rest
  Bytes pinned_bytes = 0;          // host memory held, used or not
  Bytes pinned_in_save = 0;        // of those, what preparing had not provided
  std::uint64_t scan_ns = 0;       // waiting for FindNonZero
  std::uint64_t pin_ns = 0;        // pinning in Save
  std::uint64_t save_copy_ns = 0;  // from the first copy that Save queued to the end of Finish
  std::uint64_t restore_ns = 0;    // from the beginning of Restore to the end of Finish
  std::string unscanned;           // not empty: why contents were copied whole
  std::string not_prepared;        // not empty: why preparing stopped early
};

// Save, Restore, Finish, ForgetAll and questions about what is saved are for one thread at a time; everything else for any.
class Backup {
 public:
  // A part of an allocation, mapped at `address` with access for `device`; address and bytes are multiples of 4096.
  struct Item {
    AllocationId allocation;
    DeviceOrdinal device;
    Address address;
    Bytes bytes = 0;
    Bytes offset = 0;  // in the allocation; with it, the name of what is saved
  };

  explicit Backup(Copier& copier, BackupOptions options = {});
  ~Backup();  // waits for copies, and gives the pinned memory back. In a forked child it touches nothing.
  Backup(const Backup&) = delete;
  Backup& operator=(const Backup&) = delete;

  // Queues the copies of all items, devices beside each other; they are saved, and their memory may go, once Finish is OK.
  // After a failure: Finish, then ForgetAll. kWhole: contents are not looked at, so that no kernel runs.
  enum class Looking : std::uint8_t { kForZeros, kWhole };
  Status Save(std::span<const Item> items, Looking looking = Looking::kForZeros);
  // Queues copying back and clearing, to the addresses given now; done once Finish is OK. The contents stay saved until
  // ForgetAll, so that it can be tried again. kNotFound, before anything is queued: an item that was not saved with that size.
  // kInvalid: Save or its Finish failed, or Finish is missing.
  Status Restore(std::span<const Item> items);
  Status Finish();  // waits for all that is queued
  // Waits until the contents of one allocation are copied, so that its memory may go while others are still on their way. They
  // can be restored once Finish was called, even if that fails for others.
  Status AwaitSaved(AllocationId allocation);
  Status AwaitRestored(AllocationId allocation);                  // until all that Restore queued for it is done
  [[nodiscard]] bool Queued() const { return !queued_.empty(); }  // Finish has something to wait for
  [[nodiscard]] bool Saving() const { return contents_ == Contents::kQueued; }
  void ForgetAll();                                       // waits too; the memory stays pinned for the next cycle
  [[nodiscard]] bool Has(AllocationId allocation) const;  // is saved, or queued to be
  [[nodiscard]] std::vector<Item> ItemsOf(AllocationId allocation) const;  // what is, by offset; the addresses are zero

  // How much to Prepare for contents of that size: what the last Save needed, else a guess that is rather too much.
  [[nodiscard]] Bytes Expected(Bytes contents) const;
  // Begins to pin host memory, in a thread of its own, until `expected` bytes or the limit are there. Returns at once; a call
  // replaces the one before. The thread rests while contents are queued, ends when it has done its work and is never begun in
  // a forked child. What it does neither waits for kernels that run nor holds them up.
  void Prepare(Bytes expected) { pinned_.Prepare(expected); }
  // The host program is making driver calls: preparing, which would hold them up, waits until it has been quiet again.
  void Busy() { pinned_.Busy(); }
  void StopPreparing() { static_cast<void>(pinned_.StopPreparing()); }  // waits for the piece that is being pinned, some 10 ms
  // Gives pinned memory back that holds nothing, until no more than `keep` is left; stops preparing. CUDA waits there for all
  // kernels that run: for quiet times, such as the end of a pause.
  void Trim(Bytes keep) { pinned_.Trim(keep); }

  [[nodiscard]] BackupStatistics Statistics() const;
  [[nodiscard]] Bytes pinned_bytes() const { return pinned_.Count().pinned_bytes; }

 private:
  using Key = std::pair<AllocationId, Bytes>;  // allocation and offset
  struct Piece {                               // of saved contents; the rest of its item is zero
    Bytes offset = 0, bytes = 0;               // in the item
    std::byte* host = nullptr;
    bool joined = false;  // lies in the same pinned buffer as the piece before, directly behind it
  };
  struct Saved {
    Bytes bytes = 0;
    std::size_t first = 0, count = 0;  // of pieces_
    DeviceOrdinal device;
    bool whole = false;      // the pieces are all of it
    std::uint64_t mark = 0;  // the driver's, of the copies that were queued last
    bool done = false;       // its save was waited for by itself
    bool restoring = false;  // the mark is of its restore
  };
  enum class Contents : std::uint8_t { kNone, kQueued, kSaved, kLost };
  class Queue;  // of parts that lie one after the other in host memory

  Status SaveOn(DeviceOrdinal device, std::span<const Item> items, Looking looking);
  Status LookAndSave(DeviceOrdinal device, std::span<const Item> items, Looking looking);
  Result<NonZero> Look(DeviceOrdinal device, std::span<const Item> items, Looking looking);
  Status SaveBatch(DeviceOrdinal device, std::span<const Item> items, std::span<const Extent> runs,
                   std::span<const std::size_t> counts);
  [[nodiscard]] bool Dense(const Item& item, std::span<const Extent> runs) const;
  Status RestoreOn(DeviceOrdinal device, std::span<const Item> items);
  Status RestoreBatch(DeviceOrdinal device, std::span<const Item> items);
  Status Place(Queue& queue, const Extent& run, Bytes offset, bool whole);

  Copier& copier_;
  const BackupOptions options_;
  const ForkGuard fork_;
  PinnedMemory pinned_;

  std::map<Key, Saved> saved_;
  std::vector<Piece> pieces_;
  std::set<DeviceOrdinal> queued_;  // on which something is
  Contents contents_ = Contents::kNone;
  std::uint64_t began_ns_ = 0;  // the copies that are queued

  mutable std::mutex mutex_;     // over statistics_
  BackupStatistics statistics_;  // but for what pinned_ counts
};

}  // namespace amem
