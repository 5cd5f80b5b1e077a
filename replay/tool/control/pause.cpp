// pause and resume of a living job, from outside, what its ranks say of themselves (ls --live), and what freeze shares.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "journal/base/clock.h"
#include "replay/job/names.h"
#include "replay/job/story/job_cycles.h"
#include "replay/tool/answer.h"
#include "replay/tool/control/request.h"

namespace amem::tool {
namespace {

constexpr std::string_view kAskingCommands[] = {"pause", "resume", "park", "ls"};
constexpr std::string_view kFreezeWords[] = {"frozen", "lost", "stuck", "under way"};

struct PhaseWord {
  std::string_view word;  // of control::RankView
};
Json Show(PhaseWord phase) { return phase.word; }
Json FormOf(PhaseWord) {
  Json words = Json::array({control::RankView().phase()});  // of one that has not answered
  for (unsigned i = 0; i <= static_cast<unsigned>(EnumeratorsOf(control::Phase{}).last); ++i)
    words.push_back(ToText(static_cast<control::Phase>(i)));
  return {{"enum", std::move(words)}};
}

Result<State> StateIn(const std::filesystem::path& session) {  // after its last event
  AMEM_ASSIGN(const auto reader, JournalReader::Open(session));
  return reader->StateAt(std::nullopt);
}

// Reads in each rank's journal what pauses have taken and what is on its GPUs.
void ReadAccounts(std::vector<control::RankView>& ranks) {
  for (control::RankView& rank : ranks)
    if (const Result<State> state = StateIn(rank.process.directory); state.ok()) rank.account = MeasureAccount(*state);
}

Bytes HeldBy(const control::RankView& rank) {
  if (!rank.account) return rank.is.held;
  const Account::OfDevice all = OfAllDevices(*rank.account);
  Bytes sum = 0;
  for (const auto& share : {all.running, all.kept})
    for (const auto& [whose, bytes] : share) sum += bytes;
  return sum;
}

struct StaysRow {
  std::string what;
  std::optional<AtLeast<1>> pieces;
  Bytes bytes = 0;
};
template <class To>
void WriteFields(To& to, const StaysRow& row) {
  to("what", row.what);
  to("pieces", row.pieces, "null where they are not counted");
  to("bytes", row.bytes);
}

std::vector<StaysRow> StaysOf(const Account& account, const Account::OfDevice& all) {
  std::vector<StaysRow> stays;
  for (const auto& [reason, bytes] : all.kept) stays.push_back({reason, {}, bytes});
  for (const auto& [whose, share] : account.unplaced)
    stays.push_back({whose, AtLeast<1>{static_cast<std::int64_t>(share.pieces)}, share.bytes});
  return stays;
}

struct RankRow {
  control::RankView rank;
};
template <class To>
void WriteFields(To& to, const RankRow& row) {
  const control::RankView& rank = row.rank;
  const Account::OfDevice all = rank.account ? OfAllDevices(*rank.account) : Account::OfDevice();
  const auto if_read = [&rank](auto value) { return rank.account ? std::optional(std::move(value)) : std::nullopt; };
  to("session", rank.process.session);
  to("rank", RankShown(rank.rank), "null where no launcher gave it a number");
  to("pid", AtLeast<0>{rank.process.pid});
  to("start_ticks", rank.process.start_ticks, "Field 22 of /proc/PID/stat: with the pid it names one process");
  to("directory", rank.process.directory.string());
  to("alive", rank.alive);
  to("phase", PhaseWord{rank.phase()});
  to("safepoints", rank.is.steps, "That the rank has come to");
  to("paused_by_program", rank.paused_by_program(), "The program's own pause holds");
  to("held_bytes", HeldBy(rank), "Resident GPU memory that AMem knows of, when the rank last came, paused or resumed");
  to("freed_bytes", rank.is.freed, "By the last pause from outside");
  to("taken", if_read(all.taken), "Bytes that pauses have taken, by tag; null: its journal cannot be read");
  to("running", if_read(all.running),
     "Of held_bytes, what a pause of the tag would take, by tag; null: its journal cannot be read");
  to("stays", if_read(rank.account ? StaysOf(*rank.account, all) : std::vector<StaysRow>()),
     "What a pause leaves on the GPUs; of ls --live; null: its journal cannot be read");
  to("between_launches", rank.is.launches.why_not.empty(), "It can be stopped between two launches of NCCL's");
  to("why_not_between_launches", OrNull{rank.is.launches.why_not}, "null where it can");
  to("parked", rank.is.parked, "Of a rank that is paused: it stands between launches, with all its memory");
  to("doing", rank.Doing(), "A sentence for people");
}

// How a pause would stop it.
std::string StopsAt(const control::RankView& rank) {
  if (!rank.heard || rank.phase() != "running" || rank.is.steps == 0) return "";
  return rank.is.launches.why_not.empty()
             ? "; can be stopped at its safe points, and between launches"
             : "; can be stopped at its safe points, and not between launches: " + rank.is.launches.why_not;
}

// "; away: 480 MiB (nccl); holds 3.00 GiB, of it 2.00 GiB (tag weights); a pause leaves 24.0 MiB (cuMemAllocAsync, 2 pieces)"
std::string AccountOf(const control::RankView& rank) {
  if (!rank.account) {
    const std::string held = rank.is.held == 0 ? "" : "; holds " + RoundedBytes(rank.is.held);
    return held + "; its journal cannot be read, so it is not known of what";
  }
  const Account& account = *rank.account;
  const Account::OfDevice all = OfAllDevices(account);
  std::string text;
  std::string_view first = "; away:";
  const auto add = [&](Bytes bytes, const std::string& what) {
    text += fmt::format("{} {} ({})", std::exchange(first, ","), RoundedBytes(bytes), what);
  };
  for (const auto& [tag, bytes] : all.taken) add(bytes, tag);
  if (const Bytes held = HeldBy(rank); held != 0) text += "; holds " + RoundedBytes(held);
  first = ", of it";
  for (const auto& [tag, bytes] : all.running) add(bytes, "tag " + tag);
  first = "; a pause leaves";
  for (const auto& [reason, bytes] : all.kept) add(bytes, reason);
  for (const auto& [whose, share] : account.unplaced)
    add(share.bytes, share.pieces == 1 ? whose : fmt::format("{}, {} pieces", whose, share.pieces));
  return text;
}

struct ControlAnswer {
  static constexpr const char* kSchema = "control";
  static constexpr const char* kTitle = "amem pause --json, resume, park, ls --live";
  static constexpr const char* kMeaning = "The living ranks of a job on this host.";
  std::string_view command{};
  double seconds = 0;
  std::size_t elsewhere = 0;
  std::optional<FreezeStep> freeze{};
  std::vector<RankRow> ranks{};
};
template <class To>
void WriteFields(To& to, const ControlAnswer& answer) {
  using Outcome = OneOf<kFreezeWords>;
  const auto outcome = [](const FreezeStep& freeze) {
    return Outcome{freeze.outcome.empty() ? "under way" : std::string_view(freeze.outcome)};
  };
  to("command", OneOf<kAskingCommands>{answer.command});
  to("seconds", answer.seconds, "How long the request took; 0 for ls --live");
  to("elsewhere", answer.elsewhere, "Ranks that the launcher counts beside these: those of other hosts are asked there");
  to("freeze", answer.freeze ? std::optional(outcome(*answer.freeze)) : std::nullopt,
     "Of ls --live: what came of a freeze or thaw that has not brought the job back; null: of none. under way: it has not "
     "ended, or "
     "its tool died");
  to("ranks", answer.ranks);
}

// The ranks with what they do; with --json an object of the schema `control`. `done`: what was done, a sentence. `freeze`: that
// has not come to its end.
void PrintRanks(Output& out, const std::vector<control::RankView>& ranks, const FoundJob& job, const std::string& done,
                double seconds, bool json, const std::optional<FreezeStep>& freeze = {}) {
  std::vector<control::RankView> sorted = ranks;
  std::ranges::sort(sorted, {}, [](const control::RankView& rank) { return std::pair(rank.rank, rank.process.pid); });
  if (json) {
    ControlAnswer answer{running_command, seconds, job.elsewhere, freeze};
    for (control::RankView& rank : sorted) answer.ranks.push_back({std::move(rank)});
    return PrintAnswer(out, answer);
  }
  if (!done.empty()) out << done << "\n";
  for (const control::RankView& rank : sorted)
    out << fmt::format("{}{}: {}{}\n", rank.process.name, rank.rank < 0 ? "" : fmt::format(" (pid {})", rank.process.pid),
                       rank.Doing(), (done.empty() ? StopsAt(rank) : "") + AccountOf(rank));
  if (job.elsewhere > 0)
    out << fmt::format("The launcher counts {}: those of other hosts are asked there.\n", Plural(job.elsewhere, "more rank"));
}

// How a freeze of the job stands, as its journals say. Nothing: nothing is left of one.
std::optional<FreezeStep> FreezeOf(const FoundJob& job) {
  std::optional<FreezeStep> last;
  for (const control::RankPlace& rank : job.ranks) {
    const Result<State> state = StateIn(rank.directory);
    if (state.ok() && state->freeze && (!last || Order(*last) < Order(*state->freeze))) last = state->freeze;
  }
  return last && IsBack(*last) ? std::nullopt : last;
}

enum class Asked : std::uint8_t { kPause, kPark, kResume };

control::AskOptions HowToPause(const RequestOptions& options, Asked asked) {
  control::AskOptions how{
      .deadline = std::chrono::seconds(options.deadline_s), .at_step = options.at_step, .all_tags = options.tags};
  how.parks = asked == Asked::kPark;
  how.where = how.parks ? control::Where::kBetweenLaunches : WhereOf(options);
  return how;
}

struct Asking {
  FoundJob job;
  control::JobControl control;

  std::vector<control::RankView> Ranks() {
    auto ranks = control.Ranks();
    ReadAccounts(ranks);
    return ranks;
  }
};

constexpr std::string_view DoneWord(Asked asked) {
  return asked == Asked::kPark ? "parked" : asked == Asked::kPause ? "paused" : "resumed";
}

// Whether the rank is already as the command would have it. Of a pause or a resume that failed, memory may be there.
bool IsAsAsked(const control::RankView& rank, Asked asked) {
  const bool pauses = asked != Asked::kResume;
  const control::Phase wanted = pauses ? control::Phase::kPaused : control::Phase::kRunning;
  return rank.heard && rank.is.phase == wanted && !rank.paused_by_program() &&
         (!pauses || (rank.is.failure.ok() && rank.is.parked == (asked == Asked::kPark)));
}

// Has the ranks do it, and prints what came of it.
int Ask(Asking& asking, const RequestOptions& options, Asked asked, Output& out) {
  const std::chrono::seconds deadline(options.deadline_s);
  const std::uint64_t began_ns = MonotonicNs();
  const Status done =
      asked == Asked::kResume ? asking.control.Resume(deadline, Note) : asking.control.Pause(HowToPause(options, asked), Note);
  if (!done.ok()) return ComplainOf(done, done.code() == Code::kRefused ? kCannotRead : kViolationFound);
  const double seconds = static_cast<double>(MonotonicNs() - began_ns) / 1e9;
  const auto ranks = asking.Ranks();
  Bytes freed = 0;
  for (const control::RankView& rank : ranks) freed += rank.is.freed;
  const bool frees = asked != Asked::kResume && freed != 0;
  PrintRanks(out, ranks, asking.job,
             fmt::format("{} {} in {:.2f} s{}", DoneWord(asked), Plural(ranks.size(), "rank"), seconds,
                         frees ? ", " + FormatBytes(freed) + " given back" : ""),
             seconds, options.json);
  return kFine;
}

// Finds the job, connects to its ranks, and asks them. Nothing is asked of a job whose ranks all are as is wanted already.
template <Asked asked>
int RunRequest(const RequestOptions& options, Output& out) {
  if (const std::string wrong = WhatIsWrong(options); !wrong.empty()) return Complain(wrong, kUsage);
  const Result<FoundJob> job = FindJob(options.job, Ties::kCertain);
  if (!job.ok()) return ComplainOf(job.status(), kCannotRead);
  if (const auto freeze = asked == Asked::kResume ? FreezeOf(*job) : std::nullopt; freeze && freeze->outcome == "frozen")
    return Complain("the job is frozen, and its calls of the driver wait: amem thaw brings it back, and lets it go on");
  Result<control::JobControl> control = control::JobControl::Open(job->ranks, DefaultSocketDirectory());
  if (!control.ok()) return ComplainOf(control.status(), kCannotRead);
  Asking asking{*job, *std::move(control)};
  const auto ranks = asking.Ranks();
  const auto as_asked = [](const control::RankView& rank) { return IsAsAsked(rank, asked); };
  if (!ranks.empty() && !options.tags && std::ranges::all_of(ranks, as_asked)) {  // tags may not be paused yet
    const std::string_view is = asked == Asked::kResume ? "running" : DoneWord(asked);
    PrintRanks(out, ranks, *job,
               fmt::format("{} {} already; nothing was changed", Plural(ranks.size(), "rank is", "ranks are"), is), 0,
               options.json);
    return kFine;
  }
  const auto is_otherwise = [](const control::RankView& rank) {
    return rank.is.phase == control::Phase::kPaused && rank.is.parked != (asked == Asked::kPark);
  };
  if (asked != Asked::kResume && std::ranges::any_of(ranks, is_otherwise))
    return Complain(asked == Asked::kPark ? "the job is paused already: resume it first"
                                          : "the job is parked: resume it first");
  return Ask(asking, options, asked, out);
}

void AddResume(Arguments& arguments, RequestOptions& options) {
  AddRequest(arguments, options, "Give up after so many seconds, and leave the job as it was; default: 60");
  AddJson(arguments, options.json);
}

void AddPark(Arguments& arguments, RequestOptions& options) { AddResume(arguments, options); }

void AddPause(Arguments& arguments, RequestOptions& options) {
  AddResume(arguments, options);
  arguments.Add("--at-step", "N", options.at_step,
                "Stop at safe point N, which no rank may have reached yet; give the same N on each host");
  arguments.Flag("--tags,--all", options.tags,
                 "The program's tags as well, with all contents; under AMEM_SCOPE=all that is all its memory");
  AddWhere(arguments, options);
}

}  // namespace

void AddRequest(Arguments& arguments, RequestOptions& options, const char* deadline) {
  arguments.Add(
      "JOB", "JOB", options.job,
      "The pid of a rank or of its launcher, a directory of journals, the launcher's id of the job, or several pids of "
      "ranks; default: the only living job of this user on this host");
  arguments.Add("--deadline", "SECONDS", options.deadline_s, deadline, 1);
}

void AddWhere(Arguments& arguments, RequestOptions& options) {
  arguments.Flag("--at-safepoint", options.at_safepoint, "Stop at a safe point, as by default");
  arguments.Flag("--between-launches", options.between_launches,
                 "Stop between two NCCL launches; needs no safe points; has run on two GPUs so far");
}

std::string WhatIsWrong(const RequestOptions& options) {
  return options.at_safepoint && options.between_launches ? "give --at-safepoint or --between-launches, not both" : "";
}

control::Where WhereOf(const RequestOptions& options) {
  return options.between_launches ? control::Where::kBetweenLaunches : control::Where::kAtSafepoint;
}

Exit ComplainOf(const Status& why, Exit code) {
  for (const std::string& line : Split(why.message(), '\n')) Complain(line, code);
  return code;
}

int PrintLive(const std::vector<std::string>& names, bool json, Output& out) {
  const Result<FoundJob> job = FindJob(names, Ties::kProbable);
  if (!job.ok()) return ComplainOf(job.status(), kCannotRead);
  auto ranks = control::RanksAt(job->ranks, DefaultSocketDirectory());
  if (ranks.empty())
    return Complain(
        "the job's processes take no requests: their libamem_nccl.so is older than this program, or they are another "
        "user's");
  ReadAccounts(ranks);
  const auto freeze = FreezeOf(*job);
  PrintRanks(out, ranks, *job, "", 0, json, freeze);
  if (freeze && !json) out << TextOf(*freeze, true) << "\n";
  return kFine;
}

Json ControlSchema() { return SchemaOf<ControlAnswer>(); }

Command PauseCommand() {
  return WithOptions<RequestOptions>(
      {kLivingGroup, "pause", "Pauses all ranks of a job, or none",
       "  amem pause                      the only living job of this user on this host\n"
       "  amem pause 4711 --deadline 300  the job of that process, or of that launcher\n"
       "  amem pause --tags               the program's tags too\n"
       "  amem pause 4711 --all           the same; under AMEM_SCOPE=all that is all memory of the job\n"
       "  amem pause 4711 4712            ranks of which nothing else says that they belong together\n"
       "The ranks stop at a safe point or at their program's next own pause; with --between-launches between two launches "
       "of NCCL's, if they are counted (ls --live). Exit code 3: it was asked and did not pause, and runs as before.\n",
       false},
      AddPause, RunRequest<Asked::kPause>);
}

Command ResumeCommand() {
  return WithOptions<RequestOptions>({kLivingGroup, "resume", "Resumes a job that was paused from outside",
                                      "  amem resume\n"
                                      "  amem resume 4711\n"
                                      "A rank that its program had paused goes on when its program resumes it.\n",
                                      false},
                                     AddResume, RunRequest<Asked::kResume>);
}

Command ParkCommand() {
  return WithOptions<RequestOptions>(
      {kLivingGroup, "park", "Stops a job between two launches of NCCL's, with all its memory",
       "  amem park 4711\n"
       "No NCCL kernel runs or starts before amem resume, so that a kill interrupts no transfer. "
       "Programs run on until they launch. Exit code 3: it could not be stopped, and runs as "
       "before.\n",
       false},
      AddPark, RunRequest<Asked::kPark>);
}

}  // namespace amem::tool
