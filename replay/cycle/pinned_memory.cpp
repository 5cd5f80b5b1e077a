#include "replay/cycle/pinned_memory.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/no_memory.h"
#include "journal/base/thread.h"

namespace amem {
namespace {

constexpr std::chrono::minutes kPieceAtMost{1};  // pinning takes some 10 ms unless the driver hangs
constexpr int kNiceness = 10;
// The program's calls of the driver do not get their turn while a thread registers memory without a break: one took 50 to 120
// ms beside 2 GiB (H100, driver 580). A buffer of 32 MiB takes 1 to 2 ms.
constexpr std::chrono::milliseconds kBreak{1};

PinnedSupply::Options WithKey(PinnedSupply::Options options) {
  if (options.key != nullptr) return options;
  auto key = RandomContentKey();
  if (key.ok()) options.key = *std::move(key);
  return options;
}

Bytes HeldOf(const PinnedSupply::Buffers& buffers) {  // without those that serve others
  return buffers.size() - static_cast<Bytes>(std::count(buffers.begin(), buffers.end(), nullptr));
}

void Forget(PinnedSupply::Buffers& buffers) {
  for (auto& buffer : buffers) static_cast<void>(buffer.release());
}

}  // namespace

PinnedSupply::PinnedSupply(Copier& copier, Options options)
    : copier_(copier),
      options_(WithKey(std::move(options))),
      claims_(options_.claims, [this] { return copier_.HostMemory(); }),
      pages_(copier, options_.chunk, options_.prepare_threads,
             {[this] { return ClaimPiece().ok(); }, [this] { claims_.EndClaim(options_.chunk); }}) {}

PinnedSupply::~PinnedSupply() {
  if (fork_.InChild()) {  // the driver's memory does not survive a fork
    Forget(idle_);
    for (Kept& kept : kept_) Forget(kept.buffers);
    return;
  }
  if (!StopPreparing()) thread_->join();
}

void PinnedSupply::WantPages() {
  const auto pieces = [&](Bytes wanted, Bytes there) {
    return (wanted - std::min(wanted, there) + options_.chunk - 1) / options_.chunk;
  };
  if (const std::size_t now = pieces(promised_, IdleBytes() + Coming()); now > 0)
    return pages_.Want(now, PageSupply::Haste::kNow);
  pages_.Want(pieces(target_, statistics_.pinned_bytes + Coming()), PageSupply::Haste::kAhead);
}

// What is promised and not yet populated.
Bytes PinnedSupply::Missing(Bytes promised) const {
  return promised - std::min(promised, IdleBytes() + Coming() + pages_.Pieces() * options_.chunk);
}

Status PinnedSupply::Promise(Bytes bytes) {
  if (fork_.InChild()) return {};
  const std::lock_guard lock(mutex_);
  const auto more = [&] {
    const Bytes missing = Missing(promised_ + bytes);
    return missing - std::min(missing, reserved_);
  };
  // What others keep comes before more is pinned than was wanted for all, and before the host is asked for what it has not got.
  const Bytes wanted = Target(), there = statistics_.pinned_bytes + reserved_ + pages_.Pieces() * options_.chunk;
  while (!kept_.empty() && more() > wanted - std::min(wanted, there)) idle_.push_back(TakeKept());
  Status claimed = claims_.Claim(more());
  while (!claimed.ok() && !kept_.empty()) {
    idle_.push_back(TakeKept());
    claimed = claims_.Claim(more());
  }
  AMEM_TRY(claimed);
  reserved_ += more();
  promised_ += bytes;
  WantPages();
  return {};
}

Status PinnedSupply::ClaimPiece() {
  {
    const std::lock_guard lock(mutex_);
    if (reserved_ >= options_.chunk) {
      reserved_ -= options_.chunk;
      return {};
    }
  }
  return claims_.Claim(options_.chunk);
}

Result<std::unique_ptr<PinnedBuffer>> PinnedSupply::Pin(std::unique_ptr<HostPages> pages) {
  const bool populated = pages != nullptr;
  if (!populated) AMEM_TRY(ClaimPiece());
  auto buffer = OrNoMemory([&] { return copier_.Pin(std::move(pages), options_.chunk); });
  if (!populated) claims_.EndClaim(options_.chunk);  // also of what was not had: others would count it for ever
  return buffer;
}

void PinnedSupply::Unpromise(Bytes bytes) {
  if (fork_.InChild()) return;
  const std::lock_guard lock(mutex_);
  promised_ -= bytes;
  const Bytes needed = std::min(reserved_, Missing(promised_));
  claims_.EndClaim(std::exchange(reserved_, needed) - needed);
  WantPages();
}

Result<PinnedSupply::Taken> PinnedSupply::Take(Deadline until) {
  const std::uint64_t began = MonotonicNs();
  const auto late = [&](const char* what) {
    return Status{Code::kDriver,
                  fmt::format("pin host memory for contents: {} within {} ms", what, (MonotonicNs() - began) / 1'000'000),
                  cuda::kTimeout};
  };
  if (!TryLockUntil(mutex_, until)) return late("another thread has not let go of the supply");
  std::unique_lock lock(mutex_, std::adopt_lock);
  bool pinned_now = false;
  while (idle_.empty()) {
    pinned_now = true;
    if (pinning_) {  // the buffer that the thread is pinning comes first
      if (!changed_->wait_until(lock, until, [&] { return !pinning_; }))
        return late("a call of the driver that pins ahead has not returned");
      continue;
    }
    if (!kept_.empty() && reserved_ == 0 && statistics_.pinned_bytes + options_.chunk > Target()) {
      idle_.push_back(TakeKept());
      continue;
    }
    lock.unlock();
    auto pages = pages_.Take(until);
    if (!pages.ok()) return late("a thread that populates host memory has not ended");
    auto buffer = Pin(*std::move(pages));
    lock.lock();
    if (!buffer.ok() && !kept_.empty()) {
      idle_.push_back(TakeKept());
      continue;
    }
    if (!buffer.ok()) {
      return buffer.status().Within(
          fmt::format("pin host memory for contents, {} bytes are pinned already", statistics_.pinned_bytes));
    }
    statistics_.pinned_bytes += (*buffer)->size();
    return Taken{*std::move(buffer), true};
  }
  Taken taken{std::move(idle_.back()), pinned_now};
  idle_.pop_back();
  return taken;
}

void PinnedSupply::Give(Buffers buffers) {
  const std::lock_guard lock(mutex_);
  std::ranges::move(buffers, std::back_inserter(idle_));
}

void PinnedSupply::Retain(const PinnedMemory& owner, Buffers buffers) {
  const std::lock_guard lock(mutex_);
  kept_.push_back({&owner, std::move(buffers)});
}

PinnedSupply::Buffers PinnedSupply::Reclaim(const PinnedMemory& owner) {
  const std::lock_guard lock(mutex_);
  const auto it = std::ranges::find(kept_, &owner, &Kept::owner);
  if (it == kept_.end()) return {};
  Buffers buffers = std::move(it->buffers);
  kept_.erase(it);
  return buffers;
}

Bytes PinnedSupply::KeptFor(const PinnedMemory& owner) const {
  const std::lock_guard lock(mutex_);
  const auto it = std::ranges::find(kept_, &owner, &Kept::owner);
  return it == kept_.end() ? 0 : options_.chunk * HeldOf(it->buffers);
}

// With the lock, and something is kept: of what is kept for longest, the last buffer. What an owner has lost all of is not
// kept.
std::unique_ptr<PinnedBuffer> PinnedSupply::TakeKept() {
  Buffers& buffers = kept_.front().buffers;
  const auto last = std::ranges::find_if(buffers.rbegin(), buffers.rend(), [](const auto& one) { return one != nullptr; });
  auto buffer = std::move(*last);
  while (!buffers.empty() && buffers.back() == nullptr) buffers.pop_back();
  if (buffers.empty()) kept_.erase(kept_.begin());
  return buffer;
}

PinnedSupply::Statistics PinnedSupply::Count() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

// What all scopes together would take.
Bytes PinnedSupply::Wanted() const {
  Bytes sum = 0;
  for (const auto& [scope, bytes] : wanted_) sum += bytes;
  return sum;
}

Bytes PinnedSupply::Target() const {
  Bytes nccl = 0, pools = 0;
  for (const auto& [scope, bytes] : wanted_) (scope ? pools : nccl) += bytes;
  return std::min(nccl, options_.nccl_limit) + std::min(pools, options_.pools_limit);
}

void PinnedSupply::Want(PoolId scope, Bytes bytes) {
  if (fork_.InChild()) return;
  const std::lock_guard threads(thread_mutex_);
  {
    const std::lock_guard lock(mutex_);
    wanted_[scope] = bytes;
    most_wanted_ = std::max(most_wanted_, Wanted());
    target_ = Target();
    WantPages();
    asked_ = std::chrono::steady_clock::now();
    statistics_.not_prepared.clear();
    changed_->notify_all();
    if (preparing_ || statistics_.pinned_bytes >= target_) return;  // the thread will see the new target
    preparing_ = true;
  }
  if (thread_->joinable()) thread_->join();
  auto started = StartThread("amem-pinning", [this] { PinInBackground(); });
  if (started.ok()) {
    *thread_ = *std::move(started);
    return;
  }
  const std::lock_guard lock(mutex_);
  preparing_ = false;
  statistics_.not_prepared = started.status().message();
}

void PinnedSupply::PinInBackground() {
  static_cast<void>(setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNiceness));
  std::chrono::steady_clock::time_point turn;
  std::unique_lock lock(mutex_);
  while (statistics_.pinned_bytes < target_) {
    if (suspended_ > 0) {
      changed_->wait(lock);
      continue;
    }
    pinning_ = true;
    lock.unlock();
    auto pages = pages_.Take(In(kPieceAtMost));
    AwaitQuiet(turn);
    auto buffer = Pin(pages.ok() ? *std::move(pages) : nullptr);
    turn = std::chrono::steady_clock::now() + kBreak;
    lock.lock();
    pinning_ = false;
    if (buffer.ok()) {
      statistics_.pinned_bytes += (*buffer)->size();
      idle_.push_back(*std::move(buffer));
    } else {
      statistics_.not_prepared = buffer.status().message();
      target_ = 0;
    }
    changed_->notify_all();
  }
  preparing_ = false;
  changed_->notify_all();
}

// Returns at once if preparing is to stop or rest: the caller that asked for it may need the buffer that is being pinned.
void PinnedSupply::AwaitQuiet(std::chrono::steady_clock::time_point not_before) {
  std::unique_lock lock(mutex_);
  while (suspended_ == 0 && target_ > 0) {
    const auto busy = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(busy_ns_.load(std::memory_order_relaxed)));
    const auto quiet = std::max(std::max(asked_, busy) + options_.quiet, not_before);
    if (std::chrono::steady_clock::now() >= quiet) return;
    changed_->wait_until(lock, quiet);
  }
}

void PinnedSupply::SuspendPinning(bool suspended) {
  if (fork_.InChild()) return;
  const std::lock_guard lock(mutex_);
  suspended_ += suspended ? 1 : -1;
  changed_->notify_all();
}

bool PinnedSupply::StopPreparing() {
  if (fork_.InChild()) return true;
  const std::lock_guard threads(thread_mutex_);
  {
    std::unique_lock lock(mutex_);
    target_ = 0;
    pages_.Want(0, PageSupply::Haste::kAhead);
    changed_->notify_all();
    if (!changed_->wait_for(lock, kPieceAtMost, [&] { return !preparing_; })) return false;
  }
  if (thread_->joinable()) thread_->join();
  return true;
}

void PinnedSupply::Trim(Bytes keep) {
  if (fork_.InChild() || !StopPreparing()) return;
  pages_.Drop();
  Drop(keep);
}

void PinnedSupply::GiveSpareBack(std::chrono::nanoseconds since_last) {
  if (fork_.InChild()) return;
  Bytes keep = 0;
  {
    const std::lock_guard lock(mutex_);
    Bytes used = statistics_.pinned_bytes - IdleBytes();
    for (const Kept& kept : kept_) used -= HeldOf(kept.buffers) * options_.chunk;
    recently_used_ = std::max(used, recently_used_ - recently_used_ / 8);
    keep = std::max({most_wanted_, most_before_, recently_used_});
    most_before_ = std::exchange(most_wanted_, Wanted());
  }
  constexpr Bytes kLittle = Bytes{64} << 20;  // below this a scope wants nothing ahead
  keep += std::max(keep / 8, kLittle);
  const auto most = static_cast<std::uint64_t>(options_.unpins_for == 0 ? since_last.max().count() / 2
                                                                        : since_last.count() / options_.unpins_for);
  const std::uint64_t until = MonotonicNs() + most;
  Bytes pinned = Count().pinned_bytes;
  for (std::uint64_t now = MonotonicNs(); pinned > keep && now + unpin_ns_ <= until;) {
    Drop(std::max(keep, pinned - options_.chunk));
    const std::uint64_t began = std::exchange(now, MonotonicNs());
    unpin_ns_ = now - began;
    if (std::exchange(pinned, Count().pinned_bytes) == pinned) return;  // the rest is in use
  }
}

void PinnedSupply::GiveBack(Bytes bytes) {
  if (fork_.InChild()) return;
  pages_.Drop();
  const Bytes pinned = Count().pinned_bytes;
  Drop(pinned - std::min(pinned, bytes));
}

void PinnedSupply::Drop(Bytes keep) {
  Buffers unused;  // freed after the lock is released, because that takes long
  const std::lock_guard lock(mutex_);
  while (statistics_.pinned_bytes > keep) {
    if (IdleBytes() < promised_ + options_.chunk) {
      if (kept_.empty()) return;
      idle_.push_back(TakeKept());
      continue;
    }
    statistics_.pinned_bytes -= options_.chunk;
    unused.push_back(std::move(idle_.back()));
    idle_.pop_back();
  }
}

PinnedMemory::~PinnedMemory() {
  if (fork_.InChild()) {
    Forget(buffers_);
  } else {
    TakeBack();
    SuspendPinning(false);
  }
}

Status PinnedMemory::Promise(Bytes wanted) {
  wanted -= std::min(wanted, buffers_.size() * supply_.chunk() - filled_);
  wanted = (wanted + supply_.chunk() - 1) / supply_.chunk() * supply_.chunk();
  if (wanted <= promised_) return {};
  AMEM_TRY(supply_.Promise(wanted - promised_));
  promised_ = wanted;
  return {};
}

void PinnedMemory::Unpromise() {
  if (promised_ > 0) supply_.Unpromise(std::exchange(promised_, 0));
}

Result<PinnedMemory::Room> PinnedMemory::Take(Bytes bytes, Deadline until) {
  Room room{.at = filled_};
  while (filled_ + bytes > buffers_.size() * supply_.chunk()) {
    const std::uint64_t began = MonotonicNs();
    auto taken = supply_.Take(until);
    room.pin_ns += MonotonicNs() - began;
    if (!taken.ok()) return taken.status();
    room.pinned_now += taken->pinned_now ? 1 : 0;
    const Bytes kept = std::min(promised_, supply_.chunk());
    supply_.Unpromise(kept);
    promised_ -= kept;
    buffers_.push_back(std::move(taken->buffer));
    used_.push_back(0);
    held_bytes_ += supply_.chunk();
  }
  filled_ += bytes;
  used_bytes_ += bytes;
  for (Bytes at = room.at; at < filled_;) {
    const Bytes some = std::min(filled_ - at, supply_.chunk() - at % supply_.chunk());
    used_[at / supply_.chunk()] += some;
    at += some;
  }
  return room;
}

// The buffer that is being filled stays, and so does what comes behind it.
void PinnedMemory::Free(Bytes at, Bytes bytes) {
  used_bytes_ -= bytes;
  for (const Bytes end = at + bytes; at < end;) {
    const std::size_t index = at / supply_.chunk();
    const Bytes some = std::min(end - at, supply_.chunk() - at % supply_.chunk());
    used_[index] -= some;
    at += some;
    if (used_[index] > 0 || buffers_[index] == nullptr || filled_ < (index + 1) * supply_.chunk()) continue;
    PinnedSupply::Buffers unused;
    unused.push_back(std::move(buffers_[index]));
    held_bytes_ -= supply_.chunk();
    supply_.Give(std::move(unused));
  }
}

void PinnedMemory::TakeBack() {
  Unpromise();
  Reclaim();
  auto buffers = std::exchange(buffers_, {});
  std::erase(buffers, nullptr);
  supply_.Give(std::move(buffers));
  used_.clear();
  filled_ = used_bytes_ = held_bytes_ = 0;
}

void PinnedMemory::Retain() {
  Unpromise();
  if (used_bytes_ == 0) return TakeBack();
  supply_.Retain(*this, std::exchange(buffers_, {}));
  held_bytes_ = 0;
}

void PinnedMemory::Reclaim() {
  auto kept = supply_.Reclaim(*this);
  if (kept.empty() && !buffers_.empty()) return;  // none was
  kept.resize(used_.size());
  buffers_ = std::move(kept);
  held_bytes_ = supply_.chunk() * HeldOf(buffers_);
  // Nothing is put into a buffer that has gone, or reaches over into one.
  if (!buffers_.empty() && buffers_.back() == nullptr) filled_ = buffers_.size() * supply_.chunk();
}

bool PinnedMemory::Has(Bytes at, Bytes bytes) const {
  if (bytes == 0) return true;
  for (Bytes index = at / supply_.chunk(); index * supply_.chunk() < at + bytes; ++index)
    if (buffers_[index] == nullptr) return false;
  return true;
}

PinnedMemory::Piece PinnedMemory::PieceAt(Bytes at, Bytes most) const {
  const Bytes past = at % supply_.chunk();
  return {buffers_[at / supply_.chunk()]->data() + past, std::min(most, supply_.chunk() - past), past > 0};
}

void PinnedMemory::SuspendPinning(bool suspended) {
  if (std::exchange(suspended_, suspended) != suspended) supply_.SuspendPinning(suspended);
}

}  // namespace amem
