#include "replay/diagnosis/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <tuple>

#include "replay/diagnosis/explanation.h"
#include "replay/job/fold.h"
#include "replay/job/jobs.h"
#include "replay/job/sessions.h"
#include "replay/job/story/job_cycles.h"

namespace amem {
namespace {

void Count(const Roster& roster, Verdict& verdict) {
  Verdict::Totals& totals = verdict.totals;
  for (const SessionStory& j : roster.journals()) {
    ++totals.journals;
    totals.events += j.findings.events;
    const auto [pauses, resumes, failures] = j.AllAttempts();
    totals.pauses = std::max(totals.pauses, pauses);
    totals.resumes = std::max(totals.resumes, resumes);
    totals.failures = std::max(totals.failures, failures);
    const Holdings holdings = Measure(j.findings.state);
    totals.held += holdings.own_device_resident + holdings.pools_resident;
    totals.released += holdings.own_device - std::min(holdings.own_device, holdings.own_device_resident);  // slabs are larger
    totals.released += holdings.pools - holdings.pools_resident;
  }
}

void NoteDamage(const Roster& roster, Verdict& verdict) {
  for (const SessionStory& j : roster.journals())
    for (std::string& damage : DamageOf(j.findings.info.directory, j.findings.report))
      if (std::ranges::find(verdict.damage, damage) == verdict.damage.end()) verdict.damage.push_back(std::move(damage));
}

// An earlier attempt that failed and was repeated with success is not what is wrong now, but worth knowing.
void NoteOvercome(const Roster& roster, Verdict& verdict) {
  std::set<std::string> said;
  for (const SessionStory& j : roster.journals()) {
    const bool overcome = j.Last().end == Attempt::End::kDone;
    for (const Attempt& attempt : j.attempts) {
      if (!overcome || attempt.end != Attempt::End::kFailed) continue;
      const std::string cycle = NameOf(attempt);
      if (!said.insert(cycle).second) continue;
      verdict.notes.push_back(fmt::format("an earlier try at {} failed and was overcome: {}", cycle, attempt.failure));
    }
  }
}

// What explains how long it took.
void NoteContents(const Roster& roster, Verdict& verdict) {
  verdict.contents = LastContents(roster.journals());
  for (const PauseContents& last : verdict.contents)
    verdict.notes.push_back(fmt::format("of {} in pause {} ({}): {}", last.tag.empty() ? "NCCL's contents" : "tag " + last.tag,
                                        last.cycle, Plural(last.processes, "process", "processes"), ToText(last.contents)));
}

// What explains how little was freed. Of cards whose names are known, which is so with AMEM_NETWORK=renew.
void NoteCards(const Roster& roster, Verdict& verdict) {
  struct Left {
    CardHoldings::Regions regions;
    std::vector<SessionId> in;
  };
  std::map<std::pair<std::string, std::string>, Left> left;  // by card and reason
  for (const SessionStory& j : roster.journals()) {
    for (const auto& [name, card] : MeasureCards(j.findings.state)) {
      for (const auto& [why, regions] : card.by_why) {
        if (name.empty()) continue;
        Left& one = left[{name, why}];
        one.regions.count += regions.count;
        one.regions.bytes += regions.bytes;
        one.in.push_back(j.session());
      }
    }
  }
  for (const auto& [of, one] : left)
    verdict.notes.push_back(fmt::format("of {} {} holds {} in {} that a pause leaves: {}", roster.names().Names(one.in),
                                        of.first, FormatBytes(one.regions.bytes), Plural(one.regions.count, "region"),
                                        of.second));
}

// A job that somebody outside keeps paused looks like one that hangs, and nothing in it is wrong.
void NoteOutside(const Roster& roster, Verdict& verdict) {
  std::vector<SessionId> kept, frozen;
  for (const SessionStory& j : roster.journals()) {
    if (j.outside.paused && j.outside.waits_in) kept.push_back(j.session());
    if (j.outside.frozen) frozen.push_back(j.session());
  }
  if (!kept.empty()) {
    const SessionStory& one = *roster.Find(kept.back());
    const Dated<SafepointReached>& at = *one.outside.waits_in;
    const std::string where =
        at.event.step != 0 ? fmt::format("safe point {}", at.event.step) : "the resume of its own program";
    verdict.notes.push_back(
        fmt::format("{} {} in {} since {}, because request {} from outside paused the job (amem pause); amem "
                    "resume lets it go on",
                    roster.names().Names(kept), kept.size() == 1 ? "waits" : "wait", where,
                    DateText(roster.Wall(one, at.at.time_ns)), at.event.request));
  }
  if (!frozen.empty()) {
    const Outside& one = roster.Find(frozen.back())->outside;
    verdict.notes.push_back(fmt::format("{} {} been frozen {} (event {}): {}", roster.names().Names(frozen),
                                        frozen.size() == 1 ? "has" : "have",
                                        one.freezes == 1 ? "once" : fmt::format("{} times, the last time", one.freezes),
                                        one.frozen->at.seq.value, ToText(EventBody(one.frozen->event))));
  }
}

// No failure as a rule: a program may end while a tag is paused. Who misses the contents learns here where they went.
void NoteEndedPaused(const Roster& roster, Verdict& verdict) {
  for (const SessionStory& j : roster.journals()) {
    if (!j.closed && j.findings.info.status != SessionStatus::kCrashed) continue;
    const State& state = j.findings.state;
    for (const auto& [id, pool] : state.pools) {
      if (pool.lifecycle != Lifecycle::kPaused) continue;
      Bytes saved = 0;
      for (const auto& [allocation, a] : state.allocations) saved += a.pool == id && a.saved ? a.bytes : 0;
      const std::string contents =
          saved == 0 ? ""
                     : fmt::format(
                           "; its contents, {} at most, went with it: resume before they are needed, and wait for what was "
                           "asked for without waiting (amem_wait), which an exit does not begin any more",
                           FormatBytes(saved));
      verdict.notes.push_back(fmt::format("tag {} of {} was paused (pause {}) and not resumed when the process ended{}",
                                          pool.tag, roster.names().Name(j.session()), pool.cycles, contents));
    }
  }
}

void NoteAbsent(const Roster& roster, Verdict& verdict) {
  std::set<SessionId> absent;
  for (const SessionStory& j : roster.journals()) {
    for (const SessionId session : roster.SharingWith(j.session(), roster.KnownUntil(j)))
      if (roster.Find(session) == nullptr) absent.insert(session);
    for (const SessionId session : j.Last().members)
      if (roster.Find(session) == nullptr) absent.insert(session);
  }
  if (absent.empty()) return;
  verdict.notes.push_back("the journal of " + roster.names().Names({absent.begin(), absent.end()}) +
                          " was not given; give the directories of all ranks for the whole story");
}

// Of a frozen process pauses and resumes say only that it is paused.
void NoteFreeze(const Roster& roster, Verdict& verdict) {
  const FreezeStep* last = nullptr;
  bool here = false;
  for (const SessionStory& j : roster.journals()) {
    const auto& freeze = j.findings.state.freeze;
    here |= !j.process_now.empty();
    if (freeze && (last == nullptr || Order(*last) < Order(*freeze))) last = &*freeze;
  }
  if (last != nullptr && !IsBack(*last)) verdict.notes.push_back(TextOf(*last, here));
}

std::string JobText(const Roster& roster) {
  std::set<std::string> hosts;
  std::uint64_t since = UINT64_MAX;
  for (const SessionStory& j : roster.journals()) {
    if (!j.who().host.empty()) hosts.insert(j.who().host);
    since = std::min(since, roster.Wall(j, j.who().monotonic_ns));
  }
  const std::string where = hosts.size() == 1 ? " on host " + *hosts.begin()
                            : hosts.empty()   ? std::string()
                                              : " on " + Plural(hosts.size(), "host");
  return Plural(roster.journals().size(), "process", "processes") + where +
         (since == UINT64_MAX ? "" : ", since " + DateText(since));
}

void Finish(Verdict& verdict) {
  std::ranges::stable_sort(verdict.evidence, {}, [](const Evidence& e) { return e.wall_ns == 0 ? UINT64_MAX : e.wall_ns; });
  auto& evidence = verdict.evidence;
  const auto same = std::unique(evidence.begin(), evidence.end(), [](const Evidence& a, const Evidence& b) {
    return a.session == b.session && a.seq == b.seq && a.text == b.text;
  });
  evidence.erase(same, evidence.end());
}

}  // namespace

Verdict Diagnose(std::span<const SessionStory> journals) {
  const Roster roster(journals);
  std::vector<const JournalFindings*> findings;
  for (const SessionStory& j : journals) findings.push_back(&j.findings);
  const JobFindings references = VerifyJob(findings);
  const std::vector<CandidateCause> candidates = CauseSearch(roster, references).Run();
  Verdict verdict;
  Count(roster, verdict);
  verdict.totals.references = references.references;
  NoteDamage(roster, verdict);
  verdict.job = JobText(roster);
  Consider(roster, candidates, verdict);
  if (!candidates.empty()) {
    Explain(roster, candidates.front(), verdict);
  } else {
    ExplainHealth(roster, verdict);
  }
  NoteContents(roster, verdict);
  NoteCards(roster, verdict);
  NoteOvercome(roster, verdict);
  NoteOutside(roster, verdict);
  NoteEndedPaused(roster, verdict);
  NoteAbsent(roster, verdict);
  NoteFreeze(roster, verdict);
  Finish(verdict);
  return verdict;
}

namespace {

// A session that has not voted yet belongs to a build that records votes if another one of that build does.
void ExpectVotes(std::vector<SessionStory>& journals) {
  std::set<std::string> builds;
  for (const SessionStory& j : journals)
    if (j.records_votes) builds.insert(j.who().amem_version);
  for (SessionStory& j : journals) {
    const bool began_here = j.first.seq.value <= 1;
    j.records_votes = j.records_votes || (began_here && builds.contains(j.who().amem_version));
  }
}

struct ReadJournals {
  std::vector<SessionStory> journals;
  std::vector<std::string> unread, copies;
};

Result<ReadJournals> ReadAll(std::span<const std::filesystem::path> sessions, const BesideEach& beside = {}) {
  std::vector<Result<SessionStory>> read(sessions.size(), Status{});
  SideBySide(sessions.size(), [&](std::size_t i) {
    read[i] = ReadStory(sessions[i], beside ? [&beside, i](StoryBuilder& story) { return beside(i, story); } : Beside());
  });
  ReadJournals all;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    Result<SessionStory> one = std::move(read[i]);
    one ? all.journals.push_back(*std::move(one))
        : all.unread.push_back("a journal could not be read: " + one.status().message());
  }
  if (all.journals.empty()) {
    return Status{Code::kNotFound, all.unread.empty() ? "there is no journal to read: give a directory of journals, or a pack"
                                                      : "none of the journals could be read: " + Listed(all.unread)};
  }
  if (const auto copies = DropCopies(all.journals); copies.size() == 1) {
    all.copies.push_back(copies.front().string() + " is another copy of a journal that was given; the longer one is used");
  } else if (!copies.empty()) {
    all.copies.push_back(fmt::format("{} and {} more are other copies of journals that were given; of each the longest is used",
                                     copies.front().string(), copies.size() - 1));
  }
  ExpectVotes(all.journals);
  CountTheDying(all.journals);
  return all;
}

void AddUnread(Verdict& verdict, std::span<const std::string> unread, const ReadJournals& all) {
  verdict.damage.insert(verdict.damage.end(), unread.begin(), unread.end());
  verdict.damage.insert(verdict.damage.end(), all.unread.begin(), all.unread.end());
  verdict.notes.insert(verdict.notes.end(), all.copies.begin(), all.copies.end());
}

}  // namespace

Result<Verdict> Diagnose(std::span<const std::filesystem::path> sessions, std::span<const std::string> unread,
                         const BesideEach& beside) {
  AMEM_ASSIGN(const auto all, ReadAll(sessions, beside));
  Verdict verdict = Diagnose(all.journals);
  AddUnread(verdict, unread, all);
  SayWhatIsMissing(verdict);
  return verdict;
}

Result<std::vector<Verdict>> DiagnoseJobs(std::span<const std::filesystem::path> sessions,
                                          std::span<const std::string> unread) {
  AMEM_ASSIGN(auto all, ReadAll(sessions));
  std::vector<JobTies> ties;
  for (const SessionStory& j : all.journals) ties.push_back(TiesOf(j));
  std::vector<Verdict> verdicts;
  for (const std::vector<std::size_t>& job : GroupIntoJobs(ties)) {
    std::vector<SessionStory> journals;
    for (const std::size_t i : job) journals.push_back(std::move(all.journals[i]));
    verdicts.push_back(Diagnose(journals));
  }
  // Of those that are healthy the order of the jobs stays: the one that went on for longest comes first.
  std::ranges::stable_sort(verdicts, std::greater{}, [](const Verdict& v) {
    return v.healthy() ? std::pair(false, std::uint64_t{0}) : std::pair(true, v.wall_ns);
  });
  const bool healthy = std::ranges::all_of(verdicts, &Verdict::healthy);
  for (Verdict& verdict : verdicts) AddUnread(verdict, unread, all);
  if (healthy) std::stable_partition(verdicts.begin(), verdicts.end(), std::not_fn(&Verdict::certain));
  std::ranges::for_each(verdicts, SayWhatIsMissing);
  return verdicts;
}

}  // namespace amem
