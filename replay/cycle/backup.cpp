#include "replay/cycle/backup.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "statemachine/check.h"
#include "statemachine/event.h"

namespace amem {
namespace {

constexpr Bytes kQueueBytes = Bytes{64} << 20;  // handed to the driver at once, so that copying begins early

std::string Name(const Backup::Item& item) {
  return fmt::format("{} ({} bytes at offset {})", ToText(item.allocation), item.bytes, item.offset);
}

// The items of each device, in the order in which they were given.
std::map<DeviceOrdinal, std::vector<Backup::Item>> ByDevice(std::span<const Backup::Item> items) {
  std::map<DeviceOrdinal, std::vector<Backup::Item>> sorted;
  for (const Backup::Item& item : items) sorted[item.device].push_back(item);
  return sorted;
}

std::vector<Extent> ExtentsOf(std::span<const Backup::Item> items) {
  std::vector<Extent> extents;
  extents.reserve(items.size());
  for (const Backup::Item& item : items) extents.push_back({item.address, item.bytes});
  return extents;
}

// The same memory in as few extents as there are gaps in it.
std::vector<Extent> Joined(std::span<const Backup::Item> items) {
  std::vector<Extent> extents;
  for (const Backup::Item& item : items) {
    if (!extents.empty() && extents.back().address + extents.back().bytes == item.address) {
      extents.back().bytes += item.bytes;
    } else {
      extents.push_back({item.address, item.bytes});
    }
  }
  return extents;
}

// Calls one(batch) for some items after the other, of about `bytes` each.
Status InBatches(std::span<const Backup::Item> items, Bytes bytes, const auto& one) {
  while (!items.empty()) {
    std::size_t count = 0;
    for (Bytes sum = 0; count < items.size() && sum < bytes; ++count) sum += items[count].bytes;
    AMEM_TRY(one(items.first(count)));
    items = items.subspan(count);
  }
  return {};
}

}  // namespace

// Copies between units and their rooms. What copy engines do not take goes to the driver at once, wherever the rooms lie.
class Backup::Queue {
 public:
  Queue(Copier& copier, DeviceOrdinal device, bool save) : copier_(copier), device_(device), save_(save) {}

  // `engine`: by a copy engine, in copies as large as the memory on both sides allows.
  Status Add(Address address, const PinnedMemory::Piece& piece, bool engine) {
    const Extent part{address, piece.bytes, piece.at};
    Extent* const last = engine ? &whole_ : parts_.empty() ? nullptr : &parts_.back();
    if (piece.joined && last != nullptr && last->bytes < kQueueBytes && last->address + last->bytes == address &&
        last->host + last->bytes == piece.at) {
      last->bytes += piece.bytes;
    } else if (engine) {
      AMEM_TRY(CopyWhole());
      whole_ = part;
    } else {
      parts_.push_back(part);
    }
    bytes_ += engine ? 0 : piece.bytes;
    return bytes_ >= kQueueBytes ? MoveParts() : Status{};
  }

  Status Flush() {
    AMEM_TRY(CopyWhole());
    return parts_.empty() ? Status{} : MoveParts();
  }

 private:
  Status CopyWhole() {
    const Extent one = std::exchange(whole_, {});
    if (one.bytes == 0) return {};
    return save_ ? copier_.CopyToHost(device_, one.host, one.address, one.bytes)
                 : copier_.CopyToDevice(device_, one.address, one.host, one.bytes);
  }
  Status MoveParts() {
    const std::vector<Extent> parts = std::exchange(parts_, {});
    bytes_ = 0;
    return save_ ? copier_.Gather(device_, parts) : copier_.Scatter(device_, parts);
  }

  Copier& copier_;
  const DeviceOrdinal device_;
  const bool save_;
  Extent whole_;
  std::vector<Extent> parts_;
  Bytes bytes_ = 0;  // of the parts
};

Backup::Backup(Copier& copier, PinnedSupply& supply, BackupOptions options)
    : copier_(copier), options_(options), supply_(supply), table_(supply, options.without_copy) {}

Backup::~Backup() {
  if (fork_.InChild()) return;
  SetUntil(In(std::chrono::minutes(1)));
  ForgetAll();
  FreeUnfinished(until_);
}

Status Backup::Save(std::span<const Item> items, ScanMode mode) {
  if (contents_ == Contents::kForgotten) ForgetAll();
  if (contents_ == Contents::kLost) ForgetLost();
  if (contents_ == Contents::kForgotten || contents_ == Contents::kLost)
    return {Code::kInvalid, "save contents: copies of an earlier Save have not ended"};
  if (contents_ == Contents::kNone) BeginSave();
  table_.memory().SuspendPinning(true);
  if (queued_.empty()) began_ns_ = MonotonicNs();
  contents_ = Contents::kLost;  // if any of this fails
  scan_mode_ = mode;
  if (const Status room = FindRoom(items); !room.ok()) {
    if (queued_.empty()) table_.memory().SuspendPinning(false);  // no Finish would
    return room.Within("save contents");
  }
  // While the next part is looked at, copies of the part before are under way. They are marked in smaller steps, so that memory
  // can be released as soon as its own copies are done.
  for (const auto& [device, own] : ByDevice(items)) {
    queued_.insert(device);
    const Status saved = InBatches(own, options_.scan, [&](std::span<const Item> some) { return ScanAndSave(some); });
    AMEM_TRY(saved.Within(fmt::format("save contents on device {}", device.value)));
  }
  contents_ = Contents::kQueued;
  table_.memory().Unpromise();
  return {};
}

// Before any of it is pinned. The guess may be too much: where the host has less, a look at all contents says what is needed. A
// copy that was kept is of less use than room for what is to be saved.
Status Backup::FindRoom(std::span<const Item> items) {
  Bytes total = 0;
  for (const Item& item : items) total += item.bytes;
  const Bytes guess = scan_mode_ == ScanMode::kBeside ? total : Expected(total);
  Status room = table_.memory().Promise(guess - std::min(guess, table_.RetainedFor(items)));
  if (room.ok()) return room;
  Bytes exactly = 0;
  for (const auto& [device, own] : ByDevice(items)) {
    AMEM_TRY(InBatches(own, options_.scan, [&](std::span<const Item> some) -> Status {
      const auto found = Scan(some);
      if (found.ok()) exactly += ContentsTable::RoomFor(WhatToSave(some, *found));
      return found.status();
    }));
  }
  room = table_.memory().Promise(exactly);
  return room.ok() || !table_.DropRetained() ? room : FindRoom(items);
}

Result<NonZero> Backup::Scan(std::span<const Item> items) {
  const DeviceOrdinal device = items.front().device;
  if (scan_mode_ == ScanMode::kIdle || copier_.CanScanNow(device))
    return copier_.FindNonZero(device, ExtentsOf(items), table_.Hashes() ? supply_.key() : nullptr, until_);
  return Unscanned(ExtentsOf(items), "loading kernels would wait for those of the program");
}

Status Backup::ScanAndSave(std::span<const Item> items) {
  const std::uint64_t began = MonotonicNs();
  const auto found = Scan(items);
  const std::uint64_t looked = MonotonicNs() - began;
  if (!found.ok()) return found.status();
  counters_.Change([&](BackupStatistics& counted) {
    counted.scan_ns += looked;
    if (!found->unscanned.empty()) counted.unscanned = found->unscanned;
  });
  std::vector<Wanted> wanted = WhatToSave(items, *found);
  if (options_.compare) AMEM_TRY(CompareRetained(items, wanted));
  if (table_.FreesRetained(items, wanted)) wanted = WhatToSave(items, *found);
  AMEM_TRY(table_.memory().Promise(ContentsTable::RoomFor(wanted)));
  std::size_t unit = 0;
  return InBatches(items, options_.batch, [&](std::span<const Item> batch) {
    std::size_t units = 0;
    for (const Item& item : batch) units += UnitsOf(item.bytes);
    const auto hashes = found->hashes.empty() ? std::span<const ContentHash>() : std::span(found->hashes).subspan(unit, units);
    const Status queued = SaveBatch(batch, std::span(wanted).subspan(unit, units), hashes);
    unit += units;
    return queued;
  });
}

Status Backup::SaveBatch(std::span<const Item> items, std::span<const Wanted> wanted, std::span<const ContentHash> hashes) {
  const DeviceOrdinal device = items.front().device;
  Queue queue(copier_, device, true);
  BackupStatistics sums;
  std::size_t next = 0;
  for (const Item& item : items) {
    SavedItem& saved = table_.Renew(item);
    Bytes done = 0;
    for (Unit& unit : saved.units) {
      const Bytes at = std::exchange(done, done + kUnitBytes);
      if (!hashes.empty()) unit = {hashes[next], 0, 0, true};
      const Wanted& one = wanted[next++];
      if (one.pages != 0 || one.kept != nullptr) AMEM_TRY(MakeRoom(one, unit));
      saved.whole = saved.whole && unit.stored != 0 && unit.stored == PagesOf(item.bytes - at);
      if (unit.stored == 0) continue;
      const bool travels = !one.unchanged || one.travels;
      if (travels) AMEM_TRY(QueueUnit(queue, item.address + at, unit, one.engine));
      (travels ? sums.bytes_saved : sums.bytes_unchanged) += SizeOf(unit.stored);
    }
    sums.bytes_total += item.bytes;
  }
  AMEM_TRY(queue.Flush());
  AMEM_ASSIGN(const auto mark, copier_.Mark(device));
  for (const Item& item : items) {
    SavedItem* const saved = table_.Find(item);
    AMEM_CHECK(saved != nullptr, item.allocation, item.offset);
    saved->mark = mark;
  }
  counters_.Change([&](BackupStatistics& counted) {
    counted.bytes_total += sums.bytes_total;
    counted.bytes_saved += sums.bytes_saved;
    counted.bytes_unchanged += sums.bytes_unchanged;
    counted.bytes_zero += sums.bytes_total - sums.bytes_saved - sums.bytes_unchanged;
  });
  return {};
}

std::vector<Backup::Wanted> Backup::WhatToSave(std::span<const Item> items, const NonZero& found) {
  return table_.WhatToSave(items, found, scan_mode_ == ScanMode::kBeside, options_.dense);
}

Status Backup::MakeRoom(const Wanted& wanted, Unit& unit) {
  AMEM_ASSIGN(const auto room, table_.MakeRoom(wanted, unit, until_));
  if (room.pinned_now == 0) return {};
  counters_.Change([&](BackupStatistics& counted) {
    counted.pin_ns += room.pin_ns;
    counted.pinned_in_save += room.pinned_now * supply_.chunk();
  });
  return {};
}

Status Backup::QueueUnit(Queue& queue, Address address, const Unit& unit, bool engine) {
  return table_.EachPiece(
      unit, [&](Bytes offset, const PinnedMemory::Piece& piece) { return queue.Add(address + offset, piece, engine); });
}

Status Backup::AwaitSaved(AllocationId allocation) {
  if (contents_ == Contents::kSaved) return {};
  if (contents_ != Contents::kQueued) return {Code::kInvalid, "wait for contents to be saved: nothing is being saved"};
  for (auto& [key, saved] : table_.Of(allocation)) {
    AMEM_TRY(copier_.Await(saved.device, saved.mark, until_));
    saved.done = true;
  }
  return {};
}

Status Backup::Restore(std::span<const Item> items) {
  if (contents_ == Contents::kQueued) return {Code::kInvalid, "restore contents: they are not saved before Finish is OK"};
  for (const Item& item : items) {
    const SavedItem* const it = table_.Find(item);
    // An item whose save has ended is whole, even if the rest was lost.
    if (contents_ == Contents::kLost && (it == nullptr || !it->done))
      return {Code::kInvalid, "restore contents of " + Name(item) + ": saving them failed"};
    if (it == nullptr) return {Code::kNotFound, "the backup has no contents of " + Name(item)};
    if (it->bytes != item.bytes) return {Code::kNotFound, fmt::format("the backup has {} bytes of {}", it->bytes, Name(item))};
  }
  table_.memory().SuspendPinning(true);
  if (queued_.empty()) began_ns_ = MonotonicNs();
  for (const auto& [device, own] : ByDevice(items))
    AMEM_TRY(RestoreOn(device, own).Within(fmt::format("restore contents on device {}", device.value)));
  return {};
}

// One mark for all batches: recording one in every stream, and waiting for it there, costs as much as a small copy.
Status Backup::RestoreOn(DeviceOrdinal device, std::span<const Item> items) {
  queued_.insert(device);
  AMEM_TRY(InBatches(items, options_.batch, [&](std::span<const Item> batch) { return RestoreBatch(device, batch); }));
  AMEM_ASSIGN(const auto mark, copier_.Mark(device));
  for (const Item& item : items) {
    SavedItem* const saved = table_.Find(item);
    AMEM_CHECK(saved != nullptr, item.allocation, item.offset);
    saved->mark = mark;
    saved->restoring = true;
  }
  return {};
}

Status Backup::RestoreBatch(DeviceOrdinal device, std::span<const Item> items) {
  std::vector<Item> sparse;
  for (const Item& item : items) {
    const SavedItem* const saved = table_.Find(item);
    AMEM_CHECK(saved != nullptr, item.allocation, item.offset);  // Restore has seen it
    if (!saved->whole) sparse.push_back(item);
  }
  if (!sparse.empty()) AMEM_TRY(copier_.ClearAll(device, Joined(sparse)));
  Queue queue(copier_, device, false);
  for (const Item& item : items) {
    const SavedItem& saved = *table_.Find(item);
    Address to = item.address;
    for (const Unit& unit : saved.units) {
      if (unit.stored != 0) AMEM_TRY(QueueUnit(queue, to, unit, saved.whole && options_.dense <= 1));
      to = to + kUnitBytes;
    }
  }
  return queue.Flush();
}

Status Backup::AwaitRestored(AllocationId allocation) {
  for (auto& [key, saved] : table_.Of(allocation)) {
    if (saved.restoring && queued_.contains(saved.device)) AMEM_TRY(copier_.Await(saved.device, saved.mark, until_));
    saved.restoring = false;
  }
  return {};
}

// Calls one(item, unit, its bytes) for all units, through host memory of its own.
Status Backup::ReadBack(std::span<const Item> items,
                        const std::function<Status(const Item&, std::size_t, std::span<const std::byte>)>& one) {
  if (items.empty()) return {};
  FreeUnfinished(Now());
  const Bytes most = std::min(std::ranges::max(items, {}, &Item::bytes).bytes, kQueueBytes);
  AMEM_ASSIGN(auto buffer, copier_.AllocatePinned(most));
  const std::byte* const host = buffer->data();
  for (const Item& item : items) {
    for (Bytes from = 0; from < item.bytes; from += most) {
      const Bytes bytes = std::min(item.bytes - from, most);
      Status read = copier_.CopyToHost(item.device, buffer->data(), item.address + from, bytes);
      if (read.ok()) read = copier_.FinishCopies(item.device, until_);
      if (!read.ok()) {  // a copy that has not ended must not outlive the buffer
        if (!copier_.FinishCopies(item.device, until_).ok()) unfinished_.Add(item.device, std::move(buffer));
        return read;
      }
      for (Bytes at = 0; at < bytes; at += kUnitBytes)
        AMEM_TRY(one(item, (from + at) / kUnitBytes, std::span(host + at, std::min(bytes - at, kUnitBytes))));
    }
  }
  return {};
}

Status Backup::Compare(std::span<const Item> items) {
  for (const Item& item : items)
    if (table_.Find(item) == nullptr) return {Code::kNotFound, "the backup has no contents of " + Name(item)};
  return ReadBack(items, [&](const Item& item, std::size_t unit, std::span<const std::byte> found) -> Status {
    const std::vector<Unit>& units = table_.Find(item)->units;
    AMEM_CHECK(unit < units.size(), item.allocation, item.offset);
    const auto differs = table_.FirstDifference(units[unit], found);
    if (!differs) return {};
    return {Code::kBroken, fmt::format("compare contents of {} with what was saved: they differ at byte {}", Name(item),
                                       unit * kUnitBytes + *differs)};
  });
}

// What the hash says is unchanged.
Status Backup::CompareRetained(std::span<const Item> items, std::span<const Wanted> wanted) {
  if (std::ranges::none_of(wanted, &Wanted::unchanged)) return {};
  std::size_t next = 0;  // all units of all items come in their order
  return ReadBack(items, [&](const Item& item, std::size_t unit, std::span<const std::byte> found) -> Status {
    const Wanted& one = wanted[next++];
    const auto differs = one.unchanged ? table_.FirstDifference(*one.kept, found) : std::nullopt;
    if (!differs) return {};
    return {Code::kBroken, fmt::format("compare contents of {} with the copy that was kept: they differ at byte {}, and their "
                                       "hash is the same",
                                       Name(item), unit * kUnitBytes + *differs)};
  });
}

Status Backup::Finish() {
  Status first;
  const bool any = !queued_.empty();
  std::set<DeviceOrdinal> unfinished;  // ForgetAll waits for them once more, before their host memory is used again
  for (const DeviceOrdinal device : queued_) {
    Status done = copier_.FinishCopies(device, until_);
    if (done.ok() && contents_ == Contents::kQueued) table_.NoteDone(device);
    if (done.ok()) continue;
    unfinished.insert(device);
    if (first.ok()) first = std::move(done);
  }
  if (any)
    counters_.Change([&](BackupStatistics& counted) {
      (contents_ == Contents::kSaved ? counted.restore_ns : counted.save_copy_ns) = MonotonicNs() - began_ns_;
    });
  queued_ = std::move(unfinished);
  if (contents_ == Contents::kQueued) {
    contents_ = first.ok() ? Contents::kSaved : Contents::kLost;
    if (first.ok()) table_.FreeRetained();
  }
  table_.memory().SuspendPinning(false);
  return first;
}

void Backup::BeginSave() {
  counters_.Change([](BackupStatistics& counted) { counted = {}; });
  table_.BeginSave();
}

void Backup::ForgetLost() {
  if (!queued_.empty()) static_cast<void>(Finish());
  if (!queued_.empty()) return;
  const bool any = table_.ForgetUnended();
  contents_ = Contents::kSaved;
  if (!any) ForgetAll();
}

void Backup::ForgetAll() {
  if (!queued_.empty()) static_cast<void>(Finish());
  table_.ForgetRows();
  contents_ = Contents::kForgotten;
  if (!queued_.empty()) return;  // copies that have not ended still use the memory, which must serve nothing else
  contents_ = Contents::kNone;
  table_.memory().TakeBack();
}

void Backup::RetainCopy() {
  if (!queued_.empty()) static_cast<void>(Finish());
  if (contents_ == Contents::kNone) return;
  const BackupStatistics last = counters_.Copy();
  if (contents_ != Contents::kSaved || !queued_.empty() ||
      table_.CopyIsOfLittleUse({last.bytes_total, last.bytes_saved + last.bytes_unchanged, last.bytes_unchanged}))
    return ForgetAll();
  contents_ = Contents::kNone;
  table_.Retain();
}

void Backup::Abandon(bool undisturbed) {
  if (contents_ == Contents::kNone) return;
  const Bytes pinned = counters_.Copy().pinned_in_save;
  if (undisturbed && contents_ == Contents::kSaved && pinned == 0) return RetainCopy();
  ForgetAll();
  if (contents_ == Contents::kNone) supply_.GiveBack(pinned);
}

bool Backup::Has(AllocationId allocation) const { return !table_.Of(allocation).empty(); }

std::vector<Backup::Item> Backup::ItemsOf(AllocationId allocation) const {
  std::vector<Item> items;
  for (const auto& [key, saved] : table_.Of(allocation))
    items.push_back({allocation, saved.device, {}, saved.bytes, key.second});
  return items;
}

Bytes Backup::Expected(Bytes contents) const {
  const BackupStatistics last = counters_.Copy();
  const auto total = static_cast<double>(last.bytes_total);
  const auto stored = static_cast<double>(last.bytes_saved + last.bytes_unchanged);
  const double share = total > 0 ? 1.1 * stored / total : options_.first_guess;
  return std::min(contents, static_cast<Bytes>(static_cast<double>(contents) * share) + supply_.chunk());
}

BackupStatistics Backup::Statistics() const {
  const PinnedSupply::Statistics pinned = supply_.Count();
  BackupStatistics all = counters_.Copy();
  all.pinned_bytes = pinned.pinned_bytes;
  all.held_bytes = table_.memory().held_bytes();
  all.kept_bytes = table_.memory().kept_bytes();
  all.not_prepared = pinned.not_prepared;
  return all;
}

}  // namespace amem
