// With AMEM_NETWORK=renew: what NCCL registers with network cards by verbs, so that a pause can undo it and a resume do it
// again.
//
// NCCL reads a registration's keys anew for each request, from the ibv_mr. So what it gets of its net buffers is an ibv_mr of
// AMem's, a shadow, whose keys follow the registration that is there today. One registration stands behind each shadow.
//
// A card must have nothing under way that uses a key which is about to end. So AMem counts, in the contexts that NCCL opens,
// what is posted on each queue pair and what has completed, by two functions of its own in the context for posting, and one
// for polling. Once a card is quiet it is shut: what NCCL posts then waits until the registrations are there again, and keys
// in it that have ended since are replaced by those of today, by address.
//
// Everything that does not fit is left as it was, and its memory stays: a registration on another thread than a communicator's
// service thread (windows, transfers from kernels, one-sided ones: their keys are told to others once); at another IO address;
// of other memory than NCCL's own; of a context that AMem did not see opened; and all while receives are posted ahead, because
// what a peer has been told then cannot be counted.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ncclpatch/intercept/card.h"
#include "ncclpatch/intercept/registrations.h"
#include "ncclpatch/intercept/verbs_abi.h"
#include "replay/cycle/network.h"

namespace amem::intercept {

// Address ranges, which may overlap each other, as they were at one moment.
class RegisteredRanges {
 public:
  struct Range {
    std::uint64_t begin = 0, end = 0;
  };
  explicit RegisteredRanges(std::vector<Range> ranges);
  [[nodiscard]] bool HaveAnyOf(std::uint64_t begin, std::uint64_t end) const;

 private:
  std::vector<Range> ranges_;  // by `begin`; each `end` is the furthest of all up to there
};

class Cards {
 public:
  // From now on registrations are renewed.
  void Begin() { on_.store(true); }
  [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }

  // How one is made again. `again` returns null and sets errno if it fails.
  struct Way {
    verbs::Domain* domain = nullptr;
    std::uint32_t access = 0;
    bool at_its_address = true;  // the card is told the memory's own address
    std::function<verbs::Region*()> again;
    std::function<int(verbs::Region*)> undo;  // as ibv_dereg_mr
  };
  // What NCCL gets for `real`, which the card has just given. Null: that registration pins, and `pins` says why. The caller
  // holds Registering, and records it.
  verbs::Region* Shadow(verbs::Region* real, const Extent& part, const Way& way, Registered* record, std::string* pins);
  // Undoes the registration behind `handle`, which may be a shadow; without one behind it, succeeds. `real_call` as
  // ibv_dereg_mr.
  int Deregister(void* handle, const std::function<int(void*)>& real_call);
  // What a shadow stands for now; `handle` itself if it is none.
  [[nodiscard]] void* Behind(void* handle);

  // What the library did, in NCCL's calls. Each does nothing for a context that is not counted.
  void Opened(verbs::Context* context);
  int Close(verbs::Context* context, const std::function<int()>& real_call);  // `real_call` as ibv_close_device
  Card* CardOf(const verbs::Context* context);                                // null: not counted

  // Puts today's keys into requests that were made before a renewal. Takes no lock for keys that live.
  void Refresh(const verbs::Domain* domain, verbs::Send* work) {
    if (renewed_.load(std::memory_order_acquire)) RefreshAll(domain, work);
  }
  // What the registrations behind shadows cover now.
  [[nodiscard]] RegisteredRanges CoveredNow();

  // ---- what a pause and a resume ask for, as Network. Of registrations that are not a card's, these do nothing.
  void FindGates(const std::vector<RegionId>& regions, std::map<RegionId, TrafficGate*>* gates);
  Status Deregister(RegionId region);
  Status Register(RegionId region);

 private:
  struct Held {
    verbs::Region shadow{};
    verbs::Region* real = nullptr;  // null while paused
    RegionId id;
    Extent part;
    Way way;
    Card* card = nullptr;
    // Those of earlier registrations, the last one last: a request may have waited for several resumes, of which one failed.
    std::vector<std::uint32_t> ended_remote_keys;

    [[nodiscard]] bool Covers(const verbs::Domain* domain, std::uint64_t address, std::uint64_t bytes) const {
      return real != nullptr && way.domain == domain && part.address.value <= address &&
             address + bytes <= part.address.value + part.bytes;
    }
  };
  // Whether AMem may know about a key for that memory; the host's is mostly elsewhere.
  [[nodiscard]] bool MayBeOurs(std::uint64_t address) const {
    return address >= lowest_.load(std::memory_order_relaxed) && address < highest_.load(std::memory_order_relaxed);
  }
  void RefreshAll(const verbs::Domain* domain, verbs::Send* work);
  void Refresh(const verbs::Domain* domain, verbs::Part* part);
  void RefreshRemote(const verbs::Domain* domain, verbs::Send* work);

  std::atomic<bool> on_{false};
  std::atomic<bool> renewed_{false};
  std::atomic<std::uint64_t> lowest_{~std::uint64_t{0}}, highest_{0};
  std::mutex mutex_;  // guards what follows, and changes of the live keys
  std::map<const void*, std::unique_ptr<Held>> shadows_;
  std::map<RegionId, Held*> by_id_;
  std::map<const verbs::Domain*, std::uint64_t> domains_;  // by numbers for the journal
  std::uint64_t next_domain_ = 0;
};

// For Runtime::Above: the cards, and the plugins whose registrations are renewed.
Network* Renew();

}  // namespace amem::intercept
