// The table of failures: how each is put into a job, and what must be said of it. To add one, add an entry: the commands are
// those of job_rank.cpp, and run behind a prologue in which the job makes a communicator, uses it, pauses, resumes, and meets.
#include <csignal>
#include <random>

#include "tests/scenarios/failure_job.h"

namespace amem::failure {
namespace {

constexpr int Killed(int signal) { return 256 + signal; }

// What is to be done about it (Remedy::Action), by the cause.
const Words kContinue = {"continue-process"};
const Words kFreeDevice = {"free-memory"};
const Words kHostMemory = {"free-host-memory"};
const Words kRestart = {"restart-process"};
const Words kGpu = {"examine-gpu"};
const Words kDisplay = {"avoid-display"};
const Words kDriver = {"find-driver-error"};
const Words kGroups = {"one-group"};
const Words kJournal = {"repair-journal"};
const Words kCall = {"call-on-every-rank"};
const Words kInTime = {"call-in-time"};
const Words kLook = {"examine-process"};
const Words kDeath = {"find-reason-of-death", "find-reason-of-end"};
const Words kLeaving = {"stay-until-resumed", "find-reason-of-death", "find-reason-of-end"};

// Kinds that are equally right for one thing.
const Words kDied = {"rank-died"};
const Words kEnded = {"rank-died", "ended-without-closing"};
const Words kLeft = {"rank-left", "rank-died", "ended-without-closing"};
// Where an exception ends those that wait, another one may have seen them leave first.
const Expected kOfLeaving = {.kinds = kLeft, .whoever = true};
const Words kAbsent = {"never-arrived"};
const Words kStopped = {"stalled", "never-arrived"};
const Words kStuck = {"stalled", "step-failed"};

// A signal at a random moment: which of the next driver calls, of some that each cycle makes on every rank.
std::string AtRandom(std::mt19937_64& random, int calls, const std::string& action) {
  return "at=*," + std::to_string(1 + random() % static_cast<std::uint64_t>(calls)) + "," + action;
}
constexpr int kPauseCalls = 4, kResumeCalls = 6;

void AddSignals(std::vector<Failure>& all, std::mt19937_64& random) {
  const auto in_pause = [&](const std::string& action) { return "1:" + AtRandom(random, kPauseCalls, action); };
  const auto in_resume = [&](const std::string& action) { return "1:" + AtRandom(random, kResumeCalls, action); };
  all.push_back({.name = "stopped before a pause",
                 .commands = {"1:do=STOP", "pause"},
                 .fate = Fate::kStopped,
                 .expected = {kStopped, {1}, kContinue}});
  all.push_back({.name = "stopped in a pause",
                 .commands = {in_pause("STOP"), "pause"},
                 .fate = Fate::kStopped,
                 .expected = {kStopped, {1}, kContinue}});
  all.push_back({.name = "stopped in a resume",
                 .commands = {"pause", in_resume("STOP"), "resume"},
                 .fate = Fate::kStopped,
                 .expected = {kStopped, {1}, kContinue}});
  all.push_back({.name = "stopped while paused",
                 .commands = {"pause", "barrier", "1:do=STOP", "resume"},
                 .fate = Fate::kStopped,
                 .expected = {kStopped, {1}, kContinue}});
  // It has voted, so the others' pause succeeds without it, and nobody sees what it does. Only its own journal is open.
  all.push_back({.name = "stopped while it waits for the votes of others",
                 .commands = {"0:at=Unmap,1,sleep=900", "1:later=500,STOP", "pause"},
                 .fate = Fate::kStopped,
                 .expected = {kStopped, {1}, {"continue-process", "examine-process"}},
                 .alone = kOfLeaving});
  all.push_back({.name = "killed while running",
                 .commands = {"1:do=KILL", "sleep=300"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kEnded, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "killed while running, before the others pause and resume",
                 .commands = {"1:do=KILL", "sleep=300", "pause", "resume"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kEnded, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "killed while the others wait for it to pause",
                 .commands = {"1:sleep=600", "1:do=KILL", "pause"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kEnded, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "killed in a pause",
                 .commands = {in_pause("KILL"), "pause"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kDied, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "killed in a resume",
                 .commands = {"pause", in_resume("KILL"), "resume"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kDied, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "killed while paused",
                 .commands = {"pause", "barrier", "1:do=KILL", "sleep=300", "resume"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kEnded, {1}, kDeath},
                 .culprit_knows = true});
  for (const char* cycle : {"pause", "resume"}) {
    const bool pause = std::string(cycle) == "pause";
    const std::string at = AtRandom(random, pause ? kPauseCalls : kResumeCalls, "KILL");
    all.push_back({.name = std::string("the first rank is killed in a ") + cycle,
                   .commands = pause ? Commands{"0:" + at, "pause"} : Commands{"pause", "0:" + at, "resume"},
                   .fate = Fate::kEnded,
                   .status = Killed(SIGKILL),
                   .silent = false,
                   .expected = {kDied, {0}, kDeath},
                   .culprit_knows = true});
  }
  all.push_back({.name = "two of four are stopped in a resume",
                 .ranks = 4,
                 // A while after its call: one that counts arrivals answers the other first.
                 .commands = {"pause", "1,2:" + AtRandom(random, kResumeCalls, "STOP=400"), "resume"},
                 .fate = Fate::kStopped,
                 .expected = {kStopped, {1, 2}, kContinue}});
  all.push_back({.name = "segmentation fault in a pause",
                 .commands = {in_pause("SEGV"), "pause"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGSEGV),
                 .silent = false,
                 .expected = {kDied, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "segmentation fault while paused",
                 .commands = {"pause", "barrier", "1:do=SEGV", "sleep=300", "resume"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGSEGV),
                 .silent = false,
                 .expected = {kEnded, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "abort in a resume",
                 .commands = {"pause", in_resume("ABRT"), "resume"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGABRT),
                 .silent = false,
                 .expected = {kDied, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "terminated in a pause",
                 .commands = {in_pause("TERM"), "pause"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGTERM),
                 .silent = false,
                 .expected = {kDied, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "terminated while running",
                 .ranks = 4,
                 .commands = {"2:do=TERM", "sleep=300"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGTERM),
                 .silent = false,
                 .expected = {kEnded, {2}, kDeath},
                 // It shares no memory with rank 2, so that its journal has the ends of its neighbours, and its own, alone.
                 .alone_of = {{0, {.kinds = kLeft, .whoever = true}}},
                 .culprit_knows = true});
}

void AddExits(std::vector<Failure>& all, std::mt19937_64& random) {
  all.push_back({.name = "exit(1) while running",
                 .commands = {"1:do=exit=1", "sleep=300"},
                 .fate = Fate::kEnded,
                 .status = 1,
                 .silent = false,
                 .expected = {kLeft, {1}, kLeaving},
                 .alone_after_exceptions = kOfLeaving,
                 .culprit_knows = true});
  all.push_back({.name = "exit(1) while the others wait for it to pause",
                 .commands = {"1:sleep=600", "1:do=exit=1", "pause"},
                 .fate = Fate::kEnded,
                 .status = 1,
                 .silent = false,
                 .expected = {kLeft, {1}, kLeaving},
                 .alone_after_exceptions = kOfLeaving,
                 .culprit_knows = true});
  all.push_back({.name = "exit(1) while paused",
                 .commands = {"pause", "barrier", "1:do=exit=1"},
                 .fate = Fate::kEnded,
                 .status = 1,
                 .silent = false,
                 .expected = {kLeft, {1}, kLeaving},
                 .alone_after_exceptions = kOfLeaving,
                 .culprit_knows = true});
  all.push_back({.name = "exit(1) while paused, and the others resume",
                 .commands = {"pause", "barrier", "1:do=exit=1", "sleep=300", "resume"},
                 .fate = Fate::kEnded,
                 .status = 1,
                 .silent = false,
                 .expected = {kLeft, {1}, kLeaving},
                 .alone_after_exceptions = kOfLeaving,
                 .culprit_knows = true});
  all.push_back({.name = "exit(0) while paused",
                 .commands = {"pause", "barrier", "1:do=exit=0"},
                 .fate = Fate::kEnded,
                 .status = 0,
                 .silent = false,
                 .expected = {kLeft, {1}, kLeaving},
                 .culprit_knows = true});
  all.push_back({.name = "_exit(3) while paused",
                 .commands = {"pause", "barrier", "1:do=_exit=3", "sleep=300", "resume"},
                 .fate = Fate::kEnded,
                 .status = 3,
                 .silent = false,
                 .expected = {kEnded, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "_exit(3) in a pause",
                 .commands = {"1:" + AtRandom(random, kPauseCalls, "_exit=3"), "pause"},
                 .fate = Fate::kEnded,
                 .status = 3,
                 .silent = false,
                 .expected = {kDied, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "exit(1) by another thread in a resume",
                 .commands = {"pause", "1:at=Create,1,sleep=900", "1:later=400,exit=1", "resume"},
                 .fate = Fate::kEnded,
                 .status = 1,
                 .silent = false,
                 .expected = {kLeft, {1}, kLeaving},
                 .alone_after_exceptions = kOfLeaving,
                 .culprit_knows = true});
}

void AddDeadlocks(std::vector<Failure>& all) {
  all.push_back({.name = "a rank never pauses",
                 .commands = {"1:linger", "pause"},
                 .expected = {kAbsent, {1}, kCall},
                 .culprit_knows = true});
  all.push_back({.name = "a rank never resumes",
                 .commands = {"pause", "1:linger", "resume"},
                 .expected = {kAbsent, {1}, kCall},
                 .culprit_knows = true});
  all.push_back({.name = "the first rank never resumes",
                 .commands = {"pause", "0:linger", "resume"},
                 .expected = {kAbsent, {0}, kCall},
                 .culprit_knows = true});
  all.push_back({.name = "two of four never pause",
                 .ranks = 4,
                 .commands = {"1,2:linger", "pause"},
                 .expected = {kAbsent, {1, 2}, kCall},
                 .culprit_knows = true});
  const job::Environment soon = {{"AMEM_TIMEOUT_MS", "1500"}};
  // After exceptions the others are gone before it comes.
  all.push_back({.name = "a rank pauses when the others have given up",
                 .environment = soon,
                 .commands = {"1:sleep=2300", "pause"},
                 .silent = false,
                 .expected = {kAbsent, {1}, kInTime},
                 .alone_after_exceptions = {kAbsent, {1}, kCall}});
  all.push_back({.name = "the first rank resumes when the others have given up",
                 .environment = soon,
                 .commands = {"pause", "0:sleep=2300", "resume"},
                 .silent = false,
                 .expected = {kAbsent, {0}, kInTime},
                 .alone_after_exceptions = {kAbsent, {0}, kCall}});
  all.push_back({.name = "a rank comes too late for one whose deadline is shorter",
                 .environment_of = {{0, {{"AMEM_TIMEOUT_MS", "900"}}}},
                 .commands = {"2:sleep=1600", "pause"},
                 .silent = false,
                 .expected = {kAbsent, {2}, kInTime},
                 .alone_after_exceptions = {kAbsent, {2}, kCall},
                 // It was told who had not come, and not that this one came later.
                 .alone_of = {{1, {kAbsent, {2}, kCall}}}});
  all.push_back({.name = "a driver call of a pause does not return",
                 .commands = {"1:at=Unmap,1,hang", "pause"},
                 .fate = Fate::kBlocked,
                 .expected = {kStuck, {1}, kLook}});
  all.push_back({.name = "a driver call of a resume does not return",
                 .commands = {"pause", "1:at=Create,1,hang", "resume"},
                 .fate = Fate::kBlocked,
                 .expected = {kStuck, {1}, kLook}});
  all.push_back({.name = "a driver call of the first rank does not return",
                 .commands = {"pause", "0:at=Map,1,hang", "resume"},
                 .fate = Fate::kBlocked,
                 .expected = {kStuck, {0}, kLook}});
  all.push_back({.name = "work on a device does not end",
                 .commands = {"1:busy", "pause"},
                 .fate = Fate::kFails,
                 .expected = {kStuck, {1}}});
}

void AddExhaustion(std::vector<Failure>& all) {
  const Words oom = {"out-of-memory"}, host = {"step-failed", "out-of-memory"};
  all.push_back({.name = "device memory taken from one rank",
                 .commands = {"pause", "1:hog=4", "barrier", "resume"},
                 .fate = Fate::kFails,
                 .silent = false,
                 .expected = {oom, {1}, kFreeDevice},
                 .culprit_knows = true});
  all.push_back({.name = "device memory taken from two ranks",
                 .ranks = 4,
                 .commands = {"pause", "1,2:hog=4", "barrier", "resume"},
                 .fate = Fate::kFails,
                 .silent = false,
                 .expected = {oom, {1, 2}, kFreeDevice}});
  all.push_back({.name = "device memory runs out at the create itself",
                 .commands = {"pause", "1:at=Create,1,fail=2", "resume"},
                 .fate = Fate::kFails,
                 .silent = false,
                 .expected = {oom, {1}, kFreeDevice},
                 .culprit_knows = true});
  all.push_back({.name = "pinned host memory runs out",
                 .first_cycle = false,
                 .commands = {"trim", "1:at=AllocatePinned|HostRegister,1,fail-all=2", "pause"},
                 .fate = Fate::kFails,
                 .silent = false,
                 .expected = {host, {1}, kHostMemory},
                 .culprit_knows = true});
  all.push_back(
      {.name = "the disk of a journal is full",
       .full_disk = {1},
       .commands = {"1:fill disk", "barrier", "pause", "resume", "sleep=300", "pause", "resume", "sleep=300", "pause"},
       .fate = Fate::kFails,
       .silent = false,
       .expected = {{"refused", "broken-session", "step-failed"}, {1}, kJournal}});
  all.push_back({.name = "a rank has nowhere for a journal",
                 .environment_of = {{1, {{"AMEM_JOURNAL_DIR", "/proc/no-such-place"}}}},
                 .first_cycle = false,
                 .commands = {"pause"},
                 .fate = Fate::kFails,
                 .silent = false,
                 .expected = {{"refused", "broken-session", "step-failed"}, {1}, kJournal}});
}

void AddDriverErrors(std::vector<Failure>& all) {
  const auto with = [&](const char* name, const Commands& commands, Words remedy) {
    all.push_back({.name = name,
                   .commands = commands,
                   .fate = Fate::kFails,
                   .silent = false,
                   .expected = {{"step-failed", "half-done"}, {1}, std::move(remedy)},
                   .culprit_knows = true});
  };
  with("illegal address (700) in a pause", {"1:at=Copy|Query,1,fail-all=700", "pause"}, kRestart);
  with("launch failure (719) when a pause waits for the device", {"1:at=Synchronize,1,fail-all=719", "pause"}, kRestart);
  with("uncorrectable memory error (214) in a pause", {"1:at=Copy|Query,1,fail-all=214", "pause"}, kGpu);
  with("uncorrectable memory error (214) in a resume", {"pause", "1:at=Map,1,fail-all=214", "resume"}, kGpu);
  with("launch timeout (702) when a pause waits for the device", {"1:at=Synchronize,1,fail-all=702", "pause"}, kDisplay);
  with("launch timeout (702) in a resume", {"pause", "1:at=Map,1,fail-all=702", "resume"}, kDisplay);
  with("unknown error (999) in a resume", {"pause", "1:at=Map,1,fail-all=999", "resume"}, kRestart);
  with("invalid value in a resume, once", {"pause", "1:at=Map,1,fail=1", "resume"}, {});
  with("not supported in a resume, and in its undo", {"pause", "1:at=SetAccess,1,fail-all=801", "resume"}, {});
  with("a pause that fails on one rank and cannot be undone on another",
       {"1:at=Release,1,fail=1", "2:at=Create,1,fail-all=1", "pause"},
       // Rank 2 may learn of the failure before it has released anything, and then has nothing to create.
       {"call ncclResume", "call ncclPause again", "all have ended", "Xid"});
}

const Expected kOfOneOfAnotherGroup = {{"refused"}, {1}, kGroups};
// Where an exception ends the ranks that are refused first, the others may have seen no more than that these left.
const Expected kOfThoseThatLeft = {.kinds = {"refused", "rank-left"}, .whoever = true};

void AddSettings(std::vector<Failure>& all) {
  all.push_back({.name = "groups that differ",
                 .environment_of = {{1, {{"AMEM_GROUPID", "7"}}}},
                 .first_cycle = false,
                 .commands = {"pause"},
                 .fate = Fate::kFails,
                 .silent = false,
                 .expected = {{"refused"}, {1}, kGroups},
                 .alone = kOfOneOfAnotherGroup,
                 .alone_after_exceptions = kOfThoseThatLeft});
  all.push_back({.name = "a rank changes its group",
                 .commands = {"1:group=3", "barrier", "pause"},
                 .fate = Fate::kFails,
                 .silent = false,
                 .expected = {{"refused"}, {1}, kGroups},
                 .alone = kOfOneOfAnotherGroup,
                 .alone_after_exceptions = kOfThoseThatLeft,
                 .culprit_knows = false,
                 .gaps = {{"alone", "a rank that is refused records by whom, and not that its group is another one now"}}});
  all.push_back({.name = "a launch while paused",
                 .commands = {"pause", "barrier", "1:reduce"},
                 .silent = false,
                 .expected = {{"launch-refused"}, {1}, {"resume-first"}},
                 // Nothing of it is in the others' journals, which tell no more than how they, and those that share memory
                 // with them, ended while they were paused.
                 .alone = {.kinds = kLeft, .whoever = true},
                 .culprit_knows = true});
}

void AddJournalsAndNeighbours(std::vector<Failure>& all, std::mt19937_64& random) {
  const auto killed = [&](const char* name, Damage damage) {
    all.push_back({.name = name,
                   .commands = {"pause", "1:" + AtRandom(random, kResumeCalls, "KILL"), "resume"},
                   .fate = Fate::kEnded,
                   .status = Killed(SIGKILL),
                   .silent = false,
                   .expected = {kDied, {1}, kDeath},
                   .damage = damage});
  };
  killed("killed in a resume, and its journal is missing", Damage::kMissing);
  killed("killed in a resume, and its journal is cut short", Damage::kCutShort);
  killed("killed in a resume, and its journal is overwritten", Damage::kOverwritten);
  for (const bool resumed : {false, true}) {
    all.push_back(
        {.name = std::string("killed while paused, its journal is missing") + (resumed ? ", and the others resume" : ""),
         .commands = resumed ? Commands{"pause", "barrier", "1:do=KILL", "sleep=300", "resume"}
                             : Commands{"pause", "barrier", "1:do=KILL", "sleep=300"},
         .fate = Fate::kEnded,
         .status = Killed(SIGKILL),
         .silent = false,
         .expected = {kDied, {1}, {"find-reason-of-death"}},
         .damage = Damage::kMissing});
  }
  all.push_back({.name = "device memory taken, and that journal is missing",
                 .commands = {"pause", "1:hog=4", "barrier", "resume"},
                 .fate = Fate::kFails,
                 .silent = false,
                 .expected = {{"out-of-memory"}, {1}, kFreeDevice},
                 .damage = Damage::kMissing});
  all.push_back({.name = "a rank never resumes, and its journal is missing",
                 .commands = {"pause", "1:linger", "resume"},
                 .expected = {kAbsent, {1}, kCall},
                 .damage = Damage::kMissing});
  const Commands failing = {"0:do=KILL", "sleep=300", "pause"};
  all.push_back({.name = "a healthy job lives on in the same directory",
                 .commands = {"1:linger", "pause"},
                 .expected = {kAbsent, {1}, kCall},
                 .culprit_knows = true,
                 .neighbour = {Neighbour::When::kLivesOn, 2, {"pause", "resume"}}});
  all.push_back({.name = "an older job failed in the same directory",
                 .commands = {"pause", "1:" + AtRandom(random, kResumeCalls, "KILL"), "resume"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kDied, {1}, kDeath},
                 .culprit_knows = true,
                 .neighbour = {Neighbour::When::kEndedBefore, 2, failing}});
  all.push_back({.name = "a job was restarted in the same directory and fails otherwise",
                 .commands = {"pause", "2:linger", "resume"},
                 .expected = {kAbsent, {2}, kCall},
                 .culprit_knows = true,
                 .neighbour = {Neighbour::When::kEndedBefore, 3, {"pause", "1:do=KILL", "sleep=200", "resume"}}});
  all.push_back({.name = "a healthy job came and went afterwards",
                 .commands = {"1:linger", "pause"},
                 .expected = {kAbsent, {1}, kCall},
                 .culprit_knows = true,
                 .neighbour = {Neighbour::When::kEndedAfter, 2, {"pause", "resume", "barrier", "destroy"}}});
}

void AddHostsAndSizes(std::vector<Failure>& all, std::mt19937_64& random) {
  const auto in_resume = [&](int rank, const std::string& action) {
    return std::to_string(rank) + ":" + AtRandom(random, kResumeCalls, action);
  };
  all.push_back({.name = "two hosts, the second an hour behind: killed in a resume",
                 .ranks = 4,
                 .hosts = 2,
                 .clock_s = {0, -3600},
                 .commands = {"pause", in_resume(2, "KILL"), "resume"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kDied, {2}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "two hosts, the second an hour ahead: a rank of the first never resumes",
                 .ranks = 4,
                 .hosts = 2,
                 .clock_s = {0, 3400},
                 .commands = {"pause", "1:linger", "resume"},
                 .expected = {kAbsent, {1}, kCall},
                 .culprit_knows = true});
  all.push_back({.name = "four hosts: a rank never pauses",
                 .ranks = 8,
                 .hosts = 4,
                 .clock_s = {0, 2, -3, -3600},
                 .commands = {"5:linger", "pause"},
                 .expected = {kAbsent, {5}, kCall},
                 .culprit_knows = true});
  all.push_back({.name = "four hosts, 16 ranks: killed in a pause",
                 .ranks = 16,
                 .hosts = 4,
                 .commands = {"9:" + AtRandom(random, kPauseCalls, "KILL"), "pause"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kDied, {9}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "16 ranks: stopped in a resume",
                 .ranks = 16,
                 .commands = {"pause", in_resume(11, "STOP"), "resume"},
                 .fate = Fate::kStopped,
                 .expected = {kStopped, {11}, kContinue}});
  all.push_back({.name = "8 ranks: device memory taken",
                 .ranks = 8,
                 .commands = {"pause", "6:hog=4", "barrier", "resume"},
                 .fate = Fate::kFails,
                 .silent = false,
                 .expected = {{"out-of-memory"}, {6}, kFreeDevice},
                 .culprit_knows = true});
  all.push_back({.name = "2 ranks: killed in a resume",
                 .ranks = 2,
                 .commands = {"pause", in_resume(1, "KILL"), "resume"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kDied, {1}, kDeath},
                 .culprit_knows = true});
}

// Jobs in which nothing is wrong, so that a verdict that always accuses somebody is noticed.
void AddHealthy(std::vector<Failure>& all) {
  const Words healthy = {"healthy"};
  all.push_back({.name = "a healthy job that runs", .commands = {"pause", "resume"}, .lives = true, .expected = {healthy, {}}});
  all.push_back({.name = "a resume that failed and was called again",
                 .commands = {"pause", "1:at=Create,1,fail=2", "resume", "barrier", "resume"},
                 .lives = true,
                 .expected = {healthy, {}}});
  all.push_back({.name = "layouts that differ do no harm",
                 .environment_of = {{1, {{"AMEM_LAYOUT", "direct"}}}},
                 .commands = {"pause", "resume"},
                 .lives = true,
                 .expected = {healthy, {}}});
  all.push_back({.name = "a rank without a directory for sockets does no harm",
                 .environment_of = {{1, {{"AMEM_SOCKET_DIR", "/proc/no-such-place"}}}},
                 .commands = {"pause", "resume"},
                 .lives = true,
                 .expected = {healthy, {}}});
  all.push_back({.name = "a resume needs no descriptors",
                 .commands = {"pause", "barrier", "1:descriptors=0", "resume"},
                 .lives = true,
                 .expected = {healthy, {}}});
  all.push_back({.name = "a healthy job that is paused", .commands = {"pause"}, .lives = true, .expected = {healthy, {}}});
}

}  // namespace

std::vector<Failure> AllFailures(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Failure> all;
  AddSignals(all, random);
  AddExits(all, random);
  AddDeadlocks(all);
  AddExhaustion(all);
  AddDriverErrors(all);
  AddSettings(all);
  AddJournalsAndNeighbours(all, random);
  AddHostsAndSizes(all, random);
  AddHealthy(all);
#ifdef AMEM_CARD
  AddCards(all);
#endif
  all.push_back({.name = "killed while another imports its memory again",
                 .commands = {"pause", "1:at=Export,1,KILL", "resume"},
                 .fate = Fate::kEnded,
                 .status = Killed(SIGKILL),
                 .silent = false,
                 .expected = {kDied, {1}, kDeath},
                 .culprit_knows = true});
  all.push_back({.name = "a driver call of an undo does not return",
                 .commands = {"1:at=Create,1,hang", "2:at=Release,1,fail=1", "pause"},
                 .fate = Fate::kFails,
                 .expected = {{"step-failed"}, {2}, kDriver}});
  return all;
}

}  // namespace amem::failure
