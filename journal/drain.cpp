#include "journal/drain.h"

#include <algorithm>
#include <cstring>

#include "journal/base/thread.h"
#include "journal/session_dir.h"
#include "statemachine/check.h"

namespace amem {

// How long records wait for others before a commit. Nothing is lost meanwhile: a reader finds them in the tail.
constexpr std::uint32_t kGatherMs = 20;
// How much goes into one commit, so that an appender that needs room waits for a few milliseconds only.
constexpr Bytes kMoveAtOnce = Bytes{512} << 10;
// Old events: more than kMoveAtOnce has, and a commit stays at a few milliseconds.
constexpr std::uint64_t kRemoveAtOnce = 8192;

static std::uint64_t SeqOf(std::span<const std::byte> frame) {
  std::uint64_t seq;
  std::memcpy(&seq, frame.data() + offsetof(RecordHeader, seq), sizeof seq);
  return seq;
}

Status Drain::reason() const {
  const std::lock_guard lock(reason_mutex_);
  return reason_;
}

Status Drain::Break(const Status& failure) {
  const std::lock_guard lock(reason_mutex_);
  if (broken_.load(std::memory_order_relaxed)) return reason_;
  reason_ = failure;
  tail_.MarkBroken(failure.message());
  MarkBroken(directory_, failure.message());
  broken_.store(true, std::memory_order_release);
  return reason_;
}

Status Drain::Start() {
  AMEM_CHECK(!thread_.joinable());
  AMEM_ASSIGN(thread_, StartThread("amem-journal", [this] { Run(); }));
  return {};
}

void Drain::Stop() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_release);
  work_.Ring();
  thread_.join();
}

void Drain::Hurry() {
  urgent_.store(true, std::memory_order_release);
  work_.Ring();
}

Status Drain::WaitFor(std::uint64_t position) {
  for (;;) {
    const std::uint32_t ticket = progress_.Ticket();
    if (tail_.DrainedUpTo() >= position) return {};
    if (broken()) return reason();
    Hurry();
    progress_.Wait(ticket);
  }
}

Status Drain::Store(Direct direct) {
  const std::lock_guard lock(store_mutex_);
  AMEM_CHECK(direct_.load() == nullptr);
  AMEM_CHECK(!direct.frame.empty());
  const std::uint64_t before = stored_.load();
  direct_.store(new Direct(std::move(direct)), std::memory_order_release);
  for (;;) {
    const std::uint32_t ticket = progress_.Ticket();
    if (stored_.load(std::memory_order_acquire) != before) return {};
    if (broken()) {
      const std::unique_ptr<Direct> not_taken(direct_.exchange(nullptr));
      return reason();
    }
    Hurry();
    progress_.Wait(ticket);
  }
}

void Drain::Run() {
  while (!stop_.load(std::memory_order_acquire)) {
    Gather();
    if (stop_.load(std::memory_order_acquire)) return;
    const Status status = MoveAll();
    if (!status.ok()) (void)Break(status);
    progress_.Ring();
    if (!status.ok()) return;
  }
}

// Waits until there is something to do.
void Drain::Gather() {
  for (;;) {
    const std::uint32_t ticket = work_.Ticket();
    if (removing_ || urgent_.load(std::memory_order_acquire) || stop_.load(std::memory_order_acquire)) return;
    if (tail_.Used() != 0) {
      if (!work_.Wait(ticket, kGatherMs)) return;
      continue;
    }
    {
      // This thread must not wait for the mutex: the thread that holds it may be waiting for this one.
      const std::unique_lock lock(append_mutex_, std::try_to_lock);
      if (lock) idle_ = tail_.Used() == 0;
      if (!lock || !idle_) {
        work_.Wait(ticket, kGatherMs);
        continue;
      }
    }
    work_.Wait(ticket);
  }
}

Status Drain::MoveAll() {
  urgent_.store(false, std::memory_order_release);  // cleared before looking: a later request is for the next round
  const std::uint64_t up_to = tail_.Published();
  while (tail_.DrainedUpTo() < up_to) {
    AMEM_TRY(MoveSome(up_to));
    progress_.Ring();
    AMEM_TRY(RemoveSome());  // more than was moved, so that the file does not grow while appends come fast
  }
  AMEM_TRY(StoreDirect());
  return RemoveSome();
}

// One commit.
Status Drain::MoveSome(std::uint64_t up_to) {
  const RingStretch stretch = tail_.Drainable(up_to);
  const std::uint64_t from = tail_.DrainedUpTo();
  std::uint64_t moved = up_to - from;
  const auto move = [&](const amem::Store::Writing& writing) -> Status {
    Status status;
    const bool whole = WalkRing(stretch, [&](std::span<const std::byte> frame, std::uint64_t end) {
      status = writing.Append(Table::kEvents, SeqOf(frame), frame);
      if (end < std::min(kMoveAtOnce, tail_.Capacity() / 4)) return status.ok();
      moved = end;
      return false;
    });
    if (whole) return status;
    return {Code::kCorrupt, "the tail was overwritten by other code in this process, and events are lost"};
  };
  AMEM_TRY(store_.Write(move));
  AMEM_CHECK(moved > 0U, from);
  AMEM_CHECK(from + moved <= up_to, from);
  tail_.Drained(from + moved);
  return {};
}

Status Drain::StoreDirect() {
  const std::unique_ptr<Direct> direct(direct_.exchange(nullptr));
  if (!direct) return {};
  AMEM_TRY(store_.Append(direct->table, direct->key, direct->frame));
  if (direct->obsolete_events_below > obsolete_events_below_) {
    AMEM_CHECK(direct->obsolete_snapshots_below < direct->obsolete_events_below, direct->key);
    obsolete_events_below_ = direct->obsolete_events_below;
    obsolete_snapshots_below_ = direct->obsolete_snapshots_below;
    removing_ = true;
    store_.ForgetDeadReaders();
  }
  stored_.fetch_add(1, std::memory_order_release);
  return {};
}

Status Drain::RemoveSome() {
  if (!removing_) return {};
  return store_.Write([&](const amem::Store::Writing& writing) -> Status {
    AMEM_TRY(writing.RemoveBelow(Table::kSnapshots, obsolete_snapshots_below_, kRemoveAtOnce).status());
    AMEM_ASSIGN(const auto events, writing.RemoveBelow(Table::kEvents, obsolete_events_below_, kRemoveAtOnce));
    removing_ = events == kRemoveAtOnce;
    return {};
  });
}

}  // namespace amem
