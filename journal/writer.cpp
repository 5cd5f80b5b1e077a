#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/errand.h"
#include "journal/base/fork_guard.h"
#include "journal/base/no_memory.h"
#include "journal/codec.h"
#include "journal/drain.h"
#include "journal/journal.h"
#include "journal/session_dir.h"
#include "journal/store.h"
#include "journal/tail.h"
#include "statemachine/check.h"

namespace amem {
namespace {

// How long a call waits for a file system that does not answer: where a session starts, where its journal begins anew, at its
// end.
constexpr std::chrono::milliseconds kStartPatience{2000}, kRenewPatience{200}, kEndPatience{2000};
constexpr std::uint64_t kTrySnapshotAgainAfter = 10'000;  // events, when the state could not be condensed

// When the next snapshot is due: after so many events or bytes, whichever comes first.
class SnapshotSchedule {
 public:
  SnapshotSchedule(std::uint64_t events, Bytes bytes) : due_(events), due_bytes_(bytes) {}
  void Count(Bytes bytes) {
    appended_.fetch_add(1, std::memory_order_relaxed);
    appended_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  void DueAfter(std::uint64_t events, Bytes bytes) {
    due_.store(appended_.load() + events, std::memory_order_relaxed);
    due_bytes_.store(appended_bytes_.load() + bytes, std::memory_order_relaxed);
  }
  [[nodiscard]] bool IsDue() const {
    return appended_.load(std::memory_order_relaxed) >= due_.load(std::memory_order_relaxed) ||
           appended_bytes_.load(std::memory_order_relaxed) >= due_bytes_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> appended_{0}, appended_bytes_{0};  // by this writer
  std::atomic<std::uint64_t> due_, due_bytes_;
};

// One journal. Everything that a forked child must not touch, together, so that the child can leave it alone.
struct Core {
  Core(std::filesystem::path path, Tail its_tail, std::unique_ptr<Store> its_store, const JournalOptions& options,
       ClockNotes notes, std::uint64_t before)
      : directory(std::move(path)),
        tail(std::move(its_tail)),
        store(std::move(its_store)),
        last(before),
        schedule(options.snapshot_every, options.snapshot_bytes),
        drain(directory, tail, *store, append_mutex, std::move(notes), before) {}
  // append_mutex held
  Status Unusable() const {
    if (drain.broken()) return drain.reason();
    if (closed) return {Code::kRefused, "journal " + directory.string() + " is closed"};
    return {};
  }
  Status Broken(const Event& event, const std::string& why) {
    return drain.Break(
        {Code::kInvalid, fmt::format("append event {} to journal {}: {}", event.seq.value, directory.string(), why)});
  }

  Status Append(const Event& event) {
    const std::lock_guard lock(append_mutex);
    AMEM_TRY(Unusable());
    if (!event.seq || (last != 0 && event.seq.value != last + 1))
      return Broken(event, fmt::format("it does not follow event {}", last));
    const auto message = encoder.Encode(event);
    if (message.empty()) return Broken(event, "it is too large to be encoded");
    AMEM_TRY(AppendEncoded(event.seq.value, message));
    last = event.seq.value;
    if (std::holds_alternative<CycleFailed>(event.body)) failed = true;
    schedule.Count(RecordBytes(message.size()));
    return {};
  }

  Status AppendEncoded(std::uint64_t seq, std::span<const std::byte> message) {
    if (message.size() > tail.LargestPayload())
      return StillBroken(drain.StoreRecord(Table::kEvents, seq, Framed(RecordType::kEvent, seq, message)));
    for (;;) {
      const std::uint64_t drained = tail.DrainedUpTo();  // before the attempt
      if (tail.Append(RecordType::kEvent, seq, message)) break;
      if (!tail.Failure().ok()) return drain.Break(tail.Failure().Within("append to " + (directory / "tail").string()));
      AMEM_TRY(StillBroken(drain.WaitFor(drained + 1)));  // until the tail has given anything back
    }
    drain.Appended();
    return {};
  }
  // What an appender waited for in vain: no later one waits again.
  Status StillBroken(const Status& waited) { return waited.code() == Code::kTimeout ? drain.Break(waited, false) : waited; }

  [[nodiscard]] std::string Condensing(const State& state) const {
    return fmt::format("snapshot journal {} through event {}", directory.string(), state.last.value);
  }
  Status CanCondense(const State& state) {
    const std::lock_guard lock(append_mutex);
    AMEM_TRY(Unusable());
    if (state.last.value != 0 && state.last.value <= last) return {};
    return {Code::kInvalid, fmt::format("{}: the last event appended is {}", Condensing(state), last)};
  }

  void SnapshotSoon(const State& state, const JournalOptions& options) {
    if (!CanCondense(state).ok() || state.last.value <= drain.last_snapshot()) return;
    drain.SnapshotSoon(state);
    schedule.DueAfter(options.snapshot_every, std::max<Bytes>(options.snapshot_bytes, 2 * drain.snapshot_bytes()));
  }

  // The events up to this state were not appended: the snapshot has what they led to.
  Status GoOnFrom(const State& state, const JournalOptions& options) {
    {
      const std::lock_guard lock(append_mutex);
      if (last == state.last.value) return {};
      last = state.last.value;
    }
    return Snapshot(state, options);
  }

  Status Snapshot(const State& state, const JournalOptions& options) {
    AMEM_TRY(CanCondense(state));
    const std::uint64_t through = state.last.value;
    const std::string doing = Condensing(state);
    if (through <= drain.last_snapshot()) return {};
    const auto payload = EncodeSnapshot(state);
    if (!payload || payload->size() > UINT32_MAX) {
      schedule.DueAfter(std::min(options.snapshot_every, kTrySnapshotAgainAfter), options.snapshot_bytes);
      return payload ? Status{Code::kInvalid, doing + ": it is larger than 4 GiB"} : payload.status().Within(doing);
    }
    AMEM_TRY(drain.StoreRecord(Table::kSnapshots, through, Framed(RecordType::kSnapshot, through, *payload)));
    // Where the state itself is large, snapshots must not make up most of what is written.
    schedule.DueAfter(options.snapshot_every, std::max<Bytes>(options.snapshot_bytes, 2 * payload->size()));
    return {};
  }

  // Before the tail is removed.
  Status CheckAllMoved() const {
    AMEM_CHECK(tail.Used() == 0U, last);
    return {};
  }

  Status Close() {
    {
      const std::lock_guard lock(append_mutex);
      if (closed && !drain.broken()) return {};
      AMEM_TRY(Unusable());
      closed = true;
    }
    AMEM_TRY(drain.WaitFor(tail.Published()));
    drain.Stop();
    if (Status status = CheckAllMoved(); !status) return drain.Break(status);
    if (Status status = store->Sync(); !status) return drain.Break(status);
    if (Status status = MarkClosed(directory, failed); !status) return drain.Break(status);
    if (tail.PlaceOfLocks().is_absolute()) unlink((directory / kLockFile).c_str());
    GiveMemoryBack(directory / "tail");
    unlink((directory / "tail").c_str());  // it is empty; its lock ends with the process or with this object
    return {};
  }

  const std::filesystem::path directory;
  Tail tail;
  std::unique_ptr<Store> store;
  std::mutex append_mutex;
  Encoder encoder;     // these four under append_mutex
  std::uint64_t last;  // sequence number
  bool closed = false;
  bool failed = false;  // a pause or resume
  SnapshotSchedule schedule;
  Drain drain;  // last, so that its thread ends first
};

Result<std::shared_ptr<Core>> Make(const JournalOptions& options, SessionId session, const State* before) {
  AMEM_ASSIGN(auto fresh, NewSessionDirectory::Create(options.directory, session, before != nullptr));
  RemoveOldSessions(options.directory, options.keep_sessions, options.keep_bytes);
  const auto ring = options.tail_in_memory ? Tail::Ring::kInMemory : Tail::Ring::kInFile;
  AMEM_ASSIGN(auto tail, Tail::Create(fresh.path() / "tail", options.tail_bytes, session, ring));
  AMEM_ASSIGN(auto store, Store::Create(fresh.path(), options.map_bytes, tail.PlaceOfLocks()));
  std::optional<WallClock> opened;
  if (before != nullptr && before->session.realtime_ns != 0)
    opened = WallClock{before->session.realtime_ns, before->session.monotonic_ns};
  ClockNotes notes(session, options.clock, opened);
  AMEM_TRY(store->Write([&](const Store::Writing& writing) { return notes.Note(writing); }));
  const std::uint64_t last = before != nullptr ? before->last.value : 0;
  if (before != nullptr) {
    AMEM_ASSIGN(const auto payload, EncodeSnapshot(*before));
    AMEM_TRY(store->Append(Table::kSnapshots, last, Framed(RecordType::kSnapshot, last, payload)));
  }
  store->MovedTo(fresh.name());
  tail.MovedTo(fresh.name());
  auto core = std::make_shared<Core>(fresh.name(), std::move(tail), std::move(store), options, std::move(notes), last);
  AMEM_TRY(core->drain.Start());
  AMEM_TRY(fresh.Publish().status());  // last: what had the name is put aside for a journal that works
  return core;
}

// `before`: of a session that has been going on.
Result<std::shared_ptr<Core>> Begin(const JournalOptions& options, SessionId session, const State* before = nullptr) {
  return Make(options, session, before).Within(before == nullptr ? "open a journal" : "begin a journal anew");
}

class Writer final : public JournalWriter {
 public:
  Writer(JournalOptions options, SessionId session, std::shared_ptr<Core> core)
      : options_(std::move(options)), session_(session), lasting_(false), core_(std::move(core)) {}
  // One that outlasts its journal: the session goes on when there is none, and in a fresh directory once there can be one.
  Writer(JournalOptions options, SessionId session) : options_(std::move(options)), session_(session), lasting_(true) {
    StartMaking(nullptr);
    auto made = making_->Wait(In(kStartPatience));
    if (made) making_.reset();
    if (made && made->ok()) {
      core_ = *std::move(*made);
    } else {
      Lose(made ? made->status() : NoAnswer(kStartPatience));
    }
  }
  ~Writer() override {
    if (!guard_.InChild()) {
      Abandon();
    } else {  // they are the parent's: its locks may be held, and its threads are not in the child
      (void)new std::shared_ptr(std::move(core_));
      (void)new std::optional(std::move(making_));
    }
  }
  Status Append(const Event& event) override {
    if (!IsHere()) return Elsewhere();
    bool ended = false;
    Status appended = OrNoMemory([&] {
      Status done = core_->Append(event);
      ended = true;
      return done;
    });
    if (!ended) appended = OrNoMemory([&] { return core_->drain.Break(appended); });  // so that its directory says so
    if (!appended && lasting_ && !ended_ && IsHere()) Lose(appended);
    return appended;
  }
  Status Flush() override {
    if (!IsHere()) return Elsewhere();
    {
      const std::lock_guard lock(core_->append_mutex);
      AMEM_TRY(core_->Unusable());
    }
    return core_->drain.WaitFor(core_->tail.Published());
  }
  [[nodiscard]] bool SnapshotDue() const override { return core_ != nullptr && core_->schedule.IsDue(); }
  Status Snapshot(const State& state) override {
    if (!IsHere()) return Elsewhere();
    return core_->Snapshot(state, options_);
  }
  void SnapshotSoon(const State& state) override {
    if (IsHere()) core_->SnapshotSoon(state, options_);
  }
  [[nodiscard]] Question AskFiles() const override {
    if (!IsHere()) return {};
    return [core = core_](Deadline until) { return core->drain.Answer(until); };
  }
  Status Renew(const State& state) override {
    if (!lasting_) return JournalWriter::Renew(state);
    if (core_ != nullptr || ended_ || guard_.InChild()) return {Code::kRefused, "this journal is not renewed now"};
    const std::chrono::milliseconds patience = making_ ? std::chrono::milliseconds(0) : kRenewPatience;
    if (!making_) StartMaking(&state);
    auto made = making_->Wait(In(patience));
    if (!made) return why_ = NoAnswer(patience);
    making_.reset();
    if (!made->ok()) return why_ = made->status();
    core_ = *std::move(*made);
    if (const Status on = OrNoMemory([&] { return core_->GoOnFrom(state, options_); }); !on.ok()) {
      Abandon();
      return why_ = on;
    }
    static_cast<void>(OrNoMemory([&] {
      Say("the journal begins anew in " + core_->directory.string() + ", and pausing works again");
      return Status{};
    }));
    return {};
  }
  Status Close() override {
    ended_ = true;
    if (core_ == nullptr) return {};  // that there is none has been said
    if (!IsHere()) return Elsewhere();
    const auto closed = Errand<Status>([core = core_] { return core->Close(); }).Wait(In(kEndPatience));
    return closed ? *closed : NoAnswer(kEndPatience).Within("close journal " + core_->directory.string());
  }
  [[nodiscard]] std::filesystem::path Directory() const override {
    return core_ == nullptr ? std::filesystem::path() : core_->directory;
  }

 private:
  // There is a journal, and it is this process's.
  [[nodiscard]] bool IsHere() const { return core_ != nullptr && !guard_.InChild(); }
  [[nodiscard]] Status Elsewhere() const {
    if (core_ == nullptr) return why_;
    return {Code::kRefused,
            "journal " + core_->directory.string() + " belongs to the process that opened it; a forked child has none"};
  }
  void Lose(const Status& why) {
    why_ = why;
    Abandon();  // its directory says by now that it is broken
    Say(
        fmt::format("there is no journal: {}; NCCL goes on, and pauses are refused while there is none (AMEM_JOURNAL_DIR "
                    "chooses another place)",
                    why.message()));
  }
  // Its thread may hang in the file system, and is waited for by another one.
  void Abandon() {
    if (core_ != nullptr && core_->drain.Stalled())
      Errand<bool>([core = std::move(core_)] { return core->drain.Stop(), true; });
    core_.reset();
  }
  void StartMaking(const State* state) {
    const auto before = state == nullptr ? nullptr : std::make_shared<const State>(*state);
    making_.emplace([options = options_, session = session_, before] { return Begin(options, session, before.get()); });
  }
  [[nodiscard]] Status NoAnswer(std::chrono::milliseconds waited) const {
    return {Code::kTimeout, fmt::format("the file system of {} has not answered for {} ms; is it frozen, or its server gone?",
                                        options_.directory.string(), waited.count())};
  }
  void Say(const std::string& message) const {
    if (options_.report) options_.report(message);
  }

  const JournalOptions options_;
  const SessionId session_;
  const bool lasting_;
  const ForkGuard guard_;
  std::shared_ptr<Core> core_;                                   // null: none now, because of why_
  std::optional<Errand<Result<std::shared_ptr<Core>>>> making_;  // the next
  Status why_;
  bool ended_ = false;
};

}  // namespace

Result<std::unique_ptr<JournalWriter>> JournalWriter::Open(const JournalOptions& options, SessionId session) {
  AMEM_ASSIGN(auto core, Begin(options, session));
  return std::unique_ptr<JournalWriter>(new Writer(options, session, std::move(core)));
}

std::unique_ptr<JournalWriter> JournalWriter::OpenLasting(const JournalOptions& options, SessionId session) {
  return std::make_unique<Writer>(options, session);
}

}  // namespace amem
