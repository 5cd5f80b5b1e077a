// why --slow: who made each phase of a pause or resume slow.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/story/job_cycles.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

constexpr std::size_t kSlack = 16;  // ranks may have failed attempts that others have not

struct CyclePhase {
  std::string name;  // "arrival", "pause: save"
  bool undo = false;
  std::uint64_t took_ns = 0;
  SessionId last;                                          // whose part ended last
  std::uint64_t cost_ns = 0;                               // after the last but one
  std::vector<std::pair<SessionId, std::uint64_t>> waits;  // from the end of each one's own part to that of the last one's
  std::string step;                                        // of the last one, the longest; empty: it had none
  std::uint64_t step_ns = 0;
};
struct CriticalPath {                   // of one pause or resume
  std::string name;                     // "pause 3"
  std::uint64_t began_ns = 0;           // wall clock: the first one came
  std::uint64_t took_ns = 0;            // until the last one was through
  std::uint64_t members = 0, seen = 0;  // sessions, and those whose journals are here
  std::string outcome;                  // the worst of all
  SavedContents contents;               // of all
  std::vector<CyclePhase> phases;
};

// ---- who was last ----------------------------------------------------------------------------------------------------------

// One session's part, on the clock of all.
struct Part {
  SessionId session;
  std::int64_t offset_ns = 0;
  const Attempt* attempt = nullptr;
  std::vector<Attempt::PhaseTaken> phases;
  [[nodiscard]] std::int64_t At(const Moment& moment) const { return WrappedSum(moment.time_ns, offset_ns); }
  [[nodiscard]] bool Arrives(std::size_t nth) const { return nth == 0 && attempt->arrived; }
};

std::uint64_t Positive(std::int64_t difference_ns) { return difference_ns < 0 ? 0 : static_cast<std::uint64_t>(difference_ns); }

// The nth phase of each part that has the same.
CyclePhase JoinPhase(const std::vector<Part>& parts, std::size_t nth, const Part& like) {
  CyclePhase phase{.name = like.Arrives(nth) ? "arrival" : std::string(ToText(like.phases[nth].phase)),
                   .undo = IsUndo(like.phases[nth].phase, like.attempt->kind)};
  std::vector<std::pair<std::int64_t, const Part*>> ends;
  std::int64_t begun = 0, over = 0;
  for (const Part& part : parts) {
    if (nth >= part.phases.size() || part.phases[nth].phase != like.phases[nth].phase || part.Arrives(nth) != like.Arrives(nth))
      continue;
    const Attempt::PhaseTaken& taken = part.phases[nth];
    const std::int64_t from = part.At(taken.begun);
    const std::int64_t to = part.At(taken.decided.time_ns > taken.worked.time_ns ? taken.decided : taken.worked);
    begun = ends.empty() ? from : std::min(begun, from);
    over = ends.empty() ? to : std::max(over, to);
    ends.emplace_back(part.At(taken.worked), &part);
  }
  std::ranges::sort(ends, {}, [](const auto& end) { return std::pair(end.first, end.second->session); });
  const auto& [last_ns, last] = ends.back();
  phase.took_ns = Positive(WrappedDifference(over, begun));
  phase.last = last->session;
  if (const auto& longest = last->phases[nth].longest) phase.step = ToText(*longest);
  phase.step_ns = last->phases[nth].longest_ns;
  phase.cost_ns = ends.size() < 2 ? 0 : Positive(WrappedDifference(last_ns, ends[ends.size() - 2].first));
  for (const auto& [end_ns, part] : ends) phase.waits.emplace_back(part->session, Positive(WrappedDifference(last_ns, end_ns)));
  return phase;
}

CriticalPath PathOf(const std::vector<Part>& parts) {
  const Part& first = parts.front();
  CriticalPath path{.seen = parts.size(), .outcome = "done"};
  const auto longest = std::ranges::max_element(parts, {}, [](const Part& part) { return part.phases.size(); });
  std::int64_t began = first.At(first.attempt->came()), ended = first.At(first.attempt->last);
  std::uint64_t number = 0;
  for (const Part& part : parts) {
    const Attempt& a = *part.attempt;
    began = std::min(began, part.At(a.came()));
    ended = std::max(ended, part.At(a.last));
    number = std::max(number, a.begun ? a.cycle : 0);
    const char* outcome = a.open() ? "not over" : a.end == Attempt::End::kDone ? "done" : "failed";
    if (a.end == Attempt::End::kFailed || path.outcome == "done") path.outcome = outcome;
    path.contents += a.contents;
  }
  path.name = fmt::format("{} {}{}", ToText(first.attempt->kind), number == 0 ? "that never began" : std::to_string(number),
                          first.attempt->tag.empty() ? "" : " of tag " + first.attempt->tag);
  path.members = std::max<std::uint64_t>(first.attempt->members.size(), parts.size());
  path.began_ns = Positive(began);
  path.took_ns = Positive(WrappedDifference(ended, began));
  for (std::size_t i = 0; i < longest->phases.size(); ++i) path.phases.push_back(JoinPhase(parts, i, *longest));
  return path;
}

// Of the last so many pauses and resumes, oldest first.
std::vector<CriticalPath> PathsOf(const std::vector<SessionStory>& stories, std::uint64_t last) {
  std::vector<JobClock::Journal> journals;
  for (const SessionStory& s : stories)
    journals.push_back({&s.who(), s.first.time_ns, s.for_clock, s.findings.info.set_clock.monotonic_ns});
  const JobClock clock(journals);
  std::vector<TimedStory> timed;
  for (const SessionStory& s : stories)
    timed.push_back({&s.who(), clock.OffsetOf(s.who()), s.first.time_ns, s.last.time_ns, s.attempts});
  const std::vector<JobCycle> cycles = JoinAttempts(timed);
  std::vector<CriticalPath> paths;
  for (std::size_t i = cycles.size() - std::min<std::size_t>(cycles.size(), last); i < cycles.size(); ++i) {
    std::vector<Part> parts;
    for (const auto& [session, index] : cycles[i].parts) {
      const Attempt& attempt = timed[session].attempts[index];
      parts.push_back({timed[session].who->session, timed[session].offset_ns, &attempt, PhasesWithArrival(attempt)});
    }
    std::ranges::stable_sort(parts, {}, [](const Part& part) { return part.At(part.attempt->came()); });
    paths.push_back(PathOf(parts));
  }
  return paths;
}

// ---- what is printed -------------------------------------------------------------------------------------------------------

// Phases take milliseconds, of which a tenth matters.
std::string Time(std::uint64_t ns) {
  const bool milliseconds = ns >= 1'000'000 && ns < 1'000'000'000;
  return milliseconds ? fmt::format("{:.1f} ms", static_cast<double>(ns) / 1e6) : DurationText(ns);
}

void PrintCycle(Output& out, const CriticalPath& cycle, const JobNames& names) {
  out.Styled(Output::Style::kHeading,
             fmt::format("{} ({}) at {}: {} in {}", cycle.name, Plural(cycle.members, "process", "processes"),
                         WallText(cycle.began_ns), cycle.outcome, Time(cycle.took_ns)))
      << "\n";
  if (cycle.contents) out << "  contents: " << ToText(cycle.contents) << "\n";
  if (cycle.seen < cycle.members)
    out << "  of " << Plural(cycle.members - cycle.seen, "process", "processes")
        << " there is no journal here: who was last among the others is told\n";
  std::vector<std::vector<std::string>> rows = {{"  PHASE", "TOOK", "LAST", "OTHERS WAITED", "LONGEST STEP OF THE LAST"}};
  for (const CyclePhase& phase : cycle.phases) {
    const auto& [first, waited_ns] = phase.waits.front();  // whose part ended first
    rows.push_back({fmt::format("  {}{}", phase.undo ? "undo, " : "", phase.name), Time(phase.took_ns),
                    names.ShortName(phase.last),
                    phase.waits.size() < 2 ? "" : fmt::format("{} ({})", Time(waited_ns), names.ShortName(first)),
                    phase.step.empty() ? "" : fmt::format("{}: {}", phase.step, Time(phase.step_ns))});
  }
  PrintTable(out, rows);
}

struct Share {
  std::uint64_t times_last = 0, cost_ns = 0;
};

// How often each session was the last one, and how much sooner the phases would have been over without it.
std::map<SessionId, Share> Shares(const std::vector<CriticalPath>& cycles) {
  std::map<SessionId, Share> shares;
  for (const CriticalPath& cycle : cycles) {
    for (const CyclePhase& phase : cycle.phases) {
      if (phase.waits.size() < 2) continue;
      Share& share = shares[phase.last];
      ++share.times_last;
      share.cost_ns += phase.cost_ns;
    }
  }
  return shares;
}

void PrintShares(Output& out, const std::map<SessionId, Share>& shares, std::size_t cycles, const JobNames& names) {
  std::vector<std::pair<SessionId, Share>> sorted(shares.begin(), shares.end());
  std::ranges::stable_sort(sorted, std::greater(), [](const auto& s) { return s.second.cost_ns; });
  out << "\nOver " << Plural(cycles, "pause and resume", "pauses and resumes") << ":\n";
  std::vector<std::vector<std::string>> rows = {{"  LAST", "PHASES", "COST (had it been as fast as the next one)"}};
  for (const auto& [session, share] : sorted)
    rows.push_back({"  " + names.ShortName(session), Grouped(share.times_last), Time(share.cost_ns)});
  PrintTable(out, rows);
}

// A session and its rank, before other things of it.
Json With(SessionId session, const JobNames& names, const Json& more = Json::object()) {
  const std::int32_t rank = names.RankOf(session);
  Json all = {{"session", SessionText(session)}, {"rank", rank < 0 ? Json(nullptr) : Json(rank)}};
  all.update(more);
  return all;
}

Json ToJson(const CriticalPath& cycle, const JobNames& names) {
  Json phases = Json::array();
  for (const CyclePhase& phase : cycle.phases) {
    Json waits = Json::array();
    for (const auto& [session, waited_ns] : phase.waits) waits.push_back(With(session, names, {{"waited_ns", waited_ns}}));
    Json step = nullptr;
    if (!phase.step.empty()) step = {{"text", phase.step}, {"took_ns", phase.step_ns}};
    phases.push_back({{"phase", phase.name},
                      {"undo", phase.undo},
                      {"took_ns", phase.took_ns},
                      {"last", With(phase.last, names)},
                      {"cost_ns", phase.cost_ns},
                      {"waits", waits},
                      {"longest_step", step}});
  }
  return {{"cycle", cycle.name},
          {"outcome", cycle.outcome},
          {"began_wall_ns", cycle.began_ns},
          {"took_ns", cycle.took_ns},
          {"sessions", cycle.members},
          {"journals", cycle.seen},
          {"phases", phases},
          {"contents", cycle.contents ? ToJson(cycle.contents) : Json(nullptr)}};
}

Json ToJson(const std::vector<CriticalPath>& cycles, const JobNames& names) {
  Json list = Json::array(), shares = Json::array();
  for (const CriticalPath& cycle : cycles) list.push_back(ToJson(cycle, names));
  for (const auto& [session, share] : Shares(cycles))
    shares.push_back(With(session, names, {{"phases_last", share.times_last}, {"cost_ns", share.cost_ns}}));
  return {{"cycles", list}, {"last", shares}};
}

}  // namespace

int PrintSlowest(const Targets& targets, std::uint64_t last, bool all, bool json, Output& out) {
  JobNames names;
  std::vector<SessionStory> stories;
  const std::size_t kept = std::max<std::size_t>(kAttemptsKept, 2 * (last + kSlack));  // a half of them are the last
  ForEachJournal(SelectSessions(targets, all).latest, [&](JournalReader& reader, ReadReport& damage) -> Status {
    AMEM_ASSIGN(auto read, ReadAttempts(reader, kept));
    damage = read.findings.report;
    stories.push_back(std::move(read));
    stories.back().attempts = TakeAttempts(stories.back());
    stories.back().times = {};
    return {};
  });
  if (stories.empty()) return kCannotRead;
  DropCopies(stories);
  for (const SessionStory& story : stories) names.Add(story.who());
  const std::vector<CriticalPath> cycles = PathsOf(stories, last);
  if (json) {
    PrintJson(out, ToJson(cycles, names), "critical-path");
  } else if (cycles.empty()) {
    out << "no pause or resume has begun\n";
  } else {
    for (std::size_t i = 0; i < cycles.size(); ++i) {
      out << (i == 0 ? "" : "\n");
      PrintCycle(out, cycles[i], names);
    }
    if (const auto shares = Shares(cycles); !shares.empty()) PrintShares(out, shares, cycles.size(), names);
  }
  return ReadAll();
}

}  // namespace amem::tool
