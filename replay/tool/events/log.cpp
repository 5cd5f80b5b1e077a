// log: the events of journals, one a line.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <limits>

#include "journal/base/clock.h"
#include "replay/job/clock.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/tool/command.h"
#include "replay/tool/events/filter.h"
#include "replay/tool/events/merge.h"
#include "replay/tool/events/moment.h"
#include "replay/tool/events/printer.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {
namespace {

struct LogOptions {
  Directories directories;
  bool json = false, merge = false, wall = false;
  std::vector<std::string> kinds, ranks;  // empty: all
  std::optional<std::uint64_t> allocation, from, to;
  std::string since, until, grep;     // empty: any
  std::optional<std::uint64_t> last;  // only so many, after all other filters
};

constexpr std::uint64_t kEnd = std::numeric_limits<std::uint64_t>::max();

// The options, understood.
struct LogWishes {
  EventWishes events;
  std::vector<std::int32_t> ranks;
  std::optional<GivenTime> since, until;
};

// "a,b" and "a" "b" are the same.
std::vector<std::string> Split(const std::vector<std::string>& lists) {
  std::vector<std::string> words;
  for (const std::string& list : lists) {
    for (std::size_t begin = 0; begin <= list.size();) {
      const std::size_t end = std::min(list.find(',', begin), list.size());
      words.push_back(list.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return words;
}

// A kind as KindName writes it, blanks or hyphens between the words. Returns what is wrong, or an empty text.
std::string UnderstandKinds(const std::vector<std::string>& given, std::array<bool, kEventKinds>& kinds) {
  kinds.fill(given.empty());
  for (const std::string& word : Split(given)) {
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

std::string UnderstandRanks(const std::vector<std::string>& given, std::vector<std::int32_t>& ranks) {
  for (const std::string& word : Split(given)) {
    if (word.empty() || word.size() > 8 || word.find_first_not_of("0123456789") != std::string::npos)
      return fmt::format("--rank: \"{}\" is not a rank; give numbers, as in --rank 2 or --rank 0,3", word);
    ranks.push_back(std::stoi(word));
  }
  return {};
}

std::string UnderstandTimes(const LogOptions& options, LogWishes& wishes) {
  const std::uint64_t now = RealtimeNs();
  for (const auto& [name, text, time] :
       {std::tuple("--since", &options.since, &wishes.since), {"--until", &options.until, &wishes.until}}) {
    if (text->empty()) continue;
    *time = ParseTime(*text, now);
    if (!*time) return fmt::format("{}: \"{}\" is not a time; {}", name, *text, kTimesKnown);
  }
  const bool both = wishes.since && wishes.until && wishes.since->wall == wishes.until->wall;
  if (both && wishes.since->ns > wishes.until->ns)
    return fmt::format("--since {} is later than --until {}: no event is both", options.since, options.until);
  return {};
}

// Returns what is wrong, or an empty text.
std::string Understand(const LogOptions& options, LogWishes& wishes) {
  wishes.events.allocation = options.allocation;
  wishes.events.from = options.from.value_or(1);
  wishes.events.to = options.to.value_or(kEnd);
  if (wishes.events.from > wishes.events.to)
    return fmt::format("--from {} is behind --to {}: no event is both", wishes.events.from, wishes.events.to);
  if (!options.grep.empty()) {
    auto pattern = Pattern::Compile(options.grep);
    if (!pattern) return "--grep: " + pattern.status().message();
    wishes.events.pattern = *std::move(pattern);
  }
  for (const std::string& wrong : {UnderstandKinds(options.kinds, wishes.events.kinds),
                                   UnderstandRanks(options.ranks, wishes.ranks), UnderstandTimes(options, wishes)}) {
    if (!wrong.empty()) return wrong;
  }
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

Status AddSource(const std::filesystem::path& directory, const LogWishes& wishes, std::vector<Source>& sources) {
  auto reader = JournalReader::Open(directory);
  if (!reader) return reader.status();
  Result<Opening> opening = ReadOpening(**reader);
  if (!opening) return opening.status();
  const bool wanted = wishes.ranks.empty() || std::ranges::find(wishes.ranks, opening->who.rank) != wishes.ranks.end();
  if (!wanted) return {};
  if (sources.size() >= kKeptOpen) reader->reset();
  sources.push_back({*std::move(reader), directory, std::move(opening->who), opening->first_ns});
  return {};
}

std::vector<Source> FindSources(const LogOptions& options, const LogWishes& wishes, bool& failed) {
  std::vector<Source> sources;
  for (const auto& directory : FindSessions(options.directories, failed))
    failed |= !Went(AddSource(directory, wishes, sources));
  CompareClocks(sources, failed);
  if (sources.empty() && !failed && !wishes.ranks.empty()) {
    Complain("--rank: no session here has such a rank; `amem-replay ls` lists them");
    failed = true;
  }
  return sources;
}

// Everything about one session that does not depend on its events.
class Logger {
 public:
  Logger(const LogOptions& options, const LogWishes& wishes, const std::vector<Source>& sources)
      : options_(options), wishes_(wishes), clock_(Journals(sources)) {
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
            .several = options_.merge,
            .name = names_.ShortName(source.who.session),
            .origin_ns = Origin(source),
            .wall_offset_ns = offset};
  }
  [[nodiscard]] EventFilter Filter(const Source& source) const {
    return {wishes_.events, wishes_.since ? OwnTime(source, *wishes_.since) : 0,
            wishes_.until ? OwnTime(source, *wishes_.until) : kEnd};
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
  [[nodiscard]] std::uint64_t OwnTime(const Source& source, const GivenTime& time) const {
    if (!time.wall) return Origin(source) > kEnd - time.ns ? kEnd : Origin(source) + time.ns;
    const std::int64_t own = WrappedDifference(static_cast<std::int64_t>(time.ns), clock_.OffsetOf(source.who));
    return own < 0 ? 0 : static_cast<std::uint64_t>(own);
  }

  const LogOptions& options_;
  const LogWishes& wishes_;
  JobClock clock_;
  JobNames names_;
  std::int64_t origin_ns_ = 0;
};

Status LogSession(Source& source, const Logger& logger, const LogOptions& options, const EventWishes& wishes, bool with_header,
                  Output& out, ReadReport& report) {
  const auto opened = TakeReader(source);
  if (!opened) return opened.status();
  JournalReader& reader = **opened;
  const Result<JournalInfo> info = reader.Info();
  if (!info) return info.status();
  const SessionOpened& who = source.who;
  if (with_header && !options.json)
    out.Styled(Output::Style::kHeading, fmt::format("# session {}, {}", SessionText(who.session), NameOf(who))) << "\n";
  EventFilter filter = logger.Filter(source);
  if (wishes.allocation) {
    const Result<State> before = StateBefore(reader, *info);
    if (!before) return before.status();
    filter.StartFrom(*before);
  }
  EventPrinter printer(out, who, logger.Printing(source));
  std::deque<Event> last;
  const auto visit = [&](const Event& event) {
    if (!filter.Wants(event)) return true;
    if (!options.last) {
      printer.Print(event);
      return !out.ReaderGone();
    }
    last.push_back(event);
    if (last.size() > *options.last) last.pop_front();
    return true;
  };
  Result<ReadReport> read = reader.Read(filter.ReadFrom(), SequenceNumber{wishes.to}, visit);
  if (!read) return read.status();
  report = *std::move(read);
  for (const Event& event : last) printer.Print(event);
  return {};
}

// All sessions in one order of time.
void LogMerged(std::vector<Source>& sources, const Logger& logger, const LogOptions& options, const EventWishes& wishes,
               Output& out, bool& failed) {
  EventMerge merge;
  std::deque<EventPrinter> printers;  // by the number that the merge gives a source
  for (Source& source : sources) {
    auto reader = TakeReader(source);
    const Status added =
        reader ? merge.Add(source.directory, *std::move(reader), logger.OffsetOf(source), logger.Filter(source), wishes)
               : reader.status();
    failed |= !Went(added);
    if (added) printers.emplace_back(out, source.who, logger.Printing(source));
  }
  std::deque<EventMerge::Next> last;
  while (std::optional<EventMerge::Next> next = merge.Take()) {
    if (!options.last) {
      printers[next->source].Print(next->event);
    } else {
      last.push_back(*std::move(next));
      if (last.size() > *options.last) last.pop_front();
    }
    if (out.ReaderGone()) return;
  }
  for (const auto& [source, event] : last) printers[source].Print(event);
  for (const std::string& problem : merge.problems()) Complain(problem);
  failed |= !merge.problems().empty();
}

int RunLog(const LogOptions& options, Output& out) {
  LogWishes wishes;
  if (const std::string wrong = Understand(options, wishes); !wrong.empty()) return Complain(wrong, kUsage);
  bool failed = false;
  std::vector<Source> sources = FindSources(options, wishes, failed);
  const Logger logger(options, wishes, sources);
  if (options.merge) {
    LogMerged(sources, logger, options, wishes.events, out, failed);
    return failed ? kCannotRead : kFine;
  }
  for (Source& source : sources) {
    ReadReport damage;
    const bool header = sources.size() > 1;
    failed |= !out.ReaderGone() && !Went(LogSession(source, logger, options, wishes.events, header, out, damage));
    failed |= ComplainAboutDamage(source.directory, damage);
    Progress::OneDone();
  }
  return failed ? kCannotRead : kFine;
}

void AddOptions(Arguments& arguments, LogOptions& options) {
  AddDirectories(arguments, options.directories);
  AddJson(arguments, options.json, "One JSON object a line");
  arguments.Flag("--merge", options.merge, "All sessions in one order of time, each line with its rank");
  arguments.Add("--rank", "RANK", options.ranks, "Only the sessions of these ranks, as in 2 or 0,3");
  arguments.Add("--kind", "KIND", options.kinds, "Only these kinds of events, as in step-failed,cycle-failed");
  arguments.Add("--grep", "PATTERN", options.grep, "Only events whose sentence matches this extended regular expression");
  arguments.Add("--allocation", "ID", options.allocation,
                "Only what is about this allocation, or an address while it is there");
  arguments.Add("--from", "SEQ", options.from, "Only from this sequence number on");
  arguments.Add("--to", "SEQ", options.to, "Only up to this sequence number");
  arguments.Add("--since", "TIME", options.since,
                "Only from then on: seconds since the session's opening, or \"10 min ago\", or \"2026-11-21 20:20:58\" in UTC");
  arguments.Add("--until", "TIME", options.until, "Only up to then");
  arguments.Add("--last", "N", options.last, "Only the last N of those, of each session, or with --merge of all");
  arguments.Flag("--wall", options.wall, "The date and time (UTC) of each event in place of seconds since the opening");
}

}  // namespace

Command LogCommand() {
  return {"log", "The events, one a line: number, seconds since the opening, thread, what happened",
          "  amem-replay log DIR --last 20\n"
          "  amem-replay log --merge --since \"10 min ago\" --wall\n"
          "  amem-replay log DIR --rank 2 --grep 'device [01]'\n"
          "  amem-replay log DIR --allocation 3           the life of one allocation\n"
          "  amem-replay log DIR --kind step-failed --kind cycle-failed\n"
          "  amem-replay log DIR --json --since 12.5 --until 13\n",
          [](Arguments& arguments) { return SetUp<LogOptions>(arguments, AddOptions, RunLog); }};
}

}  // namespace amem::tool
