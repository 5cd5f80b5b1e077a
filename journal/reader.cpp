#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "journal/codec.h"
#include "journal/journal.h"
#include "journal/record_source.h"
#include "journal/session_dir.h"
#include "journal/store.h"
#include "journal/tail.h"
#include "statemachine/apply.h"

namespace amem {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kEverything = ~std::uint64_t{0};
// How much is copied out of LMDB at a time. A long read transaction would keep the writer from reusing pages.
constexpr std::size_t kBatchBytes = std::size_t{1} << 20;
constexpr std::size_t kBatchRecords = 8192;
// How often a writer may replace the snapshot that was found by a later one, before its events were read.
constexpr int kOvertaken = 100;

struct Entry {  // a record copied out of LMDB; its frame may be damaged
  std::uint64_t seq = 0;
  std::size_t offset = 0, bytes = 0;
};
struct Batch {
  std::vector<std::byte> bytes;
  std::vector<Entry> entries;
  std::uint64_t first_kept = 0;  // the oldest event in LMDB: earlier ones were removed after a snapshot
  bool beyond = false;           // there are later ones than asked for
  bool more = false;
  [[nodiscard]] std::span<const std::byte> Frame(const Entry& e) const { return std::span(bytes).subspan(e.offset, e.bytes); }
};

// Counts what is missing or damaged, and words the first of it.
class Losses {
 public:
  explicit Losses(ReadReport& report) : report_(report) {}
  void Add(std::uint64_t records, const std::string& what) {
    report_.corrupt_records += records;
    if (report_.corruption.empty()) report_.corruption = what;
  }
  void Event(std::uint64_t seq, const std::string& what, std::size_t bytes) {
    Add(1, fmt::format("event {} {}: {} bytes dropped{}", seq, what, bytes, kAfterwards));
  }
  void Gap(std::uint64_t first, std::uint64_t last) {
    const std::string which =
        first == last ? fmt::format("event {} is", first) : fmt::format("events {} to {} are", first, last);
    Add(last - first + 1, which + " missing" + kAfterwards);
  }

 private:
  static constexpr const char* kAfterwards =
      "; the events around it are used, but the state after it is known only from the next snapshot on";
  ReadReport& report_;
};

// A copy of what a table has under a key; empty: nothing.
Result<std::vector<std::byte>> FrameAt(const RecordSource& source, Table table, std::uint64_t key) {
  std::vector<std::byte> frame;
  AMEM_TRY(source.Scan(table, key, [&](std::uint64_t found, std::span<const std::byte> value) {
    if (found == key) frame.assign(value.begin(), value.end());
    return false;
  }));
  return frame;
}

// Empty: the record is damaged.
std::optional<FileMeta> MetaOf(std::span<const std::byte> frame) {
  const auto record = ReadRecord(frame);
  if (!record || record->type != RecordType::kMeta) return std::nullopt;
  auto meta = DecodeMeta(record->payload);
  return meta ? std::optional(*std::move(meta)) : std::nullopt;
}

// Shows an event; one that is damaged is noted in place of that. False: `visit` ended the reading.
bool Show(const Record& record, Losses& losses, const std::function<bool(const Event&)>& visit) {
  const auto event = DecodeEvent(record.payload);
  if (event && event->seq.value == record.seq) return visit(*event);
  const std::string why =
      event ? fmt::format("calls itself {}", event->seq.value) : "cannot be read, " + event.status().message();
  losses.Event(record.seq, why, record.payload.size());
  return true;
}

class Reader final : public JournalReader {
 public:
  Reader(fs::path directory, std::unique_ptr<RecordSource> source, FileMeta meta)
      : directory_(std::move(directory)), source_(std::move(source)), meta_(std::move(meta)), missing_(MissingIn(directory_)) {}

  Result<JournalInfo> Info() override {
    JournalInfo info;
    info.directory = directory_;
    info.status = StatusOf(directory_);  // asked first, so that a journal that is called closed is complete
    info.session = meta_.session;
    info.pid = meta_.pid;
    info.format = meta_.format;
    AMEM_TRY(source_->Scan(Table::kMeta, 2, [&](std::uint64_t, std::span<const std::byte> frame) {
      if (const auto meta = MetaOf(frame)) info.set_clock = {meta->realtime_ns, meta->monotonic_ns};
      return true;
    }));
    AMEM_ASSIGN(const auto view, TakeView());
    info.broken_reason = BrokenReason(directory_);
    if (info.broken_reason.empty()) info.broken_reason = view.tail.broken_reason;
    if (!info.broken_reason.empty()) info.status = SessionStatus::kBroken;
    AMEM_TRY(source_->Scan(Table::kSnapshots, 0, [&](std::uint64_t through, std::span<const std::byte>) {
      info.snapshots.emplace_back(through);
      return true;
    }));
    const auto& records = view.tail.records;
    const auto unstored = std::ranges::find_if(records, [&](const Record& r) { return r.seq > view.stored_last; });
    const std::uint64_t first_in_tail = unstored != records.end() ? unstored->seq : 0;
    info.first = SequenceNumber{view.stored.first.value_or(first_in_tail)};
    info.last = SequenceNumber{view.last};
    info.events = view.stored.records + static_cast<std::uint64_t>(records.end() - unstored);
    AMEM_ASSIGN(const auto data, File::OpenToRead(directory_ / "data.mdb"));
    AMEM_ASSIGN(const auto bytes, data.Size());
    info.file_bytes = bytes + view.tail.file_bytes;
    return info;
  }

  using Visitor = std::function<bool(const Event&)>;
  Result<ReadReport> Read(SequenceNumber first, SequenceNumber last, const Visitor& visit) override {
    AMEM_ASSIGN(const auto view, TakeView());
    return ReadSeen(view, first, last, visit);
  }

  Result<State> StateAt(std::optional<SequenceNumber> at, ReadReport* report) override {
    ReadReport own;
    ReadReport& out = report != nullptr ? *report : own;
    const std::uint64_t to = at ? at->value : kEverything;
    const std::string which = at ? fmt::format("event {}", at->value) : "the last event";
    const std::string doing = fmt::format("state of journal {} after {}", directory_.string(), which);
    Result<State> state = State{};
    std::optional<SequenceNumber> before;
    for (int attempt = 0; attempt < kOvertaken; ++attempt) {
      out = {};
      Losses losses(out);
      auto start = NearestSnapshot(to, losses);
      if (!start) return start.status().Within(doing);
      if (start->last == before) break;  // there is no later snapshot, so what is missing stays missing
      before = start->last;
      state = Fold(std::move(*start), to, out);
      if (state.ok() || out.corrupt_records != 0) break;
    }
    if (!state) return state.status().Within(doing);
    if (!at || state->last == *at) return state;
    const std::string missing = fmt::format("there is no such event; the last one is {}", state->last.value);
    return Status{out.corrupt_records != 0 ? Code::kCorrupt : Code::kNotFound, doing + ": " + WhyNot(*state, missing, out)};
  }

 private:
  // What one call sees. The tail is copied first: records that leave it meanwhile are in LMDB by then.
  struct View {
    TailContents tail;
    KeyExtent stored;
    std::uint64_t stored_last = 0;
    std::uint64_t last = 0;  // later events are ignored, so that reading a live journal ends
  };

  Result<View> TakeView() const {
    View view;
    AMEM_ASSIGN(view.tail, ReadTail(directory_ / "tail"));
    AMEM_ASSIGN(view.stored, source_->ExtentOf(Table::kEvents));
    view.last = view.stored_last = view.stored.last.value_or(0);
    if (!view.tail.records.empty()) view.last = std::max(view.last, view.tail.records.back().seq);
    return view;
  }

  // `batch` is one that was read before, or empty; its storage is used again, because the system clears each new one.
  Status ReadBatch(std::uint64_t from, std::uint64_t to, Batch& batch) const {
    batch.bytes.clear();
    batch.entries.clear();
    batch.beyond = batch.more = false;
    AMEM_TRY(source_->Scan(Table::kEvents, from, [&](std::uint64_t seq, std::span<const std::byte> frame) {
      if (seq > to) {
        batch.beyond = true;
        return false;
      }
      if (batch.bytes.size() >= kBatchBytes || batch.entries.size() >= kBatchRecords) {
        batch.more = true;
        return false;
      }
      batch.entries.push_back({seq, batch.bytes.size(), frame.size()});
      batch.bytes.insert(batch.bytes.end(), frame.begin(), frame.end());
      return true;
    }));
    AMEM_ASSIGN(const auto left, source_->ExtentOf(Table::kEvents));  // afterwards: events removed meanwhile are not lost
    batch.first_kept = left.first.value_or(0);
    return {};
  }

  Result<ReadReport> ReadSeen(const View& view, SequenceNumber first, SequenceNumber last, const Visitor& visit) const {
    ReadReport report;
    Losses losses(report);
    report.incomplete = missing_;
    report.torn_tail = view.tail.torn && !WriterMayLive(directory_ / "tail");
    if (const std::string of_store = source_->Damage(); !of_store.empty()) losses.Add(1, of_store);
    const std::uint64_t to = std::min(last.value, view.last);
    std::uint64_t next = first.value;  // the number that must come next, if the journal goes back that far
    Batch batch;
    for (bool more = true; more && next <= to;) {
      AMEM_TRY(ReadBatch(next, to, batch));
      more = batch.more;
      for (const Entry& entry : batch.entries) {
        if (entry.seq > next && next > batch.first_kept) losses.Gap(next, entry.seq - 1);
        next = entry.seq + 1;
        const auto record = ReadRecord(batch.Frame(entry));
        if (!record || record->type != RecordType::kEvent || record->seq != entry.seq) {
          losses.Event(entry.seq, "is damaged (its checksum does not match)", entry.bytes);
        } else if (!Show(*record, losses, visit)) {
          return report;
        }
      }
      if (batch.beyond && next <= to && next > batch.first_kept) losses.Gap(next, to);
      if (batch.beyond) return report;
    }
    if (!ReadFromTail(view, next, to, losses, visit)) return report;
    if (last.value <= view.last) return report;
    const TailDamage& damage = view.tail.damage;
    if (damage.kind == TailDamage::Kind::kAtEnd)
      losses.Add(1, fmt::format("what follows event {} is lost: {}", view.last, damage.words));
    // Of a copy it is not known whether there was any more.
    if (damage.kind == TailDamage::Kind::kUnreachable && !WriterIsAlive(directory_ / "tail") && !IsCopy(directory_ / "tail"))
      losses.Add(1, fmt::format("what follows event {} may be lost: the last events were in memory (/dev/shm) that is gone, or "
                                "cannot be reached from here; `amem pack` where the process ran takes them along",
                                view.last));
    return report;
  }

  // Reads what LMDB does not have yet. False: `visit` ended the reading.
  bool ReadFromTail(const View& view, std::uint64_t next, std::uint64_t to, Losses& losses, const Visitor& visit) const {
    for (const Record& record : view.tail.records) {
      if (record.seq < next || record.seq <= view.stored_last || record.seq > to || record.type != RecordType::kEvent) continue;
      // Where LMDB is empty, the first record of the tail is taken for the first of the journal, unless the tail is damaged.
      const bool anchored =
          view.stored_last != 0 ? next > view.stored_last : next > view.tail.records.front().seq || view.tail.damage.bytes != 0;
      next = std::max<std::uint64_t>(next, 1);
      if (record.seq > next && anchored) losses.Gap(next, record.seq - 1);
      next = record.seq + 1;
      if (!Show(record, losses, visit)) return false;
    }
    return true;
  }

  Result<State> NearestSnapshot(std::uint64_t at, Losses& losses) const {
    std::vector<std::uint64_t> candidates;
    AMEM_TRY(source_->Scan(Table::kSnapshots, 0, [&](std::uint64_t through, std::span<const std::byte>) {
      if (through <= at) candidates.push_back(through);
      return through < at;
    }));
    for (auto it = candidates.rbegin(); it != candidates.rend(); ++it) {  // newest first
      AMEM_ASSIGN(const auto frame, FrameAt(*source_, Table::kSnapshots, *it));
      if (frame.empty()) continue;  // removed meanwhile
      const auto record = ReadRecord(frame);
      const std::string which = fmt::format("the snapshot through event {}", *it);
      if (!record || record->type != RecordType::kSnapshot || record->seq != *it) {
        losses.Add(1, fmt::format("{} is damaged (its checksum does not match): {} bytes dropped", which, frame.size()));
        continue;
      }
      auto state = DecodeSnapshot(record->payload);
      if (state && state->last.value == *it) return state;
      losses.Add(1, which + " cannot be read: " + (state ? "it ends with another event" : state.status().message()));
    }
    return State{};
  }

  // The state after event `to`, or after the last one if that comes before.
  Result<State> Fold(State state, std::uint64_t to, ReadReport& report) {
    if (to <= state.last.value) return state;
    AMEM_ASSIGN(const auto view, TakeView());
    Status failed;
    const auto apply = [&](const Event& event) { return (failed = Apply(state, event)).ok(); };
    AMEM_ASSIGN(const auto read, ReadSeen(view, SequenceNumber{state.last.value + 1}, SequenceNumber{to}, apply));
    report.torn_tail = read.torn_tail;
    report.incomplete = read.incomplete;
    report.corrupt_records += read.corrupt_records;
    if (report.corruption.empty()) report.corruption = read.corruption;
    const bool complete = state.last.value >= std::min(to, view.last) || report.corrupt_records != 0;
    if (failed.ok() && complete) return state;
    return Status{Code::kCorrupt, WhyNot(state, failed.message(), report)};
  }

  // Why the event after `reached` is not available.
  std::string WhyNot(const State& reached, const std::string& otherwise, const ReadReport& report) const {
    if (report.corrupt_records != 0) return report.corruption;
    const auto stored = source_->ExtentOf(Table::kEvents);
    const std::uint64_t first = stored ? stored->first.value_or(0) : 0;
    if (first <= reached.last.value + 1) return otherwise;
    return fmt::format("the events before {} were let go after a later snapshot; ask for a later state", first);
  }

  const fs::path directory_;
  std::unique_ptr<RecordSource> source_;
  const FileMeta meta_;
  const std::string missing_;
};

Result<FileMeta> ReadMeta(const RecordSource& source, const fs::path& directory) {
  AMEM_ASSIGN(const auto frame, FrameAt(source, Table::kMeta, 1));
  const auto name = SessionOfName(directory.filename().string());
  const auto meta = MetaOf(frame);
  if (!meta) return FileMeta{kJournalFormat, kJournalLeastReader, name.value_or(SessionId{})};  // it must not cost the events
  if (meta->least_reader > kJournalFormat) {
    return Status{Code::kUnsupported,
                  fmt::format("journal {} has format {}, which needs a reader of format {}; this one is of format {}: use a "
                              "newer AMem to read it",
                              directory.string(), meta->format, meta->least_reader, kJournalFormat)};
  }
  return *meta;
}

}  // namespace

Result<std::unique_ptr<JournalReader>> JournalReader::Open(const fs::path& given) {
  fs::path directory = given;
  if (!directory.has_filename()) directory = directory.parent_path();  // "a/b/"
  if (!IsSessionDirectory(directory)) {
    return Status{Code::kNotFound, "open journal " + directory.string() +
                                       ": it is not a session directory (there is no data.mdb in it); a journal directory "
                                       "holds one directory for each session"};
  }
  bool live = WriterMayLive(directory / "tail");
  const bool seen = live && (Store::IsOpenHere(directory) || (WriterIsTrusted(directory / "tail") && HasOwnLocks(directory)));
  if (live && !seen) live = WriterMayLive(directory / "tail");  // it may have let go of the journal meanwhile
  const bool trusted = !live || seen;
  if (!live && LifeOfWriter(directory / "tail", true) == WriterLife::kEnded)
    MoveToDisk(directory / "tail");  // so that it can be copied
  AMEM_ASSIGN(auto source, OpenSource(directory, live, trusted));
  AMEM_ASSIGN(auto meta, ReadMeta(*source, directory));
  return std::unique_ptr<JournalReader>(new Reader(directory, std::move(source), std::move(meta)));
}

}  // namespace amem
