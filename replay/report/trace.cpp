#include "replay/report/trace.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "replay/job/event_json.h"
#include "statemachine/apply.h"
#include "statemachine/fnv1a.h"

namespace amem {
namespace {

constexpr std::uint64_t kSamples = 2000;           // of the counters, of each session
constexpr std::uint64_t kOtherHosts = 10'000'000;  // more than any pid: added where two hosts have the same
constexpr std::uint64_t kShortest_ns = 1'000;      // an export or import, so that it can be seen and clicked

// JSON by hand: a million small objects of a fixed shape.
void AppendText(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  out += '"';
}
void AppendMicroseconds(std::string& out, std::uint64_t ns) {
  char text[40];
  std::snprintf(text, sizeof text, "%llu.%03u", static_cast<unsigned long long>(ns / 1000), static_cast<unsigned>(ns % 1000));
  out += text;
}

// Perfetto takes numbers of up to 64 bits for an arrow's id, and nothing else; as text, so that no reader of JSON rounds them.
std::string Hexadecimal(std::uint64_t number) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(number));
  return text;
}
std::string Mebibytes(Bytes bytes) {
  constexpr Bytes kMiB = Bytes{1} << 20;
  if (bytes % kMiB == 0) return std::to_string(bytes / kMiB);
  char text[40];
  std::snprintf(text, sizeof text, "%.3f", static_cast<double>(bytes) / static_cast<double>(kMiB));
  return text;
}

// What the counters show.
struct TracedMemory {
  TracedMemory() = default;
  explicit TracedMemory(const Holdings& h) : held(h.own_device_resident), pinned(h.host) {
    const Bytes whole = h.own_device + h.slabs_free;
    released = whole - std::min(whole, held);
    for (const auto& [why, bytes] : h.kept) kept += bytes;
  }
  Bytes held = 0, released = 0, pinned = 0, kept = 0;
  friend bool operator==(const TracedMemory&, const TracedMemory&) = default;
};

class TraceWriter {
 public:
  TraceWriter(const std::function<void(std::string_view)>& write, TraceSummary& summary) : write_(write), summary_(summary) {
    buffer_ = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  }
  void Finish() {
    buffer_ += "\n]}\n";
    write_(buffer_);
    buffer_.clear();
  }
  void Name(std::uint64_t process, std::optional<std::uint32_t> thread, std::string_view name) {
    Begin('M', thread ? "thread_name" : "process_name", process, thread.value_or(0), 0);
    buffer_ += ",\"args\":{\"name\":";
    AppendText(buffer_, name);
    buffer_ += '}';
    End();
  }
  void SortIndex(std::uint64_t process, std::int64_t index) {
    Begin('M', "process_sort_index", process, 0, 0);
    buffer_ += ",\"args\":{\"sort_index\":" + std::to_string(index) + "}";
    End();
  }
  void Slice(std::uint64_t process, std::uint32_t thread, std::string_view name, std::string_view category, std::uint64_t from,
             std::uint64_t to, SequenceNumber seq, std::string_view detail = {}) {
    Begin('X', name, process, thread, from);
    buffer_ += ",\"dur\":";
    AppendMicroseconds(buffer_, to > from ? to - from : 0);
    Category(category, seq, detail);
    End();
    ++summary_.slices;
  }
  void Instant(std::uint64_t process, std::uint32_t thread, std::string_view name, std::uint64_t at, SequenceNumber seq,
               std::string_view detail) {
    Begin('i', name, process, thread, at);
    buffer_ += ",\"s\":\"t\"";
    Category("failure", seq, detail);
    End();
  }
  void Arrow(char phase, std::uint64_t process, std::uint32_t thread, std::uint64_t id, std::uint64_t at) {
    Begin(phase, "reference", process, thread, at);
    buffer_ += ",\"cat\":\"reference\",\"id\":\"" + Hexadecimal(id) + '"';
    if (phase == 'f') buffer_ += ",\"bp\":\"e\"";
    End();
    summary_.arrows += phase == 'f' ? 1 : 0;
  }
  void Counter(std::uint64_t process, std::uint64_t at, const TracedMemory& memory) {
    Begin('C', "memory (MiB)", process, 0, at);
    buffer_ += ",\"args\":{\"held\":" + Mebibytes(memory.held) + ",\"released\":" + Mebibytes(memory.released) + "}";
    End();
    ++summary_.samples;
  }
  void Counter(std::uint64_t process, std::uint64_t at, std::string_view name, Bytes bytes) {
    Begin('C', name, process, 0, at);
    buffer_ += ",\"args\":{\"value\":" + Mebibytes(bytes) + "}";
    End();
  }

 private:
  void Begin(char phase, std::string_view name, std::uint64_t process, std::uint32_t thread, std::uint64_t at) {
    if (!first_) buffer_ += ",\n";
    first_ = false;
    buffer_ += "{\"ph\":\"";
    buffer_ += phase;
    buffer_ += "\",\"name\":";
    AppendText(buffer_, name);
    buffer_ += ",\"pid\":" + std::to_string(process) + ",\"tid\":" + std::to_string(thread) + ",\"ts\":";
    AppendMicroseconds(buffer_, at);
  }
  void Category(std::string_view category, SequenceNumber seq, std::string_view detail) {
    buffer_ += ",\"cat\":";
    AppendText(buffer_, category);
    buffer_ += ",\"args\":{\"event\":" + std::to_string(seq.value);
    if (!detail.empty()) {
      buffer_ += ",\"detail\":";
      AppendText(buffer_, detail);
    }
    buffer_ += '}';
  }
  void End() {
    buffer_ += '}';
    if (buffer_.size() < (std::size_t{1} << 16)) return;
    write_(buffer_);
    buffer_.clear();
  }

  const std::function<void(std::string_view)>& write_;
  TraceSummary& summary_;
  std::string buffer_;
  bool first_ = true;
};

// The same number for the owner's event and the importer's.
std::uint64_t ArrowId(SessionId owner, AllocationId allocation, SessionId by, AllocationId as) {
  Fnv1a number;
  for (const std::uint64_t word : {owner.value, allocation.value, by.value, as.value}) number.Add(word);
  return number.value();
}

// One session's events, as slices.
class SessionTrace {
 public:
  SessionTrace(TraceWriter& out, std::uint64_t process, std::uint64_t offset, std::uint64_t base, State state,
               std::uint64_t sample_every_ns)
      : out_(out),
        process_(process),
        offset_(offset),
        base_(base),
        state_(std::move(state)),
        sample_every_ns_(sample_every_ns) {}

  bool Take(const Event& event) {
    const std::uint64_t now = event.time_ns + offset_ > base_ ? event.time_ns + offset_ - base_ : 0;
    // Before a silence: what changed last did not change at its end.
    if (now >= next_sample_ && unsampled_) Sample();
    now_ = now;
    event_ = &event;
    if (!Apply(state_, event).ok()) return false;
    unsampled_ = true;
    std::visit([this](const auto& body) { On(body); }, event.body);
    drawn_[event.thread] = now_;
    if (now_ >= next_sample_) Sample();
    return true;
  }
  // What is still open ends with the journal.
  void Finish() {
    CloseStep("open at the end of the journal");
    ClosePhase("");
    CloseCycle("open at the end of the journal");
    Sample(true);
    for (const auto& [thread, drawn] : drawn_) {
      const bool main = std::cmp_equal(thread, state_.session.pid);
      out_.Name(process_, thread, main ? "main" : exporters_.contains(thread) ? "amem-peers" : "thread");
    }
  }

 private:
  struct Open {
    std::string name;
    std::uint64_t from = 0;
    std::uint32_t thread = 0;
    SequenceNumber seq;
  };

  template <class Body>
  void On(const Body&) {}
  void On(const PhaseBegun& e) {
    ClosePhase("");
    const std::string_view name = ToText(e.phase);  // "pause: save"
    phase_ = Begin(std::string(cycle_ ? name.substr(name.find(' ') + 1) : name));
  }
  void On(const PhaseDecided& e) {
    if (!e.passed) Fail("vote failed", e.message);
    ClosePhase(e.passed ? "" : e.message);
    Sample();
  }
  void On(const CycleBegun& e) {
    ClosePhase("");
    cycle_ = Begin(std::string(ToText(e.kind)) + " " + std::to_string(e.cycle));
  }
  void On(const CycleDone&) { CloseCycle(""); }
  void On(const CycleFailed& e) {
    Fail("cycle failed", e.message);
    ClosePhase(e.message);
    CloseCycle(e.message);
  }
  void On(const StepBegun& e) { step_ = Begin(ToText(e.step)); }
  void On(const StepDone&) { CloseStep(""); }
  void On(const StepFailed& e) {
    Fail("step failed", e.message);
    CloseStep(e.message);
  }
  void On(const PeerLost& e) { Fail("peer lost", e.reason); }
  void On(const SessionBroken& e) { Fail("session broken", e.reason); }
  void On(const ReferenceAdded& e) {
    exporters_.insert(event_->thread);
    Reference('s', "export allocation " + std::to_string(e.allocation.value),
              ArrowId(state_.session.session, e.allocation, e.by, e.as));
  }
  void On(const Imported& e) {
    Reference('f', "import allocation " + std::to_string(e.allocation.value),
              ArrowId(e.remote.owner, e.remote.allocation, state_.session.session, e.allocation));
  }

  Open Begin(std::string name) { return {std::move(name), now_, event_->thread, event_->seq}; }
  // Ends with its event and begins no sooner than the one before: slices that cross are dropped by viewers.
  void Reference(char phase, const std::string& name, std::uint64_t id) {
    const std::uint64_t from = std::max(drawn_[event_->thread], now_ - std::min(now_, kShortest_ns));
    out_.Slice(process_, event_->thread, name, "reference", from, now_, event_->seq);
    out_.Arrow(phase, process_, event_->thread, id, from);
  }
  void Fail(const char* name, const std::string& message) {
    out_.Instant(process_, event_->thread, name, now_, event_->seq, message);
  }
  void Close(std::optional<Open>& open, const char* category, std::string_view detail) {
    if (!open) return;
    out_.Slice(process_, open->thread, open->name, category, open->from, now_, open->seq, detail);
    drawn_[open->thread] = now_;
    open.reset();
  }
  void CloseStep(std::string_view detail) { Close(step_, "step", detail); }
  void ClosePhase(std::string_view detail) { Close(phase_, "phase", detail); }
  void CloseCycle(std::string_view detail) {
    CloseStep(detail);
    ClosePhase(detail);
    Close(cycle_, "cycle", detail);
    Sample();
  }
  void Sample(bool last = false) {
    const TracedMemory memory(Measure(state_));
    if (last || !sampled_ || memory != *sampled_) Draw(memory, last);
    sampled_ = memory;
    unsampled_ = false;
    next_sample_ = now_ + sample_every_ns_;
  }
  // What many jobs never have gets a track only in those that do.
  void Draw(const TracedMemory& memory, bool last) {
    const TracedMemory before = sampled_.value_or(TracedMemory{});
    const auto draw = [&](const char* name, Bytes was, Bytes is) {
      if (was != is || (last && is != 0)) out_.Counter(process_, now_, name, is);
    };
    out_.Counter(process_, now_, memory);
    draw("pinned host memory (MiB)", before.pinned, memory.pinned);
    draw("kept in a pause (MiB)", before.kept, memory.kept);
  }

  TraceWriter& out_;
  const std::uint64_t process_, offset_, base_;
  State state_;
  const std::uint64_t sample_every_ns_;
  std::uint64_t now_ = 0, next_sample_ = 0;
  const Event* event_ = nullptr;
  bool unsampled_ = false;
  std::optional<TracedMemory> sampled_;
  std::map<std::uint32_t, std::uint64_t> drawn_;  // per thread, up to where
  std::set<std::uint32_t> exporters_;
  std::optional<Open> cycle_, phase_, step_;
};

struct Part {
  JournalReader* reader = nullptr;
  JournalInfo info;
  SessionOpened who;
  State start;
  std::uint64_t first_ns = 0, last_ns = 0, offset = 0;
};

Result<Part> Look(JournalReader& reader) {
  Part part;
  part.reader = &reader;
  auto info = reader.Info();
  if (!info) return info.status();
  part.info = *std::move(info);
  if (part.info.first.value > 1) {
    auto start = reader.StateAt(SequenceNumber{part.info.first.value - 1});
    if (!start) return start.status();
    part.start = *std::move(start);
    part.who = part.start.session;
  }
  for (const SequenceNumber seq : {part.info.first, part.info.last}) {
    const auto read = reader.Read(seq, seq, [&](const Event& event) {
      if (const auto* opened = std::get_if<SessionOpened>(&event.body)) part.who = *opened;
      if (part.first_ns == 0) part.first_ns = event.time_ns;
      part.last_ns = event.time_ns;
      return false;
    });
    if (!read) return read.status();
  }
  part.offset = part.who.monotonic_ns == 0 ? 0 : part.who.realtime_ns - part.who.monotonic_ns;
  return part;
}

}  // namespace

Result<TraceSummary> WriteTrace(std::span<const std::unique_ptr<JournalReader>> journals,
                                const std::function<void(std::string_view)>& write) {
  std::vector<Part> parts;
  std::map<std::string, std::uint64_t> offsets;  // by boot: to the wall clock
  std::uint64_t base = ~std::uint64_t{0};        // wall clock of the first event
  for (const auto& reader : journals) {
    auto part = Look(*reader);
    if (!part) return part.status();
    part->offset = offsets.try_emplace(part->who.boot_id, part->offset).first->second;
    base = std::min(base, part->first_ns + part->offset);
    parts.push_back(*std::move(part));
  }
  std::ranges::stable_sort(parts, {}, [](const Part& part) { return part.who.rank; });
  TraceSummary summary;
  TraceWriter out(write, summary);
  std::set<std::uint64_t> processes;
  for (Part& part : parts) {
    std::uint64_t process = static_cast<std::uint64_t>(std::max(part.who.pid, 0));  // which viewers show beside the name
    while (!processes.insert(process).second) process += kOtherHosts;
    out.Name(process, {}, (part.who.rank >= 0 ? "rank " + std::to_string(part.who.rank) + " on " : "") + part.who.host);
    out.SortIndex(process, part.who.rank);
    SessionTrace session(out, process, part.offset, base, std::move(part.start), (part.last_ns - part.first_ns) / kSamples);
    const auto read = part.reader->Read(part.info.first, kToTheEnd, [&](const Event& event) { return session.Take(event); });
    if (!read) return read.status();
    session.Finish();
    ++summary.sessions;
  }
  out.Finish();
  return summary;
}

}  // namespace amem
