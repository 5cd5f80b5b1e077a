// What NCCL and other libraries share with other processes: exports as descriptors of tokens, and imports. What peers ask of
// this session is PeerAnswers'.
//
// No method is called with a lock held. An import waits for its owner without a lock, and leaves NCCL's gate while the owner is
// in the middle of a pause or resume, because that may wait for a pause of this session.
#pragma once

#include <mutex>
#include <shared_mutex>

#include "journal/base/no_copies.h"
#include "journal/base/unique_fd.h"
#include "replay/cycle/coordinator.h"
#include "replay/peers/peers.h"
#include "replay/session/lower_parts.h"
#include "replay/session/pools/pools.h"

namespace amem {

class Sharing : NoCopies {
 public:
  // All of them must outlive it.
  Sharing(const LowerParts& parts, Peers& peers, PinnedSupply& pinned, Pools& pools);

  // A sealed memfd that holds a token. Memory of a tag lives as long as such a descriptor is open in any process, as the
  // driver's would (Tokens).
  Result<UniqueFd> Export(AllocationId allocation);
  // `descriptor` stays the caller's. `of_others`: by another library than NCCL, whose pauses do not concern it. kNotFound: it
  // is the driver's, so pass it through. kInvalid: neither ours nor the driver's.
  Result<AllocationId> Import(int descriptor, const Origin& origin, bool of_others = false);
  // The same by a token; `gate`: NCCL's, which the caller has entered.
  Result<AllocationId> ImportToken(const Token& token, const Origin& origin, std::shared_lock<CallGate>& gate);

 private:
  Result<AllocationId> TryImport(const Token& token, const Origin& origin);
  Result<AllocationId> ImportWhole(const Token& token, AllocationId as, const SharedAllocation& shared, const Origin& origin);

  const SessionOptions& options_;
  const SessionId session_;
  Driver& driver_;
  Ledger& ledger_;
  CallAdmission& calls_;
  Tokens& tokens_;
  Allocations& allocations_;
  Slabs& slabs_;
  Peers& peers_;
  PinnedSupply& pinned_;
  Pools& pools_;
};

}  // namespace amem
