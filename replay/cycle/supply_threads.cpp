// The threads of a supply of pinned memory: those that populate pages, and the one that pins.
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "journal/base/no_memory.h"
#include "journal/base/thread.h"
#include "replay/cycle/pinned_memory.h"

namespace amem {

// On an H100 host with 16 processors a GiB takes 160 to 190 ms with one thread, 84 to 87 with two, 42 to 60 with four, and 32
// with eight (`amem-pinning-check --beside-program`). Other ranks of the host need processors, too.
constexpr std::size_t kPageThreads = 4, kProcessorsForEach = 4;
constexpr int kPagesNiceness = 10;

static std::size_t ThreadsFor(PageSupply::Haste haste, std::size_t ahead) {
  if (haste == PageSupply::Haste::kAhead) return ahead;
  return std::clamp<std::size_t>(std::thread::hardware_concurrency() / kProcessorsForEach, 2, kPageThreads);
}

struct PageSupply::Shared {
  Shared(Copier& populates, Bytes bytes, Asking asks) : copier(populates), piece(bytes), asking(std::move(asks)) {}
  void Work();

  Copier& copier;
  const Bytes piece;
  const Asking asking;
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::vector<std::unique_ptr<HostPages>> ready;
  std::size_t wanted = 0;
  std::size_t under_way = 0;  // pieces
  std::size_t threads = 0;
  bool useless = false;  // the driver pins in another way
};

void PageSupply::Shared::Work() {
  std::unique_lock lock(mutex);
  while (!useless && ready.size() + under_way < wanted) {
    ++under_way;
    lock.unlock();
    const bool claimed = asking.claim();
    auto pages = OrNoMemory([&]() -> Result<std::unique_ptr<HostPages>> { return claimed ? copier.Populate(piece) : nullptr; });
    if (claimed) asking.touched();
    lock.lock();
    --under_way;
    const bool got = pages.ok() && *pages != nullptr;
    if (!got) wanted = 0;  // the system has no more at the moment
    if (got) ready.push_back(*std::move(pages));
    changed.notify_all();
  }
  --threads;
  changed.notify_all();
}

PageSupply::PageSupply(Copier& copier, Bytes piece, std::size_t ahead, Asking asking)
    : ahead_(ahead), shared_(std::make_shared<Shared>(copier, piece, std::move(asking))) {
  shared_->useless = !copier.Populates(piece);
}

PageSupply::~PageSupply() {
  if (fork_.InChild()) {  // threads and pages do not survive a fork
    static_cast<void>(new std::shared_ptr<Shared>(shared_));
    return;
  }
  std::unique_lock lock(shared_->mutex);
  shared_->wanted = 0;
  shared_->changed.wait(lock, [&] { return shared_->threads == 0; });
}

void PageSupply::Want(std::size_t pieces, Haste haste) {
  const std::lock_guard lock(shared_->mutex);
  shared_->wanted = pieces;
  const std::size_t there = shared_->ready.size() + shared_->under_way;
  if (shared_->useless || there >= pieces) return;
  const std::size_t threads = std::min(ThreadsFor(haste, ahead_), pieces - there + shared_->under_way);
  while (shared_->threads < threads) {
    auto started = StartThread("amem-pages", [shared = shared_, haste] {
      if (haste == Haste::kAhead)
        static_cast<void>(setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kPagesNiceness));
      shared->Work();
    });
    if (!started.ok()) return;  // Take populates what is not ready
    started->detach();
    ++shared_->threads;
  }
}

Result<std::unique_ptr<HostPages>> PageSupply::Take(Deadline until) {
  std::unique_ptr<HostPages> none;
  if (fork_.InChild()) return none;
  std::unique_lock lock(shared_->mutex);
  if (!shared_->changed.wait_until(lock, until, [&] { return !shared_->ready.empty() || shared_->threads == 0; }))
    return Status{Code::kTimeout, "the system has not provided host memory in time"};
  if (shared_->wanted > 0) --shared_->wanted;
  if (shared_->ready.empty()) return none;
  auto pages = std::move(shared_->ready.back());
  shared_->ready.pop_back();
  return pages;
}

std::size_t PageSupply::Pieces() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->ready.size() + shared_->under_way;
}

void PageSupply::Drop() {
  std::vector<std::unique_ptr<HostPages>> unused;  // freed after the lock is released, because that takes long
  const std::lock_guard lock(shared_->mutex);
  shared_->wanted = 0;
  unused.swap(shared_->ready);
}

// ---- the thread that pins

constexpr int kNiceness = 10;
// The program's calls of the driver do not get their turn while a thread registers memory without a break: one took 50 to 120
// ms beside 2 GiB (H100, driver 580). A buffer of 32 MiB takes 1 to 2 ms.
constexpr std::chrono::milliseconds kBreak{1};

PinningThread::PinningThread(std::mutex& mutex, const ForkGuard& fork, std::chrono::milliseconds quiet, Asking asking)
    : thread_(fork), quiet_(quiet), asking_(std::move(asking)), mutex_(mutex), changed_(fork) {}

Status PinningThread::Want(const std::function<void(Bytes& target)>& change) {
  const std::lock_guard threads(start_mutex_);
  {
    const std::lock_guard lock(mutex_);
    change(target_);
    asked_ = std::chrono::steady_clock::now();
    changed_->notify_all();
    if (preparing_ || !asking_.is_short_of(target_)) return {};  // the thread will see the new target
    preparing_ = true;
  }
  if (thread_->joinable()) thread_->join();
  auto started = StartThread("amem-pinning", [this] { Work(); });
  if (started.ok()) {
    *thread_ = *std::move(started);
    return {};
  }
  const std::lock_guard lock(mutex_);
  preparing_ = false;
  return started.status();
}

void PinningThread::Work() {
  static_cast<void>(setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNiceness));
  std::chrono::steady_clock::time_point turn;
  std::unique_lock lock(mutex_);
  while (asking_.is_short_of(target_)) {
    if (suspended_ > 0) {
      changed_->wait(lock);
      continue;
    }
    pinning_ = true;
    lock.unlock();
    auto pinned = asking_.pin([&] { AwaitQuiet(turn); });
    turn = std::chrono::steady_clock::now() + kBreak;
    lock.lock();
    pinning_ = false;
    if (!asking_.add(std::move(pinned))) target_ = 0;
    changed_->notify_all();
  }
  preparing_ = false;
  changed_->notify_all();
}

// Returns at once if preparing is to stop or to be suspended: the caller that asked for it may need the buffer that is being
// pinned.
void PinningThread::AwaitQuiet(std::chrono::steady_clock::time_point not_before) {
  std::unique_lock lock(mutex_);
  while (suspended_ == 0 && target_ > 0) {
    const auto busy = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(busy_ns_.load(std::memory_order_relaxed)));
    const auto quiet = std::max(std::max(asked_, busy) + quiet_, not_before);
    if (std::chrono::steady_clock::now() >= quiet) return;
    changed_->wait_until(lock, quiet);
  }
}

void PinningThread::Suspend(bool suspended) {
  const std::lock_guard lock(mutex_);
  suspended_ += suspended ? 1 : -1;
  changed_->notify_all();
}

bool PinningThread::Stop() {
  const std::lock_guard threads(start_mutex_);
  {
    std::unique_lock lock(mutex_);
    target_ = 0;
    asking_.stops();
    changed_->notify_all();
    if (!changed_->wait_for(lock, kPieceAtMost, [&] { return !preparing_; })) return false;
  }
  if (thread_->joinable()) thread_->join();
  return true;
}

}  // namespace amem
