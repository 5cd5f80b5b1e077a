// What a pause and a resume need of the network cards that hold NCCL's memory. The implementer made the registrations that
// Registered::region names.
#pragma once

#include <string>
#include <vector>

#include "journal/base/deadline.h"
#include "statemachine/types.h"

namespace amem {

class Network {
 public:
  struct Kept {
    RegionId region;
    std::string why;  // for people: which queue pair has what under way, or what the card answered
  };
  virtual ~Network() = default;

  // One thread at a time calls these. For registrations that NCCL has ended meanwhile they do nothing and succeed.
  //
  // Waits until the cards of these registrations have nothing under way; from then on NCCL's sends and receives wait, until
  // Open. Returns those that must stay, because their card was not quiet by then; its traffic goes on.
  virtual std::vector<Kept> Drain(const std::vector<RegionId>& regions, Deadline until) = 0;
  // Only of what Drain did not return. After Deregister the card holds none of its pages any more; after Register NCCL uses the
  // new keys.
  virtual Status Deregister(RegionId region) = 0;
  virtual Status Register(RegionId region) = 0;
  // All registrations are there again: what waits goes on. Does nothing if nothing waits.
  virtual void Open() = 0;
};

}  // namespace amem
