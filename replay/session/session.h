// A session: one process whose libnccl is under AMem.
//
// The driver calls of NCCL arrive here in AMem's terms, with allocation ids in place of driver handles; each is made on the
// driver, recorded (journal, then state), and answered. Pause and resume work on the same ledger. The edge (edge.h) translates
// between the driver's C types and these; tests and the demo call this class directly.
//
// All methods may be called from any thread. A failed call has the CUresult to hand to NCCL in Status::driver_result.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "replay/cycle/coordinator.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "replay/session/legacy_pool.h"
#include "replay/session/session_options.h"
#include "replay/session/slabs.h"
#include "statemachine/event.h"

namespace amem {

class Session final : public PeerDelegate {
 public:
  using StartPeers = std::function<Result<std::unique_ptr<Peers>>(const PeerIdentity& self, PeerDelegate& delegate)>;

  // `driver` must outlive the session. `journal` may be null (tests without files). `start_peers` is called once.
  static Result<std::unique_ptr<Session>> Start(const SessionOptions& options, Driver& driver, SessionOpened who,
                                                std::unique_ptr<JournalWriter> journal, const StartPeers& start_peers);
  ~Session() override;
  // Closes the journal in order and stops serving peers. Memory stays as it is.
  Status Close(const std::string& reason);

  // ---- driver calls of NCCL ----------------------------------------------------------------------------------------------
  // `for_application`: the program will get it (ncclMemAlloc), and other libraries may ask the driver about it: never part of a
  // slab.
  Result<AllocationId> Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags, const CallSite& site,
                              bool for_application = false);
  Status Release(AllocationId allocation);
  Result<AllocationId> Retain(Address address);  // kNotFound: not an address of ours
  Result<Address> Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site);
  Status FreeRange(Address address, Bytes bytes);  // kNotFound: not a range of ours
  Status Map(Address address, Bytes bytes, Bytes offset, AllocationId allocation, std::uint64_t flags);
  Status Unmap(Address address, Bytes bytes);  // kNotFound: not a mapping of ours
  Status SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access);
  Result<UniqueFd> Export(AllocationId allocation);  // a sealed memfd that holds a token
  // `descriptor` stays the caller's. kNotFound: a descriptor of the driver, not ours: pass it through. kInvalid: neither.
  Result<AllocationId> Import(int descriptor, const CallSite& site);
  Result<AllocationProperties> Properties(AllocationId allocation);
  // What the driver has for an allocation: its handle, or its slab's and where in it; handle zero if none.
  [[nodiscard]] std::pair<DriverHandle, Bytes> Backing(AllocationId allocation);

  // cuMemAlloc and its IPC handles (64 bytes).
  // Small requests share blocks of 2 MiB, as the driver's own do.
  Result<Address> LegacyAllocate(Bytes bytes, DeviceOrdinal device, const CallSite& site);
  Status LegacyFree(Address address);  // kNotFound: not ours
  Result<std::array<std::byte, 64>> LegacyExport(Address address);
  Result<Address> LegacyImport(std::span<const std::byte, 64> handle, DeviceOrdinal device,
                               const CallSite& site);  // kNotFound: not a token
  Status LegacyClose(Address address);

  // The base and size of the allocation or mapping of ours that contains `address`; kNotFound if none (cuMemGetAddressRange).
  Result<std::pair<Address, Bytes>> AddressRange(Address address);

  // Records what was only seen (host memory, async pools, registrations, multicast, pass-through).
  void Note(EventBody event);

  // ---- pause and resume --------------------------------------------------------------------------------------------------
  // Idempotent; collective over the sessions that share memory with this one.
  Status Pause();
  Status Resume();
  [[nodiscard]] bool paused() const { return paused_.load(std::memory_order_acquire); }
  // Held over a launch by NCCL: no pause begins meanwhile. Not owned: refused, memory is paused or about to be.
  [[nodiscard]] std::shared_lock<std::shared_mutex> EnterLaunch();
  // True when [address, address + bytes) touches memory that a pause took away.
  bool TouchesPaused(Address address, Bytes bytes);
  void SetGroup(std::int64_t group);
  [[nodiscard]] std::int64_t group();

  State CopyState();
  [[nodiscard]] std::string StatisticsJson();
  [[nodiscard]] std::string StatisticsText();  // some lines for people
  void TrimPinned(Bytes keep);                 // gives host memory back that holds no contents; waits for a cycle's end
  [[nodiscard]] Ledger& ledger() { return ledger_; }

  // ---- PeerDelegate ------------------------------------------------------------------------------------------------------
  Result<SharedAllocation> OnImport(const PeerIdentity& by, AllocationId as, const Token& token) override;
  Result<SharedAllocation> OnReimport(const PeerIdentity& by, const ShareRequest& request) override;
  void OnReferenceDropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) override;
  void OnPeerConnected(const PeerIdentity& peer) override;
  void OnPeerLost(const PeerIdentity& peer, const std::string& reason) override;
  std::vector<SessionId> Neighbours() override;
  CycleProgress Progress() override;

 private:
  Session(const SessionOptions& options, Driver& driver, std::unique_ptr<JournalWriter> journal);

  Status Cycle(CycleKind kind);
  void PrepareContents();
  Status RefuseWhilePaused(const std::string& doing) const;
  // With the ledger's lock held: what NCCL or a peer is about to let go of; gives the driver handle back if nobody is left.
  Status ReleaseHandle(AllocationId allocation);
  Status UnmapOne(Address address, std::vector<DroppedImport>& dropped);
  Status UnmapAll(Address address, Bytes bytes, std::vector<DroppedImport>& dropped);
  void Tell(const std::vector<DroppedImport>& dropped);
  // The same calls on parts of slabs.
  Result<Address> ReservePart(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site);
  Status MapPart(Address address, Bytes bytes, Bytes offset, AllocationId allocation, bool& at_its_place);
  Status UnmapPart(Address address, Bytes bytes, AllocationId slab, std::vector<DroppedImport>& dropped);
  Status FreeOneRange(Address address, Bytes bytes, std::vector<DroppedImport>& dropped);
  [[nodiscard]] AllocationId MappedPartAt(Address address) const;
  void PartWent(AllocationId slab, std::vector<DroppedImport>& dropped);
  void RetireEmptySlabs();
  void RememberLastHandle(AllocationId allocation) const;  // this thread will map it next
  Result<UniqueFd> ExportWhole(AllocationId allocation);
  Result<AllocationId> ImportToken(const Token& token, std::uint32_t handle_type, const CallSite& site);
  Result<LegacyBlock> NewLegacyBlock(Bytes bytes, DeviceOrdinal device, const CallSite& site);
  Address RecordLegacy(const LegacyBlock& block, Address address, Bytes bytes, const CallSite& site);
  Status DropLegacyBlock(const LegacyBlock& block);
  void OpenLegacyTo(DeviceOrdinal device);
  Result<Secret> SecretOf(AllocationId allocation);

  SessionOptions options_;
  Driver& driver_;
  Ledger ledger_;
  Slabs slabs_{options_, driver_, ledger_};
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<Coordinator> coordinator_;
  std::map<AllocationId, Secret> secrets_;  // of exported allocations; ledger's lock
  LegacyPool legacy_;                       // ledger's lock
  std::set<DeviceOrdinal> legacy_devices_;  // that may reach legacy memory; ledger's lock
  std::mutex cycle_mutex_;                  // one pause or resume at a time
  std::shared_mutex gate_;                  // NCCL's calls share it; a pause or resume has it alone
  std::atomic<bool> paused_{false};
  Bytes held_bytes_ = 0;      // created so far; only a hint of what a pause will have to save
  Bytes prepared_bytes_ = 0;  // ledger's lock, both
  bool closed_ = false;
};

}  // namespace amem
