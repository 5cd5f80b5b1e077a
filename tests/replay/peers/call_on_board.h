// A pause or resume of sessions that have nothing to do in it: the agreement alone.
#pragma once

#include "replay/peers/board/participant.h"
#include "tests/replay/peers/peers_fixture.h"

namespace amem::test {

// An engine that has nothing to do.
class HooksWithoutWork final : public board::RoundHooks {
 public:
  explicit HooksWithoutWork(Assembly& assembly) : assembly_(assembly) {}
  Status Do(agreement::Work work, Deadline, const std::function<bool()>& /*is_overtaken*/) override {
    if (before_work) before_work(work);
    return {};
  }
  [[nodiscard]] bool HasEnded(SessionId session) override { return assembly_.HasEnded(session); }
  [[nodiscard]] bool SetHasChanged() override { return assembly_.SetHasChanged(); }
  [[nodiscard]] std::string NameOf(SessionId session) override { return ToText(assembly_.IdentityOf(session)); }
  std::string SeenOf(SessionId, std::chrono::milliseconds) override { return {}; }
  void OnVote(agreement::Ballot, const Status&) override {}
  void OnWait(agreement::Ballot, const board::BoardReading& reading) override {
    if (before_wait) before_wait(reading);
  }
  void OnDecision(agreement::Ballot ballot, const board::BoardReading& reading, const Status&) override {
    if (ballot == agreement::Ballot::kCome && !agreement::IsFailure(reading.decisions[0].cause)) assembly_.Begun();
  }
  std::function<void(agreement::Work)> before_work;
  std::function<void(const board::BoardReading&)> before_wait;

 private:
  Assembly& assembly_;
};

// A whole call, on the board of whatever set there is.
inline board::RoundOutcome CallOnBoards(Peers& peers, CycleKind kind, std::chrono::milliseconds time,
                                        const std::function<void(agreement::Work)>& before_work = {},
                                        const std::function<void(const board::BoardReading&)>& before_wait = {}) {
  const auto assembly = peers.Assemble(kind, "");
  board::CallOnBoard call{
      .kind = kind, .until = In(time), .again = std::chrono::milliseconds(50), .round = time / 4, .undo = time};
  while (true) {
    if (const Status found = assembly->Find(call.until); !found.ok()) return {.status = found};
    HooksWithoutWork hooks(*assembly);
    hooks.before_work = before_work;
    hooks.before_wait = before_wait;
    auto outcome = board::TakePart(assembly->board(), assembly->seat(), call, hooks);
    if (outcome.status().code() == Code::kCorrupt) {
      assembly->Discard();
      continue;
    }
    if (!outcome) return {.status = outcome.status()};
    if (outcome->again) continue;
    if (outcome->failed == agreement::Ballot::kCome && outcome->status.code() == Code::kPeerLost)
      assembly->FailedBy(outcome->status.reported_by());
    return *std::move(outcome);
  }
}

}  // namespace amem::test
