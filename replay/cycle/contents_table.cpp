#include "replay/cycle/contents_table.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace amem {

// So many unchanged units between two that changed travel with them, where copy engines take them: that takes less time than
// another copy does to begin.
constexpr std::size_t kBridged = 2;

// Asked for the units of an item in their order, which may have been parts of other items when they were retained.
class ContentsTable::RetainedUnits {
 public:
  RetainedUnits(std::map<Key, SavedItem>& retained, const ContentItem& item)
      : retained_(retained), item_(item), at_(retained.upper_bound({item.allocation, item.offset})) {
    if (at_ != retained.begin() && std::prev(at_)->first.first == item.allocation) --at_;
  }
  Unit* At(Bytes offset, Bytes bytes) {  // in the allocation; null: none
    while (Own() && at_->first.second + at_->second.bytes <= offset) ++at_;
    if (!Own() || at_->first.second > offset || at_->second.device != item_.device) return nullptr;
    const Bytes past = offset - at_->first.second;
    const bool same = past % kUnitBytes == 0 && std::min(at_->second.bytes - past, kUnitBytes) == bytes;
    return same ? &at_->second.units[past / kUnitBytes] : nullptr;
  }

 private:
  [[nodiscard]] bool Own() const { return at_ != retained_.end() && at_->first.first == item_.allocation; }

  std::map<Key, SavedItem>& retained_;
  const ContentItem& item_;
  std::map<Key, SavedItem>::iterator at_;
};

ContentsTable::SavedItem& ContentsTable::Renew(const ContentItem& item) {
  std::vector<Unit> units(UnitsOf(item.bytes));  // before any room goes: there may be no memory for it
  SavedItem& saved = saved_[{item.allocation, item.offset}];
  for (const Unit& unit : saved.units) FreeRoom(unit);
  saved = {item.bytes, std::move(units), item.device, true};
  return saved;
}

void ContentsTable::NoteDone(DeviceOrdinal device) {
  for (auto& [key, saved] : saved_) saved.done |= saved.device == device;
}

// The rest is where it was: its memory goes only once it is saved.
bool ContentsTable::ForgetUnended() {
  std::erase_if(saved_, [this](const auto& item) {
    if (!item.second.done)
      for (const Unit& unit : item.second.units) FreeRoom(unit);
    return !item.second.done;
  });
  return !saved_.empty();
}

void ContentsTable::ForgetRows() {
  saved_.clear();
  retained_.clear();
}

Result<PinnedMemory::Room> ContentsTable::MakeRoom(const Wanted& wanted, Unit& unit, Deadline until) {
  const Unit kept = wanted.kept == nullptr ? Unit{} : std::exchange(*wanted.kept, Unit{});
  const std::uint32_t pages = wanted.unchanged ? kept.stored : wanted.pages;
  const Bytes has = SizeOf(kept.stored), needs = SizeOf(pages);
  if (has >= needs) {
    unit.at = kept.at;
    unit.stored = pages;
    memory_.Free(kept.at + needs, has - needs);
    return PinnedMemory::Room{.at = kept.at};
  }
  FreeRoom(kept);
  AMEM_ASSIGN(const PinnedMemory::Room room, memory_.Take(needs, until));
  unit.at = room.at;
  unit.stored = pages;
  return room;
}

void ContentsTable::FreeRoom(const Unit& unit) { memory_.Free(unit.at, SizeOf(unit.stored)); }

// What is not stored is zero.
std::optional<Bytes> ContentsTable::FirstDifference(const Unit& unit, std::span<const std::byte> found) const {
  std::vector<std::byte> expected(found.size());
  static_cast<void>(EachPiece(unit, [&](Bytes offset, const PinnedMemory::Piece& piece) {
    std::memcpy(expected.data() + offset, piece.at, piece.bytes);
    return Status{};
  }));
  const auto differs = std::ranges::mismatch(expected, found);
  if (differs.in1 == expected.end()) return {};
  return static_cast<Bytes>(differs.in1 - expected.begin());
}

// What others needed of the retained copy is not there any more. Where a lot of the memory lies idle between what is left,
// because rooms have become too small, all is saved anew; and where the rooms are not those of the rows. A room that no row has
// would be lost until the process ends, and a row whose room is free would be written over.
void ContentsTable::BeginSave() {
  memory_.Reclaim();
  for (auto& [key, kept] : retained_) {
    for (Unit& unit : kept.units) {
      if (memory_.Has(unit.at, SizeOf(unit.stored))) continue;
      FreeRoom(unit);
      unit = {};
    }
  }
  const Bytes used = memory_.used_bytes();
  had_copy_ = used > 0 && used == RoomsOfRows() && memory_.held_bytes() <= used + used / 8 + supply_.chunk();
  if (had_copy_) return;
  ForgetRows();
  memory_.TakeBack();
}

Bytes ContentsTable::RoomsOfRows() const {
  Bytes stored = 0;
  for (const auto* const rows : {&saved_, &retained_})
    for (const auto& [key, item] : *rows)
      for (const Unit& unit : item.units) stored += SizeOf(unit.stored);
  return stored;
}

void ContentsTable::Retain() {
  retained_ = std::exchange(saved_, {});
  for (auto& [key, kept] : retained_) {
    for (Unit& unit : kept.units) {
      if (unit.hashed) continue;
      FreeRoom(unit);
      unit = {};
    }
  }
  memory_.Retain();
}

// A copy that others had to have back says nothing about its use.
bool ContentsTable::CopyIsOfLittleUse(const LastSave& last) {
  const bool mostly_zero = 8 * last.stored < last.total;
  if (pauses_without_copy_ == 0 && (mostly_zero || (had_copy_ && 4 * last.unchanged < last.stored)))
    pauses_without_copy_ = without_copy_;
  return pauses_without_copy_ > 0 && pauses_without_copy_-- > 0;
}

void ContentsTable::FreeRetained() {
  for (const auto& [key, kept] : retained_)
    for (const Unit& unit : kept.units) FreeRoom(unit);
  retained_.clear();
}

bool ContentsTable::DropRetained() {
  if (retained_.empty() || !saved_.empty()) return false;
  retained_.clear();
  had_copy_ = false;
  memory_.TakeBack();
  return true;
}

Bytes ContentsTable::RetainedFor(std::span<const ContentItem> items) {
  Bytes bytes = 0;
  if (retained_.empty()) return bytes;
  for (const ContentItem& item : items) {
    RetainedUnits kept(retained_, item);
    for (Bytes done = 0; done < item.bytes; done += kUnitBytes) {
      const Unit* const unit = kept.At(item.offset + done, std::min(item.bytes - done, kUnitBytes));
      if (unit != nullptr) bytes += SizeOf(unit->stored);
    }
  }
  return bytes;
}

// Host memory must not grow from cycle to cycle.
bool ContentsTable::FreesRetained(std::span<const ContentItem> items, std::span<const Wanted> wanted) {
  if (retained_.empty()) return false;
  Bytes idle = 0;
  for (const Wanted& one : wanted) {
    if (one.unchanged || one.kept == nullptr) continue;
    const Bytes has = SizeOf(one.kept->stored), needs = SizeOf(one.pages);
    idle += has < needs ? has : has - needs;
  }
  if (idle <= RetainedFor(items) / 8 + supply_.chunk()) return false;
  FreeRetained();
  had_copy_ = false;
  return true;
}

std::vector<ContentsTable::Wanted> ContentsTable::WhatToSave(std::span<const ContentItem> items, const NonZero& found,
                                                             bool engine, double dense) {
  std::vector<Wanted> all;
  all.reserve(found.pages.size());
  for (const ContentItem& item : items) {
    const std::size_t first = all.size();
    const auto found_here = std::span(found.pages).subspan(first, UnitsOf(item.bytes));
    bool by_engine = engine;
    if (!by_engine && dense <= 1) {
      Bytes nonzero = 0;
      for (const std::uint32_t pages : found_here) nonzero += SizeOf(pages);
      by_engine = nonzero > 0 && static_cast<double>(nonzero) >= dense * static_cast<double>(item.bytes);
    }
    if (!by_engine && retained_.empty()) {
      for (const std::uint32_t pages : found_here) all.push_back({pages});
      continue;
    }
    RetainedUnits kept(retained_, item);
    for (Bytes done = 0; done < item.bytes; done += kUnitBytes) {
      Wanted one{found.pages[all.size()], kept.At(item.offset + done, std::min(item.bytes - done, kUnitBytes)), false,
                 by_engine};
      one.unchanged =
          one.kept != nullptr && one.kept->hashed && !found.hashes.empty() && one.kept->hash == found.hashes[all.size()];
      if (by_engine) one.pages = PagesOf(item.bytes - done);
      all.push_back(one);
    }
    if (by_engine) Bridge(std::span(all).subspan(first));
  }
  return all;
}

// Between two that are copied to where they were.
void ContentsTable::Bridge(std::span<Wanted> units) {
  const auto again = [](const Wanted& one) {
    return one.engine && !one.unchanged && one.kept != nullptr && one.kept->stored == one.pages;
  };
  std::size_t apart = kBridged + 1;
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (units[i].unchanged) {
      ++apart;
      continue;
    }
    for (std::size_t back = 1; again(units[i]) && apart <= kBridged && back <= apart; ++back) units[i - back].travels = true;
    apart = again(units[i]) ? 0 : kBridged + 1;
  }
}

Bytes ContentsTable::RoomFor(std::span<const Wanted> wanted) {
  Bytes bytes = 0;
  for (const Wanted& one : wanted) {
    const bool fits = one.unchanged || (one.kept != nullptr && SizeOf(one.kept->stored) >= SizeOf(one.pages));
    bytes += fits ? 0 : SizeOf(one.pages);
  }
  return bytes;
}

}  // namespace amem
