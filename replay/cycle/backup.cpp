#include "replay/cycle/backup.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "journal/base/thread.h"
#include "statemachine/event.h"

namespace amem {
namespace {

constexpr Bytes kPage = 4096;
constexpr Bytes kQueueBytes = Bytes{64} << 20;  // handed to the driver at once, so that copying begins early
constexpr int kNiceness = 10;

std::string Name(const Backup::Item& item) {
  return ToText(item.allocation) + " (" + std::to_string(item.bytes) + " bytes at offset " + std::to_string(item.offset) + ")";
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

Backup::Backup(Driver& driver, BackupOptions options) : driver_(driver), options_(options) {}

Backup::~Backup() {
  if (guard_.InChild()) {  // neither the thread nor the driver's memory came along
    static_cast<void>(thread_.release());
    for (auto& buffer : buffers_) static_cast<void>(buffer.release());
    return;
  }
  StopPreparing();
  ForgetAll();
}

// ---- saving ----------------------------------------------------------------------------------------------------------------

Status Backup::Save(std::span<const Item> items) {
  if (contents_ == Contents::kLost) return {Code::kInvalid, "save contents: the last Save failed and was not forgotten"};
  Rest(true);
  if (contents_ == Contents::kNone) {
    const std::lock_guard lock(mutex_);
    statistics_ = {.pinned_bytes = statistics_.pinned_bytes, .not_prepared = statistics_.not_prepared};
  }
  if (queued_.empty()) began_ns_ = MonotonicNs();
  contents_ = Contents::kQueued;
  for (const auto& [device, own] : ByDevice(items)) {
    if (Status saved = SaveOn(device, own); !saved.ok()) {
      contents_ = Contents::kLost;
      return saved.Within("save contents on device " + std::to_string(device.value));
    }
  }
  return {};
}

// Copies of what was looked at are under way while the next part is looked at. They are marked in smaller steps, so that memory
// can go as soon as its own are done.
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

// `runs` of what is not zero in the items; `counts`: how many of them are each item's.
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
    const auto room = Take(run.bytes - done);
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

Result<Backup::Room> Backup::Take(Bytes wanted) {
  std::unique_lock lock(mutex_);
  for (;;) {
    for (; filling_ < buffers_.size(); ++filling_, filled_ = 0) {
      const Bytes left = buffers_[filling_]->size() - filled_;
      if (left < kPage) continue;
      const Room room{buffers_[filling_]->data() + filled_, std::min(wanted, left / kPage * kPage), filled_ > 0};
      filled_ += room.bytes;
      return room;
    }
    const std::uint64_t began = MonotonicNs();
    if (pinning_) {  // in the background: what it gets comes first
      changed_.wait(lock, [&] { return !pinning_; });
    } else {
      lock.unlock();
      auto buffer = driver_.AllocatePinned(options_.chunk);
      lock.lock();
      if (!buffer.ok()) {
        return buffer.status().Within("pin host memory for contents, " + std::to_string(statistics_.pinned_bytes) +
                                      " bytes are pinned already");
      }
      statistics_.pinned_bytes += (*buffer)->size();
      statistics_.pinned_in_save += (*buffer)->size();
      buffers_.push_back(*std::move(buffer));
    }
    statistics_.pin_ns += MonotonicNs() - began;
  }
}

// ---- bringing back ---------------------------------------------------------------------------------------------------------

Status Backup::Restore(std::span<const Item> items) {
  if (contents_ == Contents::kQueued) return {Code::kInvalid, "restore contents: they are not saved before Finish is OK"};
  for (const Item& item : items) {
    const auto it = saved_.find({item.allocation, item.offset});
    // What was waited for by itself is whole, whatever became of the rest.
    if (contents_ == Contents::kLost && (it == saved_.end() || !it->second.done))
      return {Code::kInvalid, "restore contents of " + Name(item) + ": saving them failed"};
    if (it == saved_.end()) return {Code::kNotFound, "the backup has no contents of " + Name(item)};
    if (it->second.bytes != item.bytes) {
      return {Code::kNotFound, "the backup has " + std::to_string(it->second.bytes) + " bytes of " + Name(item)};
    }
  }
  Rest(true);
  if (queued_.empty()) began_ns_ = MonotonicNs();
  for (const auto& [device, own] : ByDevice(items)) {
    AMEM_TRY(RestoreOn(device, own).Within("restore contents on device " + std::to_string(device.value)));
  }
  return {};
}

Status Backup::RestoreOn(DeviceOrdinal device, std::span<const Item> items) {
  queued_.insert(device);
  return InBatches(items, options_.batch, [&](std::span<const Item> batch) { return RestoreBatch(device, batch); });
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
  Rest(false);
  return first;
}

void Backup::ForgetAll() {
  if (!queued_.empty()) static_cast<void>(Finish());  // no copy may be under way to memory that is used again
  queued_.clear();
  saved_.clear();
  pieces_.clear();
  contents_ = Contents::kNone;
  const std::lock_guard lock(mutex_);
  filling_ = 0;
  filled_ = 0;
}

bool Backup::Has(AllocationId allocation) const {
  const auto it = saved_.lower_bound({allocation, 0});
  return it != saved_.end() && it->first.first == allocation;
}

// ---- preparing -------------------------------------------------------------------------------------------------------------

Bytes Backup::Expected(Bytes contents) const {
  const std::lock_guard lock(mutex_);
  const auto total = static_cast<double>(statistics_.bytes_total);
  const double share = total > 0 ? 1.1 * static_cast<double>(statistics_.bytes_saved) / total : 0.22;
  return std::min(contents, static_cast<Bytes>(static_cast<double>(contents) * share) + options_.chunk);
}

void Backup::Prepare(Bytes expected) {
  if (guard_.InChild()) return;
  const std::lock_guard threads(thread_mutex_);
  {
    const std::lock_guard lock(mutex_);
    target_ = std::min(expected, options_.prepare_limit);
    asked_ = std::chrono::steady_clock::now();
    statistics_.not_prepared.clear();
    changed_.notify_all();
    if (preparing_) return;  // the thread sees the new target
    preparing_ = true;
  }
  if (thread_ != nullptr) thread_->join();
  thread_.reset();
  auto started = StartThread("amem-pinning", [this] { PinInBackground(); });
  if (started) {
    thread_ = std::make_unique<std::thread>(*std::move(started));
  } else {
    const std::lock_guard lock(mutex_);
    preparing_ = false;
    statistics_.not_prepared = started.status().message();
  }
}

void Backup::PinInBackground() {
  static_cast<void>(setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNiceness));
  std::unique_lock lock(mutex_);
  while (statistics_.pinned_bytes < target_) {
    if (resting_) {
      changed_.wait(lock);
      continue;
    }
    pinning_ = true;
    lock.unlock();
    auto buffer = driver_.AllocatePinnedQuietly(options_.chunk, [this] { AwaitQuiet(); });
    lock.lock();
    pinning_ = false;
    if (buffer.ok()) {
      statistics_.pinned_bytes += (*buffer)->size();
      buffers_.push_back(*std::move(buffer));
    } else {
      statistics_.not_prepared = buffer.status().message();
      target_ = 0;
    }
    changed_.notify_all();
  }
  preparing_ = false;
}

// Whoever stops preparing, or saves and needs what is being pinned, does not wait.
void Backup::AwaitQuiet() {
  std::unique_lock lock(mutex_);
  while (!resting_ && target_ > 0) {
    const auto busy = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(busy_ns_.load(std::memory_order_relaxed)));
    const auto quiet = std::max(asked_, busy) + options_.quiet;
    if (std::chrono::steady_clock::now() >= quiet) return;
    changed_.wait_until(lock, quiet);
  }
}

void Backup::Rest(bool resting) {
  const std::lock_guard lock(mutex_);
  resting_ = resting;
  changed_.notify_all();
}

void Backup::StopPreparing() {
  if (guard_.InChild()) return;
  const std::lock_guard threads(thread_mutex_);
  {
    const std::lock_guard lock(mutex_);
    target_ = 0;
    changed_.notify_all();
  }
  if (thread_ != nullptr) thread_->join();
  thread_.reset();
}

void Backup::Trim(Bytes keep) {
  if (guard_.InChild()) return;
  StopPreparing();
  std::vector<std::unique_ptr<PinnedBuffer>> unused;  // given back without the lock
  const std::lock_guard lock(mutex_);
  const std::size_t used = filling_ + (filled_ > 0 ? 1 : 0);
  while (statistics_.pinned_bytes > keep && buffers_.size() > used) {
    statistics_.pinned_bytes -= buffers_.back()->size();
    unused.push_back(std::move(buffers_.back()));
    buffers_.pop_back();
  }
}

BackupStatistics Backup::Statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

Bytes Backup::pinned_bytes() const {
  const std::lock_guard lock(mutex_);
  return statistics_.pinned_bytes;
}

}  // namespace amem
