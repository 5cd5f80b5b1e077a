#include "replay/cycle/backup.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

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

Bytes SumOf(std::span<const Extent> extents) {
  Bytes sum = 0;
  for (const Extent& extent : extents) sum += extent.bytes;
  return sum;
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

class Backup::Queue {
 public:
  Queue(Copier& copier, DeviceOrdinal device, bool save) : copier_(copier), device_(device), save_(save) {}

  Status Add(Address address, const Piece& piece) {
    if (bytes_ > 0 && (!piece.joined || piece.host != host_ + bytes_ || bytes_ >= kQueueBytes)) AMEM_TRY(Flush());
    if (bytes_ == 0) host_ = piece.host;
    parts_.push_back({address, piece.bytes});
    bytes_ += piece.bytes;
    return {};
  }

  // By a copy engine, on its own.
  Status AddWhole(Address address, const Piece& piece) {
    return save_ ? copier_.CopyToHost(device_, piece.host, address, piece.bytes)
                 : copier_.CopyToDevice(device_, address, piece.host, piece.bytes);
  }

  Status Flush() {
    if (bytes_ == 0) return {};
    Status queued = save_ ? copier_.Gather(device_, host_, parts_) : copier_.Scatter(device_, parts_, host_);
    parts_.clear();
    bytes_ = 0;
    return queued;
  }

 private:
  Copier& copier_;
  const DeviceOrdinal device_;
  const bool save_;
  std::vector<Extent> parts_;
  std::byte* host_ = nullptr;
  Bytes bytes_ = 0;
};

Backup::Backup(Copier& copier, PinnedSupply& supply, BackupOptions options)
    : copier_(copier), options_(options), supply_(supply), pinned_(supply) {}

Backup::~Backup() {
  if (fork_.InChild()) return;
  SetUntil(In(std::chrono::minutes(1)));
  ForgetAll();
}

// ---- saving ----------------------------------------------------------------------------------------------------------------

Status Backup::Save(std::span<const Item> items, Looking looking) {
  if (contents_ == Contents::kForgotten) ForgetAll();
  if (contents_ == Contents::kForgotten) return {Code::kInvalid, "save contents: copies of an earlier Save have not ended"};
  if (contents_ == Contents::kLost) return {Code::kInvalid, "save contents: the last Save failed and was not forgotten"};
  pinned_.Rest(true);
  Bytes total = 0;
  for (const Item& item : items) total += item.bytes;
  if (contents_ == Contents::kNone) {
    const std::lock_guard lock(mutex_);
    statistics_ = {};
  }
  if (queued_.empty()) began_ns_ = MonotonicNs();
  contents_ = Contents::kQueued;
  if (Status room = FindRoom(items, looking, total); !room.ok()) {
    contents_ = Contents::kLost;
    return room.Within("save contents");
  }
  for (const auto& [device, own] : ByDevice(items)) {
    if (Status saved = SaveOn(device, own, looking); !saved.ok()) {
      contents_ = Contents::kLost;
      return saved.Within(fmt::format("save contents on device {}", device.value));
    }
  }
  pinned_.Unpromise();
  return {};
}

// Before any of it is pinned. The guess may be too much: where the host has less, a look at all contents says what is needed.
Status Backup::FindRoom(std::span<const Item> items, Looking looking, Bytes total) {
  Status room = pinned_.Promise(looking == Looking::kWhole ? total : Expected(total));
  if (room.ok() || looking == Looking::kWhole) return room;
  Bytes exactly = 0;
  for (const auto& [device, own] : ByDevice(items)) {
    AMEM_TRY(InBatches(own, options_.look, [&](std::span<const Item> some) -> Status {
      const auto found = Look(some.front().device, some, looking);
      if (found.ok()) exactly += SavedOf(some, *found);
      return found.ok() ? Status{} : found.status();
    }));
  }
  return pinned_.Promise(exactly);
}

Bytes Backup::SavedOf(std::span<const Item> items, const NonZero& found) const {
  Bytes saved = 0;
  std::span<const Extent> rest = found.runs;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto own = rest.first(found.counts[i]);
    rest = rest.subspan(own.size());
    saved += Dense(items[i], own) ? items[i].bytes : SumOf(own);
  }
  return saved;
}

// While the next part is scanned, copies of the part before are under way. They are marked in smaller steps, so that memory can
// be released as soon as its own copies are done.
Status Backup::SaveOn(DeviceOrdinal device, std::span<const Item> items, Looking looking) {
  queued_.insert(device);
  return InBatches(items, options_.look, [&](std::span<const Item> some) { return LookAndSave(device, some, looking); });
}

Result<NonZero> Backup::Look(DeviceOrdinal device, std::span<const Item> items, Looking looking) {
  if (looking == Looking::kForZeros) return copier_.FindNonZero(device, ExtentsOf(items), options_.block, until_);
  NonZero all{ExtentsOf(items), {}, "kernels would run beside those of the program"};
  all.counts.assign(items.size(), 1);
  return all;
}

bool Backup::Dense(const Item& item, std::span<const Extent> runs) const {
  const Bytes bytes = SumOf(runs);
  return bytes > 0 && static_cast<double>(bytes) >= options_.dense * static_cast<double>(item.bytes);
}

Status Backup::LookAndSave(DeviceOrdinal device, std::span<const Item> items, Looking looking) {
  const std::uint64_t began = MonotonicNs();
  const auto found = Look(device, items, looking);
  const std::uint64_t looked = MonotonicNs() - began;
  if (!found.ok()) return found.status();
  Bytes total = 0;
  for (const Item& item : items) total += item.bytes;
  const Bytes saved = SavedOf(items, *found);
  {
    const std::lock_guard lock(mutex_);
    statistics_.scan_ns += looked;
    statistics_.bytes_total += total;
    statistics_.bytes_saved += saved;
    statistics_.bytes_zero += total - saved;
    if (!found->unscanned.empty()) statistics_.unscanned = found->unscanned;
  }
  // More than was guessed for all that is saved.
  if (total > 0 && saved > Expected(total)) AMEM_TRY(pinned_.Promise(saved));
  std::size_t run = 0, item = 0;
  return InBatches(items, options_.batch, [&](std::span<const Item> batch) {
    const auto counts = std::span(found->counts).subspan(item, batch.size());
    const std::size_t runs = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    const Status queued = SaveBatch(device, batch, std::span(found->runs).subspan(run, runs), counts);
    run += runs;
    item += batch.size();
    return queued;
  });
}

// `runs` are not zero, and `counts` says how many of them lie in each item.
Status Backup::SaveBatch(DeviceOrdinal device, std::span<const Item> items, std::span<const Extent> runs,
                         std::span<const std::size_t> counts) {
  Queue queue(copier_, device, true);
  std::size_t run = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    const std::size_t first = pieces_.size();
    const bool whole = Dense(item, runs.subspan(run, counts[i]));
    if (whole) AMEM_TRY(Place(queue, {item.address, item.bytes}, 0, true));
    for (const std::size_t end = run + counts[i]; run < end; ++run) {
      if (!whole) AMEM_TRY(Place(queue, runs[run], runs[run].address.value - item.address.value, false));
    }
    saved_[{item.allocation, item.offset}] = {item.bytes, first, pieces_.size() - first, device, whole};
  }
  AMEM_TRY(queue.Flush());
  const auto mark = copier_.Mark(device);
  if (!mark.ok()) return mark.status();
  for (const Item& item : items) saved_[{item.allocation, item.offset}].mark = *mark;
  return {};
}

Status Backup::Place(Queue& queue, const Extent& run, Bytes offset, bool whole) {
  for (Bytes done = 0; done < run.bytes;) {
    const auto room = TakeRoom(run.bytes - done);
    if (!room.ok()) return room.status();
    pieces_.push_back({offset + done, room->bytes, room->at, room->joined});
    AMEM_TRY(whole ? queue.AddWhole(run.address + done, pieces_.back()) : queue.Add(run.address + done, pieces_.back()));
    done += room->bytes;
  }
  return {};
}

Result<PinnedMemory::Room> Backup::TakeRoom(Bytes wanted) {
  const std::uint64_t began = MonotonicNs();
  const auto room = pinned_.Take(wanted, until_);
  if (!room.ok() || !room->pinned_now) return room;
  const std::lock_guard lock(mutex_);
  statistics_.pin_ns += MonotonicNs() - began;
  statistics_.pinned_in_save += supply_.chunk();
  return room;
}

Status Backup::AwaitSaved(AllocationId allocation) {
  if (contents_ == Contents::kSaved) return {};
  if (contents_ != Contents::kQueued) return {Code::kInvalid, "wait for contents to be saved: nothing is being saved"};
  auto it = saved_.lower_bound({allocation, 0});
  for (; it != saved_.end() && it->first.first == allocation; ++it) {
    AMEM_TRY(copier_.Await(it->second.device, it->second.mark, until_));
    it->second.done = true;
  }
  return {};
}

// ---- bringing back ---------------------------------------------------------------------------------------------------------

Status Backup::Restore(std::span<const Item> items) {
  if (contents_ == Contents::kQueued) return {Code::kInvalid, "restore contents: they are not saved before Finish is OK"};
  for (const Item& item : items) {
    const auto it = saved_.find({item.allocation, item.offset});
    // An item that was waited for by itself is whole, even if the rest was lost.
    if (contents_ == Contents::kLost && (it == saved_.end() || !it->second.done))
      return {Code::kInvalid, "restore contents of " + Name(item) + ": saving them failed"};
    if (it == saved_.end()) return {Code::kNotFound, "the backup has no contents of " + Name(item)};
    if (it->second.bytes != item.bytes) {
      return {Code::kNotFound, fmt::format("the backup has {} bytes of {}", it->second.bytes, Name(item))};
    }
  }
  pinned_.Rest(true);
  if (queued_.empty()) began_ns_ = MonotonicNs();
  for (const auto& [device, own] : ByDevice(items)) {
    AMEM_TRY(RestoreOn(device, own).Within(fmt::format("restore contents on device {}", device.value)));
  }
  return {};
}

// One mark for all batches: recording one in every stream, and waiting for it there, costs as much as a small copy.
Status Backup::RestoreOn(DeviceOrdinal device, std::span<const Item> items) {
  queued_.insert(device);
  AMEM_TRY(InBatches(items, options_.batch, [&](std::span<const Item> batch) { return RestoreBatch(device, batch); }));
  const auto mark = copier_.Mark(device);
  if (!mark.ok()) return mark.status();
  for (const Item& item : items) {
    Saved& saved = saved_.at({item.allocation, item.offset});
    saved.mark = *mark;
    saved.restoring = true;
  }
  return {};
}

Status Backup::RestoreBatch(DeviceOrdinal device, std::span<const Item> items) {
  std::vector<Item> sparse;
  for (const Item& item : items) {
    if (!saved_.at({item.allocation, item.offset}).whole) sparse.push_back(item);
  }
  if (!sparse.empty()) AMEM_TRY(copier_.ClearAll(device, Joined(sparse)));
  Queue queue(copier_, device, false);
  for (const Item& item : items) {
    const Saved& saved = saved_.at({item.allocation, item.offset});
    for (const Piece& piece : std::span(pieces_).subspan(saved.first, saved.count)) {
      const Address to = item.address + piece.offset;
      AMEM_TRY(saved.whole ? queue.AddWhole(to, piece) : queue.Add(to, piece));
    }
  }
  return queue.Flush();
}

Status Backup::AwaitRestored(AllocationId allocation) {
  auto it = saved_.lower_bound({allocation, 0});
  for (; it != saved_.end() && it->first.first == allocation; ++it) {
    Saved& saved = it->second;
    if (saved.restoring && queued_.contains(saved.device)) AMEM_TRY(copier_.Await(saved.device, saved.mark, until_));
    saved.restoring = false;
  }
  return {};
}

Status Backup::Compare(std::span<const Item> items) {
  if (items.empty()) return {};
  const Bytes most = std::min(std::ranges::max(items, {}, &Item::bytes).bytes, kQueueBytes);
  const auto buffer = copier_.AllocatePinned(most);
  if (!buffer.ok()) return buffer.status();
  std::byte* const host = (*buffer)->data();
  for (const Item& item : items) {
    const auto saved = saved_.find({item.allocation, item.offset});
    if (saved == saved_.end()) return {Code::kNotFound, "the backup has no contents of " + Name(item)};
    for (Bytes from = 0; from < item.bytes; from += most) {
      const Bytes bytes = std::min(item.bytes - from, most);
      AMEM_TRY(copier_.CopyToHost(item.device, host, item.address + from, bytes));
      AMEM_TRY(copier_.FinishCopies(item.device, until_));
      const auto differs = FirstDifference(saved->second, from, {host, bytes});
      if (!differs) continue;
      return {Code::kBroken,
              fmt::format("compare contents of {} with what was saved: they differ at byte {}", Name(item), *differs)};
    }
  }
  return {};
}

// Between the pieces, and behind them, all is zero.
std::optional<Bytes> Backup::FirstDifference(const Saved& saved, Bytes from, std::span<const std::byte> found) const {
  Bytes at = from;
  const Bytes end = from + found.size();
  const auto differs = [&](Bytes until, const std::byte* expected) -> std::optional<Bytes> {
    for (; at < until; ++at) {
      if (found[at - from] != (expected == nullptr ? std::byte{} : *expected++)) return at;
    }
    return {};
  };
  for (const Piece& piece : std::span(pieces_).subspan(saved.first, saved.count)) {
    if (piece.offset + piece.bytes <= at || piece.offset >= end) continue;
    if (const auto byte = differs(piece.offset, nullptr)) return byte;
    if (const auto byte = differs(std::min(piece.offset + piece.bytes, end), piece.host + (at - piece.offset))) return byte;
  }
  return differs(end, nullptr);
}

Status Backup::Finish() {
  Status first;
  const bool any = !queued_.empty();
  std::set<DeviceOrdinal> unfinished;  // ForgetAll waits for them once more, before their host memory is used again
  for (const DeviceOrdinal device : queued_) {
    Status done = copier_.FinishCopies(device, until_);
    if (done.ok()) continue;
    unfinished.insert(device);
    if (first.ok()) first = std::move(done);
  }
  if (any) {
    const std::lock_guard lock(mutex_);
    (contents_ == Contents::kSaved ? statistics_.restore_ns : statistics_.save_copy_ns) = MonotonicNs() - began_ns_;
  }
  queued_ = std::move(unfinished);
  if (contents_ == Contents::kQueued) contents_ = first.ok() ? Contents::kSaved : Contents::kLost;
  pinned_.Rest(false);
  return first;
}

void Backup::ForgetAll() {
  if (!queued_.empty()) static_cast<void>(Finish());
  saved_.clear();
  pieces_.clear();
  contents_ = Contents::kForgotten;
  if (!queued_.empty()) return;  // copies that have not ended still use the memory, which must serve nothing else
  contents_ = Contents::kNone;
  pinned_.TakeBack();
}

void Backup::Abandon() {
  ForgetAll();
  if (contents_ == Contents::kNone) supply_.GiveBack(Statistics().pinned_in_save);
}

bool Backup::Has(AllocationId allocation) const {
  const auto it = saved_.lower_bound({allocation, 0});
  return it != saved_.end() && it->first.first == allocation;
}

std::vector<Backup::Item> Backup::ItemsOf(AllocationId allocation) const {
  std::vector<Item> items;
  auto it = saved_.lower_bound({allocation, 0});
  for (; it != saved_.end() && it->first.first == allocation; ++it)
    items.push_back({allocation, it->second.device, {}, it->second.bytes, it->first.second});
  return items;
}

Bytes Backup::Expected(Bytes contents) const {
  const std::lock_guard lock(mutex_);
  const auto total = static_cast<double>(statistics_.bytes_total);
  const double share = total > 0 ? 1.1 * static_cast<double>(statistics_.bytes_saved) / total : options_.first_guess;
  return std::min(contents, static_cast<Bytes>(static_cast<double>(contents) * share) + supply_.chunk());
}

BackupStatistics Backup::Statistics() const {
  const PinnedSupply::Statistics pinned = supply_.Count();
  const std::lock_guard lock(mutex_);
  BackupStatistics all = statistics_;
  all.pinned_bytes = pinned.pinned_bytes;
  all.held_bytes = pinned_.held_bytes();
  all.not_prepared = pinned.not_prepared;
  return all;
}

}  // namespace amem
