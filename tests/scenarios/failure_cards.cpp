// Failures of a network card that is asked to let go and to register again (AMEM_NETWORK=renew), in each phase of a pause and
// of a resume: two hosts of two ranks, of which a host's share memory and pause together. What the network itself then does is
// network_test.cpp's affair.
#include <csignal>

#include "tests/scenarios/failure_job.h"

namespace amem::failure {
namespace {

Failure OverCards(std::string name, Commands commands) {
  return {.name = "a card " + std::move(name),
          .ranks = 4,
          .environment = {{"AMEM_NETWORK", "renew"},
                          {"AMEM_SIM_CARD_FINDINGS", "/dev/null"},
                          {"LD_LIBRARY_PATH", AMEM_STAND_INS ":" AMEM_CARD},
                          {"STAND_IN_NET", "ib"},
                          {"STAND_IN_RANKS_PER_HOST", "2"}},
          .commands = std::move(commands)};
}

// Without slabs the buffers of a rank's connections are the last that are unmapped, by the card as well; a test of
// network_test.cpp counts what the card has let go of by then.
constexpr const char* kAfterLettingGo = "Unmap,8,";

// Of one host alone, of which the other host's journals tell nothing.
const Expected kOfTheOtherHost = {.kinds = {"healthy", "ended-without-closing", "rank-died", "rank-left"}, .whoever = true};

Failure Fails(Failure failure, Words remedy) {
  failure.fate = Fate::kFails;
  failure.silent = false;
  failure.expected = {{"step-failed"}, {1}, remedy};
  remedy.emplace_back("follow-vote");  // one journal of another rank has the failure without its step
  failure.alone = {{"step-failed"}, {1}, std::move(remedy)};
  failure.alone_of = {{2, kOfTheOtherHost}, {3, kOfTheOtherHost}};
  failure.culprit_knows = true;
  return failure;
}

Failure Kills(Failure failure) {
  failure.fate = Fate::kEnded;
  failure.status = 256 + SIGKILL;
  failure.silent = false;
  failure.expected = {{"rank-died"}, {1}, {"find-reason-of-death", "find-reason-of-end"}};
  failure.alone_of = {{2, kOfTheOtherHost}, {3, kOfTheOtherHost}};
  failure.culprit_knows = true;
  return failure;
}

Failure Stays(Failure failure) {
  failure.lives = true;
  failure.expected = {{"healthy"}, {}};
  return failure;
}

}  // namespace

void AddCards(std::vector<Failure>& all) {
  const Words card = {"examine-card"};
  for (const char* const nth : {"1", "2"}) {
    const std::string which = std::string(", the one of number ") + nth;
    all.push_back(Fails(OverCards("does not register a buffer" + which,
                                  {"barrier", "pause idle", "barrier", std::string("1:faults=register=") + nth, "resume"}),
                        card));
    all.push_back(Kills(OverCards("kills its process while it lets go" + which,
                                  {"barrier", std::string("1:faults=kill-deregister=") + nth, "pause idle"})));
    all.push_back(
        Kills(OverCards("kills its process while it registers" + which,
                        {"barrier", "pause idle", "barrier", std::string("1:faults=kill-register=") + nth, "resume"})));
    all.push_back(Stays(OverCards("does not let go of a buffer" + which,
                                  {"barrier", std::string("1:faults=deregister=") + nth, "pause idle", "barrier", "resume"})));
  }
  all.push_back(Stays(OverCards("did not register, and does when it is asked again",
                                {"barrier", "pause idle", "barrier", "1:faults=register=1", "resume", "barrier", "resume"})));
  all.push_back(Stays(OverCards("is not quiet in time", {"barrier", "1:faults=ack=60000000", "send=100", "receive=100",
                                                         "barrier", "pause idle", "barrier", "1:faults=ack=0", "resume"})));
  Failure let_go = Fails(OverCards("has let go, and the driver does not take the memory back",
                                   {"barrier", std::string("1:at=") + kAfterLettingGo + "fail=1", "pause idle"}),
                         {"find-driver-error"});
  let_go.environment["AMEM_LAYOUT"] = "direct";
  all.push_back(std::move(let_go));
}

}  // namespace amem::failure
