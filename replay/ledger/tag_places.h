// Where memory of tags is mapped, and which tags run, for calls that must not wait for the ledger's lock: a thread holds that
// lock over an unmap, the driver may wait there for a kernel of NCCL's, and the kernel waits for a copy of NCCL's own, which
// passes the gates of the tags that it touches.
//
// The ledger notes each event that it has applied. Any thread may ask, with or without the ledger's lock.
#pragma once

#include <map>
#include <set>
#include <shared_mutex>

#include "journal/base/no_copies.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

class TagPlaces : NoCopies {
 public:
  // `state` is as the event has left it. By one thread at a time.
  void Note(const EventBody& event, const State& state);
  // The same tags as State::PoolsIn.
  [[nodiscard]] std::set<PoolId> In(Address address, Bytes bytes) const;
  // False: the tag is paused or in a cycle, or an event that would say more is still to be recorded; then the state says.
  [[nodiscard]] bool Runs(PoolId tag) const;

 private:
  struct Place {
    Bytes bytes = 0;
    PoolId tag;
  };
  mutable std::shared_mutex mutex_;  // taken last
  std::map<Address, Place> mapped_;
  std::set<PoolId> running_;
};

}  // namespace amem
