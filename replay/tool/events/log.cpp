// log: the events of journals, one a line; of live sessions also as they happen. Their processes are not touched: only their
// journals are read.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <set>
#include <thread>

#include "replay/job/clock.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/tool/command.h"
#include "replay/tool/events/stream.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {
namespace {

struct LogOptions {
  Targets targets{.names = {}, .ranks = {}, .one_process = true};
  bool json = false, merge = false, wall = false, follow = false;
  EventWishes wishes;
  std::vector<Position> from, to;     // all of them count
  std::optional<std::uint64_t> last;  // only so many, after all other filters
  std::uint32_t interval_ms = 200;
};

constexpr std::uint64_t kEnd = ~std::uint64_t{0};
constexpr std::uint64_t kLastWhenFollowed = 10;

// Adds a kind as KindName writes it, blanks or hyphens between the words. Returns what is wrong, or an empty text.
std::string AddKind(const std::string& word, std::set<std::size_t>& kinds) {
  std::string name = word;
  std::ranges::replace_if(
      name, [](char c) { return c == '-' || c == '_'; }, ' ');
  if (const std::optional<std::size_t> kind = KindOf(name)) return kinds.insert(*kind), std::string();
  std::vector<std::string> known;
  for (std::size_t k = 0; k < kEventKinds; ++k) known.push_back(KindWord(k));
  return fmt::format("--kind: there is no kind of event named \"{}\"; the kinds are {}", word, fmt::join(known, ", "));
}

// kInvalid: it is no extended regular expression.
Result<std::shared_ptr<const regex_t>> CompilePattern(const std::string& text) {
  auto compiled = std::make_unique<regex_t>();
  if (const int failed = ::regcomp(compiled.get(), text.c_str(), REG_EXTENDED | REG_NOSUB); failed != 0) {
    char why[200];
    ::regerror(failed, compiled.get(), why, sizeof why);
    return Status{Code::kInvalid, "\"" + text + "\" is not a regular expression as grep -E has them: " + why};
  }
  return std::shared_ptr<const regex_t>(compiled.release(), [](regex_t* pattern) {
    ::regfree(pattern);
    delete pattern;
  });
}

bool IsBehind(const Position& from, const Position& to) {
  if (from.rank || to.rank) return false;  // not known yet
  if (from.seq || to.seq) return from.seq && to.seq && *from.seq > *to.seq;
  return from.wall == to.wall && from.ns > to.ns;
}

// What is wrong with the options together, or an empty text.
std::string WhatIsWrong(const LogOptions& options) {
  for (const Position& from : options.from)
    for (const Position& to : options.to)
      if (IsBehind(from, to)) return fmt::format("--from {} is behind --to {}: no event is both", from.text, to.text);
  return options.follow && !options.to.empty() ? "give --follow or --to, not both" : "";
}

// A session whose events are wanted.
struct Source {
  // Of the first ones: to open a journal is to check the whole file. There may be more of them than open files.
  std::unique_ptr<JournalReader> reader;
  Opening opening;
};

constexpr std::size_t kKeptOpen = 32;

Status AddSource(const std::filesystem::path& directory, bool with_state, std::vector<Source>& sources) {
  AMEM_ASSIGN(auto reader, JournalReader::Open(directory));
  AMEM_ASSIGN(auto opening, ReadOpening(*reader));
  if (!with_state) opening.before = {};
  if (sources.size() >= kKeptOpen) reader.reset();
  sources.push_back({std::move(reader), std::move(opening)});
  return {};
}

// An event of another rank is the moment when it happened. What is behind the last one is that.
Status MakeTime(Position& position, std::vector<Source>& sources, const JobClock& clock) {
  if (!position.rank) return {};
  const auto source = std::ranges::find_if(sources, [&](const Source& one) { return one.opening.who.rank == *position.rank; });
  if (source == sources.end()) return {Code::kInvalid, fmt::format("there is no journal of rank {} here", *position.rank)};
  if (source->reader == nullptr) {
    AMEM_ASSIGN(source->reader, JournalReader::Open(source->opening.info.directory));
  }
  AMEM_ASSIGN(const auto event, ReadEvent(*source->reader, std::min(*position.seq, source->opening.info.last)));
  if (!event) return {Code::kInvalid, fmt::format("rank {} has no event {}", *position.rank, position.seq->value)};
  const std::int64_t wall = WrappedSum(event->time_ns, clock.OffsetOf(source->opening.who));
  position = {.text = position.text, .wall = true, .ns = static_cast<std::uint64_t>(wall)};
  return {};
}

// All that events of one session are printed with.
class Logger {
 public:
  Logger(const LogOptions& options, const std::vector<Source>& sources, JobClock clock, Output& out)
      : options_(options), out_(out), several_(sources.size() > 1), clock_(std::move(clock)) {
    for (const Source& source : sources) {
      names_.Add(source.opening.who);
      const std::int64_t opened = WrappedSum(source.opening.who.monotonic_ns, OffsetOf(source));
      origin_ns_ = origin_ns_ == 0 ? opened : std::min(origin_ns_, opened);
    }
  }

  Status Add(Source& source, EventStream& stream) const {
    const std::filesystem::path& directory = source.opening.info.directory;
    if (source.reader == nullptr) {
      AMEM_ASSIGN(source.reader, JournalReader::Open(directory));
    }
    const bool named = options_.merge || (options_.follow && several_);
    const PrinterOptions printing{.json = options_.json,
                                  .wall = options_.wall,
                                  .name = named ? names_.ShortName(source.opening.who.session) : "",
                                  .origin_ns = Origin(source),
                                  .wall_offset_ns = OffsetOf(source)};
    stream.Add(directory, std::move(source.reader), {WishesOf(source), source.opening.before},
               {out_, source.opening.who, printing});
    return {};
  }

 private:
  [[nodiscard]] EventWishes WishesOf(const Source& source) const {
    EventWishes wishes = options_.wishes;
    for (const Position& p : options_.from) {
      std::uint64_t& from = p.seq ? wishes.from : wishes.since_ns;
      from = std::max(from, p.seq ? p.seq->value : OwnTime(source, p));
    }
    for (const Position& p : options_.to) {
      std::uint64_t& to = p.seq ? wishes.to : wishes.until_ns;
      to = std::min(to, p.seq ? p.seq->value : OwnTime(source, p));
    }
    return wishes;
  }
  [[nodiscard]] std::int64_t OffsetOf(const Source& source) const { return clock_.OffsetOf(source.opening.who); }
  // What "seconds since the opening" count from: of merged journals the first opening of all.
  [[nodiscard]] std::uint64_t Origin(const Source& source) const {
    if (!options_.merge) return source.opening.who.monotonic_ns;
    return static_cast<std::uint64_t>(WrappedDifference(origin_ns_, OffsetOf(source)));
  }
  [[nodiscard]] std::uint64_t OwnTime(const Source& source, const Position& time) const {
    if (!time.wall) return Origin(source) > kEnd - time.ns ? kEnd : Origin(source) + time.ns;
    const std::int64_t own = WrappedDifference(static_cast<std::int64_t>(time.ns), OffsetOf(source));
    return own < 0 ? 0 : static_cast<std::uint64_t>(own);
  }

  const LogOptions& options_;
  Output& out_;
  const bool several_;
  JobClock clock_;
  JobNames names_;
  std::int64_t origin_ns_ = 0;
};

// All sessions as one stream, or one after the other. Returns how many events were wanted.
std::uint64_t LogAll(std::vector<Source>& sources, const Logger& logger, const LogOptions& options, Output& out) {
  std::uint64_t wanted = 0;
  const std::size_t at_once = options.merge ? sources.size() : 1;
  for (std::size_t first = 0; first < sources.size() && !out.ReaderGone(); first += at_once) {
    EventStream stream;
    const SessionOpened& who = sources[first].opening.who;
    if (!options.merge && sources.size() > 1 && !options.json)
      out.Styled(Output::Style::kHeading, fmt::format("# session {}, {}", SessionText(who.session), NameOf(who))) << "\n";
    for (std::size_t i = first; i < first + at_once; ++i) Went(logger.Add(sources[i], stream));
    stream.Print(options.last, out);
    wanted += stream.wanted();
    Progress::OneDone();
  }
  return wanted;
}

// A live session: its events as they come.
struct Followed {
  std::string name;
  EventStream stream;
  int ended = 0;  // how often it was seen to have ended
};

// What live sessions do, as they do it.
int Follow(std::vector<Source>& sources, const Logger& logger, const LogOptions& options, Output& out) {
  constexpr int kReadsAfterTheEnd = 5;  // the last events of a process may become visible a little after its end
  std::list<Followed> followed;
  for (Source& source : sources) {
    Followed one{NameOf(source.opening.who), {}};
    if (!Went(logger.Add(source, one.stream))) continue;
    const Result<JournalInfo> info = one.stream.FirstInfo();
    if (!info || (sources.size() > 1 && !LivesNow(*info))) continue;
    if (!options.json) out << "# " << one.name << ", " << StatusText(*info) << ", " << Grouped(info->events) << " events\n";
    one.stream.Print(options.last.value_or(kLastWhenFollowed), out);
    followed.push_back(std::move(one));
  }
  if (followed.empty() && !AnyComplaint())
    return Complain("no session of these is live: `amem log` shows what the dead ones did");
  while (!followed.empty()) {
    std::erase_if(followed, [&](Followed& one) {
      const Result<JournalInfo> info = one.stream.FirstInfo();  // asked first: what it wrote before it ended is there then
      const bool any = one.stream.ReadOn();
      one.stream.Print({}, out);
      one.ended = info && (any || LivesNow(*info)) ? 0 : one.ended + 1;
      const bool over = !Went(info.status()) || one.ended >= kReadsAfterTheEnd;
      if (over && !options.json) out << "# " << one.name << " has ended\n";
      return over;
    });
    if (const Status written = out.Finish(); !written || out.ReaderGone()) break;
    if (!followed.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(options.interval_ms));
  }
  return ReadAll();
}

int RunLog(const LogOptions& given, Output& out) {
  if (const std::string wrong = WhatIsWrong(given); !wrong.empty()) return Complain(wrong, kUsage);
  std::vector<Source> sources;
  for (const auto& directory : FindSessions(given.targets))
    Went(AddSource(directory, given.wishes.allocation.has_value(), sources));
  std::vector<OpenedJournal> journals;
  for (const Source& source : sources) journals.push_back({&source.opening, source.reader.get()});
  LogOptions options = given;
  const JobClock clock = ClockOf(journals);
  for (std::vector<Position>* positions : {&options.from, &options.to})
    for (Position& position : *positions)
      if (const Status known = MakeTime(position, sources, clock); !known.ok()) return Complain(known.message(), kUsage);
  if (const std::string wrong = WhatIsWrong(options); !wrong.empty()) return Complain(wrong, kUsage);
  const Logger logger(options, sources, clock, out);
  if (options.follow) return Follow(sources, logger, options, out);
  const std::uint64_t wanted = LogAll(sources, logger, options, out);
  if (wanted == 0 && !AnyComplaint() && !options.json && !out.ReaderGone())
    Note(fmt::format("No event of {} matches.", Plural(sources.size(), "session")));
  return ReadAll();
}

void AddOptions(Arguments& arguments, LogOptions& options) {
  AddJson(arguments, options.json, "One JSON object a line");
  arguments
      .Flag("-f,--follow", options.follow,
            "Print the last 10 events, then those of live sessions as they happen; ends with the sessions")
      .paged = false;
  arguments.Flag("--merge", options.merge, "All sessions in one order of time, each line with its rank");
  const auto take_kinds = [&kinds = options.wishes.kinds](const std::vector<std::string>& given) {
    std::string wrong;
    for (const std::string& word : Split(fmt::format("{}", fmt::join(given, ",")), ','))
      if (wrong.empty()) wrong = AddKind(word, kinds);
    return wrong;
  };
  const auto take_pattern = [&pattern = options.wishes.pattern](const std::vector<std::string>& given) {
    const auto compiled = given.back().empty() ? Result(pattern) : CompilePattern(given.back());
    if (compiled) pattern = *compiled;
    return compiled ? "" : "--grep: " + compiled.status().message();
  };
  arguments.Take("--kind", "KIND", "Only these kinds of events, as in step-failed,cycle-failed", take_kinds).several = true;
  arguments.Take("--grep", "PATTERN", "Only events whose sentence matches this extended regular expression", take_pattern);
  arguments.Add("--allocation", "ID", options.wishes.allocation,
                "Only what is about this allocation, or an address while it is there");
  AddPosition(
      arguments, "--from", options.from,
      "Only from this position on: an event (--from=#17, or 2#17 of rank 2: in all sessions from then on), seconds since the "
      "session's opening, \"10 min ago\", or \"2026-11-21 "
      "20:20:58\", in local time unless UTC or +0100 is behind it")
      .several = true;
  AddPosition(arguments, "--to", options.to, "Only up to this position").several = true;
  arguments.Add("-n,--last", "N", options.last, "Only the last N of those, of each session, or with --merge of all");
  arguments.Flag("--wall", options.wall, "The local date and time of each event in place of seconds since the opening");
  arguments.Add("--interval", "MS", options.interval_ms, "With -f: poll interval in milliseconds; 200 by default", 1);
}

}  // namespace

Command LogCommand() {
  return WithOptions<LogOptions>(
      {kFailureGroup, "log", "The events, one a line; -f: as they happen",
       "  amem log DIR --last 20\n"
       "  amem log -f 4711                             what that process does, as it does it\n"
       "  amem log --merge --from \"10 min ago\" --wall\n"
       "  amem log DIR --rank 2 --grep 'device [01]'\n"
       "  amem log DIR --allocation 3                  the life of one allocation\n"
       "  amem log DIR --kind step-failed --kind cycle-failed\n"
       "  amem log DIR --json --from 12.5 --to=#1300\n"
       "  amem log DIR --merge --from=2#17             what all did from that event of rank 2 on\n"
       "A line has the event's number, seconds since the opening, the thread, and what happened. A shell takes a # that "
       "begins a word for a comment; write --from=#17.\n"},
      AddOptions, RunLog);
}

}  // namespace amem::tool
