// pause and resume of a living job, from outside, what its ranks say of themselves (ls --live), and what freeze shares.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "journal/base/clock.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/story/job_cycles.h"
#include "replay/tool/control/request.h"

namespace amem::tool {
namespace {

Result<State> StateIn(const std::filesystem::path& session) {  // after its last event
  AMEM_ASSIGN(const auto reader, JournalReader::Open(session));
  return reader->StateAt(std::nullopt);
}

// Reads in each rank's journal what pauses have taken and what is on its GPUs.
void ReadAccounts(std::vector<control::RankLook>& ranks) {
  for (control::RankLook& rank : ranks)
    if (const Result<State> state = StateIn(rank.process.directory); state.ok()) rank.account = MeasureAccount(*state);
}

Bytes HeldBy(const control::RankLook& rank) {
  if (!rank.account) return rank.is.held;
  const Account::OfDevice all = OfAllDevices(*rank.account);
  Bytes sum = 0;
  for (const auto& share : {all.running, all.kept})
    for (const auto& [whose, bytes] : share) sum += bytes;
  return sum;
}

Json StaysOf(const Account& account, const Account::OfDevice& all) {
  Json stays = Json::array();
  for (const auto& [reason, bytes] : all.kept) stays.push_back({{"what", reason}, {"pieces", nullptr}, {"bytes", bytes}});
  for (const auto& [whose, share] : account.unplaced)
    stays.push_back({{"what", whose}, {"pieces", share.pieces}, {"bytes", share.bytes}});
  return stays;
}

// What its journal would say is null where that cannot be read.
Json JsonOf(const control::RankLook& rank) {
  const Account::OfDevice all = rank.account ? OfAllDevices(*rank.account) : Account::OfDevice();
  return {{"session", SessionText(rank.process.session)},
          {"rank", rank.rank < 0 ? Json() : Json(rank.rank)},
          {"pid", rank.process.pid},
          {"start_ticks", rank.process.start_ticks},
          {"directory", rank.process.directory.string()},
          {"alive", rank.alive},
          {"phase", rank.phase()},
          {"safepoints", rank.is.steps},
          {"paused_by_program", rank.paused_by_program()},
          {"held_bytes", HeldBy(rank)},
          {"freed_bytes", rank.is.freed},
          {"taken", rank.account ? Json(all.taken) : Json()},
          {"running", rank.account ? Json(all.running) : Json()},
          {"stays", rank.account ? StaysOf(*rank.account, all) : Json()},
          {"between_launches", rank.is.launches.why_not.empty()},
          {"why_not_between_launches", rank.is.launches.why_not.empty() ? Json() : Json(rank.is.launches.why_not)},
          {"parked", rank.is.parked},
          {"doing", rank.Doing()}};
}

// How a pause would stop it.
std::string StopsAt(const control::RankLook& rank) {
  if (!rank.heard || rank.phase() != "running" || rank.is.steps == 0) return "";
  return rank.is.launches.why_not.empty()
             ? "; can be stopped at its safe points, and between launches"
             : "; can be stopped at its safe points, and not between launches: " + rank.is.launches.why_not;
}

// "; away: 480 MiB (nccl); holds 3.00 GiB, of it 2.00 GiB (tag weights); a pause leaves 24.0 MiB (cuMemAllocAsync, 2 pieces)"
std::string AccountOf(const control::RankLook& rank) {
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

// "under way": its command has not ended.
Json JsonOf(const std::optional<FreezeStep>& freeze) {
  if (!freeze) return {};
  return freeze->outcome.empty() ? "under way" : freeze->outcome;
}

// The ranks with what they do; with --json an object of the schema `control`. `done`: what was done, a sentence. `freeze`: that
// has not come to its end.
void PrintRanks(Output& out, const std::vector<control::RankLook>& ranks, const FoundJob& job, const std::string& done,
                double seconds, bool json, const std::optional<FreezeStep>& freeze = {}) {
  std::vector<control::RankLook> sorted = ranks;
  std::ranges::sort(sorted, {}, [](const control::RankLook& rank) { return std::pair(rank.rank, rank.process.pid); });
  if (json) {
    Json all = Json::array();
    for (const control::RankLook& rank : sorted) all.push_back(JsonOf(rank));
    return PrintJson(out,
                     {{"command", running_command},
                      {"seconds", seconds},
                      {"elsewhere", job.elsewhere},
                      {"freeze", JsonOf(freeze)},
                      {"ranks", all}},
                     "control");
  }
  if (!done.empty()) out << done << "\n";
  for (const control::RankLook& rank : sorted)
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

// Finds the job, connects to its ranks, has them pause, or else resume, and prints what came of it. Nothing is asked of a job
// whose ranks all stand as is wanted already.
template <Asked wanted_of>
int RunRequest(const RequestOptions& options, Output& out) {
  constexpr bool pause = wanted_of != Asked::kResume;
  if (options.at_safepoint && options.between_launches)
    return Complain("--at-safepoint and --between-launches exclude each other");
  const Result<FoundJob> job = FindJob(options.job, Ties::kCertain);
  if (!job.ok()) return ComplainOf(job.status(), kCannotRead);
  if (const auto freeze = pause ? std::nullopt : FreezeOf(*job); freeze && freeze->outcome == "frozen")
    return Complain("the job is frozen, and its calls of the driver wait: amem thaw brings it back, and lets it go on");
  Result<control::JobControl> control = control::JobControl::Open(job->ranks, DefaultSocketDirectory());
  if (!control.ok()) return ComplainOf(control.status(), kCannotRead);
  auto ranks = control->Look();
  ReadAccounts(ranks);
  const control::Phase wanted = pause ? control::Phase::kPaused : control::Phase::kRunning;
  const auto as_wanted = [&](const control::RankLook& rank) {
    return rank.heard && rank.is.phase == wanted && !rank.paused_by_program() &&
           (!pause || rank.is.parked == (wanted_of == Asked::kPark));
  };
  if (!ranks.empty() && !options.tags && std::ranges::all_of(ranks, as_wanted)) {  // tags may not be paused yet
    PrintRanks(out, ranks, *job,
               fmt::format("{} {} already; nothing was changed", Plural(ranks.size(), "rank is", "ranks are"),
                           wanted_of == Asked::kPark ? "parked" : ToText(wanted)),
               0, options.json);
    return kFine;
  }
  const auto is_otherwise = [&](const control::RankLook& rank) {
    return rank.is.phase == control::Phase::kPaused && rank.is.parked != (wanted_of == Asked::kPark);
  };
  if (pause && std::ranges::any_of(ranks, is_otherwise))
    return Complain(wanted_of == Asked::kPark ? "the job is paused already: resume it first"
                                              : "the job is parked: resume it first");
  const std::chrono::seconds deadline(options.deadline_s);
  const std::uint64_t began_ns = MonotonicNs();
  const Status asked = pause ? control->Pause(HowToPause(options, wanted_of), Note) : control->Resume(deadline, Note);
  if (!asked.ok()) return ComplainOf(asked, asked.code() == Code::kRefused ? kCannotRead : kViolationFound);
  const double seconds = static_cast<double>(MonotonicNs() - began_ns) / 1e9;
  ranks = control->Look();
  ReadAccounts(ranks);
  Bytes freed = 0;
  for (const control::RankLook& rank : ranks) freed += rank.is.freed;
  PrintRanks(
      out, ranks, *job,
      fmt::format("{} {} in {:.2f} s{}",
                  wanted_of == Asked::kPark ? "parked"
                  : pause                   ? "paused"
                                            : "resumed",
                  Plural(ranks.size(), "rank"), seconds, !pause || freed == 0 ? "" : ", " + FormatBytes(freed) + " given back"),
      seconds, options.json);
  return kFine;
}

void AddResume(Arguments& arguments, RequestOptions& options) {
  AddRequest(arguments, options, "Give up after so many seconds, and leave the job as it was; default: 60");
  AddJson(arguments, options.json);
}

void AddPark(Arguments& arguments, RequestOptions& options) { AddResume(arguments, options); }

void AddPause(Arguments& arguments, RequestOptions& options) {
  AddResume(arguments, options);
  arguments.Add("--at-step", "N", options.at_step,
                "At the safe point of this number, which must lie ahead; of a job on many hosts the same on each");
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
  arguments.Flag("--at-safepoint", options.at_safepoint, "At a safe point, as by default");
  arguments.Flag("--between-launches", options.between_launches,
                 "Between two launches of NCCL's, which a program without safe points has, too; seen on two GPUs so far");
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
  auto ranks = control::LookAt(job->ranks, DefaultSocketDirectory());
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
  return WithOptions<RequestOptions>({kLivingGroup, "park", "Stops a job between two launches of NCCL's, with all its memory",
                                      "  amem park 4711\n"
                                      "None of NCCL's kernels runs, and none starts before amem resume: for a kill that meets "
                                      "no transfer. Programs run on until "
                                      "they launch. Exit code 3: it does not stand, and runs as before.\n",
                                      false},
                                     AddPark, RunRequest<Asked::kPark>);
}

}  // namespace amem::tool
