#include "replay/report/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/job/story/story.h"
#include "statemachine/fnv1a.h"

namespace amem {
namespace {

constexpr std::uint64_t kSamples = 2000;           // of the counters, of each session
constexpr std::uint64_t kOtherHosts = 10'000'000;  // more than any pid: added where two hosts have the same
constexpr std::uint64_t kShortest_ns = 1'000;      // an export or import, so that it can be seen and clicked
constexpr std::uint32_t kTagRows = 2'000'000'000;  // more than any thread id: the rows of tags follow
constexpr const char* kGoesOn = "goes on after the time that was asked for";
constexpr const char* kStillOpen = "open at the end of the journal";
constexpr std::size_t kWriteAt = std::size_t{1} << 16;  // so many bytes at once

// The frame of JSON is written by hand, for a million small objects of a fixed shape. Strings come from elsewhere, so all but
// the plainest are left to the JSON library, which escapes control bytes and replaces what is not UTF-8.
std::string Quoted(std::string_view text) {
  const auto plain = [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; };
  if (std::ranges::all_of(text, plain)) return fmt::format("\"{}\"", text);
  return nlohmann::ordered_json(text).dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string Mebibytes(Bytes bytes) {
  constexpr Bytes kMiB = Bytes{1} << 20;
  if (bytes % kMiB == 0) return std::to_string(bytes / kMiB);
  return fmt::format("{:.3f}", static_cast<double>(bytes) / static_cast<double>(kMiB));
}

std::string Microseconds(std::uint64_t ns) { return fmt::format("{}.{:03}", ns / 1000, ns % 1000); }

std::string Category(std::string_view category, SequenceNumber seq, std::string_view detail) {
  return fmt::format(R"(,"cat":"{}","args":{{"event":{}{}{}}})", category, seq.value, detail.empty() ? "" : R"(,"detail":)",
                     detail.empty() ? "" : Quoted(detail));
}

// The JSON of a trace in the Trace Event Format, object by object. Processes are pids, threads are rows, times are nanoseconds
// since the trace's beginning.
class TraceWriter {
 public:
  // `write` gets the text in pieces; what is drawn is counted in `summary`. Both are the caller's.
  TraceWriter(const std::function<void(std::string_view)>& write, TraceSummary& summary)
      : write_(write), summary_(summary), text_("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n") {}
  void Finish() { write_(text_ + "\n]}\n"); }

  void Name(std::uint64_t process, std::optional<std::uint32_t> thread, std::string_view name) {
    Add('M', thread ? "thread_name" : "process_name", process, thread.value_or(0), 0,
        fmt::format(R"(,"args":{{"name":{}}})", Quoted(name)));
  }
  void SortIndex(std::uint64_t process, std::int64_t index) {
    Add('M', "process_sort_index", process, 0, 0, fmt::format(R"(,"args":{{"sort_index":{}}})", index));
  }
  void Slice(std::uint64_t process, std::uint32_t thread, std::string_view name, std::string_view category, std::uint64_t from,
             std::uint64_t to, SequenceNumber seq, std::string_view detail = {}) {
    Add('X', name, process, thread, from,
        fmt::format(R"(,"dur":{}{})", Microseconds(to > from ? to - from : 0), Category(category, seq, detail)));
    ++summary_.slices;
  }
  void Instant(std::uint64_t process, std::uint32_t thread, std::string_view name, std::uint64_t at, SequenceNumber seq,
               std::string_view detail) {
    Add('i', name, process, thread, at, R"(,"s":"t")" + Category("failure", seq, detail));
  }
  // `phase`: 's' where an arrow begins, 'f' where it ends.
  void Arrow(char phase, std::uint64_t process, std::uint32_t thread, std::uint64_t id, std::uint64_t at) {
    // As text, so that no reader of JSON rounds it. Perfetto takes numbers of up to 64 bits for an id, and nothing else.
    Add(phase, "reference", process, thread, at,
        fmt::format(R"(,"cat":"reference","id":"{}"{})", Hex(id), phase == 'f' ? R"(,"bp":"e")" : ""));
    summary_.arrows += phase == 'f' ? 1 : 0;
  }
  void Memory(std::uint64_t process, std::uint64_t at, Bytes held, Bytes released) {
    Add('C', "memory (MiB)", process, 0, at,
        fmt::format(R"(,"args":{{"held":{},"released":{}}})", Mebibytes(held), Mebibytes(released)));
    ++summary_.samples;
  }
  void Counter(std::uint64_t process, std::uint64_t at, std::string_view name, Bytes bytes) {
    Add('C', name, process, 0, at, fmt::format(R"(,"args":{{"value":{}}})", Mebibytes(bytes)));
  }

 private:
  // An object: what all have, and what its kind has besides.
  void Add(char phase, std::string_view name, std::uint64_t process, std::uint32_t thread, std::uint64_t at,
           std::string_view rest) {
    fmt::format_to(std::back_inserter(text_), R"({}{{"ph":"{}","name":{},"pid":{},"tid":{},"ts":{}{}}})", first_ ? "" : ",\n",
                   phase, Quoted(name), process, thread, Microseconds(at), rest);
    first_ = false;
    if (text_.size() < kWriteAt) return;
    write_(text_);
    text_.clear();
  }

  const std::function<void(std::string_view)>& write_;
  TraceSummary& summary_;
  std::string text_;  // not written yet
  bool first_ = true;
};

// A window in times of the trace.
struct Extent {
  std::uint64_t from = 0, to = std::numeric_limits<std::uint64_t>::max();
};

// The values of the counters.
struct TracedMemory {
  TracedMemory() = default;
  explicit TracedMemory(const Holdings& h) : held(h.own_device_resident), pinned(h.host) {
    const Bytes whole = h.own_device + h.slabs_free;
    released = whole - std::min(whole, held);
    for (const auto& [why, bytes] : h.kept) kept += bytes;
  }
  Bytes held = 0, released = 0, pinned = 0, kept = 0;
  std::map<std::string, Bytes> tags;  // of each, what is on devices
  friend bool operator==(const TracedMemory&, const TracedMemory&) = default;
};

// The same number for the owner's event and the importer's.
std::uint64_t ArrowId(SessionId owner, AllocationId allocation, SessionId by, AllocationId as) {
  Fnv1a number;
  for (const std::uint64_t word : {owner.value, allocation.value, by.value, as.value}) number.Add(word);
  return number.value();
}

// A time of a journal in the trace; what comes before the trace's beginning is drawn there.
std::uint64_t TimeOf(std::uint64_t time_ns, std::int64_t origin_ns) {
  return static_cast<std::uint64_t>(
      std::max<std::int64_t>(WrappedDifference(static_cast<std::int64_t>(time_ns), origin_ns), 0));
}

std::uint32_t RowOf(PoolId pool) { return kTagRows + pool.value; }

// Where the tracks of one session are drawn, and up to which event it has been read.
struct Sheet {
  enum class Window : std::uint8_t { kAhead, kInside, kBehind };

  TraceWriter& out;
  const std::uint64_t process;
  const std::int64_t origin_ns;  // the time of this journal that is 0 in the trace
  const Extent extent;
  std::uint64_t now = 0;  // of the last event
  Window window = Window::kAhead;

  [[nodiscard]] std::uint64_t Time(std::uint64_t time_ns) const { return TimeOf(time_ns, origin_ns); }
  [[nodiscard]] bool Drawing() const { return window != Window::kBehind && now >= extent.from; }
};

// The counters of memory: a sample every so often, where a cycle ends, and before a silence.
class MemoryTrack {
 public:
  MemoryTrack(const Sheet& sheet, std::uint64_t every_ns) : sheet_(sheet), every_ns_(every_ns) {}

  void SampleSoon() { due_ = true; }
  void After(const State& state) {
    unsampled_ = sheet_.Drawing();
    if (unsampled_ && (std::exchange(due_, false) || sheet_.now >= next_)) Sample(state);
  }
  // A counter is drawn before a silence, too: the last change was not at the silence's end.
  void Before(std::uint64_t next_event, const State& state) {
    if (next_event >= next_ && unsampled_) Sample(state);
  }
  void Sample(const State& state, bool last = false) {
    if (!sheet_.Drawing()) return;
    TracedMemory memory(Measure(state));
    for (const auto& [pool, holdings] : MeasurePools(state))
      if (const Pool* known = FindIn(state.pools, pool)) memory.tags[known->tag] = holdings.own_resident;
    if (last || !sampled_ || memory != *sampled_) Draw(memory, last);
    sampled_.emplace(memory);
    unsampled_ = false;
    next_ = sheet_.now + every_ns_;
  }

 private:
  // Memory that many jobs never have gets a track only in those that do.
  void Draw(const TracedMemory& memory, bool last) {
    const TracedMemory before = sampled_.value_or(TracedMemory{});
    const auto draw = [&](const char* name, Bytes was, Bytes is) {
      if (was != is || (last && is != 0)) sheet_.out.Counter(sheet_.process, sheet_.now, name, is);
    };
    sheet_.out.Memory(sheet_.process, sheet_.now, memory.held, memory.released);
    draw("pinned host memory (MiB)", before.pinned, memory.pinned);
    draw("kept in a pause (MiB)", before.kept, memory.kept);
    for (const auto& [tag, bytes] : memory.tags) {
      const Bytes* was = FindIn(before.tags, tag);
      draw(("tag " + tag + " (MiB)").c_str(), was == nullptr ? 0 : *was, bytes);
    }
  }

  const Sheet& sheet_;
  const std::uint64_t every_ns_;
  std::uint64_t next_ = 0;
  bool unsampled_ = false, due_ = false;
  std::optional<TracedMemory> sampled_;
};

// The rows: of each thread, and of each pool's cycles, of which several may be under way at once.
class SliceTracks {
 public:
  explicit SliceTracks(const Sheet& sheet) : sheet_(sheet) {}

  // Draws what the last event has ended of that pause or resume, and notes what it has begun. `attempt`: null where none is
  // open.
  void Follow(PoolId pool, const Attempt* attempt, const State& state, std::string_view detail) {
    if (attempt == nullptr && !lanes_.contains(pool)) return;
    Lane& lane = lanes_[pool];
    std::array<Moment, kParts> begun;
    if (attempt != nullptr) begun = BegunIn(*attempt);
    for (std::size_t part = 0; part < kParts; ++part)
      if (lane.parts[part] && lane.parts[part]->from.seq != begun[part].seq) Close(pool, static_cast<Part>(part), detail);
    for (std::size_t part = 0; part < kParts; ++part) {
      if (begun[part] && !lane.parts[part])
        lane.parts[part] = Open{NameOf(*attempt, static_cast<Part>(part), FindIn(state.pools, pool)), begun[part]};
    }
    lane.drawn = true;
  }
  // Likewise of the wait for a request from outside, in a safe point or in its own resume.
  void FollowRequest(const SessionStory& story, std::string_view detail) {
    const auto& waits = story.outside.waits_in;
    if (waits_ && (!waits || waits->at.seq != waits_->from.seq)) Draw(waits_, {}, "request", detail);
    if (!waits || waits_) return;
    const std::uint64_t step = waits->event.step;
    waits_ = Open{step != 0 ? fmt::format("safe point {}", step) : "resume waits for the outside", waits->at};
  }
  void CloseAll(const char* detail) {
    for (const auto& [pool, lane] : lanes_)
      for (const Part part : {kStep, kWait, kPhase, kCycle}) Close(pool, part, part == kPhase ? "" : detail);
    Draw(waits_, {}, "request", detail);
  }
  void Reach(std::uint32_t thread) { drawn_[thread] = sheet_.now; }
  // A slice of that thread which ends now begins there at the earliest: viewers drop slices that cross.
  std::uint64_t Reached(std::uint32_t thread) { return drawn_[thread]; }
  void NameRows(const State& state, const SessionOpened& who, const std::set<std::uint32_t>& exporters) const {
    for (const auto& [thread, drawn] : drawn_) {
      const bool main = std::cmp_equal(thread, who.pid);
      sheet_.out.Name(sheet_.process, thread, main ? "main" : exporters.contains(thread) ? "amem-peers" : "thread");
    }
    for (const auto& [pool, lane] : lanes_) {
      const Pool* known = FindIn(state.pools, pool);
      if (lane.drawn && known != nullptr) sheet_.out.Name(sheet_.process, RowOf(pool), "tag " + known->tag);
    }
  }

 private:
  // A slice that has begun.
  struct Open {
    std::string name;
    Moment from;
  };
  enum Part : std::size_t { kStep, kWait, kPhase, kCycle, kParts };
  struct Lane {
    std::array<std::optional<Open>, kParts> parts;
    bool drawn = false;
  };

  static std::array<Moment, kParts> BegunIn(const Attempt& attempt) {
    const bool undecided = !attempt.phases.empty() && !attempt.phases.back().decided;
    std::array<Moment, kParts> begun;
    if (attempt.open_step) begun[kStep] = attempt.open_step->at;
    if (undecided) begun[kWait] = attempt.phases.back().voted;
    begun[kPhase] = undecided ? attempt.phases.back().begun : attempt.begun ? Moment{} : attempt.arrived;
    begun[kCycle] = attempt.begun;
    return begun;
  }
  static std::string NameOf(const Attempt& attempt, Part part, const Pool* pool) {
    if (part == kStep) return ToText(attempt.open_step->event);
    if (part == kWait) return "waiting for the others";
    if (part == kCycle)
      return fmt::format("{} {}{}", ToText(attempt.kind), attempt.cycle, pool == nullptr ? "" : " of " + pool->tag);
    return std::string(attempt.begun ? PhaseWord(attempt.phases.back().phase) : ToText(ArrivalOf(attempt.kind)));
  }
  void Close(PoolId pool, Part part, std::string_view detail) {
    constexpr std::array kCategories = {"step", "wait", "phase", "cycle"};
    Draw(lanes_[pool].parts[part], pool, kCategories[part], part == kWait ? "" : detail);
  }
  void Draw(std::optional<Open>& open, PoolId pool, const char* category, std::string_view detail) {
    if (!open) return;
    if (sheet_.now >= sheet_.extent.from) {
      const std::uint32_t row = pool ? RowOf(pool) : open->from.thread;
      sheet_.out.Slice(sheet_.process, row, open->name, category, sheet_.Time(open->from.time_ns), sheet_.now, open->from.seq,
                       detail);
      if (!pool) drawn_[row] = sheet_.now;
    }
    open.reset();
  }

  const Sheet& sheet_;
  std::map<std::uint32_t, std::uint64_t> drawn_;  // per thread, up to where
  std::map<PoolId, Lane> lanes_;
  std::optional<Open> waits_;
};

// One session's events, as slices, marks and counters.
class SessionTrace final : public FoldObserver {
 public:
  SessionTrace(const Sheet& sheet, const SessionOpened& who, std::uint64_t sample_every_ns)
      : who_(who), sheet_(sheet), memory_(sheet_, sample_every_ns), slices_(sheet_) {}

  void Begin(const State& before) override {
    state_ = &before;
    builder_.Begin(before);
  }
  void Before(const Event& event, const State& before) override {
    if (Done()) return;
    next_ = sheet_.Time(event.time_ns);
    if (next_ >= sheet_.extent.from) {
      if (sheet_.window == Sheet::Window::kAhead) Enter();
      if (next_ > sheet_.extent.to) return Leave();
      memory_.Before(next_, *state_);
    }
    builder_.Before(event, before);
  }
  Status After(const Event& event, const State& after) override {
    if (Done()) return {};
    static_cast<void>(builder_.After(event, after));
    sheet_.now = next_;
    event_ = &event;
    std::visit([this](const auto& body) { On(body); }, event.body);
    const std::string_view detail = DetailOf(event.body);
    const PoolId pool = builder_.PoolOfLastEvent();
    slices_.Follow(pool, builder_.OpenOf(pool), *state_, detail);
    slices_.FollowRequest(story_, detail);
    if (sheet_.Drawing()) {
      slices_.Reach(event.thread);
      ++events_;
    }
    memory_.After(*state_);
    return {};
  }
  [[nodiscard]] bool Done() const override { return sheet_.window == Sheet::Window::kBehind; }
  // What is still open ends with the journal, which left this state, or with the window.
  void Finish(const State& state) {
    state_ = &state;
    if (!Done()) slices_.CloseAll(kStillOpen);
    if (sheet_.window == Sheet::Window::kInside || sheet_.extent.from == 0) memory_.Sample(state, true);
    slices_.NameRows(state, who_, exporters_);
  }
  [[nodiscard]] std::uint64_t events() const { return events_; }

 private:
  // The first event in the window: until then the memory held was this.
  void Enter() {
    sheet_.window = Sheet::Window::kInside;
    if (sheet_.extent.from == 0) return;
    sheet_.now = sheet_.extent.from;
    memory_.Sample(*state_, true);
  }
  // Before the first event behind the window. From now on nothing is drawn.
  void Leave() {
    sheet_.now = sheet_.extent.to;
    slices_.CloseAll(kGoesOn);
    sheet_.window = Sheet::Window::kBehind;
  }

  // What a slice says that ends with this event.
  static std::string_view DetailOf(const EventBody& body) {
    if (const auto* e = std::get_if<StepFailed>(&body)) return e->message;
    if (const auto* e = std::get_if<PhaseDecided>(&body); e != nullptr && !e->passed) return e->message;
    if (const auto* e = std::get_if<CycleFailed>(&body)) return e->message;
    if (const auto* e = std::get_if<RequestEnded>(&body)) return e->message;
    return {};
  }

  template <class Body>
  void On(const Body& e) {
    if constexpr (kIsOneOf<Body, ProcessSeen, LaunchRefused, RequestEnded, CommunicatorReady, CommunicatorEnded>)
      Mark(Body::kKind, ToText(event_->body));
    if constexpr (kIsOneOf<Body, PeerLost, SessionBroken>) Mark(Body::kKind, e.reason);
    if constexpr (kIsOneOf<Body, StepFailed, CycleFailed>) Mark(Body::kKind, e.message, e.pool);
    if constexpr (kIsOneOf<Body, CycleDone, CycleFailed>) memory_.SampleSoon();
  }
  void On(const PhaseDecided& e) {
    if (!e.passed) Mark("vote failed", e.message, e.pool);
    memory_.SampleSoon();
  }
  void On(const VoteCast& e) { Mark(e.ok ? "vote" : "vote against", e.message, e.pool); }
  void On(const BallotShown& e) {
    if (e.cause != agreement::Cause::kAllVoted)
      Mark(agreement::IsFailure(e.cause) ? "ballot failed" : "waits", ToText(event_->body), e.pool);
  }
  void On(const RequestSeen&) { Mark("request", ToText(event_->body)); }
  void On(const Frozen& e) {
    const auto from = std::max(sheet_.Time(e.from_ns), sheet_.extent.from), to = std::min(sheet_.Time(e.to_ns), sheet_.now);
    if (sheet_.Drawing() && from < to)
      sheet_.out.Slice(sheet_.process, event_->thread, "frozen", "request", from, to, event_->seq, e.moved_gpus);
  }
  void On(const CommunicatorSuspended& e) {
    Mark(e.suspended ? "communicator suspended" : "communicator resumed", ToText(event_->body));
  }
  void On(const ReferenceAdded& e) {
    exporters_.insert(event_->thread);
    Reference('s', fmt::format("export allocation {}", e.allocation.value), ArrowId(who_.session, e.allocation, e.by, e.as));
  }
  void On(const Imported& e) {
    Reference('f', fmt::format("import allocation {}", e.allocation.value),
              ArrowId(e.remote.owner, e.remote.allocation, who_.session, e.allocation));
  }

  void Reference(char phase, const std::string& name, std::uint64_t id) {
    if (!sheet_.Drawing()) return;
    const std::uint64_t from = std::max(slices_.Reached(event_->thread), sheet_.now - std::min(sheet_.now, kShortest_ns));
    sheet_.out.Slice(sheet_.process, event_->thread, name, "reference", from, sheet_.now, event_->seq);
    sheet_.out.Arrow(phase, sheet_.process, event_->thread, id, from);
  }
  void Mark(std::string_view name, const std::string& message, PoolId pool = {}) {
    const std::uint32_t row = pool ? RowOf(pool) : event_->thread;
    if (sheet_.Drawing()) sheet_.out.Instant(sheet_.process, row, name, sheet_.now, event_->seq, message);
  }

  const SessionOpened& who_;
  Sheet sheet_;
  MemoryTrack memory_;
  SliceTracks slices_;
  std::uint64_t events_ = 0, next_ = 0;  // next_: the time of the event to come
  const State* state_ = nullptr;
  const Event* event_ = nullptr;  // the last one
  std::set<std::uint32_t> exporters_;
  SessionStory story_;
  StoryBuilder builder_{story_, 8, false};
};

struct Part {
  JournalReader* reader = nullptr;
  Opening opening;
};

Result<Extent> ExtentOf(const TraceWindow& window, const JobClock& clock) {
  const bool wall_known = clock.boots_without_wall_clock() < clock.boots();
  Extent extent;
  const auto set = [&](const std::optional<TraceTime>& time, std::uint64_t& end) {
    if (!time) return true;
    const std::int64_t ns = time->wall ? WrappedDifference(time->ns, clock.began_ns()) : time->ns;
    end = static_cast<std::uint64_t>(std::max<std::int64_t>(ns, 0));
    return !time->wall || wall_known;
  };
  const bool from = set(window.from, extent.from), to = set(window.to, extent.to);
  if (!from || !to)
    return Status{Code::kInvalid,
                  "no journal of this job noted the wall clock; give the time in seconds after its first event"};
  if (extent.from > extent.to) return Status{Code::kInvalid, "the window ends before it begins"};
  return extent;
}

// Draws one journal.
Status DrawPart(const Part& part, const JobClock& clock, const Extent& window, std::uint64_t process, TraceWriter& out,
                TraceSummary& summary) {
  const Opening& opening = part.opening;
  out.Name(process, {}, NameOf(opening.who));
  out.SortIndex(process, opening.who.rank);
  const std::int64_t origin_ns = WrappedDifference(clock.began_ns(), clock.OffsetOf(opening.who));
  const std::uint64_t first = std::max(TimeOf(opening.first_ns, origin_ns), window.from);
  const std::uint64_t last = std::min(TimeOf(opening.last_ns, origin_ns), window.to);
  summary.duration_ns = std::max(summary.duration_ns, TimeOf(opening.last_ns, origin_ns));
  SessionTrace session({out, process, origin_ns, window}, opening.who, (last - std::min(last, first)) / kSamples);
  AMEM_ASSIGN(const auto folded, FoldJournal(*part.reader, std::array<FoldObserver*, 1>{&session}));
  session.Finish(folded.state);
  ++summary.sessions;
  summary.events += session.events();
  const std::string where = opening.info.directory.string();
  if (const std::string damage = DamageText(folded.damage); !damage.empty())
    summary.incomplete.push_back(where + ": " + damage);
  if (folded.broken) summary.incomplete.push_back(where + ": drawn only up to where " + ToText(*folded.broken));
  return {};
}

}  // namespace

Result<TraceSummary> WriteTrace(std::span<const std::unique_ptr<JournalReader>> journals,
                                const std::function<void(std::string_view)>& write, const TraceWindow& window) {
  std::vector<Part> parts;
  for (const auto& reader : journals) {
    AMEM_ASSIGN(auto opening, ReadOpening(*reader));
    parts.push_back({reader.get(), std::move(opening)});
  }
  std::ranges::stable_sort(parts, {}, [](const Part& part) { return part.opening.who.rank; });
  std::vector<OpenedJournal> opened;
  for (const Part& part : parts) opened.push_back({&part.opening, part.reader});
  const JobClock clock = ClockOf(opened);
  AMEM_ASSIGN(const auto extent, ExtentOf(window, clock));
  TraceSummary summary;
  TraceWriter out(write, summary);
  std::set<std::uint64_t> processes;
  for (const Part& part : parts) {
    // Viewers show the pid beside the name.
    std::uint64_t process = static_cast<std::uint64_t>(std::max(part.opening.who.pid, 0));
    while (!processes.insert(process).second) process += kOtherHosts;
    AMEM_TRY(DrawPart(part, clock, extent, process, out, summary));
  }
  out.Finish();
  return summary;
}

}  // namespace amem
