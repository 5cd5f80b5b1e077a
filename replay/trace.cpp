#include "replay/trace.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <set>

#include "replay/event_json.h"
#include "statemachine/apply.h"

namespace amem {
namespace {

constexpr std::uint64_t kSamples = 2000;       // of the counters, of each session
constexpr std::uint64_t kShortest_ns = 1'000;  // an export or import, so that it can be seen and clicked

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
    buffer_ += ",\"s\":\"p\"";
    Category("failure", seq, detail);
    End();
  }
  void Arrow(char phase, std::uint64_t process, std::uint32_t thread, std::string_view id, std::uint64_t at) {
    Begin(phase, "reference", process, thread, at);
    buffer_ += ",\"cat\":\"reference\",\"id\":";
    AppendText(buffer_, id);
    if (phase == 'f') buffer_ += ",\"bp\":\"e\"";
    End();
    summary_.arrows += phase == 'f' ? 1 : 0;
  }
  void Counter(std::uint64_t process, std::uint64_t at, const Holdings& h) {
    Begin('C', "memory (MiB)", process, 0, at);
    const auto mib = [](Bytes bytes) { return std::to_string(bytes >> 20); };
    buffer_ += ",\"args\":{\"held\":" + mib(h.own_device_backed) +
               ",\"released\":" + mib(h.own_device - std::min(h.own_device, h.own_device_backed)) +
               ",\"pinned host\":" + mib(h.host) + "}";
    End();
    ++summary_.samples;
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
    now_ = event.time_ns + offset_ > base_ ? event.time_ns + offset_ - base_ : 0;
    event_ = &event;
    if (threads_.insert(event.thread).second) out_.Name(process_, event.thread, "thread " + std::to_string(event.thread));
    if (!Apply(state_, event).ok()) return false;
    std::visit([this](const auto& body) { On(body); }, event.body);
    if (now_ >= next_sample_) Sample();
    return true;
  }
  // What is still open ends with the journal.
  void Finish() {
    CloseStep("open at the end of the journal");
    ClosePhase("");
    CloseCycle("open at the end of the journal");
    Sample();
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
    phase_ = Begin(std::string(ToText(e.phase)));
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
    const std::string id = SessionText(state_.session.session) + "." + std::to_string(e.allocation.value) + "." +
                           SessionText(e.by) + "." + std::to_string(e.as.value);
    Short("export allocation " + std::to_string(e.allocation.value));
    out_.Arrow('s', process_, event_->thread, id, now_);
  }
  void On(const Imported& e) {
    const std::string id = SessionText(e.remote.owner) + "." + std::to_string(e.remote.allocation.value) + "." +
                           SessionText(state_.session.session) + "." + std::to_string(e.allocation.value);
    Short("import allocation " + std::to_string(e.allocation.value));
    out_.Arrow('f', process_, event_->thread, id, now_);
  }

  Open Begin(std::string name) { return {std::move(name), now_, event_->thread, event_->seq}; }
  void Short(const std::string& name) {
    out_.Slice(process_, event_->thread, name, "reference", now_, now_ + kShortest_ns, event_->seq);
  }
  void Fail(const char* name, const std::string& message) {
    out_.Instant(process_, event_->thread, name, now_, event_->seq, message);
  }
  void Close(std::optional<Open>& open, const char* category, std::string_view detail) {
    if (!open) return;
    out_.Slice(process_, open->thread, open->name, category, open->from, now_, open->seq, detail);
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
  void Sample() {
    out_.Counter(process_, now_, Measure(state_));
    next_sample_ = now_ + sample_every_ns_;
  }

  TraceWriter& out_;
  const std::uint64_t process_, offset_, base_;
  State state_;
  const std::uint64_t sample_every_ns_;
  std::uint64_t now_ = 0, next_sample_ = 0;
  const Event* event_ = nullptr;
  std::set<std::uint32_t> threads_;
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
  std::uint64_t process = 0;
  for (Part& part : parts) {
    ++process;
    out.Name(process, {},
             (part.who.rank >= 0 ? "rank " + std::to_string(part.who.rank) + ", " : "") + "pid " +
                 std::to_string(part.info.pid) + " on " + part.who.host);
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
