// Failures that a session records of itself: of a step, of its own vote, of its journal; and records that contradict each
// other.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "replay/diagnosis/explanation.h"
#include "replay/driver/result_names.h"

namespace amem {
namespace {

using Action = Remedy::Action;
using Outlook = Remedy::Outlook;
using Role = Evidence::Role;

// "pid 7 (python3) holds 3 072 MiB and rank 3 holds 1 GiB"; empty: it is not recorded.
std::string HoldersText(const Explanation& e, const Attempt::Failure& failure) {
  std::vector<std::string> parts;
  for (const MemoryHolder& holder : failure.holders) {
    const auto of_job = std::ranges::find_if(e.roster.journals(), [&](const SessionStory& j) {
      return j.who().pid == holder.pid && j.who().host == e.story->who().host;
    });
    const std::string program = holder.name.empty() ? "" : fmt::format(" ({})", holder.name);
    const std::string who =
        of_job != e.roster.journals().end() ? e.names.Name(of_job->session()) : fmt::format("pid {}{}", holder.pid, program);
    parts.push_back(who + " holds " + (holder.bytes == 0 ? "some" : RoundedBytes(holder.bytes)));
  }
  return Listed(parts);
}

// The device of its process that the step was about; none: an owner's, whose ordinals are its own, the host's, or of no one.
std::optional<DeviceOrdinal> DeviceOf(const Attempt::Failure& failure) {
  switch (failure.step.kind) {
    case StepKind::kVerify:
    case StepKind::kDrain:
    case StepKind::kDeregister:
    case StepKind::kRegister:
      return std::nullopt;
    case StepKind::kAddDevice:
    case StepKind::kBind:
    case StepKind::kUnbind:
    case StepKind::kCreate:
      break;
    default:
      if (failure.remote) return std::nullopt;
  }
  const bool of_host = failure.location.type == LocationType::kHost || failure.location.type == LocationType::kHostNuma ||
                       failure.location.type == LocationType::kHostNumaCurrent;
  return of_host ? std::nullopt : std::optional(failure.step.device);
}

void RecommendForStep(Explanation& e, const Attempt::Failure& failure) {
  const Action action = ActionForFailure(failure.code, failure.driver_result, failure.step.kind, Action::kReadMessage);
  const Outlook undone = e.cause.attempt->undone ? Outlook::kCallAgain : Outlook::kCannotBeUndone;
  e.Recommend(action, action == Action::kExaminePeer || EndsTheJob(action) ? Outlook::kUnsaid : undone);
  Remedy& remedy = e.verdict.remedy;
  if (action == Action::kExamineGpu || action == Action::kAvoidDisplay) {
    remedy.device = DeviceOf(failure);
    if (remedy.device) remedy.gpu = GpuOf(e.story->who(), remedy.device->value);
  }
  if (action != Action::kFreeMemory) return;
  remedy.device = failure.step.device;
  remedy.bytes = std::max(failure.still_missing, failure.step.bytes);
  remedy.gpu = GpuOf(e.story->who(), failure.step.device.value);
  remedy.holders = HoldersText(e, failure);
}

// "Resume 1 (4 processes) failed at 2025-11-21 ... on rank 2 (...), in phase "resume: arrive" (event 12): the message."
void SayWhere(Explanation& e, PhaseKind phase, SequenceNumber seq, const std::string& message) {
  e.Say(Sentence(fmt::format("{}{} at {} on {}, in phase \"{}\"{}: {}", e.CycleOfAll(), e.HowItEnded(),
                             WallText(e.cause.wall_ns), e.verdict.process, ToText(phase), EventText(seq), message)));
}

// Says all about a failed step but what to do.
void DescribeFailedStep(Explanation& e, const Attempt::Failure& failure) {
  const SessionStory& journal = *e.story;
  Verdict& v = e.verdict;
  v.phase = failure.phase;
  v.code = failure.code;
  v.driver_result = failure.driver_result;
  v.seq = failure.at.seq;
  e.TakeStep(journal, failure.step);
  if (failure.allocation_bytes != 0) v.bytes = failure.allocation_bytes;

  v.headline = fmt::format("{} failed on {} at the step \"{}\": {}", Capitalized(e.Cycle()), e.NamesOfAll(),
                           ToText(failure.step), ToText(failure.code));
  if (const std::string holders = HoldersText(e, failure); !holders.empty()) v.headline += "; " + holders + " there";
  SayWhere(e, failure.phase, failure.at.seq, failure.message);
  if (failure.step.allocation) e.Say("The step was about " + e.AllocationText(journal, failure.step.allocation) + ".");
  if (failure.step.kind == StepKind::kCheckMemory) {
    e.Say("AMem itself checked how much memory was free, before it created any.");
  } else if (failure.driver_result != 0) {
    e.Say("The driver's answer was " + CudaErrorText(failure.driver_result) + ".");
  }
  if (failure.code == Code::kOutOfMemory && failure.still_missing != 0) {
    e.Say(fmt::format("At that moment {} of its memory on device {} had not come back yet.", FormatBytes(failure.still_missing),
                      failure.step.device.value));
  }
  e.AddBeginning(journal);
  e.AddEvidence(journal, failure.at, Role::kCause, "step failed: " + failure.message);
  for (const SessionId other : e.cause.together) {
    const SessionStory* j = e.roster.Find(other);
    const Attempt* attempt = j == nullptr ? nullptr : LastAttempt(*j, e.cause.attempt->tag);
    if (attempt == nullptr || !attempt->failed_step) continue;
    const Attempt::Failure& too = *attempt->failed_step;
    e.Say(Sentence(
        fmt::format("{} failed by itself, too, at \"{}\": {}", e.names.ShortName(other), ToText(too.step), too.message)));
    e.AddEvidence(*j, too.at, Role::kCause, "step failed: " + too.message);
  }
}

// Its vote was no, and none of its own steps is to blame.
void DescribeVote(Explanation& e, const Attempt::Decision& decision) {
  e.verdict.phase = decision.phase;
  e.verdict.seq = decision.at.seq;
  e.verdict.headline = fmt::format("{} failed on {} in phase \"{}\"", Capitalized(e.Cycle()),
                                   e.names.ShortName(e.cause.session), ToText(decision.phase));
  SayWhere(e, decision.phase, decision.at.seq, decision.message);
  e.AddBeginning(*e.story);
  e.AddEvidence(*e.story, decision.at, Role::kCause, decision.message);
}

void DescribeDisagreement(Explanation& e, std::string headline) {
  e.verdict.seq = e.cause.record.seq;
  e.verdict.headline = std::move(headline);
  e.Say(e.verdict.headline + EventText(e.cause.record.seq) + ".");
  e.Say(Sentence(e.cause.record.message));
  e.AddEvidence(*e.story, {e.cause.record.seq, 0}, Role::kCause, e.cause.record.message);
  e.Recommend(Action::kReportJournals);
}

}  // namespace

// A pause or resume of a pool that failed without a step's failing, for lack of host memory as a rule.
static void ExplainFailedPool(Explanation& e) {
  const Attempt& attempt = *e.cause.attempt;
  e.verdict.code = e.cause.record.code;
  e.verdict.seq = attempt.ended.seq;
  e.verdict.headline = fmt::format("{} failed on {}: {}", Capitalized(e.Cycle()), e.NamesOfAll(), ToText(e.cause.record.code));
  e.Say(Sentence(fmt::format("{} failed at {} on {}{}: {}", e.CycleOfAll(), WallText(e.cause.wall_ns), e.verdict.process,
                             EventText(attempt.ended.seq), attempt.failure)));
  e.AddBeginning(*e.story);
  e.AddEvidence(*e.story, attempt.ended, Role::kCause, "failed: " + attempt.failure);
  const bool saves = attempt.kind == CycleKind::kPause && e.cause.record.code == Code::kOutOfMemory;
  const auto step = saves ? std::optional(StepKind::kScan) : std::nullopt;
  e.Recommend(ActionForFailure(e.cause.record.code, 0, step, Action::kReadMessage), Outlook::kCallAgain);
}

void ExplainFailedStep(Explanation& e) {
  const Attempt& attempt = *e.cause.attempt;
  if (!attempt.tag.empty() && !attempt.failed_step) {
    ExplainFailedPool(e);
  } else if (attempt.failed_step) {
    DescribeFailedStep(e, *attempt.failed_step);
    RecommendForStep(e, *attempt.failed_step);
  } else {
    const Attempt::Decision& vote = attempt.failed_vote ? *attempt.failed_vote : *attempt.decided;
    DescribeVote(e, vote);
    const Code code = e.cause.record.code;
    e.verdict.code = code;
    e.verdict.driver_result = e.cause.record.driver_result;
    e.Recommend(ActionForFailure(code, e.cause.record.driver_result, std::nullopt, Action::kFollowVote));
  }
}

bool EndsTheJob(Action action) {
  return action == Action::kRestartProcess || action == Action::kExamineGpu || action == Action::kAvoidDisplay;
}

// What an answer of the driver's says by itself: of memory that is faulty, or a context that is dead, as the CUDA driver
// documents them.
static Action ActionForResult(int driver_result, Action otherwise) {
  constexpr int kEccUncorrectable = 214;  // CUDA_ERROR_ECC_UNCORRECTABLE
  constexpr int kLaunchTimeout = 702;     // CUDA_ERROR_LAUNCH_TIMEOUT
  constexpr std::array kFatal = {4, 201, 700, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999};
  if (driver_result == kEccUncorrectable) return Action::kExamineGpu;
  if (driver_result == kLaunchTimeout) return Action::kAvoidDisplay;
  return std::ranges::find(kFatal, driver_result) != kFatal.end() ? Action::kRestartProcess : otherwise;
}

Action ActionForFailure(Code code, int driver_result, std::optional<StepKind> step, Action otherwise) {
  constexpr int kOperatingSystem = 304;  // CUDA_ERROR_OPERATING_SYSTEM
  // Contents are kept in pinned memory of the host; the other steps ask for memory of the device.
  const bool contents =
      step == StepKind::kScan || step == StepKind::kSave || step == StepKind::kBeginRestore || step == StepKind::kRestore;
  const bool passes_descriptors = !step || step == StepKind::kImport || step == StepKind::kCreate;
  if (step == StepKind::kRegister || step == StepKind::kDeregister) return Action::kExamineCard;
  switch (code) {
    case Code::kOutOfMemory:
      return contents ? Action::kFreeHostMemory : Action::kFreeMemory;
    case Code::kIo:  // where another rank's step is not known it may be anything
      return step && passes_descriptors ? Action::kRaiseDescriptors : otherwise;
    case Code::kNoDescriptors:
      return Action::kRaiseDescriptors;
    case Code::kPeerLost:
    case Code::kTimeout:
      return step ? Action::kExaminePeer : otherwise;
    case Code::kRefused:
      return step ? Action::kEndCaptures : otherwise;
    case Code::kBroken:
      return Action::kRepairJournal;
    case Code::kDriver:
      return ActionForResult(driver_result, passes_descriptors && step && driver_result == kOperatingSystem
                                                ? Action::kRaiseDescriptors
                                                : Action::kFindDriverError);
    default:
      return otherwise;
  }
}

// A failed step or vote that such a reference explains comes with its attempt; a comparison of journals has none.
void ExplainReferences(Explanation& e) {
  const Attempt* attempt = e.cause.attempt;
  if (attempt == nullptr) {
    return DescribeDisagreement(
        e, fmt::format("Only one side knows a reference: {} and a peer disagree", e.names.ShortName(e.cause.session)));
  }
  if (attempt->failed_step) {
    DescribeFailedStep(e, *attempt->failed_step);
  } else {
    DescribeVote(e, *attempt->decided);
    const AllocationId unknown = DetailOf<CandidateCause::UnknownReference>(e.cause).allocation;
    e.verdict.allocation = unknown;
    e.Say(
        fmt::format("It holds {}, and the owner's journal does not know that reference.", e.AllocationText(*e.story, unknown)));
  }
  e.Recommend(Action::kReportReference);
}

void ExplainBroken(Explanation& e) {
  const SessionStory& j = *e.story;
  e.verdict.code = Code::kBroken;
  e.verdict.seq = j.broken_at ? j.broken_at->seq : j.last.seq;
  e.verdict.headline = fmt::format("The session of {} is broken, and its pauses are refused: {}",
                                   e.names.ShortName(e.cause.session), e.cause.record.message);
  e.Say(
      fmt::format("The session of {} has been broken since {}{}: from then on its journal is incomplete, and every pause is "
                  "refused.",
                  e.verdict.process, WallText(e.cause.wall_ns), EventText(e.verdict.seq)));
  e.Say("The reason: " + Sentence(e.cause.record.message));
  e.AddEvidence(j, j.broken_at ? *j.broken_at : Moment{{}, j.last.time_ns}, Role::kCause, "broken: " + e.cause.record.message);
  for (const SessionStory& other : e.roster.journals()) {
    if (other.Last().end != Attempt::End::kFailed) continue;
    const Attempt& attempt = other.Last();
    e.AddEvidence(other, attempt.ended, Role::kConsequence, "gave up: " + attempt.failure);
  }
  e.Recommend(Action::kRepairJournal);
}

void ExplainHalfDone(Explanation& e) {
  e.verdict.code = e.cause.record.code;
  e.verdict.seq = e.cause.attempt->ended.seq;
  e.verdict.headline =
      fmt::format("{} failed on {} and could not be undone", Capitalized(e.Cycle()), e.names.ShortName(e.cause.session));
  e.Say(fmt::format("{} at {}{}.", e.verdict.headline, WallText(e.cause.wall_ns), EventText(e.verdict.seq)));
  e.Say(Sentence(e.cause.record.message));
  e.AddEvidence(*e.story, e.cause.attempt->ended, Role::kCause, e.cause.record.message);
  e.Recommend(Action::kResumeAgain);
}

void ExplainNotUnderAmem(Explanation& e) {
  const std::vector<std::int32_t> without = DetailOf<CandidateCause::RanksWithoutSession>(e.cause).ranks;
  std::vector<SessionId> tried;
  std::int32_t ranks = 0;
  for (const SessionStory& j : e.roster.journals()) {
    for (const UnmadeCommunicator& one : j.unmade) {
      if (one.begun.ranks == 0 || one.begun.rank != j.who().rank) continue;
      ranks = std::max(ranks, one.begun.ranks);
      tried.push_back(j.session());
      e.AddEvidence(j, one.at, Role::kCause, fmt::format("NCCL was asked for a communicator of {} ranks", one.begun.ranks));
      if (one.failed) e.AddEvidence(j, one.failed, Role::kConsequence, "NCCL gave it up");
    }
  }
  const bool several = without.size() > 1;
  const std::string missing = fmt::format("{} {}", several ? "ranks" : "rank", Listed(InRanges(without)));
  e.verdict.rank = without.front();
  e.verdict.process = missing;
  e.verdict.headline = fmt::format("NCCL could not make a communicator of {} ranks, and {} {} no session of AMem here", ranks,
                                   missing, several ? "have" : "has");
  e.Say(
      fmt::format("Since {} {} tried to make it. {} either {} without AMem, which cannot import memory that a rank under AMem "
                  "shares, or the {} not given.",
                  WallText(e.cause.wall_ns), e.names.Names(tried), Capitalized(missing), several ? "run" : "runs",
                  several ? "journals of them were" : "journal of it was"));
  e.Recommend(Action::kStartUnderAmem);
  e.verdict.remedy.process = missing;
}

void ExplainImpossible(Explanation& e) {
  DescribeDisagreement(
      e, fmt::format("The journal of {} has events in an order that is impossible", e.names.ShortName(e.cause.session)));
}

}  // namespace amem
