#include "replay/diagnosis/verdict_text.h"

#include <algorithm>

#include "replay/driver/result_names.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"

namespace amem {
namespace {

using Role = Evidence::Role;

constexpr std::size_t kEvidenceOfOthersMax = 32;

std::string Number(std::uint64_t n) { return std::to_string(n); }
// Of a sentence that may begin with a name of the driver's, which stays as it is.
std::string Capital(std::string text) {
  const std::string first = text.substr(0, text.find(' '));
  const bool word = std::ranges::all_of(first, [](char c) { return (c >= 'a' && c <= 'z') || c == ','; });
  if (word && !text.empty()) text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text;
}
std::string Sentence(std::string text) {
  text = Capital(std::move(text));
  if (!text.empty() && text.back() != '.') text += '.';
  return text;
}

std::string DriverAnswer(int result) {
  if (result == 0) return {};
  const std::string name(CudaErrorName(result));
  return name.empty() ? "CUresult " + Number(static_cast<std::uint64_t>(result))
                      : name + " (" + Number(static_cast<std::uint64_t>(result)) + ", " +
                            std::string(CudaErrorDescription(result)) + ")";
}

class Writer {
 public:
  Writer(const Roster& cast, const CandidateCause& suspect, Verdict& verdict) : cast_(cast), s_(suspect), v_(verdict) {}

  void Write() {
    v_.healthy = false;
    v_.kind = s_.kind;
    v_.session = s_.session;
    v_.rank = cast_.RankOf(s_.session);
    v_.process = cast_.Name(s_.session);
    v_.wall_ns = s_.wall_ns;
    v_.live = s_.live;
    if (s_.attempt != nullptr) {
      v_.cycle_kind = s_.attempt->kind;
      v_.cycle = s_.attempt->cycle;
    }
    const std::string_view kind = s_.kind;
    if (kind == verdict::kDied || kind == verdict::kEnded) {
      WriteDeath(kind == verdict::kDied);
    } else if (kind == verdict::kNeverArrived) {
      WriteNeverArrived();
    } else if (kind == verdict::kRefused) {
      WriteRefused();
    } else if (kind == verdict::kStalled) {
      WriteStalled();
    } else if (kind == verdict::kBroken) {
      WriteBroken();
    } else if (kind == verdict::kHalfDone) {
      WriteHalfDone();
    } else if (s_.attempt != nullptr && s_.attempt->failed_step) {
      WriteFailedStep(*s_.attempt->failed_step);
    } else if (s_.attempt != nullptr && s_.attempt->decided) {
      WriteFailedVote(*s_.attempt->decided);
    } else {
      WriteDisagreement();
    }
    if (s_.attempt != nullptr && s_.attempt->begun) WriteOthers();
    if (kind == verdict::kDied && s_.attempt == nullptr) WriteLater();
    Say(Afterwards());
  }

 private:
  // ---- parts
  // -----------------------------------------------------------------------------------------------------------------

  void Add(const JournalHistory& j, const Moment& at, Role role, std::string text) {
    v_.evidence.push_back({.session = j.session(),
                           .rank = cast_.RankOf(j.session()),
                           .seq = at.seq,
                           .wall_ns = cast_.Wall(j, at.time_ns),
                           .role = role,
                           .text = std::move(text)});
  }

  [[nodiscard]] std::string Cycle() const {  // "resume 3"
    return s_.attempt == nullptr ? "" : std::string(ToText(s_.attempt->kind)) + " " + Number(s_.attempt->cycle);
  }
  [[nodiscard]] std::string CycleOfAll() const {  // "Resume 3 of 4 ranks"
    const std::size_t members = s_.attempt->members.size();
    return Capital(Cycle()) + (members > 1 ? " of " + Number(members) + " sessions" : "");
  }
  [[nodiscard]] std::string At(std::uint64_t wall_ns) const { return "at " + WallText(wall_ns); }
  [[nodiscard]] std::string Event(SequenceNumber seq) const { return seq ? " (event " + Number(seq.value) + ")" : ""; }

  // "allocation 7 (10 MiB on device 2, created at libnccl+1234)".
  [[nodiscard]] std::string Thing(const JournalHistory& j, AllocationId id) const {
    std::string text = "allocation " + Number(id.value);
    const auto it = j.findings.state.allocations.find(id);
    if (it == j.findings.state.allocations.end()) return text;
    const Allocation& a = it->second;
    text += " (" + FormatBytes(a.bytes) + " on " + ToText(a.properties.location);
    if (a.remote) {
      text += ", which belongs to " + cast_.ShortName(a.remote->owner) + " as allocation " + Number(a.remote->allocation.value);
    } else if (!a.importers.empty()) {
      std::vector<SessionId> by;
      for (const auto& [importer, count] : a.importers) {
        if (std::ranges::find(by, importer.by) == by.end()) by.push_back(importer.by);
      }
      text += ", shared with " + cast_.Names(by);
    }
    if (const auto slab = j.findings.state.slabs.find(id); slab != j.findings.state.slabs.end())
      text += ", a slab with " + Plural(slab->second.parts.size(), "allocation") + " of NCCL's";
    if (a.site.frames[0] != 0) text += ", made at libnccl" + ToText(a.site);
    return text + ")";
  }

  void TakeStep(const JournalHistory* j, const Step& step) {
    v_.step = step;
    v_.bytes = step.bytes;
    if (!step.allocation) return;
    v_.allocation = step.allocation;
    if (j == nullptr) return;
    const auto it = j->findings.state.allocations.find(step.allocation);
    if (it != j->findings.state.allocations.end()) v_.bytes = it->second.bytes;
  }

  // What the caller sees now: running, paused, or neither.
  [[nodiscard]] std::string Afterwards() const {
    std::vector<SessionId> running, paused, neither, ended;
    for (const JournalHistory& j : cast_.journals()) {
      if (!j.findings.whole && j.findings.info.status == SessionStatus::kLive) return {};  // nobody knows
      const Lifecycle lifecycle = j.findings.state.lifecycle;
      const SessionStatus status = j.findings.info.status;
      (status == SessionStatus::kClosed || status == SessionStatus::kCrashed || lifecycle == Lifecycle::kClosed ? ended
       : lifecycle == Lifecycle::kRunning                                                                       ? running
       : lifecycle == Lifecycle::kPaused                                                                        ? paused
                                                                                                                : neither)
          .push_back(j.session());
    }
    std::vector<std::string> parts;
    const auto part = [&](const std::vector<SessionId>& who, const std::string& how) {
      if (!who.empty())
        parts.push_back((who.size() == cast_.journals().size() && who.size() > 1
                             ? (who.size() == 2 ? "both sessions" : "all " + Number(who.size()) + " sessions")
                             : cast_.Names(who)) +
                        (who.size() == 1 ? " is " : " are ") + how);
    };
    part(running, "running");
    part(paused, "paused, with contents kept");
    part(neither, "half way");
    if (ended.size() == cast_.journals().size()) return ended.size() == 1 ? "" : "All have ended since.";
    if (!ended.empty()) parts.push_back(cast_.Names(ended) + (ended.size() == 1 ? " has ended" : " have ended"));
    return parts.empty() ? "" : "Now " + Listed(parts) + ".";
  }

  void Say(const std::string& sentence) {
    if (sentence.empty()) return;
    if (!v_.summary.empty()) v_.summary += " ";
    v_.summary += sentence;
  }

  void BeginAttempt(const JournalHistory& j) {
    if (s_.attempt == nullptr || !s_.attempt->begun) return;
    Add(j, s_.attempt->begun, Role::kContext,
        Cycle() + " begun by " + Number(s_.attempt->members.size()) +
            (s_.attempt->members.size() == 1 ? " session" : " sessions"));
  }

  [[nodiscard]] std::string HowItEnded() const {  // the attempt, for all
    if (s_.attempt->end == Attempt::End::kFailed) return " failed";
    return s_.live ? " hangs" : " did not come to its end";
  }

  // ---- one for each kind
  // -----------------------------------------------------------------------------------------------------

  void WriteFailedStep(const Attempt::Failure& failure) {
    const JournalHistory& j = *s_.journal;
    const std::string step = ToText(failure.step), message = WithoutPrefix(failure.message, step);
    v_.phase = failure.phase;
    v_.code = failure.code;
    v_.driver_result = failure.driver_result;
    v_.seq = failure.at.seq;
    TakeStep(&j, failure.step);
    if (failure.allocation_bytes != 0) v_.bytes = failure.allocation_bytes;

    v_.headline = Capital(Cycle()) + " failed on " + cast_.ShortName(s_.session) + " at the step \"" + step +
                  "\": " + std::string(ToText(failure.code));
    Say(CycleOfAll() + HowItEnded() + " " + At(s_.wall_ns) + " on " + v_.process + ", in phase \"" +
        std::string(ToText(failure.phase)) + "\", at the step \"" + step + "\"" + Event(failure.at.seq) + ".");
    if (failure.step.allocation) Say("It is about " + Thing(j, failure.step.allocation) + ".");
    Say(Sentence(message));
    if (failure.driver_result != 0 && message.find("CUDA_ERROR") == std::string::npos) {
      Say(failure.step.kind == StepKind::kCheckMemory ? "AMem itself looked how much is free, before it took anything."
                                                      : "The driver's answer was " + DriverAnswer(failure.driver_result) + ".");
    }
    if (failure.code == Code::kOutOfMemory && failure.still_missing != 0) {
      Say("At that moment " + FormatBytes(failure.still_missing) + " of its memory on device " +
          Number(static_cast<std::uint64_t>(failure.step.device.value)) + " had not come back yet.");
    }
    BeginAttempt(j);
    Add(j, failure.at, Role::kCause, "step failed: " + failure.message);
    v_.remedy = StepRemedy(failure);
  }

  // Its vote was a no without a step of its own to blame.
  void WriteFailedVote(const Attempt::Decision& decision) {
    const JournalHistory& j = *s_.journal;
    const bool denied = std::string_view(s_.kind) == verdict::kReferences;
    v_.phase = decision.phase;
    v_.seq = decision.at.seq;
    const std::string phase(ToText(decision.phase));
    v_.headline = Capital(Cycle()) + " failed on " + cast_.ShortName(s_.session) + " in phase \"" + phase + "\"";
    Say(CycleOfAll() + HowItEnded() + " " + At(s_.wall_ns) + " on " + v_.process + ", in phase \"" + phase + "\"" +
        Event(decision.at.seq) + ".");
    Say(Sentence(WithoutPrefix(decision.message, cast_.Name(s_.session) + " failed in phase " + phase)));
    if (denied) {
      v_.allocation = s_.allocation;
      Say("It holds " + Thing(j, s_.allocation) + ", and the owner's journal does not know that reference.");
    }
    BeginAttempt(j);
    Add(j, decision.at, Role::kCause, decision.message);
    v_.remedy = denied ? StepRemedy({})
                       : "do what the message says; if a rank that it names is dead, restart the job, otherwise call " +
                             std::string(s_.attempt->kind == CycleKind::kPause ? "ncclPause" : "ncclResume") +
                             " again on all ranks";
  }

  [[nodiscard]] std::string StepRemedy(const Attempt::Failure& failure) const {
    const std::string again = s_.attempt->kind == CycleKind::kPause ? "ncclPause" : "ncclResume";
    const std::string retry = s_.attempt->undone ? "then call " + again + " again on all ranks; nothing is lost by a try"
                                                 : "then restart the job: the failure could not be undone";
    const std::string device = "device " + std::to_string(failure.step.device.value) + " of " + cast_.ShortName(s_.session);
    if (std::string_view(s_.kind) == verdict::kReferences) {
      return "the owner does not know the reference that this rank holds; keep these journals (`amem-replay pack`) for a bug "
             "report, and restart the job";
    }
    switch (failure.code) {
      case Code::kOutOfMemory: {
        const Bytes needed = std::max(failure.still_missing, failure.step.bytes);
        const auto& gpus = s_.journal->who().gpu_uuids;
        const auto ordinal = static_cast<std::size_t>(failure.step.device.value);
        return "free memory on " + device + " until " + FormatBytes(needed) + " fit" +
               (ordinal < gpus.size() ? " (" + gpus[ordinal] + ")" : "") +
               "; nvidia-smi lists the processes that hold memory there, and a cache of this process counts too (for PyTorch "
               "torch.cuda.empty_cache()); " +
               retry;
      }
      case Code::kPeerLost:
      case Code::kTimeout:
        return "look at the rank that is named there and why it went or does not answer; if it is dead, restart the job, "
               "otherwise " +
               again + " can be called again on all ranks";
      case Code::kRefused:
        return "let streams come to rest and end stream captures before the call, " + retry;
      case Code::kDriver:
        return "look for an earlier CUDA error of that process (a sticky one makes every later call fail) and for Xid lines "
               "in dmesg; " +
               retry;
      default:
        return "read the message; " + retry;
    }
  }

  void WriteDeath(bool in_cycle) {
    const JournalHistory& j = *s_.journal;
    const Progress progress = s_.attempt != nullptr ? ProgressOf(j) : Progress{};
    v_.seq = j.last.seq;
    v_.phase = progress.phase;
    if (progress.step) TakeStep(&j, *progress.step);
    const Lifecycle lifecycle = j.findings.state.lifecycle;
    const std::string where = s_.attempt != nullptr ? "in the middle of " + Cycle()
                              : in_cycle            ? "while it was " + std::string(ToText(lifecycle))
                                                    : "while it was running";
    v_.headline = Capital(cast_.ShortName(s_.session)) + " ended without closing its journal, " + where;
    Say(Capital(v_.process) + " ended " + where + " without closing its journal; its last event is number " +
        Number(j.last.seq.value) + ", " + At(cast_.Wall(j, j.last.time_ns)) +
        (j.findings.report.torn_tail ? ", and the one after it was cut short" : "") + ".");
    if (s_.attempt != nullptr && !s_.attempt->begun) Say("It waited for the others to come.");
    if (progress.phase) {
      Say("It was in phase \"" + std::string(ToText(*progress.phase)) + "\"" + (progress.undoing ? " of the undo" : "") + ": " +
          StepWords(j, progress));
    }
    if (s_.witness != nullptr) {
      Say(Capital(cast_.ShortName(s_.witness->session())) + " saw it go " + At(s_.wall_ns) + Event(s_.witness_seq) +
          (j.dying ? "; the process was still being taken down when its journal was read." : "."));
    }
    BeginAttempt(j);
    if (s_.attempt != nullptr && s_.attempt->open_step) {
      Add(j, s_.attempt->open_step->at, Role::kCause,
          "step begun, and neither done nor failed: " + ToText(s_.attempt->open_step->step));
    }
    Add(j, {{}, j.last.time_ns}, Role::kCause,
        "the journal ends here with event " + Number(j.last.seq.value) + ": the process is dead, and did not close it");
    if (s_.witness != nullptr) {
      Add(*s_.witness, {s_.witness_seq, LostTime()}, Role::kConsequence, "lost " + cast_.Name(s_.session));
    }
    v_.remedy = in_cycle ? "find what ended that process (its own output, `dmesg` for the OOM killer and Xid lines, the "
                           "launcher's log); the others " +
                               std::string(s_.attempt != nullptr && s_.attempt->kind == CycleKind::kPause
                                               ? "run on, but without that rank the job cannot go on: restart it"
                                               : "cannot get the memory back that it shared: restart the job")
                         : "if it was not meant to end, look at its own output and the launcher's log; no pause or resume was "
                           "under way, so that AMem's part is only that the journal was left open";
  }

  [[nodiscard]] std::uint64_t LostTime() const {
    for (std::size_t i = 0; i < s_.witness->lost.size(); ++i) {
      if (s_.witness->lost[i].peer == s_.session) return s_.witness->lost_at[i].time_ns;
    }
    return 0;
  }

  [[nodiscard]] std::string StepWords(const JournalHistory& j, const Progress& p) const {
    if (p.did_its_part) return "its own steps there were done, and it waited for the others.";
    std::string text = Plural(p.steps_done, "step was", "steps were") + " done there and " + Number(p.steps_left) + " left; ";
    if (!p.step) return text + "none was under way.";
    text += (p.step_begun ? "it had begun, and not finished, \"" : "the next was \"") + ToText(*p.step) + "\"";
    if (p.step->allocation) text += ", about " + Thing(j, p.step->allocation);
    return text + ".";
  }

  void WriteNeverArrived() {
    const std::string what(ToText(s_.attempt->kind));
    v_.phase = s_.attempt->kind == CycleKind::kPause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive;
    v_.code = Code::kTimeout;
    const std::string missing = cast_.Names(s_.missing);
    v_.headline = Capital(missing) + " did not come to " + Cycle();
    std::vector<SessionId> waiting;
    for (const JournalHistory& j : cast_.journals()) {
      const bool waits = !j.attempts.empty() && j.attempts.back().kind == s_.attempt->kind && !j.attempts.back().begun &&
                         j.attempts.back().end != Attempt::End::kDone;
      if (!waits) continue;
      const Attempt& attempt = j.attempts.back();
      waiting.push_back(j.session());
      if (attempt.arrived) Add(j, attempt.arrived, Role::kContext, "came to " + Cycle() + " and waits for the others");
      if (attempt.ended) Add(j, attempt.ended, Role::kConsequence, "gave up: " + attempt.failure);
    }
    Say(Capital(cast_.Names(waiting)) +
        (!s_.live              ? " waited"
         : waiting.size() == 1 ? " has been waiting"
                               : " have been waiting") +
        " for " + DurationText(s_.waited_ns) + " since " + WallText(s_.wall_ns) + " for " + missing + " to come to " + Cycle() +
        ".");
    if (!s_.text.empty()) Say("What they were told: " + Sentence(s_.text));
    for (const SessionId session : s_.missing) SayWhereabouts(session);
    v_.remedy = "call " + std::string(s_.attempt->kind == CycleKind::kPause ? "ncclPause" : "ncclResume") +
                " on every rank that shares memory, in whatever order; look at what " + missing +
                (s_.missing.size() == 1 ? " does" : " do") +
                " instead (py-spy dump, gdb), or raise AMEM_TIMEOUT_MS if it only comes late";
    if (s_.journal == nullptr) v_.seq = s_.witness_seq;
    if (s_.journal == nullptr) v_.notes.push_back("what the missing rank did is not known: its journal was not given");
  }

  // What is known of somebody who should have come.
  void SayWhereabouts(SessionId session) {
    const JournalHistory* j = cast_.Find(session);
    if (j == nullptr) return;
    // Times of two hosts' clocks differ by what Wall makes of them.
    const std::uint64_t shift = cast_.Wall(*j, j->last.time_ns) - j->last.time_ns;
    const auto before = j->LastUpTo(s_.wall_ns > shift ? s_.wall_ns - shift : 0);
    const std::string name = Capital(cast_.Name(session));
    std::string text;
    if (before) {
      const std::uint64_t wall = cast_.Wall(*j, before->at.time_ns);
      text = "its last event before that is number " + Number(before->at.seq.value) + " (" + std::string(before->kind) + "), " +
             DurationText(s_.wall_ns - wall) + " earlier";
      const std::uint64_t since = j->last.seq.value - before->at.seq.value;
      text += since == 0 ? ", and nothing since" : ", and " + Plural(since, "more event") + " since, none of them its coming";
    } else {
      text = "it was not there yet when they began to wait";
    }
    const SessionStatus status = j->findings.info.status;
    text += status == SessionStatus::kLive ? "; the process lives"
            : status == SessionStatus::kClosed
                ? "; it closed its journal in order, " + WallText(cast_.Wall(*j, j->last.time_ns))
            : status == SessionStatus::kCrashed ? "; the process is dead now"
                                                : "; its journal is broken";
    Say(name + " did not call it: " + text + ".");
    const Moment shown = before ? before->at : j->last;
    Add(*j, shown, Role::kCause,
        before ? "the last event before the others began to wait (" + std::string(before->kind) + "); nothing about " +
                     Cycle() + " after it"
               : "nothing about " + Cycle() + " here");
    if (v_.seq.value == 0) v_.seq = shown.seq;
  }

  void WriteRefused() {
    v_.headline = Capital(Cycle()) + " could not begin";
    Say(Capital(Cycle()) + " could not begin on " + v_.process + ", " + At(cast_.Wall(*s_.witness, s_.attempt->ended.time_ns)) +
        " after " + DurationText(s_.waited_ns) + Event(s_.witness_seq) + ".");
    Say(Sentence(s_.text));
    v_.seq = s_.witness_seq;
    Add(*s_.witness, s_.attempt->ended, Role::kCause, Cycle() + " could not begin: " + s_.text);
    v_.remedy = "do what the message says, then call it again on all ranks that share memory";
  }

  void WriteStalled() {
    const std::string name = cast_.ShortName(s_.session);
    const JournalHistory* j = s_.journal;
    const Progress progress = j != nullptr ? ProgressOf(*j) : Progress{};
    v_.code = Code::kTimeout;
    v_.phase = progress.phase;
    if (!v_.phase && s_.witness != nullptr && !s_.witness->attempts.empty() && s_.witness->attempts.back().decided)
      v_.phase = s_.witness->attempts.back().decided->phase;
    if (progress.step) TakeStep(j, *progress.step);
    v_.headline = Capital(Cycle()) + (s_.live ? " waits for " : " waited for ") + name +
                  (v_.step ? ", which is at \"" + ToText(*v_.step) + "\"" : "");
    Say(CycleOfAll() + HowItEnded() + ", because " + v_.process + " came and did not finish" +
        (v_.phase ? " phase \"" + std::string(ToText(*v_.phase)) + "\"" : " its part") + ".");
    if (j == nullptr) {
      Say("What it does is not known: its journal was not given.");
      v_.seq = s_.witness_seq;
    } else {
      BeginAttempt(*j);
      s_.attempt->end == Attempt::End::kOpen ? SayStuck(*j, progress) : SayLate(*j);
    }
    if (!s_.text.empty()) Say("The others were told: " + Sentence(s_.text));
    v_.remedy = "look at where " + name +
                " is (gdb -p PID, py-spy dump): a kernel that never ends keeps \"quiesce\" and copies waiting, and a driver "
                "call may hang after a GPU fault (dmesg); if it is only slow, raise AMEM_TIMEOUT_MS";
  }

  // It is there still, or was when its journal ended.
  void SayStuck(const JournalHistory& j, const Progress& progress) {
    v_.seq = progress.since ? progress.since.seq : j.last.seq;
    if (progress.phase) Say(Capital(StepWords(j, progress)));
    const std::uint64_t since = cast_.Wall(j, progress.since ? progress.since.time_ns : j.last.time_ns);
    Say("Nothing has been heard of it since " + WallText(since) + Event(v_.seq) +
        (s_.waited_ns != 0 ? ", for " + DurationText(s_.waited_ns) : "") + ".");
    if (s_.attempt->open_step) {
      Add(j, s_.attempt->open_step->at, Role::kCause,
          "step begun, and neither done nor failed: " + ToText(s_.attempt->open_step->step));
    } else {
      Add(j, progress.since ? progress.since : j.last, Role::kCause, "the last thing it did: " + j.last_text);
    }
  }

  // It went on in the end, too late for the others.
  void SayLate(const JournalHistory& j) {
    const Attempt::Silence& silence = s_.attempt->silence;
    v_.seq = silence.from.seq;
    if (silence.phase) v_.phase = silence.phase;
    if (silence.step) TakeStep(&j, *silence.step);
    const std::string during = silence.step ? "step \"" + ToText(*silence.step) + "\" took it " + DurationText(silence.ns())
                                            : "it was silent for " + DurationText(silence.ns());
    Say("Of its own time, " + during + Event(silence.from.seq) + ", which is the longest" +
        (silence.step && silence.step->allocation ? "; that is about " + Thing(j, silence.step->allocation) : "") + ".");
    Add(j, silence.from, Role::kCause, during);
    v_.headline = Capital(Cycle()) + " waited for " + cast_.ShortName(s_.session) +
                  (silence.step ? ", which spent " + DurationText(silence.ns()) + " at \"" + ToText(*silence.step) + "\"" : "");
  }

  void WriteBroken() {
    const JournalHistory& j = *s_.journal;
    v_.code = Code::kBroken;
    v_.seq = j.broken_at ? j.broken_at->seq : j.last.seq;
    v_.headline = "The session of " + cast_.ShortName(s_.session) + " is broken: its pauses are refused";
    Say("The session of " + v_.process + " has been broken since " + WallText(s_.wall_ns) + Event(v_.seq) +
        ": from then on its journal does not tell the whole truth, and every pause is refused.");
    Say("The reason: " + Sentence(s_.text));
    Add(j, j.broken_at ? *j.broken_at : Moment{{}, j.last.time_ns}, Role::kCause, "broken: " + s_.text);
    for (const JournalHistory& other : cast_.journals()) {
      if (other.attempts.empty() || other.attempts.back().end != Attempt::End::kFailed) continue;
      Add(other, other.attempts.back().ended, Role::kConsequence, "gave up: " + other.attempts.back().failure);
    }
    v_.remedy =
        "remove the cause (a full disk or an unwritable AMEM_JOURNAL_DIR are the usual ones) and restart the job; it "
        "runs on meanwhile, but its memory cannot be given back";
  }

  void WriteHalfDone() {
    const JournalHistory& j = *s_.journal;
    v_.seq = s_.attempt->ended.seq;
    v_.headline = Capital(Cycle()) + " failed on " + cast_.ShortName(s_.session) + " and could not be undone";
    Say(v_.headline + " " + At(s_.wall_ns) + Event(v_.seq) + ".");
    Say(Sentence(s_.text));
    Add(j, s_.attempt->ended, Role::kCause, s_.text);
    v_.remedy = "call ncclResume again on all ranks, which takes up what is left to do; if that fails too, restart the job";
  }

  void WriteDisagreement() {
    const JournalHistory& j = *s_.journal;
    const bool order = std::string_view(s_.kind) == verdict::kImpossible;
    v_.seq = s_.witness_seq;
    v_.headline = order ? "The journal of " + cast_.ShortName(s_.session) + " has an order of events that cannot be"
                        : "A reference is known to one side only: " + cast_.ShortName(s_.session) + " and a peer disagree";
    Say(v_.headline + Event(v_.seq) + ".");
    Say(Sentence(s_.text));
    Add(j, {v_.seq, 0}, Role::kCause, s_.text);
    v_.remedy =
        "no pause or resume failed because of it so far, but one may; keep the journals (`amem-replay pack`) for a bug "
        "report: this should not be possible";
  }

  // Nothing failed for the others after that.
  void WriteSurvivors() {
    std::vector<SessionId> resumed;
    for (const JournalHistory& other : cast_.journals()) {
      if (other.session() == s_.session || other.attempts.empty()) continue;
      const Attempt& attempt = other.attempts.back();
      const bool done = attempt.end == Attempt::End::kDone && attempt.kind == CycleKind::kResume;
      if (done && cast_.Wall(other, attempt.ended.time_ns) > s_.wall_ns) resumed.push_back(other.session());
    }
    if (resumed.empty()) return;
    Say("After that " + cast_.Names(resumed) + " resumed without it.");
    v_.remedy =
        v_.remedy.substr(0, v_.remedy.find("; the others")) +
        "; the others have their own memory back, but what it shared with them is gone: communicators with that rank are of "
        "no use any more";
  }

  // What others tried after it was gone.
  void WriteLater() {
    std::vector<SessionId> failed;
    const Attempt* example = nullptr;
    for (const JournalHistory& other : cast_.journals()) {
      if (other.session() == s_.session || other.attempts.empty()) continue;
      const Attempt& attempt = other.attempts.back();
      if (attempt.end == Attempt::End::kDone || !attempt.ended || cast_.Wall(other, attempt.ended.time_ns) < s_.wall_ns)
        continue;
      failed.push_back(other.session());
      example = &attempt;
      if (failed.size() <= kEvidenceOfOthersMax) Add(other, attempt.ended, Role::kConsequence, "gave up: " + attempt.failure);
    }
    if (example == nullptr) return WriteSurvivors();
    v_.cycle_kind = example->kind;
    v_.cycle = example->cycle;
    const std::string what = std::string(ToText(example->kind)) + " " + Number(example->cycle);
    Say("After that " + what + " failed on " + cast_.Names(failed) + ": " + example->failure + ".");
  }

  // How the failure reached the other members.
  void WriteOthers() {
    std::vector<SessionId> gave_up, waiting, half;
    std::size_t shown = 0, hidden = 0;
    const std::string reason = s_.attempt->failed_step ? ": " + s_.attempt->failed_step->message : "";
    for (const JournalHistory& other : cast_.journals()) {
      if (other.session() == s_.session && (s_.attempt->ended.seq || s_.attempt->decided)) {
        if (s_.attempt->end == Attempt::End::kFailed)
          Add(other, s_.attempt->ended, Role::kConsequence,
              Cycle() + " failed" + (s_.attempt->undone ? ", undone" : ", NOT undone"));
        continue;
      }
      if (other.session() == s_.session || other.attempts.empty() || other.attempts.back().kind != s_.attempt->kind) continue;
      const Attempt& attempt = other.attempts.back();
      if (attempt.end == Attempt::End::kDone || !attempt.begun) continue;
      if (++shown > kEvidenceOfOthersMax) {
        ++hidden;
        continue;
      }
      if (attempt.decided) {
        (attempt.undone ? gave_up : half).push_back(other.session());
        std::string told = attempt.decided->message;
        if (!reason.empty() && told.ends_with(reason)) told.resize(told.size() - reason.size());
        Add(other, attempt.decided->at, Role::kConsequence, "was told: " + told);
      } else if (attempt.failed_step) {
        (attempt.undone ? gave_up : half).push_back(other.session());
        Add(other, attempt.failed_step->at, Role::kConsequence, "step failed: " + attempt.failed_step->message);
      } else {
        waiting.push_back(other.session());
        const Progress progress = ProgressOf(other);
        Add(other, progress.since, Role::kConsequence,
            progress.did_its_part ? "did its part of phase \"" + std::string(progress.phase ? ToText(*progress.phase) : "") +
                                        "\" and waits for the vote of the others"
                                  : "is at its own steps still");
      }
      if (attempt.end == Attempt::End::kFailed && !attempt.undone)
        v_.notes.push_back(cast_.Name(other.session()) + " could not undo what it had done: " + attempt.failure);
    }
    if (!gave_up.empty()) Say(Capital(cast_.Names(gave_up)) + " gave up because of it, and undid what was done.");
    if (!half.empty())
      Say(Capital(cast_.Names(half)) +
          " gave up because of it, and could not undo all: " + (half.size() == 1 ? "it is" : "they are") + " half way.");
    if (!half.empty() && std::string_view(s_.kind) == verdict::kDied)
      v_.remedy = v_.remedy.substr(0, v_.remedy.find("; the others")) +
                  "; the others need memory that it had, so that the job cannot go on: restart it";
    if (!waiting.empty()) Say(Capital(cast_.Names(waiting)) + (waiting.size() == 1 ? " waits" : " wait") + " for it.");
    if (hidden != 0) v_.notes.push_back("and " + Plural(hidden, "more rank") + " with the same consequence");
  }

  const Roster& cast_;
  const CandidateCause& s_;
  Verdict& v_;
};

}  // namespace

void Describe(const Roster& cast, const CandidateCause& suspect, Verdict& verdict) { Writer(cast, suspect, verdict).Write(); }

void DescribeHealth(const Roster& cast, Verdict& verdict) {
  const Verdict::Totals& t = verdict.totals;
  std::size_t live = 0, closed = 0, paused = 0, under_way = 0;
  for (const JournalHistory& j : cast.journals()) {
    live += j.findings.info.status == SessionStatus::kLive ? 1 : 0;
    closed += j.findings.info.status == SessionStatus::kClosed ? 1 : 0;
    paused += j.findings.state.lifecycle == Lifecycle::kPaused ? 1 : 0;
    under_way += !j.attempts.empty() && j.attempts.back().end == Attempt::End::kOpen ? 1 : 0;
  }
  verdict.live = live != 0;
  verdict.headline = "Nothing is wrong: " + Plural(t.pauses, "pause") + " and " + Plural(t.resumes, "resume") + " of " +
                     Plural(t.journals, "session") + " came to their ends";
  verdict.summary = Plural(t.events, "event") + " were checked, and " + Plural(t.references, "reference") +
                    " between sessions " + (t.references == 1 ? "agrees" : "agree") + " on both sides.";
  if (under_way != 0) verdict.summary += " A pause or resume is under way, and moves.";
  if (live != 0) {
    verdict.summary += " " + Plural(live, "session lives", "sessions live") +
                       (paused != 0 ? ", " + Number(paused) + " paused" : "") + "; they hold " + FormatBytes(t.held) +
                       " of their own memory on devices" +
                       (t.released != 0 ? ", and " + FormatBytes(t.released) + " are given back" : "") + ".";
  }
  if (closed != 0) verdict.summary += " " + Plural(closed, "session has ended in order", "sessions have ended in order") + ".";
}

void DescribeUnreadable(Verdict& verdict) {
  verdict.healthy = false;
  verdict.kind = verdict::kUnreadable;
  verdict.headline = "Nothing is wrong in what could be read, but not all could be read";
  verdict.summary = verdict.headline + ": " + verdict.damage.front() + ".";
  verdict.remedy =
      "give whole journals (copy the directories of sessions with all their files), or take the verdict for what it "
      "is: about the rest";
}

}  // namespace amem
