#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/fork_guard.h"
#include "journal/codec.h"
#include "journal/drain.h"
#include "journal/journal.h"
#include "journal/session_dir.h"
#include "journal/store.h"
#include "journal/tail.h"

namespace amem {
namespace {

constexpr std::uint64_t kTrySnapshotAgainAfter = 10'000;  // events, when the state could not be condensed

// Everything that a forked child must not touch, together, so that the child can leave it alone.
struct Core {
  Core(std::filesystem::path path, Tail its_tail, std::unique_ptr<Store> its_store)
      : directory(std::move(path)),
        tail(std::move(its_tail)),
        store(std::move(its_store)),
        latch(directory, tail),
        drain(tail, *store, latch, append_mutex) {}
  std::filesystem::path directory;
  Tail tail;
  std::unique_ptr<Store> store;
  BrokenLatch latch;
  std::mutex append_mutex;
  Encoder encoder;         // these four under append_mutex
  std::uint64_t last = 0;  // sequence number
  bool closed = false;
  bool failed = false;  // a pause or resume
  Drain drain;          // last, so that its thread ends first
};

class Writer final : public JournalWriter {
 public:
  Writer(std::unique_ptr<Core> core, const JournalOptions& options)
      : core_(std::move(core)),
        directory_(core_->directory),
        sync_(options.sync),
        snapshot_every_(options.snapshot_every),
        snapshot_bytes_(options.snapshot_bytes),
        snapshot_due_(options.snapshot_every),
        snapshot_due_bytes_(options.snapshot_bytes),
        last_snapshot_(core_->last) {}
  ~Writer() override {
    if (guard_.InChild())
      (void)core_.release();  // it is the parent's: its locks may be held, and its thread is not in the child
  }
  Status Append(const Event& event) override;
  Status Flush() override;
  [[nodiscard]] bool SnapshotDue() const override {
    return appended_.load(std::memory_order_relaxed) >= snapshot_due_.load(std::memory_order_relaxed) ||
           appended_bytes_.load(std::memory_order_relaxed) >= snapshot_due_bytes_.load(std::memory_order_relaxed);
  }
  Status Snapshot(const State& state) override;
  Status Close() override;
  [[nodiscard]] std::filesystem::path Directory() const override { return directory_; }
  [[nodiscard]] Bytes TailBytesUsed() const override { return guard_.InChild() ? 0 : core_->tail.Used(); }

 private:
  [[nodiscard]] Status Refused() const {
    return {Code::kRefused,
            "journal " + directory_.string() + " belongs to the process that opened it; a forked child has none"};
  }
  [[nodiscard]] Status Unusable() const;  // append_mutex held
  Status Broken(const Event& event, const std::string& why) {
    return core_->latch.Break(
        {Code::kInvalid, fmt::format("append event {} to journal {}: {}", event.seq.value, directory_.string(), why)});
  }
  Status AppendEncoded(std::uint64_t seq, std::span<const std::byte> message);
  void SnapshotDueAfter(std::uint64_t events, Bytes bytes);

  std::unique_ptr<Core> core_;
  const std::filesystem::path directory_;
  const SyncMode sync_;
  const std::uint64_t snapshot_every_;
  const Bytes snapshot_bytes_;
  std::atomic<std::uint64_t> appended_{0}, appended_bytes_{0};  // by this writer
  std::atomic<std::uint64_t> snapshot_due_, snapshot_due_bytes_;
  std::uint64_t last_snapshot_ = 0;
  ForkGuard guard_;
};

Status Writer::Unusable() const {
  if (core_->latch.broken()) return core_->latch.reason();
  if (core_->closed) return {Code::kRefused, "journal " + directory_.string() + " is closed"};
  return {};
}

Status Writer::Append(const Event& event) {
  if (guard_.InChild()) return Refused();
  std::uint64_t position = 0;
  {
    const std::lock_guard lock(core_->append_mutex);
    AMEM_TRY(Unusable());
    const std::uint64_t last = core_->last;
    if (!event.seq || (last != 0 && event.seq.value != last + 1))
      return Broken(event, fmt::format("it does not follow event {}", last));
    const auto message = core_->encoder.Encode(event);
    if (message.empty()) return Broken(event, "it is too large to be encoded");
    AMEM_TRY(AppendEncoded(event.seq.value, message));
    core_->last = event.seq.value;
    if (std::holds_alternative<CycleFailed>(event.body)) core_->failed = true;
    appended_.fetch_add(1, std::memory_order_relaxed);
    appended_bytes_.fetch_add(RecordBytes(message.size()), std::memory_order_relaxed);
    position = core_->tail.Published();
  }
  return sync_ == SyncMode::kFull ? core_->drain.WaitFor(position) : Status{};
}

Status Writer::AppendEncoded(std::uint64_t seq, std::span<const std::byte> message) {
  if (message.size() > core_->tail.LargestPayload())
    return core_->drain.Store({.table = Table::kEvents, .key = seq, .frame = Framed(RecordType::kEvent, seq, message)});
  for (;;) {
    const std::uint64_t drained = core_->tail.DrainedUpTo();  // before the attempt
    if (core_->tail.Append(RecordType::kEvent, seq, message)) break;
    AMEM_TRY(core_->drain.WaitFor(drained + 1));  // until the tail has given anything back
  }
  core_->drain.Appended();
  return {};
}

Status Writer::Flush() {
  if (guard_.InChild()) return Refused();
  std::unique_lock lock(core_->append_mutex);
  AMEM_TRY(Unusable());
  lock.unlock();
  return core_->drain.WaitFor(core_->tail.Published());
}

void Writer::SnapshotDueAfter(std::uint64_t events, Bytes bytes) {
  snapshot_due_.store(appended_.load() + events, std::memory_order_relaxed);
  snapshot_due_bytes_.store(appended_bytes_.load() + bytes, std::memory_order_relaxed);
}

Status Writer::Snapshot(const State& state) {
  if (guard_.InChild()) return Refused();
  std::uint64_t last = 0;
  {
    const std::lock_guard lock(core_->append_mutex);
    AMEM_TRY(Unusable());
    last = core_->last;
  }
  const std::uint64_t through = state.last.value;
  const std::string doing = fmt::format("snapshot journal {} through event {}", directory_.string(), through);
  if (through == 0 || through > last) {
    return {Code::kInvalid, fmt::format("{}: the last event appended is {}", doing, last)};
  }
  if (through <= last_snapshot_) return {};
  const auto payload = EncodeSnapshot(state);
  if (!payload || payload->size() > UINT32_MAX) {
    SnapshotDueAfter(std::min(snapshot_every_, kTrySnapshotAgainAfter), snapshot_bytes_);
    return payload ? Status{Code::kInvalid, doing + ": it is larger than 4 GiB"} : payload.status().Within(doing);
  }
  AMEM_TRY(core_->drain.Store({.table = Table::kSnapshots,
                               .key = through,
                               .frame = Framed(RecordType::kSnapshot, through, *payload),
                               .obsolete_events_below = last_snapshot_ == 0 ? 0 : last_snapshot_ + 1,
                               .obsolete_snapshots_below = last_snapshot_}));
  last_snapshot_ = through;
  // Where the state itself is large, snapshots must not make up most of what is written.
  SnapshotDueAfter(snapshot_every_, std::max<Bytes>(snapshot_bytes_, 2 * payload->size()));
  return {};
}

Status Writer::Close() {
  if (guard_.InChild()) return Refused();
  {
    const std::lock_guard lock(core_->append_mutex);
    if (core_->closed && !core_->latch.broken()) return {};
    AMEM_TRY(Unusable());
    core_->closed = true;
  }
  AMEM_TRY(core_->drain.WaitFor(core_->tail.Published()));
  core_->drain.Stop();
  if (Status status = core_->store->Sync(); !status) return core_->latch.Break(status);
  if (Status status = MarkClosed(directory_, sync_, core_->failed); !status) return core_->latch.Break(status);
  unlink((directory_ / "tail").c_str());  // it is empty; its lock ends with the process or with this object
  return {};
}

Status Introduce(Store& store, SessionId session) {
  const FileMeta meta{kJournalFormat, kJournalLeastReader, session, getpid(), RealtimeNs()};
  Encoder encoder;
  const auto frame = Framed(RecordType::kMeta, 1, encoder.Encode(meta));
  return store.Write([&](const Store::Writing& writing) { return writing.Append(Table::kMeta, 1, frame); });
}

Status Begin(Store& store, const State& state) {
  AMEM_ASSIGN(const auto payload, EncodeSnapshot(state));
  const auto frame = Framed(RecordType::kSnapshot, state.last.value, payload);
  return store.Write([&](const Store::Writing& writing) { return writing.Append(Table::kSnapshots, state.last.value, frame); });
}

Result<std::unique_ptr<JournalWriter>> Make(const JournalOptions& options, SessionId session, const State* before) {
  AMEM_ASSIGN(auto fresh, NewSessionDirectory::Create(options.directory, session, before != nullptr));
  RemoveOldSessions(options.directory, options.keep_sessions, options.keep_bytes);
  AMEM_ASSIGN(auto tail, Tail::Create(fresh.path() / "tail", options.tail_bytes, session));
  AMEM_ASSIGN(auto store, Store::Create(fresh.path(), options.map_bytes, options.sync));
  AMEM_TRY(Introduce(*store, session));
  if (before != nullptr) AMEM_TRY(Begin(*store, *before));
  AMEM_ASSIGN(const auto directory, fresh.Publish());
  store->MovedTo(directory);
  auto core = std::make_unique<Core>(directory, std::move(tail), std::move(store));
  if (before != nullptr) core->last = before->last.value;
  AMEM_TRY(core->drain.Start());
  return std::unique_ptr<JournalWriter>(new Writer(std::move(core), options));
}

}  // namespace

Result<std::unique_ptr<JournalWriter>> JournalWriter::Open(const JournalOptions& options, SessionId session) {
  return Make(options, session, nullptr).Within("open a journal");
}

Result<std::unique_ptr<JournalWriter>> JournalWriter::Continue(const JournalOptions& options, SessionId session,
                                                               const State& state) {
  return Make(options, session, &state).Within("begin a journal anew");
}

}  // namespace amem
