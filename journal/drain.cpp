#include "journal/drain.h"

#include <algorithm>
#include <cstring>

#include "journal/base/clock.h"
#include "journal/base/no_memory.h"
#include "journal/base/thread.h"
#include "journal/codec.h"
#include "journal/session_dir.h"
#include "statemachine/check.h"

namespace amem {

// How long records wait for others before a commit. Nothing is lost meanwhile: a reader finds them in the tail.
constexpr std::uint32_t kGatherMs = 20;
// How much goes into one commit, so that an appender that needs room waits for a few milliseconds only.
constexpr Bytes kMoveAtOnce = Bytes{512} << 10;
// Old events: more than kMoveAtOnce has, and a commit stays at a few milliseconds.
constexpr std::uint64_t kRemoveAtOnce = 8192;
// How often a session that appends nothing checks that its files are still there.
constexpr std::uint32_t kCheckFilesMs = 5000;
constexpr std::uint64_t kStalledNs = 2'000'000'000;  // a busy machine takes less

static std::uint64_t SeqOf(std::span<const std::byte> frame) {
  std::uint64_t seq;
  std::memcpy(&seq, frame.data() + offsetof(RecordHeader, seq), sizeof seq);
  return seq;
}

Status ClockNotes::Note(const Store::Writing& writing) {
  const WallClock now = clock_();
  if (!newest_) newest_ = now;
  const auto add = [&] {
    ++key_;
    return writing.Append(Table::kMeta, key_, MetaRecord(session_, getpid(), *newest_, key_));
  };
  if (key_ == 0) AMEM_TRY(add());
  if (!now.IsSetSince(*newest_)) return {};
  newest_ = now;
  return add();
}

Status JournalFailure::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

Status JournalFailure::Break(const Status& failure, bool by_file) {
  const std::lock_guard lock(mutex_);
  if (broken_.load(std::memory_order_relaxed)) return reason_;
  reason_ = failure;
  tail_.MarkBroken(failure.message());
  if (by_file) MarkBroken(directory_, failure.message());
  broken_.store(true, std::memory_order_release);
  return reason_;
}

void JournalFailure::MarkDirectory() const { MarkBroken(directory_, reason().message()); }

Status Drain::Start() {
  AMEM_CHECK(!thread_.joinable());
  AMEM_ASSIGN(thread_, StartThread("amem-journal", [this] { Run(); }));
  return {};
}

void Drain::Stop() {
  if (!thread_.joinable()) return;
  wanted_.store(Wanted::kEnd, std::memory_order_release);
  work_.Ring();
  thread_.join();
}

void Drain::Hurry() {
  Wanted nothing = Wanted::kNothing;
  wanted_.compare_exchange_strong(nothing, Wanted::kWorkAtOnce);
  work_.Ring();
}

bool Drain::Stalled() const {
  const std::uint64_t since = working_since_ns_.load(std::memory_order_acquire);
  return since != 0 && MonotonicNs() - since > kStalledNs;
}

Status Drain::WaitUntil(const std::function<bool()>& done, std::optional<Deadline> until) {
  const std::uint64_t began = MonotonicNs();
  for (;;) {
    const std::uint32_t ticket = progress_.Ticket();
    if (done()) return {};
    if (broken()) return reason();
    if (until ? Passed(*until) : Stalled())
      return {Code::kTimeout, "the file system of journal " + failure_.directory().string() + " has not answered for " +
                                  std::to_string((MonotonicNs() - began) / 1'000'000) +
                                  " ms; is it frozen, or its server gone?"};
    Hurry();
    constexpr std::chrono::milliseconds kAtMost{100};
    const auto left = until ? std::min(LeftUntil(*until), kAtMost) : kAtMost;
    progress_.Wait(ticket, static_cast<std::uint32_t>(left.count()));
  }
}

Status Drain::WaitFor(std::uint64_t position) {
  return WaitUntil([&] { return tail_.DrainedUpTo() >= position; }, std::nullopt);
}

Status Drain::Answer(Deadline until) {
  const std::uint64_t mine = asked_.fetch_add(1) + 1;
  return WaitUntil([&] { return answered_.load(std::memory_order_acquire) >= mine; }, until);
}

Status Drain::StoreRecord(Table table, std::uint64_t key, std::vector<std::byte> frame) {
  AMEM_CHECK(!frame.empty());
  const auto direct = std::make_shared<Direct>();
  direct->table = table;
  direct->key = key;
  direct->frame = std::move(frame);
  AMEM_TRY(WaitUntil([&] { return transfer_.Offer(direct); }, std::nullopt));
  return WaitUntil([&] { return direct->stored.load(std::memory_order_acquire); }, std::nullopt);
}

void Drain::SnapshotSoon(const State& state) {
  if (transfer_.HasOffer()) return;
  const auto direct = std::make_shared<Direct>();
  direct->table = Table::kSnapshots;
  direct->key = state.last.value;
  direct->state = state;
  if (transfer_.Offer(direct)) Hurry();
}

void Drain::Run() {
  while (!Ends()) {
    Gather();
    if (Ends()) return;
    const std::uint64_t asked = asked_.load();
    working_since_ns_.store(MonotonicNs(), std::memory_order_release);
    const Status status = OrNoMemory([this] { return MoveAll(); });
    if (!status.ok()) (void)Break(status);
    if (broken()) failure_.MarkDirectory();
    working_since_ns_.store(0, std::memory_order_release);
    if (status.ok()) answered_.store(asked, std::memory_order_release);
    progress_.Ring();
    if (broken()) return;
  }
}

// Waits until there is something to do.
void Drain::Gather() {
  for (;;) {
    const std::uint32_t ticket = work_.Ticket();
    if (transfer_.removing() || wanted_.load(std::memory_order_acquire) != Wanted::kNothing) return;
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
    if (!work_.Wait(ticket, kCheckFilesMs)) return;
  }
}

Status Drain::MoveAll() {
  Wanted at_once = Wanted::kWorkAtOnce;  // cleared first: a later request is for the next round
  wanted_.compare_exchange_strong(at_once, Wanted::kNothing);
  AMEM_TRY(transfer_.CheckFiles().Within("the files of journal " + failure_.directory().string()));
  const std::uint64_t up_to = tail_.Published();
  AMEM_CHECK(tail_.DrainedUpTo() <= up_to);
  AMEM_CHECK(up_to - tail_.DrainedUpTo() <= tail_.Capacity(), up_to);
  while (tail_.DrainedUpTo() < up_to) {
    AMEM_TRY(transfer_.MoveSome(up_to));
    working_since_ns_.store(MonotonicNs(), std::memory_order_release);
    progress_.Ring();
    AMEM_TRY(transfer_.RemoveSome());  // more than was moved, so that the file does not grow while appends come fast
  }
  AMEM_TRY(transfer_.StoreDirect());
  return transfer_.RemoveSome();
}

bool Transfer::Offer(const std::shared_ptr<Direct>& direct) {
  const std::lock_guard lock(mutex_);
  if (offered_ != nullptr) return false;
  offered_ = direct;
  return true;
}

bool Transfer::HasOffer() {
  const std::lock_guard lock(mutex_);
  return offered_ != nullptr;
}

Status Transfer::MoveSome(std::uint64_t up_to) {
  const RingStretch stretch = tail_.Drainable(up_to);
  const std::uint64_t from = tail_.DrainedUpTo();
  std::uint64_t moved = up_to - from;
  const auto move = [&](const Store::Writing& writing) -> Status {
    Status status;
    const bool whole = WalkRing(stretch, [&](std::span<const std::byte> frame, std::uint64_t end) {
      status = writing.Append(Table::kEvents, SeqOf(frame), frame);
      if (end < std::min(kMoveAtOnce, tail_.Capacity() / 4)) return status.ok();
      moved = end;
      return false;
    });
    if (whole) return status.ok() ? notes_.Note(writing) : status;
    return {Code::kCorrupt, "the tail was overwritten by other code in this process, and events are lost"};
  };
  AMEM_TRY(store_.Write(move));
  AMEM_CHECK(moved > 0U, from);
  AMEM_CHECK(from + moved <= up_to, from);
  tail_.Drained(from + moved);
  return {};
}

Status Transfer::StoreDirect() {
  std::shared_ptr<Direct> direct;
  {
    const std::lock_guard lock(mutex_);
    direct = std::exchange(offered_, nullptr);
  }
  if (!direct) return {};
  if (direct->state) {
    const auto payload = EncodeSnapshot(*direct->state);
    direct->state.reset();
    if (!payload || payload->size() > UINT32_MAX) return {};  // earlier events are kept, and nothing is lost
    direct->frame = Framed(RecordType::kSnapshot, direct->key, *payload);
  }
  const std::uint64_t before = last_snapshot();
  const bool snapshot = direct->table == Table::kSnapshots;
  if (snapshot && direct->key <= before) return {};
  AMEM_TRY(store_.Append(direct->table, direct->key, direct->frame));
  if (snapshot) {
    last_snapshot_.store(direct->key, std::memory_order_release);
    snapshot_bytes_.store(direct->frame.size(), std::memory_order_relaxed);
  }
  if (snapshot && before != 0) {
    obsolete_ = {.events_below = before + 1, .snapshots_below = before, .removing = true};
    store_.ForgetDeadReaders();
  }
  direct->stored.store(true, std::memory_order_release);
  return {};
}

Status Transfer::RemoveSome() {
  if (!obsolete_.removing) return {};
  AMEM_CHECK(obsolete_.snapshots_below < last_snapshot());  // what is left begins with a snapshot
  AMEM_CHECK(obsolete_.events_below <= last_snapshot());
  return store_.Write([&](const Store::Writing& writing) -> Status {
    AMEM_TRY(writing.RemoveBelow(Table::kSnapshots, obsolete_.snapshots_below, kRemoveAtOnce).status());
    AMEM_ASSIGN(const auto events, writing.RemoveBelow(Table::kEvents, obsolete_.events_below, kRemoveAtOnce));
    obsolete_.removing = events == kRemoveAtOnce;
    return {};
  });
}

}  // namespace amem
