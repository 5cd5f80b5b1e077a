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

// One session's events, as slices.
class SessionTrace final : public FoldObserver {
 public:
  // `origin_ns`: the time of this journal that is 0 in the trace.
  SessionTrace(TraceWriter& out, std::uint64_t process, const SessionOpened& who, std::int64_t origin_ns, const Extent& window,
               std::uint64_t sample_every_ns)
      : out_(out), process_(process), who_(who), origin_ns_(origin_ns), window_(window), sample_every_ns_(sample_every_ns) {}

  void Begin(const State& before) override {
    state_ = &before;
    builder_.Begin(before);
  }
  void Before(const Event& event, const State& before) override {
    next_ = TimeOf(event.time_ns, origin_ns_);
    if (left_) return;
    if (next_ >= window_.from) {
      if (!entered_) Enter();
      if (next_ > window_.to) return Leave();
      // A counter is drawn before a silence, too: the last change was not at the silence's end.
      if (next_ >= next_sample_ && unsampled_) Sample();
    }
    builder_.Before(event, before);
  }
  Status After(const Event& event, const State& after) override {
    if (left_) return {};
    static_cast<void>(builder_.After(event, after));
    now_ = next_;
    event_ = &event;
    const bool inside = now_ >= window_.from;
    unsampled_ = inside;
    std::visit([this](const auto& body) { On(body); }, event.body);
    const std::string_view detail = DetailOf(event.body);
    Follow(builder_.PoolOfLastEvent(), detail);
    FollowRequest(detail);
    if (!inside) return {};
    drawn_[event.thread] = now_;
    ++events_;
    if (std::exchange(sample_now_, false) || now_ >= next_sample_) Sample();
    return {};
  }
  [[nodiscard]] bool Done() const override { return left_; }
  // What is still open ends with the journal, which left this state, or with the window.
  void Finish(const State& state) {
    state_ = &state;
    if (!left_) CloseAll(kStillOpen);
    if (entered_ || window_.from == 0) Sample(true);
    for (const auto& [thread, drawn] : drawn_) {
      const bool main = std::cmp_equal(thread, who_.pid);
      out_.Name(process_, thread, main ? "main" : exporters_.contains(thread) ? "amem-peers" : "thread");
    }
    for (const auto& [pool, lane] : lanes_) {
      const Pool* known = FindIn(state.pools, pool);
      if (lane.drawn && known != nullptr) out_.Name(process_, RowOf(pool), "tag " + known->tag);
    }
  }
  [[nodiscard]] std::uint64_t events() const { return events_; }

  // A time of a journal in the trace; what comes before the trace's beginning is drawn there.
  static std::uint64_t TimeOf(std::uint64_t time_ns, std::int64_t origin_ns) {
    return static_cast<std::uint64_t>(
        std::max<std::int64_t>(WrappedDifference(static_cast<std::int64_t>(time_ns), origin_ns), 0));
  }

 private:
  // A slice that has begun.
  struct Open {
    std::string name;
    Moment from;
  };
  // What the story has open of NCCL's pause or resume, which is drawn on the row of its thread, or of a pool's, which has a row
  // of its own: several may be under way at once.
  enum Part : std::size_t { kStep, kWait, kPhase, kCycle, kParts };
  struct Lane {
    std::array<std::optional<Open>, kParts> parts;
    bool drawn = false;
  };

  // The first event in the window: until then the memory held was this.
  void Enter() {
    entered_ = true;
    if (window_.from == 0) return;
    now_ = window_.from;
    Sample(true);
  }
  // Before the first event behind the window. From now on nothing is drawn.
  void Leave() {
    now_ = window_.to;
    CloseAll(kGoesOn);
    left_ = true;
  }
  [[nodiscard]] bool Drawing() const { return !left_ && now_ >= window_.from; }

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
    sample_now_ |= kIsOneOf<Body, CycleDone, CycleFailed>;
  }
  void On(const PhaseDecided& e) {
    if (!e.passed) Mark("vote failed", e.message, e.pool);
    sample_now_ = true;
  }
  void On(const VoteCast& e) { Mark(e.ok ? "vote" : "vote against", e.message, e.pool); }
  void On(const BallotShown& e) {
    if (e.cause != agreement::Cause::kAllVoted)
      Mark(agreement::IsFailure(e.cause) ? "ballot failed" : "waits", ToText(event_->body), e.pool);
  }
  void On(const RequestSeen&) { Mark("request", ToText(event_->body)); }
  void On(const Frozen& e) {
    const auto from = std::max(TimeOf(e.from_ns, origin_ns_), window_.from), to = std::min(TimeOf(e.to_ns, origin_ns_), now_);
    if (Drawing() && from < to) out_.Slice(process_, RowNow({}), "frozen", "request", from, to, event_->seq, e.moved_gpus);
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

  static std::uint32_t RowOf(PoolId pool) { return kTagRows + pool.value; }
  [[nodiscard]] std::uint32_t RowNow(PoolId pool) const { return pool ? RowOf(pool) : event_->thread; }
  [[nodiscard]] std::string OfTag(PoolId pool) const {
    const Pool* known = FindIn(state_->pools, pool);
    return known == nullptr ? "" : " of " + known->tag;
  }
  // Draws what the last event has ended of it, and notes what it has begun.
  void Follow(PoolId pool, std::string_view detail) {
    const Attempt* attempt = builder_.OpenOf(pool);
    if (attempt == nullptr && !lanes_.contains(pool)) return;
    Lane& lane = lanes_[pool];
    std::array<Moment, kParts> begun;
    const Attempt::PhaseTaken* phase = nullptr;
    if (attempt != nullptr) {
      if (!attempt->phases.empty() && !attempt->phases.back().decided) phase = &attempt->phases.back();
      if (attempt->open_step) begun[kStep] = attempt->open_step->at;
      if (phase != nullptr) begun[kWait] = phase->voted;
      begun[kPhase] = phase != nullptr ? phase->begun : attempt->begun ? Moment{} : attempt->arrived;
      begun[kCycle] = attempt->begun;
    }
    for (std::size_t part = 0; part < kParts; ++part)
      if (lane.parts[part] && lane.parts[part]->from.seq != begun[part].seq) Close(pool, static_cast<Part>(part), detail);
    for (std::size_t part = 0; part < kParts; ++part) {
      if (begun[part] && !lane.parts[part])
        lane.parts[part] = Open{NameOf(*attempt, static_cast<Part>(part), pool), begun[part]};
    }
    lane.drawn = true;
  }
  [[nodiscard]] std::string NameOf(const Attempt& attempt, Part part, PoolId pool) const {
    if (part == kStep) return ToText(attempt.open_step->event);
    if (part == kWait) return "waiting for the others";
    if (part == kCycle) return fmt::format("{} {}{}", ToText(attempt.kind), attempt.cycle, OfTag(pool));
    return std::string(attempt.begun ? PhaseWord(attempt.phases.back().phase) : ToText(ArrivalOf(attempt.kind)));
  }
  void FollowRequest(std::string_view detail) {
    const auto& waits = story_.outside.waits_in;
    if (waits_ && (!waits || waits->at.seq != waits_->from.seq)) Draw(waits_, {}, "request", detail);
    if (!waits || waits_) return;
    const std::uint64_t step = waits->event.step;
    waits_ = Open{step != 0 ? fmt::format("safe point {}", step) : "resume waits for the outside", waits->at};
  }
  // The slice ends with its event and begins no sooner than the slice before ended: viewers drop slices that cross.
  void Reference(char phase, const std::string& name, std::uint64_t id) {
    if (!Drawing()) return;
    const std::uint64_t from = std::max(drawn_[event_->thread], now_ - std::min(now_, kShortest_ns));
    out_.Slice(process_, event_->thread, name, "reference", from, now_, event_->seq);
    out_.Arrow(phase, process_, event_->thread, id, from);
  }
  void Mark(std::string_view name, const std::string& message, PoolId pool = {}) {
    if (Drawing()) out_.Instant(process_, RowNow(pool), name, now_, event_->seq, message);
  }
  void Draw(std::optional<Open>& open, PoolId pool, const char* category, std::string_view detail) {
    if (!open) return;
    if (now_ >= window_.from) {
      const std::uint32_t row = pool ? RowOf(pool) : open->from.thread;
      out_.Slice(process_, row, open->name, category, TimeOf(open->from.time_ns, origin_ns_), now_, open->from.seq, detail);
      if (!pool) drawn_[row] = now_;
    }
    open.reset();
  }
  void Close(PoolId pool, Part part, std::string_view detail) {
    constexpr std::array kCategories = {"step", "wait", "phase", "cycle"};
    Draw(lanes_[pool].parts[part], pool, kCategories[part], part == kWait ? "" : detail);
  }
  void CloseAll(const char* detail) {
    for (const auto& [pool, lane] : lanes_)
      for (const Part part : {kStep, kWait, kPhase, kCycle}) Close(pool, part, part == kPhase ? "" : detail);
    Draw(waits_, {}, "request", detail);
  }
  void Sample(bool last = false) {
    if (left_ || now_ < window_.from) return;
    TracedMemory memory(Measure(*state_));
    for (const auto& [pool, holdings] : MeasurePools(*state_)) memory.tags[state_->pools.at(pool).tag] = holdings.own_resident;
    if (last || !sampled_ || memory != *sampled_) Draw(memory, last);
    sampled_.emplace(memory);
    unsampled_ = false;
    next_sample_ = now_ + sample_every_ns_;
  }
  // Memory that many jobs never have gets a track only in those that do.
  void Draw(const TracedMemory& memory, bool last) {
    const TracedMemory before = sampled_.value_or(TracedMemory{});
    const auto draw = [&](const char* name, Bytes was, Bytes is) {
      if (was != is || (last && is != 0)) out_.Counter(process_, now_, name, is);
    };
    out_.Memory(process_, now_, memory.held, memory.released);
    draw("pinned host memory (MiB)", before.pinned, memory.pinned);
    draw("kept in a pause (MiB)", before.kept, memory.kept);
    for (const auto& [tag, bytes] : memory.tags) {
      const Bytes* was = FindIn(before.tags, tag);
      draw(("tag " + tag + " (MiB)").c_str(), was == nullptr ? 0 : *was, bytes);
    }
  }

  TraceWriter& out_;
  const std::uint64_t process_;
  const SessionOpened& who_;
  const std::int64_t origin_ns_;
  const Extent window_;
  const std::uint64_t sample_every_ns_;
  bool entered_ = false, left_ = false;
  std::uint64_t events_ = 0;
  const State* state_ = nullptr;
  std::uint64_t now_ = 0, next_ = 0, next_sample_ = 0;  // of the last event, of the one to come, of the counters
  const Event* event_ = nullptr;
  bool unsampled_ = false, sample_now_ = false;
  std::optional<TracedMemory> sampled_;
  std::map<std::uint32_t, std::uint64_t> drawn_;  // per thread, up to where
  std::set<std::uint32_t> exporters_;
  std::map<PoolId, Lane> lanes_;
  SessionStory story_;
  StoryBuilder builder_{story_, 8, false};
  std::optional<Open> waits_;  // in a safe point, or in its own resume, for a request from outside
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
  const std::uint64_t first = std::max(SessionTrace::TimeOf(opening.first_ns, origin_ns), window.from);
  const std::uint64_t last = std::min(SessionTrace::TimeOf(opening.last_ns, origin_ns), window.to);
  summary.duration_ns = std::max(summary.duration_ns, SessionTrace::TimeOf(opening.last_ns, origin_ns));
  SessionTrace session(out, process, opening.who, origin_ns, window, (last - std::min(last, first)) / kSamples);
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
