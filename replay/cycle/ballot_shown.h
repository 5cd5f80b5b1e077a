// What a board shows of a ballot, as journals have it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "replay/peers/assembly.h"
#include "statemachine/event_cycle.h"

namespace amem {

// `why`: the reason of a failure, as all members read it. Makes system calls only for members that have ended.
inline BallotShown ShownOf(CycleKind kind, std::uint64_t cycle, PoolId pool, Assembly& assembly, agreement::Ballot ballot,
                           const board::BoardReading& reading, const Status& why) {
  using agreement::Cause;
  using agreement::Vote;
  const auto index = static_cast<std::size_t>(ballot);
  const board::BallotDecision& decision = reading.decisions[index];
  const std::vector<SessionId>& members = assembly.board().members();
  const PeerIdentity self = assembly.IdentityOf(members[assembly.seat()]);
  BallotShown shown{.kind = kind,
                    .cycle = cycle,
                    .pool = pool,
                    .board = assembly.board().id(),
                    .round = reading.round,
                    .ballot = ballot,
                    .cause = decision.cause,
                    .members = static_cast<std::uint32_t>(members.size()),
                    .message = why.message(),
                    .code = why.code(),
                    .driver_result = why.driver_result()};
  if (decision.cause != Cause::kUndecided) shown.by = members[decision.by];

  std::vector<std::size_t> seats, voted;  // listed; with a yes
  for (std::size_t seat = 0; seat < reading.seats.size(); ++seat)
    (reading.seats[seat].votes[index] == Vote::kYes ? voted : seats).push_back(seat);
  const auto voted_ns = [&](std::size_t seat) { return reading.voted_at_ns[seat][index]; };
  std::ranges::sort(voted, {}, voted_ns);
  shown.yes = static_cast<std::uint32_t>(voted.size());
  if (!voted.empty()) shown.first_ns = voted_ns(voted.front());

  if (decision.cause == Cause::kUndecided || decision.cause == Cause::kLate) {
    for (const std::size_t seat : agreement::Absent(reading.ViewOf(assembly.seat()), ballot))
      shown.culprits.push_back(members[seat]);
  } else if (agreement::IsFailure(decision.cause) && why.reported_by()) {
    shown.culprits.push_back(why.reported_by());
  }
  const std::size_t skipped = voted.size() - std::min(voted.size(), BallotShown::kSeatsMost);
  seats.insert(seats.end(), voted.begin() + static_cast<std::ptrdiff_t>(skipped), voted.end());
  for (const std::size_t seat : seats) {
    const PeerIdentity who = assembly.IdentityOf(members[seat]);
    SeatShown& one = shown.seats.emplace_back(SeatShown{.session = members[seat],
                                                        .rank = who.rank,
                                                        .pid = who.pid,
                                                        .vote = reading.seats[seat].votes[index],
                                                        .voted_ns = voted_ns(seat)});
    if (who.host != self.host) one.host = who.host;
    if (!reading.seats[seat].ended) continue;
    one.end = assembly.HowItEnded(members[seat]);
    one.end_seen = assembly.EndSeenBy(members[seat]);
  }
  return shown;
}

}  // namespace amem
