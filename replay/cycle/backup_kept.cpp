// What a backup keeps from one cycle to the next, and what of it is of use for the next save.
#include <algorithm>
#include <iterator>

#include "replay/cycle/backup.h"

namespace amem {

// So many unchanged units between two that changed travel with them, where copy engines take them: that takes less time than
// another copy does to begin.
constexpr std::size_t kBridged = 2;

// Asked for the units of an item in their order, which may have been parts of other items when they were kept.
class Backup::KeptOnes {
 public:
  KeptOnes(std::map<Key, SavedItem>& kept, const Item& item)
      : kept_(kept), item_(item), at_(kept.upper_bound({item.allocation, item.offset})) {
    if (at_ != kept.begin() && std::prev(at_)->first.first == item.allocation) --at_;
  }
  Unit* At(Bytes offset, Bytes bytes) {  // in the allocation; null: none
    while (Own() && at_->first.second + at_->second.bytes <= offset) ++at_;
    if (!Own() || at_->first.second > offset || at_->second.device != item_.device) return nullptr;
    const Bytes past = offset - at_->first.second;
    const bool same = past % kUnitBytes == 0 && std::min(at_->second.bytes - past, kUnitBytes) == bytes;
    return same ? &at_->second.units[past / kUnitBytes] : nullptr;
  }

 private:
  [[nodiscard]] bool Own() const { return at_ != kept_.end() && at_->first.first == item_.allocation; }

  std::map<Key, SavedItem>& kept_;
  const Item& item_;
  std::map<Key, SavedItem>::iterator at_;
};

// What others needed of the kept copy is not there any more. Where a lot of the memory lies idle between what is left, because
// rooms have become too small, all is saved anew.
void Backup::BeginSave() {
  {
    const std::lock_guard lock(mutex_);
    statistics_ = {};
  }
  pinned_.Reclaim();
  for (auto& [key, kept] : kept_) {
    for (Unit& unit : kept.units) {
      if (pinned_.Has(unit.at, SizeOf(unit.stored))) continue;
      FreeRoom(unit);
      unit = {};
    }
  }
  const Bytes used = pinned_.used_bytes();
  had_copy_ = used > 0 && pinned_.held_bytes() <= used + used / 8 + supply_.chunk();
  if (had_copy_) return;
  kept_.clear();
  pinned_.TakeBack();
}

Bytes Backup::KeptFor(std::span<const Item> items) {
  Bytes bytes = 0;
  if (kept_.empty()) return bytes;
  for (const Item& item : items) {
    KeptOnes kept(kept_, item);
    for (Bytes done = 0; done < item.bytes; done += kUnitBytes) {
      const Unit* const unit = kept.At(item.offset + done, std::min(item.bytes - done, kUnitBytes));
      if (unit != nullptr) bytes += SizeOf(unit->stored);
    }
  }
  return bytes;
}

// Where an item is dense, all its pages are wanted.
std::vector<Backup::Wanted> Backup::WhatToSave(std::span<const Item> items, const NonZero& found) {
  std::vector<Wanted> all;
  all.reserve(found.pages.size());
  for (const Item& item : items) {
    const std::size_t first = all.size();
    const auto found_here = std::span(found.pages).subspan(first, UnitsOf(item.bytes));
    bool engine = scan_mode_ == ScanMode::kBeside;
    if (!engine && options_.dense <= 1) {
      Bytes nonzero = 0;
      for (const std::uint32_t pages : found_here) nonzero += SizeOf(pages);
      engine = nonzero > 0 && static_cast<double>(nonzero) >= options_.dense * static_cast<double>(item.bytes);
    }
    if (!engine && kept_.empty()) {
      for (const std::uint32_t pages : found_here) all.push_back({pages});
      continue;
    }
    KeptOnes kept(kept_, item);
    for (Bytes done = 0; done < item.bytes; done += kUnitBytes) {
      Wanted one{found.pages[all.size()], kept.At(item.offset + done, std::min(item.bytes - done, kUnitBytes)), false, engine};
      one.unchanged =
          one.kept != nullptr && one.kept->hashed && !found.hashes.empty() && one.kept->hash == found.hashes[all.size()];
      if (engine) one.pages = PagesOf(item.bytes - done);
      all.push_back(one);
    }
    if (engine) Bridge(std::span(all).subspan(first));
  }
  return all;
}

// Between two that are copied to where they were.
void Backup::Bridge(std::span<Wanted> units) {
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

// New room, that is.
Bytes Backup::RoomFor(std::span<const Wanted> wanted) {
  Bytes bytes = 0;
  for (const Wanted& one : wanted) {
    const bool fits = one.unchanged || (one.kept != nullptr && SizeOf(one.kept->stored) >= SizeOf(one.pages));
    bytes += fits ? 0 : SizeOf(one.pages);
  }
  return bytes;
}

// If much of the kept rooms would lie idle between the others: host memory must not grow from cycle to cycle.
bool Backup::FreesKept(std::span<const Item> items, std::span<const Wanted> wanted) {
  if (kept_.empty()) return false;
  Bytes idle = 0;
  for (const Wanted& one : wanted) {
    if (one.unchanged || one.kept == nullptr) continue;
    const Bytes has = SizeOf(one.kept->stored), needs = SizeOf(one.pages);
    idle += has < needs ? has : has - needs;
  }
  if (idle <= KeptFor(items) / 8 + supply_.chunk()) return false;
  FreeKept();
  had_copy_ = false;
  return true;
}

// Copies of memory that is not there any more, or not saved any more.
void Backup::FreeKept() {
  for (const auto& [key, kept] : kept_)
    for (const Unit& unit : kept.units) FreeRoom(unit);
  kept_.clear();
}

// Whether the copy is not worth keeping: the contents are mostly zero, or less than a quarter of the last copy was unchanged.
// One that others had to have back says nothing about that.
bool Backup::CopyIsOfLittleUse() {
  const BackupStatistics last = Statistics();
  const Bytes stored = last.bytes_saved + last.bytes_unchanged;
  const bool mostly_zero = 8 * stored < last.bytes_total;
  if (pauses_without_copy_ == 0 && (mostly_zero || (had_copy_ && 4 * last.bytes_unchanged < stored)))
    pauses_without_copy_ = options_.without_copy;
  return pauses_without_copy_ > 0 && pauses_without_copy_-- > 0;
}

void Backup::RetainCopy() {
  if (!queued_.empty()) static_cast<void>(Finish());
  if (contents_ == Contents::kNone) return;
  if (contents_ != Contents::kSaved || !queued_.empty() || CopyIsOfLittleUse()) return ForgetAll();
  kept_ = std::exchange(saved_, {});
  for (auto& [key, kept] : kept_) {
    for (Unit& unit : kept.units) {
      if (unit.hashed) continue;
      FreeRoom(unit);
      unit = {};
    }
  }
  contents_ = Contents::kNone;
  pinned_.Retain();
}

void Backup::Abandon(bool undisturbed) {
  if (contents_ == Contents::kNone) return;
  const Bytes pinned = Statistics().pinned_in_save;
  if (undisturbed && contents_ == Contents::kSaved && pinned == 0) return RetainCopy();
  ForgetAll();
  if (contents_ == Contents::kNone) supply_.GiveBack(pinned);
}

}  // namespace amem
