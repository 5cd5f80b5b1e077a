#include "replay/cycle/pinned_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/no_memory.h"
#include "statemachine/check.h"

namespace amem {
namespace {

PinnedSupply::Options WithKey(PinnedSupply::Options options) {
  if (options.key != nullptr) return options;
  auto key = RandomContentKey();
  if (key.ok()) options.key = *std::move(key);
  return options;
}

std::size_t HeldOf(const PinnedSupply::Buffers& buffers) {  // without those that serve others
  return buffers.size() - static_cast<std::size_t>(std::count(buffers.begin(), buffers.end(), nullptr));
}

void Forget(PinnedSupply::Buffers& buffers) {
  for (auto& buffer : buffers) static_cast<void>(buffer.release());
}

}  // namespace

std::unique_ptr<PinnedBuffer> UnusedBuffers::TakeIdle() {
  auto buffer = std::move(idle_.back());
  idle_.pop_back();
  return buffer;
}

std::size_t UnusedBuffers::RetainedFor(const PinnedMemory& owner) const {
  const auto it = std::ranges::find(retained_, &owner, &OfOwner::owner);
  return it == retained_.end() ? 0 : HeldOf(it->buffers);
}

std::size_t UnusedBuffers::Retained() const {
  std::size_t all = 0;
  for (const OfOwner& one : retained_) all += HeldOf(one.buffers);
  return all;
}

UnusedBuffers::Buffers UnusedBuffers::Reclaim(const PinnedMemory& owner) {
  const auto it = std::ranges::find(retained_, &owner, &OfOwner::owner);
  if (it == retained_.end()) return {};
  Buffers buffers = std::move(it->buffers);
  retained_.erase(it);
  return buffers;
}

// What an owner has lost all of is not retained.
void UnusedBuffers::FreeRetained() {
  Buffers& buffers = retained_.front().buffers;
  const auto last = std::ranges::find_if(buffers.rbegin(), buffers.rend(), [](const auto& one) { return one != nullptr; });
  auto buffer = std::move(*last);
  while (!buffers.empty() && buffers.back() == nullptr) buffers.pop_back();
  if (buffers.empty()) retained_.erase(retained_.begin());
  idle_.push_back(std::move(buffer));
}

void UnusedBuffers::Forget() {
  amem::Forget(idle_);
  for (OfOwner& one : retained_) amem::Forget(one.buffers);
}

Bytes HostMemoryDemand::Sum() const {
  Bytes sum = 0;
  for (const auto& [scope, bytes] : wanted_) sum += bytes;
  return sum;
}

Bytes HostMemoryDemand::Target(Bytes nccl_limit, Bytes pools_limit) const {
  Bytes nccl = 0, pools = 0;
  for (const auto& [scope, bytes] : wanted_) (scope ? pools : nccl) += bytes;
  return std::min(nccl, nccl_limit) + std::min(pools, pools_limit);
}

Bytes HostMemoryDemand::SpareAbove(Bytes used) {
  constexpr Bytes kLittle = Bytes{64} << 20;  // below this a scope wants nothing ahead
  recently_used_ = std::max(used, recently_used_ - recently_used_ / 8);
  const Bytes most = std::max({most_wanted_, most_before_, recently_used_});
  most_before_ = std::exchange(most_wanted_, Sum());
  return most + std::max(most / 8, kLittle);
}

PinnedSupply::PinnedSupply(Copier& copier, Options options)
    : copier_(copier),
      options_(WithKey(std::move(options))),
      claims_(options_.claims, [this] { return copier_.HostMemory(); }),
      thread_(mutex_, fork_, options_.quiet, ForThread()),
      pages_(copier, options_.chunk, options_.prepare_threads,
             {[this] { return ClaimPiece().ok(); }, [this] { claims_.EndClaim(options_.chunk); }}) {}

PinnedSupply::~PinnedSupply() {
  if (fork_.InChild()) {  // the driver's memory does not survive a fork
    unused_.Forget();
    return;
  }
  if (!StopPreparing()) thread_.Join();
}

void PinnedSupply::WantPages() {
  const auto pieces = [&](Bytes wanted, Bytes there) {
    return (wanted - std::min(wanted, there) + options_.chunk - 1) / options_.chunk;
  };
  if (const std::size_t now = pieces(promised_.bytes, IdleBytes() + Coming()); now > 0)
    return pages_.Want(now, PageSupply::Haste::kNow);
  pages_.Want(pieces(thread_.target(), statistics_.pinned_bytes + Coming()), PageSupply::Haste::kAhead);
}

// What is promised and not yet populated.
Bytes PinnedSupply::Missing(Bytes promised) const {
  return promised - std::min(promised, IdleBytes() + Coming() + pages_.Pieces() * options_.chunk);
}

Status PinnedSupply::Promise(Bytes bytes) {
  if (fork_.InChild()) return {};
  const std::lock_guard lock(mutex_);
  AMEM_CHECK(promised_.claimed <= promised_.bytes);
  AMEM_CHECK(IdleBytes() + unused_.Retained() * options_.chunk <= statistics_.pinned_bytes);
  const auto more = [&] {
    const Bytes missing = Missing(promised_.bytes + bytes);
    return missing - std::min(missing, promised_.claimed);
  };
  // What others keep comes before more is pinned than was wanted for all, and before the host is asked for what it has not got.
  const Bytes wanted = Target(), there = statistics_.pinned_bytes + promised_.claimed + pages_.Pieces() * options_.chunk;
  while (unused_.AnyRetained() && more() > wanted - std::min(wanted, there)) unused_.FreeRetained();
  Status claimed = claims_.Claim(more());
  while (!claimed.ok() && unused_.AnyRetained()) {
    unused_.FreeRetained();
    claimed = claims_.Claim(more());
  }
  AMEM_TRY(claimed);
  promised_.claimed += more();
  promised_.bytes += bytes;
  WantPages();
  return {};
}

Status PinnedSupply::ClaimPiece() {
  {
    const std::lock_guard lock(mutex_);
    if (promised_.claimed >= options_.chunk) {
      promised_.claimed -= options_.chunk;
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
  promised_.bytes -= bytes;
  const Bytes needed = std::min(promised_.claimed, Missing(promised_.bytes));
  claims_.EndClaim(std::exchange(promised_.claimed, needed) - needed);
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
  while (unused_.idle() == 0) {
    pinned_now = true;
    if (thread_.pinning()) {  // the buffer that the thread is pinning comes first
      if (!thread_.AwaitPiece(lock, until)) return late("a call of the driver that pins ahead has not returned");
      continue;
    }
    if (unused_.AnyRetained() && promised_.claimed == 0 && statistics_.pinned_bytes + options_.chunk > Target()) {
      unused_.FreeRetained();
      continue;
    }
    lock.unlock();
    auto pages = pages_.Take(until);
    if (!pages.ok()) return late("a thread that populates host memory has not ended");
    auto buffer = Pin(*std::move(pages));
    lock.lock();
    if (!buffer.ok() && unused_.AnyRetained()) {
      unused_.FreeRetained();
      continue;
    }
    if (!buffer.ok()) {
      return buffer.status().Within(
          fmt::format("pin host memory for contents, {} bytes are pinned already", statistics_.pinned_bytes));
    }
    statistics_.pinned_bytes += (*buffer)->size();
    return Taken{*std::move(buffer), true};
  }
  return Taken{unused_.TakeIdle(), pinned_now};
}

void PinnedSupply::Give(Buffers buffers) {
  const std::lock_guard lock(mutex_);
  for (auto& buffer : buffers) unused_.Add(std::move(buffer));
}

void PinnedSupply::Retain(const PinnedMemory& owner, Buffers buffers) {
  const std::lock_guard lock(mutex_);
  unused_.Retain(owner, std::move(buffers));
}

PinnedSupply::Buffers PinnedSupply::Reclaim(const PinnedMemory& owner) {
  const std::lock_guard lock(mutex_);
  return unused_.Reclaim(owner);
}

Bytes PinnedSupply::RetainedFor(const PinnedMemory& owner) const {
  const std::lock_guard lock(mutex_);
  return options_.chunk * unused_.RetainedFor(owner);
}

PinnedSupply::Statistics PinnedSupply::Count() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

PinningThread::Asking PinnedSupply::ForThread() {
  return {.is_short_of = [this](Bytes target) { return statistics_.pinned_bytes < target; },
          .pin = [this](const std::function<void()>& quiet) -> PinningThread::Pinned {
            auto pages = pages_.Take(In(PinningThread::kPieceAtMost));
            quiet();
            return Pin(pages.ok() ? *std::move(pages) : nullptr);
          },
          .add =
              [this](PinningThread::Pinned pinned) {
                if (!pinned.ok()) {
                  statistics_.not_prepared = pinned.status().message();
                  return false;
                }
                statistics_.pinned_bytes += (*pinned)->size();
                unused_.Add(*std::move(pinned));
                return true;
              },
          .stops = [this] { pages_.Want(0, PageSupply::Haste::kAhead); }};
}

void PinnedSupply::Want(PoolId scope, Bytes bytes) {
  if (fork_.InChild()) return;
  const Status wanted = thread_.Want([&](Bytes& target) {
    demand_.Want(scope, bytes);
    target = Target();
    WantPages();
    statistics_.not_prepared.clear();
  });
  if (wanted.ok()) return;
  const std::lock_guard lock(mutex_);
  statistics_.not_prepared = wanted.message();
}

bool PinnedSupply::StopPreparing() { return fork_.InChild() || thread_.Stop(); }

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
    keep = demand_.SpareAbove(statistics_.pinned_bytes - IdleBytes() - unused_.Retained() * options_.chunk);
  }
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
    if (IdleBytes() < promised_.bytes + options_.chunk) {
      if (!unused_.AnyRetained()) return;
      unused_.FreeRetained();
      continue;
    }
    statistics_.pinned_bytes -= options_.chunk;
    unused.push_back(unused_.TakeIdle());
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

// The buffer that is being filled stays, and so does what comes behind it. A buffer that there is no memory to give stays as
// well, until all go: whoever frees a room has freed it.
void PinnedMemory::Free(Bytes at, Bytes bytes) {
  used_bytes_ -= bytes;
  for (const Bytes end = at + bytes; at < end;) {
    const std::size_t index = at / supply_.chunk();
    const Bytes some = std::min(end - at, supply_.chunk() - at % supply_.chunk());
    used_[index] -= some;
    at += some;
    if (used_[index] > 0 || buffers_[index] == nullptr || filled_ < (index + 1) * supply_.chunk()) continue;
    static_cast<void>(OrNoMemory([&] {
      PinnedSupply::Buffers unused;
      unused.push_back(std::move(buffers_[index]));
      held_bytes_ -= supply_.chunk();
      supply_.Give(std::move(unused));
      return Status{};
    }));
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
