#include "replay/report/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "replay/job/clock.h"
#include "replay/job/fold.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "statemachine/fnv1a.h"

namespace amem {
namespace {

constexpr std::uint64_t kSamples = 2000;           // of the counters, of each session
constexpr std::uint64_t kOtherHosts = 10'000'000;  // more than any pid: added where two hosts have the same
constexpr std::uint64_t kShortest_ns = 1'000;      // an export or import, so that it can be seen and clicked

// The frame of JSON is written by hand, for a million small objects of a fixed shape. Strings come from elsewhere, so all but
// the plainest are left to the JSON library, which escapes control bytes and replaces what is not UTF-8.
std::string Quoted(std::string_view text) {
  const auto plain = [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; };
  if (std::ranges::all_of(text, plain)) return fmt::format("\"{}\"", text);
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}
template <class... Values>
void Append(std::string& out, fmt::format_string<Values...> format, Values&&... values) {
  fmt::format_to(std::back_inserter(out), format, std::forward<Values>(values)...);
}
void AppendMicroseconds(std::string& out, std::uint64_t ns) { Append(out, "{}.{:03}", ns / 1000, ns % 1000); }

std::string Mebibytes(Bytes bytes) {
  constexpr Bytes kMiB = Bytes{1} << 20;
  if (bytes % kMiB == 0) return std::to_string(bytes / kMiB);
  return fmt::format("{:.3f}", static_cast<double>(bytes) / static_cast<double>(kMiB));
}

// The values of the counters.
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
    Append(buffer_, R"(,"args":{{"name":{}}})", Quoted(name));
    End();
  }
  void SortIndex(std::uint64_t process, std::int64_t index) {
    Begin('M', "process_sort_index", process, 0, 0);
    Append(buffer_, R"(,"args":{{"sort_index":{}}})", index);
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
    // As text, so that no reader of JSON rounds it. Perfetto takes numbers of up to 64 bits for an id, and nothing else.
    Append(buffer_, R"(,"cat":"reference","id":"{:#x}")", id);
    if (phase == 'f') buffer_ += ",\"bp\":\"e\"";
    End();
    summary_.arrows += phase == 'f' ? 1 : 0;
  }
  void Counter(std::uint64_t process, std::uint64_t at, const TracedMemory& memory) {
    Begin('C', "memory (MiB)", process, 0, at);
    Append(buffer_, R"(,"args":{{"held":{},"released":{}}})", Mebibytes(memory.held), Mebibytes(memory.released));
    End();
    ++summary_.samples;
  }
  void Counter(std::uint64_t process, std::uint64_t at, std::string_view name, Bytes bytes) {
    Begin('C', name, process, 0, at);
    Append(buffer_, R"(,"args":{{"value":{}}})", Mebibytes(bytes));
    End();
  }

 private:
  void Begin(char phase, std::string_view name, std::uint64_t process, std::uint32_t thread, std::uint64_t at) {
    if (!first_) buffer_ += ",\n";
    first_ = false;
    Append(buffer_, R"({{"ph":"{}","name":{},"pid":{},"tid":{},"ts":)", phase, Quoted(name), process, thread);
    AppendMicroseconds(buffer_, at);
  }
  void Category(std::string_view category, SequenceNumber seq, std::string_view detail) {
    Append(buffer_, R"(,"cat":{},"args":{{"event":{})", Quoted(category), seq.value);
    if (!detail.empty()) Append(buffer_, R"(,"detail":{})", Quoted(detail));
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
class SessionTrace final : public FoldObserver {
 public:
  // `origin_ns`: the time of this journal that is 0 in the trace.
  SessionTrace(TraceWriter& out, std::uint64_t process, const SessionOpened& who, std::int64_t origin_ns,
               std::uint64_t sample_every_ns)
      : out_(out), process_(process), who_(who), origin_ns_(origin_ns), sample_every_ns_(sample_every_ns) {}

  void Begin(const State& before) override { state_ = &before; }
  void Before(const Event& event, const State&) override {
    next_ = static_cast<std::uint64_t>(
        std::max<std::int64_t>(WrappedDifference(static_cast<std::int64_t>(event.time_ns), origin_ns_), 0));
    // A counter is drawn before a silence, too: the last change was not at the silence's end.
    if (next_ >= next_sample_ && unsampled_) Sample();
  }
  Status After(const Event& event, const State&) override {
    now_ = next_;
    event_ = &event;
    unsampled_ = true;
    std::visit([this](const auto& body) { On(body); }, event.body);
    drawn_[event.thread] = now_;
    if (now_ >= next_sample_) Sample();
    return {};
  }
  // What is still open ends with the journal, which left this state.
  void Finish(const State& state) {
    state_ = &state;
    CloseStep("open at the end of the journal");
    ClosePhase("");
    CloseCycle("open at the end of the journal");
    Sample(true);
    for (const auto& [thread, drawn] : drawn_) {
      const bool main = std::cmp_equal(thread, who_.pid);
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
    phase_ = Start(std::string(cycle_ ? name.substr(name.find(' ') + 1) : name));
  }
  void On(const PhaseDecided& e) {
    if (!e.passed) Mark("vote failed", e.message);
    ClosePhase(e.passed ? "" : e.message);
    Sample();
  }
  void On(const CycleBegun& e) {
    ClosePhase("");
    cycle_ = Start(fmt::format("{} {}", ToText(e.kind), e.cycle));
  }
  void On(const CycleDone&) { CloseCycle(""); }
  void On(const CycleFailed& e) {
    Mark("cycle failed", e.message);
    ClosePhase(e.message);
    CloseCycle(e.message);
  }
  void On(const StepBegun& e) { step_ = Start(ToText(e.step)); }
  void On(const StepDone&) { CloseStep(""); }
  void On(const StepFailed& e) {
    Mark("step failed", e.message);
    CloseStep(e.message);
  }
  void On(const PeerLost& e) { Mark("peer lost", e.reason); }
  void On(const CommunicatorReady& e) { Mark("communicator ready", ToText(EventBody(e))); }
  void On(const CommunicatorEnded& e) { Mark("communicator ended", ToText(EventBody(e))); }
  void On(const CommunicatorSuspended& e) {
    Mark(e.suspended ? "communicator suspended" : "communicator resumed", ToText(EventBody(e)));
  }
  void On(const SessionBroken& e) { Mark("session broken", e.reason); }
  void On(const ReferenceAdded& e) {
    exporters_.insert(event_->thread);
    Reference('s', fmt::format("export allocation {}", e.allocation.value), ArrowId(who_.session, e.allocation, e.by, e.as));
  }
  void On(const Imported& e) {
    Reference('f', fmt::format("import allocation {}", e.allocation.value),
              ArrowId(e.remote.owner, e.remote.allocation, who_.session, e.allocation));
  }

  Open Start(std::string name) { return {std::move(name), now_, event_->thread, event_->seq}; }
  // The slice ends with its event and begins no sooner than the slice before ended: viewers drop slices that cross.
  void Reference(char phase, const std::string& name, std::uint64_t id) {
    const std::uint64_t from = std::max(drawn_[event_->thread], now_ - std::min(now_, kShortest_ns));
    out_.Slice(process_, event_->thread, name, "reference", from, now_, event_->seq);
    out_.Arrow(phase, process_, event_->thread, id, from);
  }
  void Mark(const char* name, const std::string& message) {
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
    const TracedMemory memory(Measure(*state_));
    if (last || !sampled_ || memory != *sampled_) Draw(memory, last);
    sampled_ = memory;
    unsampled_ = false;
    next_sample_ = now_ + sample_every_ns_;
  }
  // Memory that many jobs never have gets a track only in those that do.
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
  const std::uint64_t process_;
  const SessionOpened& who_;
  const std::int64_t origin_ns_;
  const std::uint64_t sample_every_ns_;
  const State* state_ = nullptr;
  std::uint64_t now_ = 0, next_ = 0, next_sample_ = 0;  // of the last event, of the one to come, of the counters
  const Event* event_ = nullptr;
  bool unsampled_ = false;
  std::optional<TracedMemory> sampled_;
  std::map<std::uint32_t, std::uint64_t> drawn_;  // per thread, up to where
  std::set<std::uint32_t> exporters_;
  std::optional<Open> cycle_, phase_, step_;
};

struct Part {
  JournalReader* reader = nullptr;
  Opening opening;
};

Result<std::vector<Part>> PartsOf(std::span<const std::unique_ptr<JournalReader>> journals) {
  std::vector<Part> parts;
  for (const auto& reader : journals) {
    Result<Opening> opening = ReadOpening(*reader);
    if (!opening) return opening.status();
    parts.push_back({reader.get(), *std::move(opening)});
  }
  std::ranges::stable_sort(parts, {}, [](const Part& part) { return part.opening.who.rank; });
  return parts;
}

}  // namespace

Result<TraceSummary> WriteTrace(std::span<const std::unique_ptr<JournalReader>> journals,
                                const std::function<void(std::string_view)>& write) {
  const Result<std::vector<Part>> parts = PartsOf(journals);
  if (!parts) return parts.status();
  std::vector<JobClock::Journal> times;
  for (const Part& part : *parts) times.push_back({&part.opening.who, part.opening.first_ns});
  const JobClock clock(times);
  TraceSummary summary;
  TraceWriter out(write, summary);
  std::set<std::uint64_t> processes;
  for (const auto& [reader, opening] : *parts) {
    std::uint64_t process = static_cast<std::uint64_t>(std::max(opening.who.pid, 0));  // which viewers show beside the name
    while (!processes.insert(process).second) process += kOtherHosts;
    out.Name(process, {}, NameOf(opening.who));
    out.SortIndex(process, opening.who.rank);
    SessionTrace session(out, process, opening.who, WrappedDifference(clock.began_ns(), clock.OffsetOf(opening.who)),
                         (opening.last_ns - std::min(opening.last_ns, opening.first_ns)) / kSamples);
    const Result<Folded> folded = FoldJournal(*reader, std::array<FoldObserver*, 1>{&session});
    if (!folded) return folded.status();
    session.Finish(folded->state);
    ++summary.sessions;
    const std::string where = opening.info.directory.string();
    if (const std::string damage = DamageText(folded->damage); !damage.empty())
      summary.incomplete.push_back(where + ": " + damage);
    if (folded->broken) summary.incomplete.push_back(where + ": drawn only up to where " + ToText(*folded->broken));
  }
  out.Finish();
  return summary;
}

}  // namespace amem
