// Slabs: memory that AMem takes from the driver in large allocations and cuts NCCL's allocations from.
//
// An allocation gets its place when it is created or imported, before NCCL knows an address for it. That the address range
// which NCCL reserves next is meant for it is a guess (Session::Reserve); while it is untouched, a wrong guess is mended by
// moving it, or by giving it a driver handle of its own.
//
// Several of NCCL's threads may call at the same time. A method says whether the ledger's lock is held by the caller.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "replay/session/session_options.h"

namespace amem {

struct DroppedImport {  // to be told to its owner, once no lock is held
  RemoteAllocation remote;
  AllocationId as;
};

class Slabs {
 public:
  Slabs(const SessionOptions& options, Driver& driver, Ledger& ledger) : options_(options), driver_(driver), ledger_(ledger) {}

  // What can be part of a slab: ordinary device memory, small against the largest slab, in a process that has allocated on
  // one device only (with several, NCCL maps one handle for each, at addresses that cannot be foreseen). Takes the lock.
  bool Suits(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags);

  // A new allocation, recorded and placed. Without the lock. kOutOfMemory: there is no room for a slab of any size.
  Result<AllocationId> Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags, const CallSite& site);
  // The allocation `as`, which the owner of `token` says is a part of one of its slabs; imports that slab if need be. Without
  // the lock.
  Status Import(const Token& token, AllocationId as, const SharedAllocation& shared, std::uint32_t handle_type,
                const CallSite& site, Peers& peers);
  // Lets `access` reach the slab that a part lies in. Without the lock.
  Status Open(AllocationId part, std::span<const AccessDescriptor> access);

  // All below: with the lock.
  // Gives an untouched part a driver handle of its own. kUnsupported: it is not untouched.
  Status Back(AllocationId part);
  // Puts the untouched part `moved` where the untouched part `other` is, which gets a driver handle of its own.
  Status Swap(AllocationId moved, AllocationId other);
  // After a part was freed: a slab without any goes back to the driver, and an imported one to its owner (`dropped`).
  Status Retire(AllocationId slab, std::vector<DroppedImport>& dropped);
  Status RetireAll(std::vector<DroppedImport>& dropped);

  [[nodiscard]] std::uint64_t wrong_guesses() const { return wrong_guesses_; }

 private:
  struct Kind {
    AllocationProperties properties;
    std::uint64_t flags = 0;
    friend auto operator<=>(const Kind&, const Kind&) = default;
  };
  struct Own {
    Kind kind;
    Bytes refused = ~Bytes{0};  // nothing of that size or more fits, since a part was last freed
  };
  struct Place {
    AllocationId slab;
    Bytes offset = 0;
  };
  std::optional<Place> Find(const Kind& kind, Bytes bytes, Bytes alignment);
  Result<AllocationId> OpenOwn(const Kind& kind, Bytes bytes, std::unique_lock<std::mutex>& lock);
  Result<AllocationId> OpenImported(const Token& token, Peers& peers, std::unique_lock<std::mutex>& lock);
  [[nodiscard]] AllocationId ImportedAs(const RemoteAllocation& slab) const;
  [[nodiscard]] Bytes SizeOfNext(const Kind& kind) const;
  Status Clear(const Place& place, Bytes bytes, std::unique_lock<std::mutex>& lock);
  Result<Bytes> GranularityOf(const AllocationProperties& properties);

  const SessionOptions& options_;
  Driver& driver_;
  Ledger& ledger_;
  std::mutex mutex_;  // one thread at a time finds room, opens a slab or lets a device reach one; taken before the ledger's
  // The rest: ledger's lock.
  std::map<AllocationId, Own> own_;
  std::set<std::int32_t> devices_;
  std::map<AllocationProperties, Bytes> granularity_;
  AllocationId busy_;  // is being worked on without the ledger's lock, and must not be retired
  std::uint64_t wrong_guesses_ = 0;
};

}  // namespace amem
