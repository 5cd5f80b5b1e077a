#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "journal/codec.h"
#include "journal/journal.h"
#include "journal/session_dir.h"
#include "journal/snapshot.h"
#include "journal/store.h"
#include "journal/tail.h"
#include "statemachine/apply.h"

namespace amem {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kEverything = ~std::uint64_t{0};
// How much is copied out of LMDB at a time: a read transaction that lasts keeps the writer from using pages again.
constexpr std::size_t kBatchBytes = std::size_t{1} << 20;
constexpr std::size_t kBatchRecords = 8192;

struct Entry {  // one of LMDB's, copied; `frame` may be damaged
  std::uint64_t seq = 0;
  std::size_t offset = 0, bytes = 0;
};
struct Batch {
  std::vector<std::byte> bytes;
  std::vector<Entry> entries;
  std::uint64_t first_kept = 0;  // the oldest event that LMDB has: what is missing before was let go
  bool more = false;
  [[nodiscard]] std::span<const std::byte> Frame(const Entry& e) const {
    return std::span(bytes).subspan(e.offset, e.bytes);
  }
};

// Counts what is missing or damaged, and words the first of it.
class Losses {
 public:
  explicit Losses(ReadReport& report) : report_(report) {}
  void Add(std::uint64_t records, const std::string& what) {
    report_.corrupt_records += records;
    if (report_.corruption.empty()) {
      report_.corruption = what + "; the state after it cannot be told, the events around it are intact";
    }
  }
  void Gap(std::uint64_t first, std::uint64_t last) {
    const std::string which = first == last ? "event " + std::to_string(first) + " is"
                                            : "events " + std::to_string(first) + " to " + std::to_string(last) + " are";
    Add(last - first + 1, which + " missing");
  }

 private:
  ReadReport& report_;
};

class Reader final : public JournalReader {
 public:
  Reader(fs::path directory, std::unique_ptr<Store> store, FileMeta meta)
      : directory_(std::move(directory)), store_(std::move(store)), meta_(std::move(meta)) {}
  Result<JournalInfo> Info() override;
  Result<ReadReport> Read(SequenceNumber first, SequenceNumber last,
                          const std::function<bool(const Event&)>& visit) override;
  Result<State> StateAt(std::optional<SequenceNumber> at, ReadReport* report) override;

 private:
  // What one call sees. The tail is copied first: what leaves it meanwhile is in LMDB by then.
  struct View {
    TailContents tail;
    std::uint64_t last = 0;  // nothing after it is looked at, so that reading a live journal ends
    std::uint64_t stored_last = 0;
  };
  Result<View> Look() const;
  Result<Batch> ReadBatch(std::uint64_t from, std::uint64_t to) const;
  Result<State> NearestSnapshot(std::uint64_t at, Losses& losses) const;

  const fs::path directory_;
  std::unique_ptr<Store> store_;
  const FileMeta meta_;
};

Result<Reader::View> Reader::Look() const {
  View view;
  auto tail = ReadTail(directory_ / "tail");
  if (!tail) return tail.status();
  view.tail = std::move(*tail);
  AMEM_TRY(store_->Read([&](const Store::Reading& reading) -> Status {
    const auto last = reading.LastKey(Table::kEvents);
    if (!last) return last.status();
    view.stored_last = last->value_or(0);
    return {};
  }));
  view.last = view.stored_last;
  if (!view.tail.records.empty()) view.last = std::max(view.last, view.tail.records.back().seq);
  return view;
}

Result<Batch> Reader::ReadBatch(std::uint64_t from, std::uint64_t to) const {
  Batch batch;
  AMEM_TRY(store_->Read([&](const Store::Reading& reading) -> Status {
    const auto first = reading.FirstKey(Table::kEvents);
    if (!first) return first.status();
    batch.first_kept = first->value_or(0);
    return reading.Scan(Table::kEvents, from, [&](std::uint64_t seq, std::span<const std::byte> frame) {
      if (seq > to) return false;
      if (batch.bytes.size() >= kBatchBytes || batch.entries.size() >= kBatchRecords) {
        batch.more = true;
        return false;
      }
      batch.entries.push_back({seq, batch.bytes.size(), frame.size()});
      batch.bytes.insert(batch.bytes.end(), frame.begin(), frame.end());
      return true;
    });
  }));
  return batch;
}

// Decodes what is at `seq`; nullopt: it is damaged, and noted.
std::optional<Event> Open(std::span<const std::byte> frame, std::uint64_t seq, Losses& losses) {
  const std::string dropped = std::to_string(frame.size()) + " bytes dropped";
  const auto record = ReadRecord(frame);
  if (!record || record->type != RecordType::kEvent || record->seq != seq) {
    losses.Add(1, "event " + std::to_string(seq) + " is damaged (its checksum does not fit): " + dropped);
    return std::nullopt;
  }
  auto event = DecodeEvent(record->payload);
  if (!event) {
    losses.Add(1, "event " + std::to_string(seq) + " cannot be read: " + event.status().message() + "; " + dropped);
    return std::nullopt;
  }
  if (event->seq.value != seq) {
    losses.Add(1, "event " + std::to_string(seq) + " calls itself " + std::to_string(event->seq.value) + ": " + dropped);
    return std::nullopt;
  }
  return std::move(*event);
}

std::optional<Event> Open(const Record& record, Losses& losses) {
  auto event = DecodeEvent(record.payload);
  if (event && event->seq.value == record.seq) return std::move(*event);
  losses.Add(1, "event " + std::to_string(record.seq) + " in the tail cannot be read: " +
                    (event ? "it has another number" : event.status().message()) + "; " +
                    std::to_string(record.payload.size()) + " bytes dropped");
  return std::nullopt;
}

Result<ReadReport> Reader::Read(SequenceNumber first, SequenceNumber last, const std::function<bool(const Event&)>& visit) {
  const auto view = Look();
  if (!view) return view.status();
  ReadReport report;
  Losses losses(report);
  report.torn_tail = view->tail.torn && !WriterIsAlive(directory_ / "tail");
  const std::uint64_t to = std::min(last.value, view->last);
  std::uint64_t next = first.value;  // the number that must come next
  bool anchored = false;             // an event was met: from here on a missing number is a lost event
  const auto meet = [&](std::uint64_t seq, std::uint64_t first_kept) {
    if (seq > next && (anchored || first_kept < next) && next != 0 && seq > first_kept) {
      losses.Gap(std::max(next, first_kept), seq - 1);
    }
    anchored = true;
    next = seq + 1;
  };
  for (bool more = true; more && next <= to;) {
    const auto batch = ReadBatch(next, to);
    if (!batch) return batch.status();
    more = batch->more;
    for (const Entry& entry : batch->entries) {
      meet(entry.seq, batch->first_kept);
      const auto event = Open(batch->Frame(entry), entry.seq, losses);
      if (event && !visit(*event)) return report;
    }
  }
  for (const Record& record : view->tail.records) {
    if (record.seq < next || record.seq > to || record.type != RecordType::kEvent) continue;
    meet(record.seq, view->stored_last == 0 ? view->tail.records.front().seq : 0);
    const auto event = Open(record, losses);
    if (event && !visit(*event)) return report;
  }
  if (view->tail.damaged_at_end && last.value > view->last) {
    losses.Add(1, "the end of the tail is damaged, after event " + std::to_string(view->last) + ": " + view->tail.damage);
  }
  return report;
}

Result<State> Reader::NearestSnapshot(std::uint64_t at, Losses& losses) const {
  struct Found {
    std::uint64_t through;
    std::vector<std::byte> frame;
  };
  std::vector<std::uint64_t> candidates;
  AMEM_TRY(store_->Read([&](const Store::Reading& reading) {
    return reading.Scan(Table::kSnapshots, 0, [&](std::uint64_t through, std::span<const std::byte>) {
      if (through <= at) candidates.push_back(through);
      return through < at;
    });
  }));
  for (auto it = candidates.rbegin(); it != candidates.rend(); ++it) {  // newest first
    std::vector<std::byte> frame;
    AMEM_TRY(store_->Read([&](const Store::Reading& reading) {
      return reading.Scan(Table::kSnapshots, *it, [&](std::uint64_t through, std::span<const std::byte> value) {
        if (through == *it) frame.assign(value.begin(), value.end());
        return false;
      });
    }));
    if (frame.empty()) continue;  // let go meanwhile
    const auto record = ReadRecord(frame);
    const std::string which = "the snapshot through event " + std::to_string(*it);
    if (!record || record->type != RecordType::kSnapshot || record->seq != *it) {
      losses.Add(1, which + " is damaged (its checksum does not fit): " + std::to_string(frame.size()) + " bytes dropped");
      continue;
    }
    auto state = DecodeSnapshot(record->payload);
    if (state && state->last.value == *it) return state;
    losses.Add(1, which + " cannot be read: " + (state ? "it ends elsewhere" : state.status().message()));
  }
  return State{};
}

Result<State> Reader::StateAt(std::optional<SequenceNumber> at, ReadReport* report) {
  ReadReport own;
  ReadReport& out = report != nullptr ? *report : own;
  out = {};
  Losses losses(out);
  const std::uint64_t to = at ? at->value : kEverything;
  auto state = NearestSnapshot(to, losses);
  if (!state) return state.status();
  Status failed;
  const auto fold = [&](const Event& event) {
    failed = Apply(*state, event);
    return failed.ok();
  };
  const std::uint64_t from = state->last.value + 1;
  const auto read = to < from ? ReadReport{} : Read(SequenceNumber{from}, SequenceNumber{to}, fold);
  if (!read) return read.status();
  out.torn_tail = read->torn_tail;
  out.corrupt_records += read->corrupt_records;
  if (out.corruption.empty()) out.corruption = read->corruption;
  const std::string which = at ? "event " + std::to_string(at->value) : "the last event";
  const std::string doing = "state of journal " + directory_.string() + " after " + which;
  if (!failed) {
    return Status{Code::kCorrupt, doing + ": " + (out.corruption.empty() ? failed.message() : out.corruption)};
  }
  if (at && state->last != *at) {
    return Status{Code::kNotFound, doing + ": the journal has no such event; it ends with event " +
                                       std::to_string(state->last.value)};
  }
  return state;
}

Result<JournalInfo> Reader::Info() {
  JournalInfo info;
  info.directory = directory_;
  info.status = StatusOf(directory_);  // before looking, so that a journal called closed is complete
  info.session = meta_.session;
  info.pid = meta_.pid;
  info.format = meta_.format;
  const auto view = Look();
  if (!view) return view.status();
  info.broken_reason = BrokenReason(directory_);
  if (info.broken_reason.empty()) info.broken_reason = view->tail.broken_reason;
  if (!info.broken_reason.empty()) info.status = SessionStatus::kBroken;
  std::uint64_t stored = 0;
  std::uint64_t first = 0;
  AMEM_TRY(store_->Read([&](const Store::Reading& reading) -> Status {
    const auto first_key = reading.FirstKey(Table::kEvents);
    const auto count = reading.Count(Table::kEvents);
    if (!first_key || !count) return first_key ? count.status() : first_key.status();
    first = first_key->value_or(0);
    stored = *count;
    return reading.Scan(Table::kSnapshots, 0, [&](std::uint64_t through, std::span<const std::byte>) {
      info.snapshots.emplace_back(through);
      return true;
    });
  }));
  const auto& records = view->tail.records;
  const auto unstored = std::find_if(records.begin(), records.end(),
                                     [&](const Record& r) { return r.seq > view->stored_last; });
  if (first == 0 && unstored != records.end()) first = unstored->seq;
  info.first = SequenceNumber{first};
  info.last = SequenceNumber{view->last};
  info.events = stored + static_cast<std::uint64_t>(records.end() - unstored);
  const auto data = File::Open(directory_ / "data.mdb", O_RDONLY);
  if (!data) return data.status();
  const auto bytes = data->Size();
  if (!bytes) return bytes.status();
  info.file_bytes = *bytes + view->tail.file_bytes;
  return info;
}

Result<FileMeta> ReadMeta(const Store& store, const fs::path& directory) {
  std::vector<std::byte> frame;
  AMEM_TRY(store.Read([&](const Store::Reading& reading) {
    return reading.Scan(Table::kMeta, 1, [&](std::uint64_t, std::span<const std::byte> value) {
      frame.assign(value.begin(), value.end());
      return false;
    });
  }));
  const auto record = ReadRecord(frame);
  const auto name = SessionOfName(directory.filename().string());
  const FileMeta unknown{kJournalFormat, kJournalLeastReader, name.value_or(SessionId{}), 0, 0};
  if (!record || record->type != RecordType::kMeta) return unknown;  // its loss must not cost the events
  const auto meta = DecodeMeta(record->payload);
  if (!meta) return unknown;
  if (meta->least_reader > kJournalFormat) {
    return Status{Code::kUnsupported, "journal " + directory.string() + " has format " + std::to_string(meta->format) +
                                          ", which needs a reader of format " + std::to_string(meta->least_reader) +
                                          "; this one is of format " + std::to_string(kJournalFormat) +
                                          ": use a newer AMem to read it"};
  }
  return meta;
}

}  // namespace

Result<std::unique_ptr<JournalReader>> JournalReader::Open(const fs::path& given) {
  fs::path directory = given;
  if (!directory.has_filename()) directory = directory.parent_path();  // "a/b/"
  if (!IsSessionDirectory(directory)) {
    return Status{Code::kNotFound, "open journal " + directory.string() +
                                       ": it is no session directory (there is no data.mdb in it); a journal directory holds "
                                       "one directory a session"};
  }
  auto store = Store::Open(directory, WriterIsAlive(directory / "tail"));
  if (!store) return store.status();
  auto meta = ReadMeta(**store, directory);
  if (!meta) return meta.status();
  return std::unique_ptr<JournalReader>(new Reader(directory, std::move(*store), std::move(*meta)));
}

}  // namespace amem
