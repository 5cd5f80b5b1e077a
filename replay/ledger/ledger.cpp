#include "replay/ledger/ledger.h"

#include <fcntl.h>
#include <spdlog/fmt/fmt.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "journal/base/clock.h"
#include "journal/base/deadline.h"
#include "journal/base/no_memory.h"
#include "journal/base/process_sight.h"

namespace amem {
namespace {

// How often NCCL's calls try to begin a lost journal anew.
constexpr std::uint64_t kRenewAgainAfterNs = 5'000'000'000;

std::uint32_t ThreadId() {
  thread_local const auto id = static_cast<std::uint32_t>(::syscall(SYS_gettid));
  return id;
}

// No plan depends on these: host memory, driver pools, the driver's cuMemAlloc memory, passing sights.
struct IsOnlyCounted {
  const State& state;
  bool operator()(const LegacyAllocated& e) const { return !e.backing; }
  bool operator()(const MulticastDeviceAdded& e) const { return Stays(e.multicast); }
  bool operator()(const MulticastUnbound& e) const { return Stays(e.multicast); }
  template <class Kind>
  bool operator()(const Kind&) const {
    return std::is_same_v<Kind, HostAllocated> || std::is_same_v<Kind, HostFreed> || std::is_same_v<Kind, AsyncAllocated> ||
           std::is_same_v<Kind, AsyncFreed> || std::is_same_v<Kind, Deregistered>;
  }
  [[nodiscard]] bool Stays(AllocationId multicast) const {
    auto* const it = FindIn(state.allocations, multicast);
    return it == nullptr || !it->rebuilt();
  }
};

}  // namespace

void Ledger::lock() {
  mutex_.lock();
  NoteHolder();
  RecordWhatEnded();
}

void Ledger::unlock() { mutex_.unlock(); }

bool Ledger::TryLockUntil(Deadline until) {
  constexpr std::chrono::milliseconds kLeast{100};
  return TryLockFor(std::max(LeftUntil(until), kLeast));
}

bool Ledger::TryLockFor(std::chrono::milliseconds patience) {
  if (!amem::TryLockUntil(mutex_, In(patience))) return false;
  NoteHolder();
  RecordWhatEnded();
  return true;
}

void Ledger::RecordSoon(const CycleFailed& ended) {
  const std::lock_guard lock(owed_.mutex);
  owed_.events.push_back(ended);
  owed_.any.store(true, std::memory_order_release);
  if (ended.pool || !(ended.undone || ended.paused)) return;
  const bool runs = ended.kind == CycleKind::kPause && !ended.paused;
  const std::uint64_t cycles = progress_.load(std::memory_order_acquire) >> 8;
  owed_.progress.store(cycles << 8 | static_cast<std::uint64_t>(runs ? Lifecycle::kRunning : Lifecycle::kPaused),
                       std::memory_order_release);
}

void Ledger::RecordWhatEnded() {
  if (!owed_.any.load(std::memory_order_acquire)) return;
  std::vector<EventBody> events;
  {
    const std::lock_guard lock(owed_.mutex);
    events = std::exchange(owed_.events, {});
    owed_.any.store(false, std::memory_order_release);
  }
  for (EventBody& owed : events) {
    const auto* const broken = std::get_if<SessionBroken>(&owed);
    broken != nullptr ? Break(broken->reason) : Record(std::move(owed));
  }
  const std::lock_guard lock(owed_.mutex);
  if (owed_.events.empty()) owed_.progress.store(0, std::memory_order_release);
}

void Ledger::NoteHolder() {
  holder_.store(ThreadId(), std::memory_order_relaxed);
  held_since_ns_.store(MonotonicNs(), std::memory_order_relaxed);
}

Status Ledger::Held() const {
  constexpr std::size_t kThreadsMost = 256;
  const std::uint32_t holder = holder_.load(std::memory_order_relaxed);
  const std::uint64_t held_ms = (MonotonicNs() - held_since_ns_.load(std::memory_order_relaxed)) / 1'000'000;
  std::string text = fmt::format("a driver call of another thread has not returned for {} ms: thread {}", held_ms, holder);
  for (const ThreadSight& seen : SeeOwnThreads(kThreadsMost)) {
    if (static_cast<std::uint32_t>(seen.thread) != holder) continue;
    text += fmt::format(" ({}) is {}{}{}", seen.name, seen.sight.state, seen.sight.where.empty() ? "" : " ", seen.sight.where);
  }
  return {Code::kTimeout, std::move(text), cuda::kNotReady};
}

std::pair<Lifecycle, std::uint64_t> Ledger::Progress() const {
  const std::uint64_t owed = owed_.progress.load(std::memory_order_acquire);
  const std::uint64_t now = owed != 0 ? owed : progress_.load(std::memory_order_acquire);
  return {static_cast<Lifecycle>(now & 0xff), now >> 8};
}

void Ledger::Record(EventBody body) { static_cast<void>(Recorded(std::move(body), true)); }
bool Ledger::RecordIfThereIsMemory(EventBody body) { return Recorded(std::move(body), false); }

bool Ledger::Recorded(EventBody body, bool happened) {
  const bool broken_before = !state_.broken.empty();
  const Event event{SequenceNumber{state_.last.value + 1}, MonotonicNs(), ThreadId(), std::move(body)};
  bool had_memory = false;
  const Status applied = OrNoMemory([&] {
    CallerHoldsIt();
    Status done = Apply(state_, event);
    had_memory = true;
    return done;
  });
  if (!had_memory && !happened) return false;
  if (!applied.ok()) {
    CannotFollow(event, applied);
    return true;
  }
  const Status noted = OrNoMemory([&] {
    CallerHoldsIt();
    tag_places_.Note(event.body, state_);
    return Status{};
  });
  progress_.store(state_.cycles << 8 | static_cast<std::uint64_t>(state_.lifecycle), std::memory_order_release);
  if (journal_ != nullptr && !broken_before) Append(event);
  if (!noted.ok()) BreakWith([&] { return "where memory of tags is cannot be noted: " + noted.message(); });
  return true;
}

// The event happened, but the state cannot follow.
void Ledger::CannotFollow(const Event& event, const Status& why) {
  if (std::holds_alternative<SessionBroken>(event.body)) {
    static_cast<void>(OrNoMemory([&] {
      CallerHoldsIt();
      state_.broken = why.message();
      return Status{};
    }));
    if (state_.broken.empty()) state_.broken = NoMemory().message();
  } else if (!std::visit(IsOnlyCounted{state_}, static_cast<const EventVariant&>(event.body))) {
    BreakWith([&] { return "the state machine refused an event that happened: " + why.message(); });
  } else {
    ++dropped_events_;
    static_cast<void>(OrNoMemory([&] {
      CallerHoldsIt();
      Record(PassedThrough{std::string(KindName(event.body.index())), "not counted: " + why.message(), 0});
      return Status{};
    }));
  }
}

void Ledger::LockAndRecord(EventBody body) {
  const LedgerLock lock(*this);
  Record(std::move(body));
}

void Ledger::Append(const Event& event) {
  if (!lost_.ok()) {
    if (event.time_ns >= renew_after_ns_) RenewJournal();
    return;
  }
  lost_ = OrNoMemory([&] {
    CallerHoldsIt();
    return journal_->Append(event);
  });
  lost_.ok() ? SnapshotIfDue() : RenewJournal();
}

// The state holds what could not be appended, so the fresh journal lacks only the events themselves.
void Ledger::RenewJournal() {
  if (lost_.ok() || !state_.broken.empty()) return;
  not_renewed_ = OrNoMemory([&] {
    CallerHoldsIt();
    return journal_->Renew(state_);
  });
  if (not_renewed_.ok()) lost_ = {};
  renew_after_ns_ = MonotonicNs() + kRenewAgainAfterNs;
}

Status Ledger::CanPause() const {
  if (!state_.broken.empty())
    return {Code::kBroken, "pause refused: this session is broken: " + state_.broken +
                               "; the job runs on, and its memory cannot be given back until it is restarted"};
  if (lost_.ok()) return {};
  return {lost_.code() == Code::kNoDescriptors ? lost_.code() : Code::kBroken,
          "pause refused: this session has no journal: " + lost_.message() +
              (not_renewed_.ok() || not_renewed_.message() == lost_.message()
                   ? ""
                   : "; it cannot begin anew: " + not_renewed_.message()) +
              "; the job runs on, and can be paused once a journal can be written"};
}

Status Ledger::AwaitFiles(Deadline until) {
  JournalWriter::Question ask;
  {
    if (!TryLockFor(LeftUntil(until))) return Held();
    const LedgerLock lock(*this, std::adopt_lock);
    if (journal_ != nullptr && lost_.ok()) ask = journal_->AskFiles();
  }
  const Status answer = ask ? ask(until) : Status{};
  if (answer.code() != Code::kTimeout) return {};
  return {Code::kRefused,
          "pause refused: " + answer.message() + "; the job runs on, and can be paused once a journal can be written",
          cuda::kNotReady};
}

template <class Words>
void Ledger::BreakWith(const Words& words) {
  if (!state_.broken.empty()) return;
  const Status said = OrNoMemory([&] {
    CallerHoldsIt();
    Record(SessionBroken{words()});
    return Status{};
  });
  if (!said.ok()) state_.broken = said.message();
}

void Ledger::Break(const std::string& reason) {
  BreakWith([&] { return reason; });
}

bool Ledger::IsFailedCheck(const Status& work) {
  return work.code() == Code::kInvalid && work.message().find("check failed at ") != std::string::npos;
}

void Ledger::BreakIfCheckFailed(const Status& work) {
  if (IsFailedCheck(work)) Break(work.message());
}

void Ledger::BreakSoonIfCheckFailed(const Status& work) {
  if (!IsFailedCheck(work)) return;
  const std::lock_guard lock(owed_.mutex);
  owed_.events.emplace_back(SessionBroken{work.message()});
  owed_.any.store(true, std::memory_order_release);
}

bool Ledger::Check(bool holds, std::string_view otherwise, SourceLine where) {
  if (holds) return true;
  BreakWith([&] {
    const std::string_view file = where.file.substr(where.file.rfind('/') + 1);  // npos + 1 is 0
    return fmt::format("check failed at {}:{}: {}; this is a defect of AMem, report it with the journal", file, where.line,
                       otherwise);
  });
  return false;
}

Status Ledger::Broken() const { return {Code::kBroken, state_.broken}; }

void Ledger::SnapshotIfDue() {
  const bool in_cycle = state_.lifecycle == Lifecycle::kPausing || state_.lifecycle == Lifecycle::kResuming;
  if (!state_.broken.empty() || in_cycle || !journal_->SnapshotDue()) return;
  // If it fails, earlier events are kept and nothing is lost.
  static_cast<void>(OrNoMemory([&] {
    CallerHoldsIt();
    journal_->SnapshotSoon(state_);
    return Status{};
  }));
}

DriverHandle Ledger::HandleOf(AllocationId allocation) const {
  auto* const it = FindIn(backing_, allocation.value);
  return it == nullptr ? DriverHandle{} : it->handle;
}
AllocationId Ledger::AllocationOf(DriverHandle handle) const {
  for (const auto& [id, backing] : backing_)
    if (handle && backing.handle == handle) return AllocationId{id};
  return {};
}

void Ledger::SetHandle(AllocationId allocation, DriverHandle handle) {
  backing_[allocation.value] = {handle, ++handles_set_, {}};
}
void Ledger::ForgetHandle(AllocationId allocation) { backing_.erase(allocation.value); }

const Ledger::Rebuilt& Ledger::RebuiltAs(AllocationId allocation) const {
  static const Rebuilt as_nccl_made_it;
  auto* const it = FindIn(rebuilt_, allocation.value);
  return it == nullptr ? as_nccl_made_it : *it;
}
void Ledger::SetRebuilt(AllocationId allocation, Rebuilt rebuilt) { rebuilt_[allocation.value] = std::move(rebuilt); }
void Ledger::DeviceAdded(AllocationId multicast, DeviceOrdinal device) {
  if (auto* const it = FindIn(rebuilt_, multicast.value)) it->lacks.erase(device);
}

Result<UniqueFd> Ledger::Export(AllocationId allocation, Driver& driver, bool keep) {
  const auto copy_of = [](const UniqueFd& descriptor) { return UniqueFd(::fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 3)); };
  const MutexLock one(export_mutex_);
  DriverHandle handle;
  std::uint64_t set_as = 0;
  {
    const LedgerLock lock(*this);
    if (const auto* const known = FindIn(backing_, allocation.value)) {
      set_as = known->set_as;
      if (UniqueFd kept = known->descriptor ? copy_of(known->descriptor) : UniqueFd()) return kept;
      handle = known->handle;
    }
  }
  if (!handle) return Status{Code::kNotFound, ToText(allocation) + " has no memory now"};
  auto descriptor = driver.Export(handle);
  if (!descriptor.ok()) return descriptor;
  const LedgerLock lock(*this);
  auto* const known = FindIn(backing_, allocation.value);
  // It was released meanwhile, and perhaps made anew: what was exported would stay as memory of its own.
  if (known == nullptr || known->set_as != set_as)
    return Status{Code::kNotFound, ToText(allocation) + " was released while it was exported"};
  if (keep) known->descriptor = copy_of(*descriptor);
  return descriptor;
}

}  // namespace amem
