// Failed jobs, and what `amem-replay why` says of them: a job of real processes on the stand-ins, into which one failure is
// put, and which is then looked at as people do: while it hangs, after the deadline, after the launcher's clean-up, with the
// journal of one rank only, and in a copy that was made while the job ran. The table of failures is failure_table.cpp.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/scenarios/job.h"

namespace amem::failure {

using Commands = std::vector<std::string>;
using Words = std::vector<std::string>;

// What must be said of it.
struct Expected {
  Words kinds;                  // one of them: they are equally right
  std::vector<int> ranks = {};  // just these are at fault
  Words remedy = {};            // one of these words is in the remedy; empty: any remedy
  bool whoever = false;         // any rank may be named: what was recorded does not tell which one is at fault
};

// What has become of the first of `ranks` when the job is looked at. If it is something else, the failure did not happen, and
// nothing is shown by what is said of it.
enum class Fate { kRuns, kStopped, kBlocked, kFails, kEnded };

// How the launcher, or a person, ends the job.
enum class Teardown { kTerminate, kKill, kInterrupt, kExceptions };
inline constexpr Teardown kTeardowns[] = {Teardown::kTerminate, Teardown::kKill, Teardown::kInterrupt, Teardown::kExceptions};
const char* ToText(Teardown teardown);

enum class Damage { kNone, kMissing, kCutShort, kOverwritten };  // of the journal of the first of `ranks`, before each look

// Another job in the same directory.
struct Neighbour {
  enum class When { kNone, kLivesOn, kEndedBefore, kEndedAfter };  // kEndedAfter: it begins and ends behind the job in question
  When when = When::kNone;
  int ranks = 2;
  Commands commands = {};
};

// A look at which what is said is known to be wrong, or to be less than could be wished, and why.
struct Gap {
  std::string look;  // "hang", "copy", "deadline", "after", "alone", or "" for all
  std::string reason;
};

struct Failure {
  std::string name;
  int ranks = 3;
  int hosts = 1;                  // the ranks are spread evenly
  std::vector<int> clock_s = {};  // how far the wall clock of each host is ahead
  job::Environment environment = {};
  std::map<int, job::Environment> environment_of = {};
  std::vector<int> full_disk = {};  // ranks whose disk "fill disk" fills
  bool first_cycle = true;          // the job has paused and resumed once before
  Commands commands;                // behind it; at the end every rank idles until it is ended
  Fate fate = Fate::kRuns;
  int status = 0;      // with kEnded: the exit status, or 256 + the signal
  bool silent = true;  // the job hangs until the deadline, so that it can be looked at before
  bool lives = false;  // nothing is wrong, or no more after the failure: what is expected holds only as long as it runs
  Expected expected = {};
  Expected in_hang = {};  // where less can be known before the deadline; no kinds: as `expected`
  Expected alone = {};    // with one survivor's journal; no kinds: as `expected`
  // The same where exceptions ended the ranks one because of the other, and one that is not connected with the first one, or
  // ended before it was told, has seen another one leave. No kinds: as `alone`.
  Expected alone_after_exceptions = {};
  std::map<int, Expected> alone_of = {};  // with that of this survivor
  bool culprit_knows = false;             // the journal of the rank at fault tells it, too, without the others'
  Damage damage = Damage::kNone;
  Neighbour neighbour = {};
  std::vector<Gap> gaps = {};
};

// The failures; those of the day are spread over it so that each sort is among them.
std::vector<Failure> AllFailures(std::uint64_t seed);

// Part of them, where the stand-in card is built.
void AddCards(std::vector<Failure>& all);

struct Look {
  std::string name;   // "hang", "copy", "deadline", "after SIGTERM", "alone 0"
  std::string wrong;  // empty: what was said is right
  std::string gap;    // the reason why it is known to be wrong
  std::string said;   // kind, ranks and headline
};

struct Result {
  std::string name;
  std::string broken;  // the failure did not happen as it should: what was seen in its place
  std::vector<Look> looks;
};

// Runs it once and looks at it. `every_rank`: at the journal of each rank alone, and not only of the first survivor's and of
// the rank at fault.
Result LookAt(const Failure& failure, Teardown teardown, bool every_rank, std::uint64_t seed);

}  // namespace amem::failure
