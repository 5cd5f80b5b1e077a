// The table of saved contents: for each item, which pages of its units are stored, where in pinned host memory they are, and
// what is retained of the previous contents for the next save. Backup makes the copies.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "replay/cycle/pinned_memory.h"
#include "replay/driver/driver.h"
#include "statemachine/types.h"

namespace amem {

// A part of an allocation, mapped at `address` with access for `device`; address and bytes are multiples of 4096.
struct ContentItem {
  AllocationId allocation;
  DeviceOrdinal device;
  Address address;
  Bytes bytes = 0;
  Bytes offset = 0;  // in the allocation; with it, the name of what is saved
};

// For one thread at a time. What is stored of a unit has a place in `memory`; no two units share one.
class ContentsTable : NoCopies {
  template <class Iterator>
  struct Rows {  // Debian 12's Clang does not take std::ranges::subrange
    [[nodiscard]] Iterator begin() const { return first; }
    [[nodiscard]] Iterator end() const { return last; }
    [[nodiscard]] bool empty() const { return first == last; }
    Iterator first, last;
  };
  static auto RowsOf(auto& rows, AllocationId allocation) {
    return Rows<decltype(rows.begin())>{rows.lower_bound({allocation, 0}),
                                        rows.lower_bound({AllocationId{allocation.value + 1}, 0})};
  }

 public:
  using Key = std::pair<AllocationId, Bytes>;  // allocation and offset
  struct Unit {                                // of an item: kUnitBytes, the last one may be less
    ContentHash hash;
    Bytes at = 0;              // the room of what is stored
    std::uint32_t stored = 0;  // which pages that is, one behind the other; the others are zero
    bool hashed = false;
  };
  struct SavedItem {
    Bytes bytes = 0;
    std::vector<Unit> units;
    DeviceOrdinal device;
    bool whole = false;      // all pages are stored
    std::uint64_t mark = 0;  // the driver's, of the copies that were queued last
    bool done = false;       // it is saved, whatever happens to the rest
    bool restoring = false;  // the mark is of its restore
  };
  struct Wanted {             // of a unit
    std::uint32_t pages = 0;  // to be stored
    Unit* kept = nullptr;     // of before; null: nothing
    bool unchanged = false;   // since then
    bool engine = false;      // copied by a copy engine
    bool travels = false;     // although it is unchanged
  };
  struct LastSave {  // what it had
    Bytes total = 0, stored = 0, unchanged = 0;
  };

  // `without_copy`: BackupOptions::without_copy.
  ContentsTable(PinnedSupply& supply, unsigned without_copy) : supply_(supply), memory_(supply), without_copy_(without_copy) {}

  [[nodiscard]] PinnedMemory& memory() { return memory_; }
  [[nodiscard]] const PinnedMemory& memory() const { return memory_; }

  // ---- what is saved
  // The items of one allocation, as (key, SavedItem), by offset.
  [[nodiscard]] auto Of(AllocationId allocation) { return RowsOf(saved_, allocation); }
  [[nodiscard]] auto Of(AllocationId allocation) const { return RowsOf(saved_, allocation); }
  [[nodiscard]] SavedItem* Find(const ContentItem& item) { return FindIn(saved_, {item.allocation, item.offset}); }
  // Replaces the item's entry by a new one.
  SavedItem& Renew(const ContentItem& item);
  void NoteDone(DeviceOrdinal device);  // all items of that device are saved
  // Only what is done stays. False: nothing does.
  bool ForgetUnended();
  // Forgets all entries, saved and retained. Their rooms, which copies may still use, are freed only by `memory().TakeBack()`.
  void ForgetRows();

  // ---- rooms
  // The room that was retained, or as much of it as is needed, else a new one.
  Result<PinnedMemory::Room> MakeRoom(const Wanted& wanted, Unit& unit, Deadline until);
  // Calls one(offset in the unit, piece of host memory) for all that is stored.
  Status EachPiece(const Unit& unit, const auto& one) const {
    Bytes at = unit.at;
    for (unsigned page = 0; page < kUnitPages;) {
      const std::uint32_t left = unit.stored >> page;
      if (left == 0) break;
      page += static_cast<unsigned>(std::countr_zero(left));
      const auto run = static_cast<unsigned>(std::countr_one(unit.stored >> page));
      const Bytes bytes = Bytes{run} * kPageBytes;
      for (Bytes done = 0; done < bytes;) {
        const PinnedMemory::Piece piece = memory_.PieceAt(at + done, bytes - done);
        AMEM_TRY(one(Bytes{page} * kPageBytes + done, piece));
        done += piece.bytes;
      }
      at += bytes;
      page += run;
    }
    return {};
  }
  [[nodiscard]] std::optional<Bytes> FirstDifference(const Unit& unit, std::span<const std::byte> found) const;

  // ---- what is retained from one cycle to the next
  // Before the first save of a pause: nothing is saved.
  void BeginSave();
  // What is saved is retained for the next save, for as long as nobody else needs the memory; nothing is saved any more.
  void Retain();
  // Whether the copy is not worth retaining: the contents are mostly zero, or less than a quarter of the last copy was
  // unchanged. Called once after each pause.
  bool CopyIsOfLittleUse(const LastSave& last);
  [[nodiscard]] bool Hashes() const { return pauses_without_copy_ == 0; }  // the next save compares with a copy, or makes one
  void FreeRetained();  // copies of memory that is not there any more, or not saved any more
  // Frees the retained copy, for a host that lacks memory. False: there is none, or contents are saved beside it.
  bool DropRetained();
  [[nodiscard]] Bytes RetainedFor(std::span<const ContentItem> items);
  // If much of the retained rooms would lie idle between the others, frees them, and what is wanted has to be asked for again.
  bool FreesRetained(std::span<const ContentItem> items, std::span<const Wanted> wanted);
  // Where an item is dense (BackupOptions::dense), or `engine`, all its pages are wanted.
  std::vector<Wanted> WhatToSave(std::span<const ContentItem> items, const NonZero& found, bool engine, double dense);
  static Bytes RoomFor(std::span<const Wanted> wanted);  // new room, that is

 private:
  class RetainedUnits;  // in the order of an item's units
  [[nodiscard]] Bytes RoomsOfRows() const;
  void FreeRoom(const Unit& unit);
  static void Bridge(std::span<Wanted> units);

  PinnedSupply& supply_;
  PinnedMemory memory_;
  const unsigned without_copy_;
  std::map<Key, SavedItem> saved_;
  std::map<Key, SavedItem> retained_;  // of before; nothing is saved there any more
  bool had_copy_ = false;              // when the last save began, and since
  unsigned pauses_without_copy_ = 0;   // until a copy is retained again; meanwhile nothing is hashed
};

}  // namespace amem
