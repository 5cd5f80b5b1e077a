// What peers ask of this session, and what they say of themselves: the owner's side of sharing, on the service thread.
//
// The service thread must not wait for a driver call of another thread. So each method takes the ledger's lock for some
// milliseconds at most, and answers "busy" or "later" (PeerDelegate) if it does not get it; Neighbours, which any thread calls,
// and OnWitnessed wait as long as their callers say. No method calls into the parts above (session.h), and none is called with
// a lock.
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <vector>

#include "journal/base/no_copies.h"
#include "replay/peers/peers.h"
#include "replay/session/lower_parts.h"
#include "replay/session/records.h"

namespace amem {

class PeerAnswers final : public PeerDelegate, NoCopies {
 public:
  // Questions may come from construction on, even before Peers::Start has returned. All of them must outlive it.
  PeerAnswers(const LowerParts& parts, Records& records, const PeerIdentity& self);

  Result<SharedAllocation> OnImport(const PeerIdentity& by, AllocationId as, const Token& token) override;
  Result<SharedAllocation> OnReimport(const PeerIdentity& by, const ShareRequest& request) override;
  bool OnReferenceDropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) override;
  bool OnPeerConnected(const PeerIdentity& peer) override;
  bool OnPeerLost(const PeerIdentity& peer, const std::string& reason) override;
  Result<std::vector<SessionId>> Neighbours(const std::string& tag, Deadline until) override;
  CycleProgress Progress(const std::string& tag = {}) override;
  bool OnWitnessed(std::span<const EventBody> facts, std::chrono::milliseconds patience) override;

 private:
  Result<UniqueFd> ExportWhole(AllocationId allocation);
  Result<SharedAllocation> Resolve(const PeerIdentity& by, const Token& token) REQUIRES(ledger_);  // what a peer's token opens
  [[nodiscard]] Incarnation IncarnationOf(AllocationId allocation) const REQUIRES(ledger_);        // as peers import it now
  // Refuses because of a pause or resume of that scope.
  [[nodiscard]] Status RefuseImport(const PeerIdentity& by, AllocationId allocation, PoolId pool) const REQUIRES(ledger_);

  Driver& driver_;
  Ledger& ledger_;
  Tokens& tokens_;
  DroppedImports& dropped_;
  Allocations& allocations_;
  Records& records_;
  const std::string self_;  // for messages
};

}  // namespace amem
