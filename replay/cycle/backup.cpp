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
  Queue(Driver& driver, DeviceOrdinal device, bool save) : driver_(driver), device_(device), save_(save) {}

  Status Add(Address address, const Piece& piece) {
    if (bytes_ > 0 && (!piece.joined || piece.host != host_ + bytes_ || bytes_ >= kQueueBytes)) AMEM_TRY(Flush());
    if (bytes_ == 0) host_ = piece.host;
    parts_.push_back({address, piece.bytes});
    bytes_ += piece.bytes;
    return {};
  }

  Status Flush() {
    if (bytes_ == 0) return {};
    Status queued = save_ ? driver_.Gather(device_, host_, parts_) : driver_.Scatter(device_, parts_, host_);
    parts_.clear();
    bytes_ = 0;
    return queued;
  }

 private:
  Driver& driver_;
  const DeviceOrdinal device_;
  const bool save_;
  std::vector<Extent> parts_;
  std::byte* host_ = nullptr;
  Bytes bytes_ = 0;
};

Backup::Backup(Driver& driver, BackupOptions options)
    : driver_(driver),
      options_(options),
      pinned_(driver, {.chunk = options.chunk, .quiet = options.quiet, .prepare_limit = options.prepare_limit}) {}

Backup::~Backup() {
  if (fork_.InChild()) return;
  StopPreparing();
  ForgetAll();
}

// ---- saving ----------------------------------------------------------------------------------------------------------------

Status Backup::Save(std::span<const Item> items) {
  if (contents_ == Contents::kLost) return {Code::kInvalid, "save contents: the last Save failed and was not forgotten"};
  pinned_.Rest(true);
  Bytes total = 0;
  for (const Item& item : items) total += item.bytes;
  pinned_.Expect(Expected(total));
  if (contents_ == Contents::kNone) {
    pinned_.BeginCount();
    const std::lock_guard lock(mutex_);
    statistics_ = {};
  }
  if (queued_.empty()) began_ns_ = MonotonicNs();
  contents_ = Contents::kQueued;
  for (const auto& [device, own] : ByDevice(items)) {
    if (Status saved = SaveOn(device, own); !saved.ok()) {
      contents_ = Contents::kLost;
      return saved.Within(fmt::format("save contents on device {}", device.value));
    }
  }
  pinned_.Expect(0);
  return {};
}

// While the next part is scanned, copies of the part before are under way. They are marked in smaller steps, so that memory can
// be released as soon as its own copies are done.
Status Backup::SaveOn(DeviceOrdinal device, std::span<const Item> items) {
  queued_.insert(device);
  return InBatches(items, options_.look, [&](std::span<const Item> some) { return LookAndSave(device, some); });
}

Status Backup::LookAndSave(DeviceOrdinal device, std::span<const Item> items) {
  const std::uint64_t began = MonotonicNs();
  const auto found = driver_.FindNonZero(device, ExtentsOf(items), options_.block);
  const std::uint64_t looked = MonotonicNs() - began;
  if (!found.ok()) return found.status();
  Bytes total = 0, saved = 0;
  for (const Item& item : items) total += item.bytes;
  for (const Extent& run : found->runs) saved += run.bytes;
  {
    const std::lock_guard lock(mutex_);
    statistics_.scan_ns += looked;
    statistics_.bytes_total += total;
    statistics_.bytes_saved += saved;
    statistics_.bytes_zero += total - saved;
    if (!found->unscanned.empty()) statistics_.unscanned = found->unscanned;
  }
  // More than was guessed for all that is saved.
  if (total > 0 && saved > Expected(total)) pinned_.Expect(saved);
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
  Queue queue(driver_, device, true);
  std::size_t run = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    const std::size_t first = pieces_.size();
    for (const std::size_t end = run + counts[i]; run < end; ++run) {
      AMEM_TRY(Place(queue, runs[run], runs[run].address.value - item.address.value));
    }
    saved_[{item.allocation, item.offset}] = {item.bytes, first, pieces_.size() - first, device, 0};
  }
  AMEM_TRY(queue.Flush());
  const auto mark = driver_.Mark(device);
  if (!mark.ok()) return mark.status();
  for (const Item& item : items) saved_[{item.allocation, item.offset}].mark = *mark;
  return {};
}

Status Backup::Place(Queue& queue, const Extent& run, Bytes offset) {
  for (Bytes done = 0; done < run.bytes;) {
    const auto room = pinned_.Take(run.bytes - done);
    if (!room.ok()) return room.status();
    pieces_.push_back({offset + done, room->bytes, room->at, room->joined});
    AMEM_TRY(queue.Add(run.address + done, pieces_.back()));
    done += room->bytes;
  }
  return {};
}

Status Backup::AwaitSaved(AllocationId allocation) {
  if (contents_ == Contents::kSaved) return {};
  if (contents_ != Contents::kQueued) return {Code::kInvalid, "wait for contents to be saved: nothing is being saved"};
  auto it = saved_.lower_bound({allocation, 0});
  for (; it != saved_.end() && it->first.first == allocation; ++it) {
    AMEM_TRY(driver_.Await(it->second.device, it->second.mark));
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
  const auto mark = driver_.Mark(device);
  if (!mark.ok()) return mark.status();
  for (const Item& item : items) {
    Saved& saved = saved_.at({item.allocation, item.offset});
    saved.mark = *mark;
    saved.restoring = true;
  }
  return {};
}

Status Backup::RestoreBatch(DeviceOrdinal device, std::span<const Item> items) {
  AMEM_TRY(driver_.ClearAll(device, Joined(items)));
  Queue queue(driver_, device, false);
  for (const Item& item : items) {
    const Saved& saved = saved_.at({item.allocation, item.offset});
    for (const Piece& piece : std::span(pieces_).subspan(saved.first, saved.count)) {
      AMEM_TRY(queue.Add(item.address + piece.offset, piece));
    }
  }
  return queue.Flush();
}

Status Backup::AwaitRestored(AllocationId allocation) {
  auto it = saved_.lower_bound({allocation, 0});
  for (; it != saved_.end() && it->first.first == allocation; ++it) {
    Saved& saved = it->second;
    if (saved.restoring && queued_.contains(saved.device)) AMEM_TRY(driver_.Await(saved.device, saved.mark));
    saved.restoring = false;
  }
  return {};
}

Status Backup::Finish() {
  Status first;
  const bool any = !queued_.empty();
  std::set<DeviceOrdinal> unfinished;  // ForgetAll waits for them once more, before their host memory is used again
  for (const DeviceOrdinal device : queued_) {
    Status done = driver_.FinishCopies(device);
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
  if (!queued_.empty()) static_cast<void>(Finish());  // no copy may be under way to memory that is used again
  queued_.clear();
  saved_.clear();
  pieces_.clear();
  contents_ = Contents::kNone;
  pinned_.TakeBack();
}

bool Backup::Has(AllocationId allocation) const {
  const auto it = saved_.lower_bound({allocation, 0});
  return it != saved_.end() && it->first.first == allocation;
}

Bytes Backup::Expected(Bytes contents) const {
  const std::lock_guard lock(mutex_);
  const auto total = static_cast<double>(statistics_.bytes_total);
  const double share = total > 0 ? 1.1 * static_cast<double>(statistics_.bytes_saved) / total : 0.22;
  return std::min(contents, static_cast<Bytes>(static_cast<double>(contents) * share) + options_.chunk);
}

BackupStatistics Backup::Statistics() const {
  const PinnedMemory::Statistics pinned = pinned_.Count();
  const std::lock_guard lock(mutex_);
  BackupStatistics all = statistics_;
  all.pinned_bytes = pinned.pinned_bytes;
  all.pinned_in_save = pinned.pinned_in_take;
  all.pin_ns = pinned.pin_ns;
  all.not_prepared = pinned.not_prepared;
  return all;
}

}  // namespace amem
