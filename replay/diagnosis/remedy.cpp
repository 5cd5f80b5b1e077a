#include "replay/diagnosis/remedy.h"

#include <fmt/format.h>

#include <array>
#include <string_view>

namespace amem {

// The word for programs, and what to do; `of_tag`: with a pool, which concerns its own process only, if that is another thing.
struct ActionText {
  std::string_view word, text, of_tag = {};
};
// In the order of the enumeration.
constexpr std::array<ActionText, kRemedyActions> kActions = {{
    {"none", ""},
    {"free-memory",
     "free memory on device {device} of {process} until {bytes} fit{gpu}; {holders}, and a cache of this process counts too "
     "(for PyTorch torch.cuda.empty_cache())"},
    {"end-captures", "let all streams finish and end stream captures before the call"},
    {"find-driver-error",
     "look for an earlier CUDA error of that process (a sticky one makes every later call fail) and for Xid lines "
     "in dmesg"},
    {"examine-peer",
     "find out why the peer that the reason above names died or does not answer; if it is dead, restart the job, "
     "otherwise {again}"},
    {"read-message", "remove the reason given above; `amem log` has the events before it"},
    {"follow-vote", "remove the reason given above; if a rank that it names is dead, restart the job, otherwise {again}"},
    {"follow-refusal", "remove the reason given above, then {again}"},
    {"call-on-every-rank",
     "{on_all}; find out what prevents {process} from that{look}, or raise AMEM_TIMEOUT_MS if it is only late"},
    {"examine-process",
     "inspect the stacks of {process}{look}: a kernel that never ends blocks the step \"quiesce\" and copies, and a "
     "driver call may hang after a GPU fault (dmesg); if it is only slow, raise AMEM_TIMEOUT_MS",
     "inspect the stacks of {process}{look}; calls that do not wait (wait=False) are carried out by its "
     "threads amem-pool-out and amem-pool-in; a kernel that never ends blocks the step \"quiesce\" and copies, and a driver "
     "call may hang after a GPU fault (dmesg); if it is only slow, it goes on by itself"},
    {"find-reason-of-death",
     "find what ended that process (its own output, `dmesg` for the OOM killer and Xid lines, the launcher's log)"},
    {"find-reason-of-end",
     "if it was not meant to end, read its own output and the launcher's log; no pause or resume was under way, so "
     "AMem did not fail"},
    {"repair-journal",
     "remove the cause ({reason}) and restart the job; it runs on until then, but its memory cannot be given back"},
    {"resume-again", "{resume_again} to finish what is left; if that fails too, restart the job",
     "call {call} again to finish what is left; if that fails too, restart the process"},
    {"report-reference",
     "keep these journals (`amem pack`) for a bug report, because the owner does not know the reference that this "
     "rank holds, and restart the job"},
    {"report-journals",
     "keep these journals (`amem pack`) for a bug report, because this should not be possible; no pause or resume "
     "has failed because of it so far, but one may"},
    {"give-whole-journals",
     "supply complete journals (copy session directories with all their files); otherwise the verdict covers only what "
     "could be read"},
    {"free-host-memory",
     "make more host memory available for pinning to {process}: free some (free -h, the container's limit), "
     "raise ulimit -l, or stop what else pins it; a pause saves contents there"},
    {"raise-descriptors",
     "raise the limit of open descriptors of {process} (ulimit -n, LimitNOFILE of the service or container), or "
     "find what keeps them open (ls /proc/{pid}/fd)"},
    {"restart-process",
     "restart the job: the CUDA context of {process} is dead after such an error, and every later call of that "
     "process fails as well; look for what came first, in its own output and for Xid lines in dmesg "
     "(compute-sanitizer finds illegal accesses)"},
    {"one-group",
     "give all sessions that share memory one group (AMEM_GROUPID, or ncclSetGroupID before the pause), then {again}"},
    {"same-settings", "run all ranks that share memory with the same version of AMem and the same AMEM_ settings"},
    {"reach-peer",
     "let the ranks reach each other's sockets: containers of one job need a common /tmp, or a common network "
     "namespace, or AMEM_SOCKET_DIR on a volume that all of them mount"},
    {"continue-process",
     "continue {process} (kill -CONT {pid}), and find out who stopped it (a debugger, job control, SIGSTOP); the "
     "others go on when it does, if they still wait",
     "continue {process} (kill -CONT {pid}), and find out who stopped it (a debugger, job control, SIGSTOP); it goes on then"},
    {"resume-first", "{resume_all} before the program uses NCCL again, also in CUDA graphs and other threads"},
    {"stay-until-resumed",
     "find out why {process} ended (its own output, the launcher's log); a rank that ends must do so before a "
     "pause or after the resume, because the others need what it shared; restart the job"},
    {"call-the-same", "call the same, {pause} or {resume}, on all ranks that share memory"},
    {"call-in-time",
     "find out what kept {process} so long, or raise AMEM_TIMEOUT_MS on all ranks{timeouts}: the first rank to call {call} "
     "waits "
     "that long for the last one"},
    {"start-under-amem",
     "start {process} under AMem as the other ranks are, or all without it (AMEM_ENABLE must be the same on all): a process "
     "without AMem cannot import what one with it shares; if {process} ran under AMem, give that journal, too"},
    {"examine-card",
     "look at the network card of {process} that the message names, with region and errno: its driver (dmesg, ibv_devinfo), "
     "and how much may be locked (ulimit -l); AMEM_NETWORK=keep leaves what cards hold where it is"},
    {"examine-gpu",
     "end the job and have {gpu_of} examined (`nvidia-smi -q -d ECC`, Xid lines in dmesg), and reset or replaced; repeating "
     "{call} does not help"},
    {"avoid-display",
     "restart the job, because repeating {call} does not help; before that take the display off {gpu_of} (Disp.A in "
     "nvidia-smi), or give that rank a GPU without one (CUDA_VISIBLE_DEVICES), or shorten its kernels"},
}};

constexpr std::string_view kFreeSomeMemory =
    "free memory on the device of {process} that the message names; {holders}, and a cache of this process counts too (for "
    "PyTorch torch.cuda.empty_cache())";

// In the order of the enumeration.
constexpr std::array<std::string_view, kRemedyOutlooks> kOutlooks = {
    "",
    "; then {again}; a failed attempt loses nothing",
    "; wait until the failed call has returned on all ranks, before it is made again",
    "; then {resume_all}: the failure could not be undone, and contents are kept; if that fails, too, restart the job",
    "; the others run on, but without that rank the job cannot go on: restart it",
    "; the others cannot get back the memory that it shared: restart the job",
    "; the others need memory that it had, so the job cannot go on: restart it",
    "; the others have their own memory back, but what it shared with them is gone: communicators with that rank cannot be "
    "used any more",
    "all have ended, so for the next run: "};

// What is no enumerator says nothing.
static const ActionText& TextsOf(Remedy::Action action) {
  const auto index = static_cast<std::size_t>(action);
  return kActions[index < kActions.size() ? index : 0];
}
static std::string_view TextOf(Remedy::Outlook outlook) {
  const auto index = static_cast<std::size_t>(outlook);
  return kOutlooks[index < kOutlooks.size() ? index : 0];
}

std::string_view ToText(Remedy::Action action) { return TextsOf(action).word; }

// With what to see where a process is; nothing where it has ended.
static std::string DebuggersText(const Remedy& r) {
  if (r.outlook == Remedy::Outlook::kAllEnded) return "";
  return r.pid > 0 ? fmt::format(" (gdb -p {0}, py-spy dump --pid {0})", r.pid) : " (py-spy dump, gdb)";
}

std::string CallText(Remedy::Caller caller, CycleKind kind, const std::string& tag) {
  const std::string_view verb = ToText(kind);
  switch (caller) {
    case Remedy::Caller::kC:
      break;
    case Remedy::Caller::kPython:
      return tag.empty() ? fmt::format("amem.{}()", verb) : fmt::format("amem.{}(\"{}\")", verb, tag);
    case Remedy::Caller::kCommand:
      return fmt::format("`amem {}`", verb);
  }
  if (!tag.empty()) return fmt::format("amem_{} for {}", verb, tag);
  return kind == CycleKind::kPause ? "ncclPause" : "ncclResume";
}

std::string GpuText(const Remedy& r) {
  if (!r.device) return "the GPU of " + r.process;
  return fmt::format("device {} of {}{}", r.device->value, r.process, r.gpu.empty() ? "" : " (" + r.gpu + ")");
}

// nvidia-smi numbers GPUs as it likes, and a process as its variables say; a UUID means one of them to both.
static std::string HoldersText(const Remedy& r) {
  if (!r.holders.empty()) return r.holders + " there";
  const std::string command = r.gpu.empty() ? "nvidia-smi" : fmt::format("`nvidia-smi -i {}`", r.gpu);
  return command + " lists the processes that hold memory there";
}

// To be put into the sentences. A command is about all ranks at once, and each rank of a program makes its own calls.
static std::string Filled(std::string_view text, const Remedy& r) {
  const bool command = r.caller == Remedy::Caller::kCommand;
  const auto call_of = [&r](CycleKind kind) { return CallText(r.caller, kind, r.tag); };
  const std::string call = call_of(r.cycle), resume = call_of(CycleKind::kResume);
  const std::string again = command         ? fmt::format("run {} again", call)
                            : r.tag.empty() ? fmt::format("call {} again on all ranks", call)
                                            : fmt::format("call {} again", call);
  const auto resume_all = [&](std::string_view suffix) {
    return command ? fmt::format("run {}{}", resume, suffix) : fmt::format("call {}{} on all ranks", resume, suffix);
  };
  const std::string on_all = command ? fmt::format("make every rank reach the safe point that {} has set", call)
                                     : fmt::format("call {} on every rank that shares memory, in any order", call);
  return fmt::format(
      fmt::runtime(text), fmt::arg("call", call), fmt::arg("again", again), fmt::arg("on_all", on_all),
      fmt::arg("pause", call_of(CycleKind::kPause)), fmt::arg("resume", resume), fmt::arg("resume_all", resume_all("")),
      fmt::arg("resume_again", resume_all(" again")), fmt::arg("process", r.process),
      fmt::arg("pid", r.pid > 0 ? std::to_string(r.pid) : "PID"), fmt::arg("look", DebuggersText(r)),
      fmt::arg("device", r.device.value_or(DeviceOrdinal{}).value), fmt::arg("bytes", FormatBytes(r.bytes)),
      fmt::arg("gpu", r.gpu.empty() ? "" : " (" + r.gpu + ")"), fmt::arg("holders", HoldersText(r)),
      fmt::arg("gpu_of", GpuText(r)),
      fmt::arg("reason", r.reason.empty() ? "usually a full disk or an AMEM_JOURNAL_DIR that cannot be written" : r.reason),
      fmt::arg("timeouts", r.timeouts_differ ? ", to the same value" : ""));
}

std::string ToText(const Remedy& r) {
  const bool of_pool = !r.tag.empty();
  const auto filled = [&r](std::string_view text) { return Filled(text, r); };
  const bool unknown_device = r.action == Remedy::Action::kFreeMemory && r.bytes == 0;  // only others tell of it
  const ActionText& action = TextsOf(r.action);
  std::string_view outlook = TextOf(r.outlook);
  const bool own = of_pool && !action.of_tag.empty();
  const std::string_view text = own ? action.of_tag : unknown_device ? kFreeSomeMemory : action.text;
  if (r.outlook == Remedy::Outlook::kAllEnded) return filled(outlook) + filled(text);
  if (own) return filled(text);
  if (of_pool && r.outlook == Remedy::Outlook::kCannotBeUndone)
    outlook = "; then resume the tag: the failure could not be undone";
  return filled(text) + filled(outlook);
}

}  // namespace amem
