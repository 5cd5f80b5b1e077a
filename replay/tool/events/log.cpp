// log: the events of journals, one a line; of live sessions also as they happen. Their processes are not touched: only their
// journals are read.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <limits>
#include <list>
#include <thread>

#include "replay/job/clock.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/tool/command.h"
#include "replay/tool/events/filter.h"
#include "replay/tool/events/merge.h"
#include "replay/tool/events/printer.h"
#include "replay/tool/position.h"
#include "replay/tool/targets.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {
namespace {

struct LogOptions {
  Targets targets{.names = {}, .ranks = {}, .one_process = true};
  bool json = false, merge = false, wall = false, follow = false;
  std::vector<std::string> kinds;  // empty: all
  std::optional<std::uint64_t> allocation;
  std::vector<std::string> from, to;  // positions; all of them count
  std::string grep;                   // empty: any
  std::optional<std::uint64_t> last;  // only so many, after all other filters
  std::uint32_t interval_ms = 200;
};

constexpr std::uint64_t kEnd = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kLastWhenFollowed = 10;

// The options, understood.
struct LogWishes {
  EventWishes events;
  std::vector<Position> since, until;  // times
};

// A kind as KindName writes it, blanks or hyphens between the words. Returns what is wrong, or an empty text.
std::string UnderstandKinds(const std::vector<std::string>& given, std::array<bool, kEventKinds>& kinds) {
  kinds.fill(given.empty());
  for (const std::string& word : SplitAtCommas(given)) {
    std::string name = word;
    std::ranges::replace_if(
        name, [](char c) { return c == '-' || c == '_'; }, ' ');
    const std::optional<std::size_t> kind = KindOf(name);
    if (!kind) {
      std::vector<std::string> known;
      for (std::size_t k = 0; k < kEventKinds; ++k) known.push_back(KindWord(k));
      return fmt::format("--kind: there is no kind of event named \"{}\"; the kinds are {}", word, fmt::join(known, ", "));
    }
    kinds[*kind] = true;
  }
  return {};
}

// Sequence numbers go into `seq` by `narrower`, times into `times`.
template <class Narrower>
std::string UnderstandPositions(const char* option, const std::vector<std::string>& given, std::uint64_t& seq,
                                std::vector<Position>& times, const Narrower& narrower) {
  for (const std::string& text : given) {
    const Result<Position> position = UnderstandPosition(option, text);
    if (!position) return position.status().message();
    if (position->rank) return fmt::format("{} {}: give #{} here, and the rank by --rank", option, text, position->seq->value);
    if (position->seq) seq = narrower(seq, position->seq->value);
    if (!position->seq) times.push_back(*position);
  }
  return {};
}

bool NoneIsBoth(const LogWishes& wishes) {
  if (wishes.events.from > wishes.events.to) return true;
  return std::ranges::any_of(wishes.since, [&](const Position& since) {
    return std::ranges::any_of(wishes.until,
                               [&](const Position& until) { return since.wall == until.wall && since.ns > until.ns; });
  });
}

// Returns what is wrong, or an empty text.
std::string Understand(const LogOptions& options, LogWishes& wishes) {
  wishes.events.allocation = options.allocation;
  const auto later = [](std::uint64_t a, std::uint64_t b) { return std::max(a, b); };
  const auto earlier = [](std::uint64_t a, std::uint64_t b) { return std::min(a, b); };
  for (const std::string& wrong : {UnderstandPositions("--from", options.from, wishes.events.from, wishes.since, later),
                                   UnderstandPositions("--to", options.to, wishes.events.to, wishes.until, earlier),
                                   UnderstandKinds(options.kinds, wishes.events.kinds)}) {
    if (!wrong.empty()) return wrong;
  }
  if (NoneIsBoth(wishes))
    return fmt::format("--from {} is behind --to {}: no event is both", fmt::join(options.from, ", "),
                       fmt::join(options.to, ", "));
  if (options.follow && !options.to.empty()) return "give --follow or --to, not both";
  if (options.grep.empty()) return {};
  auto pattern = Pattern::Compile(options.grep);
  if (!pattern) return "--grep: " + pattern.status().message();
  wishes.events.pattern = *std::move(pattern);
  return {};
}

// A session whose events are wanted.
struct Source {
  // Of the first ones: to open a journal is to check the whole file. There may be more of them than open files.
  std::unique_ptr<JournalReader> reader;
  std::filesystem::path directory;
  SessionOpened who;
  std::uint64_t first_ns = 0;
  ReadyCommunicators for_clock = {};
};

constexpr std::size_t kKeptOpen = 32;

Result<std::unique_ptr<JournalReader>> TakeReader(Source& source) {
  if (source.reader != nullptr) return std::move(source.reader);
  return JournalReader::Open(source.directory);
}

// True: that went well. Otherwise it is said.
bool Went(const Status& status) {
  if (!status.ok()) Complain(status.message());
  return status.ok();
}

Status ReadForClock(Source& source) {
  const bool kept = source.reader != nullptr;
  auto reader = TakeReader(source);
  const Result<JournalInfo> info = reader ? (*reader)->Info() : reader.status();
  if (!info) return info.status();
  source.for_clock = ReadCommunicators(**reader, *info);
  if (kept) source.reader = *std::move(reader);
  return {};
}

// Reads what tells the clocks of several boots apart; most jobs have one boot, and their journals need not be read twice.
void CompareClocks(std::vector<Source>& sources, bool& failed) {
  std::vector<const SessionOpened*> opened;
  for (const Source& source : sources) opened.push_back(&source.who);
  if (!JobClock::NeedsCommunicators(opened)) return;
  for (Source& source : sources) failed |= !Went(ReadForClock(source));
}

Status AddSource(const std::filesystem::path& directory, std::vector<Source>& sources) {
  AMEM_ASSIGN(auto reader, JournalReader::Open(directory));
  AMEM_ASSIGN(auto opening, ReadOpening(*reader));
  if (sources.size() >= kKeptOpen) reader.reset();
  sources.push_back({std::move(reader), directory, std::move(opening.who), opening.first_ns});
  return {};
}

std::vector<Source> FindSources(const LogOptions& options, bool& failed) {
  std::vector<Source> sources;
  for (const auto& directory : FindSessions(options.targets, failed)) failed |= !Went(AddSource(directory, sources));
  CompareClocks(sources, failed);
  return sources;
}

// Everything about one session that does not depend on its events.
class Logger {
 public:
  Logger(const LogOptions& options, const LogWishes& wishes, const std::vector<Source>& sources)
      : options_(options), wishes_(wishes), several_(sources.size() > 1), clock_(Journals(sources)) {
    for (const Source& source : sources) names_.Add(source.who);
    for (const Source& source : sources) {
      const std::int64_t opened = WrappedSum(source.who.monotonic_ns, clock_.OffsetOf(source.who));
      origin_ns_ = origin_ns_ == 0 ? opened : std::min(origin_ns_, opened);
    }
  }

  [[nodiscard]] PrinterOptions Printing(const Source& source) const {
    const std::int64_t offset = clock_.OffsetOf(source.who);
    return {.json = options_.json,
            .wall = options_.wall,
            .several = options_.merge || (options_.follow && several_),
            .name = names_.ShortName(source.who.session),
            .origin_ns = Origin(source),
            .wall_offset_ns = offset};
  }
  [[nodiscard]] EventFilter Filter(const Source& source) const {
    std::uint64_t since = 0, until = kEnd;
    for (const Position& time : wishes_.since) since = std::max(since, OwnTime(source, time));
    for (const Position& time : wishes_.until) until = std::min(until, OwnTime(source, time));
    return {wishes_.events, since, until};
  }
  [[nodiscard]] std::int64_t OffsetOf(const Source& source) const { return clock_.OffsetOf(source.who); }

 private:
  static JobClock Journals(const std::vector<Source>& sources) {
    std::vector<JobClock::Journal> journals;
    for (const Source& source : sources) journals.push_back({&source.who, source.first_ns, source.for_clock});
    return JobClock(journals);
  }
  // What "seconds since the opening" count from: of merged journals the first opening of all.
  [[nodiscard]] std::uint64_t Origin(const Source& source) const {
    if (!options_.merge) return source.who.monotonic_ns;
    return static_cast<std::uint64_t>(WrappedDifference(origin_ns_, clock_.OffsetOf(source.who)));
  }
  [[nodiscard]] std::uint64_t OwnTime(const Source& source, const Position& time) const {
    if (!time.wall) return Origin(source) > kEnd - time.ns ? kEnd : Origin(source) + time.ns;
    const std::int64_t own = WrappedDifference(static_cast<std::int64_t>(time.ns), clock_.OffsetOf(source.who));
    return own < 0 ? 0 : static_cast<std::uint64_t>(own);
  }

  const LogOptions& options_;
  const LogWishes& wishes_;
  const bool several_;
  JobClock clock_;
  JobNames names_;
  std::int64_t origin_ns_ = 0;
};

// The wanted events of sessions in one order of time, on the way to the output.
class Stream {
 public:
  Stream(const Logger& logger, const EventWishes& wishes, Output& out) : logger_(logger), wishes_(wishes), out_(out) {}

  Status Add(Source& source) {
    AMEM_ASSIGN(auto reader, TakeReader(source));
    AMEM_TRY(merge_->Add(source.directory, std::move(reader), logger_.OffsetOf(source), logger_.Filter(source), wishes_));
    printers_.emplace_back(out_, source.who, logger_.Printing(source));
    return {};
  }
  // Prints what there is; of that the last ones only, if `last` is given.
  void Print(std::optional<std::uint64_t> last) {
    std::deque<EventMerge::Next> kept;
    while (std::optional<EventMerge::Next> next = out_.ReaderGone() ? std::nullopt : merge_->Take()) {
      ++wanted_;
      if (!last) printers_[next->source].Print(next->event);
      if (last) kept.push_back(*std::move(next));
      if (last && kept.size() > *last) kept.pop_front();
    }
    for (const auto& [source, event] : kept) printers_[source].Print(event);
  }
  // Says what could not be read. True: there was any.
  bool Complain() const {
    for (const std::string& problem : merge_->problems()) tool::Complain(problem);
    return !merge_->problems().empty();
  }
  [[nodiscard]] EventMerge& merge() { return *merge_; }
  [[nodiscard]] std::uint64_t wanted() const { return wanted_; }

 private:
  const Logger& logger_;
  const EventWishes& wishes_;
  Output& out_;
  std::unique_ptr<EventMerge> merge_ = std::make_unique<EventMerge>();
  std::deque<EventPrinter> printers_;  // by the number that the merge gives a source
  std::uint64_t wanted_ = 0;
};

// All sessions as one stream, or one after the other. Returns how many events were wanted.
std::uint64_t LogAll(std::vector<Source>& sources, const Logger& logger, const LogOptions& options, const EventWishes& wishes,
                     Output& out, bool& failed) {
  std::uint64_t wanted = 0;
  const std::size_t at_once = options.merge ? sources.size() : 1;
  for (std::size_t first = 0; first < sources.size() && !out.ReaderGone(); first += at_once) {
    Stream stream(logger, wishes, out);
    const SessionOpened& who = sources[first].who;
    if (!options.merge && sources.size() > 1 && !options.json)
      out.Styled(Output::Style::kHeading, fmt::format("# session {}, {}", SessionText(who.session), NameOf(who))) << "\n";
    for (std::size_t i = first; i < first + at_once; ++i) failed |= !Went(stream.Add(sources[i]));
    stream.Print(options.last);
    failed |= stream.Complain();
    wanted += stream.wanted();
    Progress::OneDone();
  }
  return wanted;
}

// A live session: its events as they come.
struct Followed {
  std::string name;
  Stream stream;
  int ended = 0;  // how often it was seen to have ended

  // False: it has ended, and all of it was printed.
  Result<bool> GoOn() {
    const Result<JournalInfo> info = stream.merge().InfoOf(0);  // asked first: what it wrote before it ended is there then
    const bool any = stream.merge().ReadOn();
    stream.Print({});
    if (!info) return info.status();
    return any || LivesNow(*info);
  }
};

// What live sessions do, as they do it.
int Follow(std::vector<Source>& sources, const Logger& logger, const LogOptions& options, const EventWishes& wishes,
           Output& out, bool failed) {
  constexpr int kLooksBeforeForgotten = 5;  // the last events of a process may become visible a little after its end
  std::list<Followed> followed;
  for (Source& source : sources) {
    Followed one{NameOf(source.who), Stream(logger, wishes, out)};
    const Status added = one.stream.Add(source);
    failed |= !Went(added);
    const auto info = added ? one.stream.merge().InfoOf(0) : Result<JournalInfo>(added);
    if (!info || (sources.size() > 1 && !LivesNow(*info))) continue;
    if (!options.json) out << "# " << one.name << ", " << StatusText(*info) << ", " << Grouped(info->events) << " events\n";
    one.stream.Print(options.last.value_or(kLastWhenFollowed));
    followed.push_back(std::move(one));
  }
  if (followed.empty() && !failed) return Complain("no session of these is live: `amem log` shows what the dead ones did");
  while (!followed.empty()) {
    std::erase_if(followed, [&](Followed& one) {
      const Result<bool> lives = one.GoOn();
      failed |= !Went(lives.status());
      one.ended = lives.ok() && *lives ? 0 : one.ended + 1;
      const bool over = !lives.ok() || one.ended >= kLooksBeforeForgotten;
      if (over) failed |= one.stream.Complain();
      if (over && !options.json) out << "# " << one.name << " has ended\n";
      return over;
    });
    if (const Status written = out.Finish(); !written || out.ReaderGone()) break;
    if (!followed.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(options.interval_ms));
  }
  return failed ? kCannotRead : kFine;
}

int RunLog(const LogOptions& options, Output& out) {
  LogWishes wishes;
  if (const std::string wrong = Understand(options, wishes); !wrong.empty()) return Complain(wrong, kUsage);
  bool failed = false;
  std::vector<Source> sources = FindSources(options, failed);
  const Logger logger(options, wishes, sources);
  if (options.follow) return Follow(sources, logger, options, wishes.events, out, failed);
  const std::uint64_t wanted = LogAll(sources, logger, options, wishes.events, out, failed);
  if (wanted == 0 && !failed && !options.json && !out.ReaderGone())
    std::fprintf(stderr, "None of the events of %s is wanted.\n", Plural(sources.size(), "session").c_str());
  return failed ? kCannotRead : kFine;
}

void AddOptions(Arguments& arguments, LogOptions& options) {
  AddTargets(arguments, options.targets);
  AddJson(arguments, options.json, "One JSON object a line");
  arguments
      .Flag("-f,--follow", options.follow,
            "Begin with the last 10, and go on with what live sessions do, as they do it; ends when they do")
      .paged = false;
  arguments.Flag("--merge", options.merge, "All sessions in one order of time, each line with its rank");
  arguments.Add("--kind", "KIND", options.kinds, "Only these kinds of events, as in step-failed,cycle-failed");
  arguments.Add("--grep", "PATTERN", options.grep, "Only events whose sentence matches this extended regular expression");
  arguments.Add("--allocation", "ID", options.allocation,
                "Only what is about this allocation, or an address while it is there");
  arguments.Add(
      "--from", kPosition, options.from,
      "Only from there on: an event (--from=#17), seconds since the session's opening, \"10 min ago\", or \"2026-11-21 "
      "20:20:58\", in local time unless UTC or +0100 is behind it");
  arguments.Add("--to", kPosition, options.to, "Only up to there");
  arguments.Add("--last", "N", options.last, "Only the last N of those, of each session, or with --merge of all");
  arguments.Flag("--wall", options.wall, "The local date and time of each event in place of seconds since the opening");
  arguments.Add("--interval", "MS", options.interval_ms, "With -f: look every so many milliseconds; 200 by default",
                std::uint32_t{1});
}

}  // namespace

Command LogCommand() {
  return {kFailureGroup, "log", "The events, one a line; -f: as they happen",
          "  amem log DIR --last 20\n"
          "  amem log -f 4711                             what that process does, as it does it\n"
          "  amem log --merge --from \"10 min ago\" --wall\n"
          "  amem log DIR --rank 2 --grep 'device [01]'\n"
          "  amem log DIR --allocation 3                  the life of one allocation\n"
          "  amem log DIR --kind step-failed --kind cycle-failed\n"
          "  amem log DIR --json --from 12.5 --to=#1300\n"
          "A line has the event's number, seconds since the opening, the thread, and what happened. A shell takes a # that "
          "begins a "
          "word for a comment; write --from=#17.\n",
          [](Arguments& arguments) { return SetUp<LogOptions>(arguments, AddOptions, RunLog); }};
}

}  // namespace amem::tool
