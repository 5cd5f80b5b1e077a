#include "replay/cycle/pinned_memory.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "journal/base/thread.h"

namespace amem {
namespace {

constexpr Bytes kPage = 4096;
constexpr int kNiceness = 10;

}  // namespace

PinnedMemory::~PinnedMemory() {
  if (fork_.InChild()) {  // neither the thread nor the driver's memory came along
    static_cast<void>(thread_.release());
    for (auto& buffer : buffers_) static_cast<void>(buffer.release());
    return;
  }
  if (!StopPreparing()) thread_->join();
}

void PinnedMemory::WantPages(Bytes more, PageSupply::Haste haste) {
  pages_.Want((more + options_.chunk - 1) / options_.chunk, haste);
}

void PinnedMemory::Expect(Bytes wanted) {
  Bytes room = 0;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = filling_; i < buffers_.size(); ++i) room += buffers_[i]->size() - (i == filling_ ? filled_ : 0);
  }
  WantPages(wanted - std::min(wanted, room), PageSupply::Haste::kNow);
}

Result<PinnedMemory::Room> PinnedMemory::Take(Bytes wanted) {
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
    if (pinning_) {  // the buffer that the thread is about to get comes first
      if (!changed_.wait_for(lock, copier_.patience(), [&] { return !pinning_; })) {
        return Status{Code::kDriver,
                      fmt::format("pin host memory for contents: a call of the driver that pins ahead has not returned within "
                                  "{} ms",
                                  copier_.patience().count()),
                      cuda::kTimeout};
      }
    } else {
      lock.unlock();
      auto buffer = copier_.Pin(pages_.Take(), options_.chunk);
      lock.lock();
      if (!buffer.ok()) {
        return buffer.status().Within(
            fmt::format("pin host memory for contents, {} bytes are pinned already", statistics_.pinned_bytes));
      }
      statistics_.pinned_bytes += (*buffer)->size();
      statistics_.pinned_in_take += (*buffer)->size();
      buffers_.push_back(*std::move(buffer));
    }
    statistics_.pin_ns += MonotonicNs() - began;
  }
}

void PinnedMemory::TakeBack() {
  const std::lock_guard lock(mutex_);
  filling_ = 0;
  filled_ = 0;
}

void PinnedMemory::BeginCount() {
  const std::lock_guard lock(mutex_);
  statistics_.pinned_in_take = 0;
  statistics_.pin_ns = 0;
}

PinnedMemory::Statistics PinnedMemory::Count() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

// ---- preparing -------------------------------------------------------------------------------------------------------------

void PinnedMemory::Prepare(Bytes expected) {
  if (fork_.InChild()) return;
  const std::lock_guard threads(thread_mutex_);
  {
    const std::lock_guard lock(mutex_);
    target_ = std::min(expected, options_.prepare_limit);
    WantPages(target_ - std::min(target_, statistics_.pinned_bytes), PageSupply::Haste::kAhead);
    asked_ = std::chrono::steady_clock::now();
    statistics_.not_prepared.clear();
    changed_.notify_all();
    if (preparing_) return;  // the thread sees the new target
    preparing_ = true;
  }
  if (thread_ != nullptr) thread_->join();
  thread_.reset();
  auto started = StartThread("amem-pinning", [this] { PinInBackground(); });
  if (started.ok()) {
    thread_ = std::make_unique<std::thread>(*std::move(started));
    return;
  }
  const std::lock_guard lock(mutex_);
  preparing_ = false;
  statistics_.not_prepared = started.status().message();
}

void PinnedMemory::PinInBackground() {
  static_cast<void>(setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNiceness));
  std::unique_lock lock(mutex_);
  while (statistics_.pinned_bytes < target_) {
    if (resting_) {
      changed_.wait(lock);
      continue;
    }
    pinning_ = true;
    lock.unlock();
    auto pages = pages_.Take();
    AwaitQuiet();
    auto buffer = copier_.Pin(std::move(pages), options_.chunk);
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
  changed_.notify_all();
}

// Returns at once when preparing is to stop or to rest: the caller that asked for it may need the very buffer that is pinned.
void PinnedMemory::AwaitQuiet() {
  std::unique_lock lock(mutex_);
  while (!resting_ && target_ > 0) {
    const auto busy = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(busy_ns_.load(std::memory_order_relaxed)));
    const auto quiet = std::max(asked_, busy) + options_.quiet;
    if (std::chrono::steady_clock::now() >= quiet) return;
    changed_.wait_until(lock, quiet);
  }
}

void PinnedMemory::Rest(bool resting) {
  const std::lock_guard lock(mutex_);
  resting_ = resting;
  changed_.notify_all();
}

bool PinnedMemory::StopPreparing() {
  if (fork_.InChild()) return true;
  const std::lock_guard threads(thread_mutex_);
  {
    std::unique_lock lock(mutex_);
    target_ = 0;
    pages_.Want(0, PageSupply::Haste::kAhead);
    changed_.notify_all();
    if (!changed_.wait_for(lock, copier_.patience(), [&] { return !preparing_; })) return false;
  }
  if (thread_ != nullptr) thread_->join();
  thread_.reset();
  return true;
}

void PinnedMemory::Trim(Bytes keep) {
  if (fork_.InChild()) return;
  if (!StopPreparing()) return;
  pages_.Drop();
  std::vector<std::unique_ptr<PinnedBuffer>> unused;  // outlives the lock: giving memory back takes long
  const std::lock_guard lock(mutex_);
  const std::size_t used = filling_ + (filled_ > 0 ? 1 : 0);
  while (statistics_.pinned_bytes > keep && buffers_.size() > used) {
    statistics_.pinned_bytes -= buffers_.back()->size();
    unused.push_back(std::move(buffers_.back()));
    buffers_.pop_back();
  }
}

}  // namespace amem
