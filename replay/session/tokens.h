// The tokens of a session: secrets of the allocations that it exported or imported, and the descriptors of tokens that hold
// memory of a tag.
//
// Such a descriptor is a separate open of the token's memfd with a lock, which ends when its last copy in any process is
// closed. All descriptors of an allocation count as one reference to it. AMem notices that the last one was closed when other
// memory of tags is given up (Allocations::DropClosed).
//
// The memfd stays open here, of the descriptors that the program may have. So once there are many, those without an open
// descriptor are closed (DropUnused), and if a fourth of all is open nevertheless, what is exported then is held for ever.
//
// The ledger's lock guards it: each method gets the ledger, locked by its caller, as an argument.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "journal/base/no_copies.h"
#include "journal/base/unique_fd.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/token.h"
#include "statemachine/types.h"

namespace amem {

class Tokens : NoCopies {
 public:
  Tokens(SessionId session, std::int32_t pid) : session_(session), pid_(pid) {}
  [[nodiscard]] SessionId session() const { return session_; }

  // A token of this session's allocation. Its secret is made for the first one.
  Result<Token> For(AllocationId allocation, Ledger& ledger) REQUIRES(ledger);
  [[nodiscard]] const Secret* SecretOf(AllocationId allocation, Ledger& ledger) const REQUIRES(ledger);  // null: none
  void SetSecret(AllocationId imported, const Secret& secret, Ledger& ledger) REQUIRES(ledger);
  // Before the allocation is given up: its tokens open nothing any more.
  void Forget(AllocationId allocation, Ledger& ledger) REQUIRES(ledger);

  // A descriptor of the token, which holds the allocation. The first one records the reference of them all.
  Result<UniqueFd> CountedDescriptor(AllocationId allocation, const Token& token, Ledger& ledger) REQUIRES(ledger);
  // Allocations that something else holds as well, and of which all descriptors are closed: the descriptors' reference is the
  // caller's to release, and the next descriptor will be a first one. None while there are few; looking costs two calls each.
  std::vector<AllocationId> TakeUnused(Ledger& ledger) REQUIRES(ledger);
  [[nodiscard]] bool HasDescriptors(AllocationId allocation, Ledger& ledger) const REQUIRES(ledger);
  // Notes that perhaps only descriptors still hold the allocation, if it has any; or each allocation that has some.
  void LeaveToDescriptors(AllocationId allocation, Ledger& ledger) REQUIRES(ledger);
  void LeaveAllToDescriptors(Ledger& ledger) REQUIRES(ledger);
  // Allocations whose last holder was a descriptor that is closed now: their one reference is the caller's to release.
  std::vector<AllocationId> TakeClosed(Ledger& ledger) REQUIRES(ledger);

 private:
  const SessionId session_;
  const std::int32_t pid_;
  std::map<AllocationId, Secret> secrets_;
  std::map<AllocationId, UniqueFd> exported_;   // memfds of tokens, whose descriptors hold a reference
  std::set<AllocationId> left_to_descriptors_;  // of these, what nothing else may hold any more
  std::set<AllocationId> held_for_ever_;        // exported while there were too many
  std::size_t many_ = 64;                       // of exported_, when it is looked through next
};

}  // namespace amem
