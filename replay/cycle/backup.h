// Contents of allocations while their memory is released: only what is not zero, in pinned host memory from the session's
// supply.
//
// What comes back is equal to the last bit: blocks that were not zero are copied, all others are cleared.
//
// After a resume what was saved may stay (RetainCopy). The next Save hashes all contents, unit by unit (content_hash.h), and
// copies only the units whose hash differs from the retained copy's: only the hash says that contents are unchanged, so writes
// need not be tracked. A unit of 128 KiB is what one warp scans anyway; smaller units would cost more host memory and time for
// their hashes, larger ones would copy more for one changed byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "replay/cycle/contents_table.h"
#include "replay/cycle/pinned_memory.h"
#include "replay/driver/driver.h"
#include "replay/driver/unfinished_copies.h"
#include "statemachine/types.h"

namespace amem {

// Whether the program's kernels run while contents are saved. kBeside: the copy engines make all copies, and contents are
// scanned only if the kernel for that is loaded already, because loading it would wait for the program's kernels.
enum class ScanMode : std::uint8_t { kIdle, kBeside };

struct BackupOptions {
  Bytes scan = Bytes{1} << 30;     // is scanned in one go, while what came before is copied
  Bytes batch = Bytes{256} << 20;  // is waited for (AwaitSaved), or cleared, in one go
  double first_guess = 0.22;       // of contents are not zero (Expected)
  // Where so much of an item is not zero, its units are saved with their zeros, so that the copy engines alone can bring it
  // back. Never, if it is above 1.
  double dense = 2;
  bool compare = false;  // also what the hash says is unchanged, byte by byte with the kept copy
  // A copy that is of little use is not retained: pages that are copied to their places in it one by one are slower than packed
  // ones, and hashing what is mostly zero takes longer than copying the rest. After so many pauses it is tried again. 0: copies
  // are kept always.
  unsigned without_copy = 0;
};

// About the contents that were saved last, and the calls that saved and restored them.
struct BackupStatistics {
  Bytes bytes_total = 0;           // of contents
  Bytes bytes_saved = 0;           // of those, copied
  Bytes bytes_unchanged = 0;       // as in the copy that was kept, and thus not copied
  Bytes bytes_zero = 0;            // the rest
  Bytes pinned_bytes = 0;          // host memory of the whole supply, used or not
  Bytes held_bytes = 0;            // of those, what these contents take
  Bytes kept_bytes = 0;            // of those, what is kept of contents that are back
  Bytes pinned_in_save = 0;        // of those, what was not idle
  std::uint64_t scan_ns = 0;       // waiting for FindNonZero
  std::uint64_t pin_ns = 0;        // pinning in Save
  std::uint64_t save_copy_ns = 0;  // from the first copy that Save queued to the end of Finish
  std::uint64_t restore_ns = 0;    // from the beginning of Restore to the end of Finish
  std::string unscanned;           // not empty: why contents were copied whole
  std::string not_prepared;        // not empty: why preparing stopped early
};

// Save, Restore, Finish, RetainCopy, ForgetAll and questions about what is saved are for one thread at a time; everything else
// for any.
class Backup : NoCopies {
 public:
  using Item = ContentItem;

  Backup(Copier& copier, PinnedSupply& supply, BackupOptions options = {});  // both outlive it
  // Sets the deadline of all waits below. A cycle calls this when it begins, and when it begins to undo.
  void SetUntil(Deadline until) { until_ = until; }
  ~Backup();  // waits for copies, and gives the pinned memory to the supply. In a forked child it touches nothing.

  // Queues the copies of all items, devices beside each other; they are saved, and their memory may go, once Finish is OK.
  // After a failure: Finish. What was saved before, or AwaitSaved waited for, can be restored; the next Save adds to that,
  // unless ForgetAll comes first.
  Status Save(std::span<const Item> items, ScanMode mode = ScanMode::kIdle);
  // Queues copying back and clearing, to the addresses given now; done once Finish is OK. The contents stay saved until
  // ForgetAll, so that it can be tried again. kNotFound, before anything is queued: an item that was not saved with that size.
  // kInvalid: saving an item failed, or Finish is missing.
  Status Restore(std::span<const Item> items);
  Status Finish();  // waits for all that is queued
  // Reads items back that Restore and Finish have brought back, through host memory of its own. kBroken: a byte differs from
  // what was saved.
  Status Compare(std::span<const Item> items);
  // Waits until the contents of one allocation are copied, so that its memory may go while others are still on their way. They
  // can be restored once Finish was called, even if that fails for others.
  Status AwaitSaved(AllocationId allocation);
  Status AwaitRestored(AllocationId allocation);                  // until all that Restore queued for it is done
  [[nodiscard]] bool Queued() const { return !queued_.empty(); }  // Finish has something to wait for
  [[nodiscard]] const std::set<DeviceOrdinal>& QueuedOn() const { return queued_; }
  [[nodiscard]] bool Saving() const { return contents_ == Contents::kQueued; }
  [[nodiscard]] bool Saved() const { return contents_ == Contents::kSaved; }  // contents that are not forgotten
  // Forgets what is saved, but keeps a copy for the next Save for as long as nobody else needs the memory.
  void RetainCopy();
  void ForgetAll();  // waits too; the memory stays pinned, for whoever needs it next
  // Call it after a Save that was in vain, and its Finish. If nothing was pinned for that Save, works as RetainCopy; otherwise
  // as ForgetAll, and what was pinned goes back to the host. `undisturbed`: nobody can have written to the memory between its
  // hashes and the end of its copies; otherwise no copy is kept.
  void Abandon(bool undisturbed = true);
  [[nodiscard]] bool Has(AllocationId allocation) const;                   // is saved, or queued to be
  [[nodiscard]] std::vector<Item> ItemsOf(AllocationId allocation) const;  // what is, by offset; the addresses are zero

  // Unpins the buffers of comparisons that timed out, if their copies end by `until`. Any thread.
  void FreeUnfinished(Deadline until) { unfinished_.Free(copier_, until); }

  // How much host memory contents of that size need: what the last Save needed, else a guess that is rather too much.
  [[nodiscard]] Bytes Expected(Bytes contents) const;
  [[nodiscard]] BackupStatistics Statistics() const;

 private:
  using Unit = ContentsTable::Unit;
  using SavedItem = ContentsTable::SavedItem;
  using Wanted = ContentsTable::Wanted;
  // kForgotten: nothing is kept, but copies are still under way.
  enum class Contents : std::uint8_t { kNone, kQueued, kSaved, kLost, kForgotten };
  class Queue;  // of parts that lie one after the other in host memory

  void BeginSave();
  void ForgetLost();
  Status FindRoom(std::span<const Item> items);
  Status ScanAndSave(std::span<const Item> items);  // of one device, as the next
  Result<NonZero> Scan(std::span<const Item> items);
  std::vector<Wanted> WhatToSave(std::span<const Item> items, const NonZero& found);
  Status SaveBatch(std::span<const Item> items, std::span<const Wanted> wanted, std::span<const ContentHash> hashes);
  Status MakeRoom(const Wanted& wanted, Unit& unit);
  Status QueueUnit(Queue& queue, Address address, const Unit& unit, bool engine);
  Status RestoreOn(DeviceOrdinal device, std::span<const Item> items);
  Status RestoreBatch(DeviceOrdinal device, std::span<const Item> items);
  // Calls one(item, unit, its bytes) for all units of all items, in their order.
  Status ReadBack(std::span<const Item> items,
                  const std::function<Status(const Item&, std::size_t, std::span<const std::byte>)>& one);
  Status CompareRetained(std::span<const Item> items, std::span<const Wanted> wanted);

  // Statistics that any thread may read, except those that the supply counts.
  class Counters {
   public:
    void Change(const auto& change) {
      const std::lock_guard lock(mutex_);
      change(counted_);
    }
    [[nodiscard]] BackupStatistics Copy() const {
      const std::lock_guard lock(mutex_);
      return counted_;
    }

   private:
    mutable std::mutex mutex_;
    BackupStatistics counted_;
  };

  Copier& copier_;
  Deadline until_ = Deadline::max();
  const BackupOptions options_;
  const ForkGuard fork_;
  PinnedSupply& supply_;
  ContentsTable table_;
  std::set<DeviceOrdinal> queued_;  // on which something is
  Contents contents_ = Contents::kNone;
  ScanMode scan_mode_ = ScanMode::kIdle;  // of the save
  std::uint64_t began_ns_ = 0;            // the copies that are queued
  Counters counters_;
  UnfinishedCopies<std::unique_ptr<PinnedBuffer>> unfinished_;  // of comparisons
};

}  // namespace amem
