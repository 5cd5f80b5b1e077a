// A session: one process whose libnccl is under AMem.
//
// NCCL's driver calls arrive here in AMem's terms, with allocation ids for driver handles. Each is made on the driver, recorded
// (state, then journal), and answered. Pause and resume work on the same ledger. ncclpatch/intercept/ translates the driver's C
// types; tests and the demo call this class directly.
//
// Any thread may call any method. Status::driver_result of a failure is the CUresult for NCCL. Sources: session.cpp (life,
// pause and resume), memory.cpp, parts.cpp (allocations in slabs), sharing.cpp (peers), legacy.cpp (cuMemAlloc), counted.cpp
// (NVLS, and memory that is only counted), statistics.cpp.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "replay/cycle/call_gate.h"
#include "replay/cycle/coordinator.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "replay/session/chunk_space.h"
#include "replay/session/pools.h"
#include "replay/session/refused_calls.h"
#include "replay/session/session_options.h"
#include "replay/session/slabs.h"
#include "replay/session/statistics.h"
#include "statemachine/event.h"

namespace amem {

class Session final : public PeerDelegate {
 public:
  using StartPeers = std::function<Result<std::unique_ptr<Peers>>(const PeerIdentity& self, PeerDelegate& delegate)>;

  // `driver` must outlive the session. `journal` may be null (tests without files). `start_peers` is called once.
  static Result<std::unique_ptr<Session>> Start(const SessionOptions& options, Driver& driver, SessionOpened who,
                                                std::unique_ptr<JournalWriter> journal, const StartPeers& start_peers);
  ~Session() override;
  // Closes the journal in order and stops serving peers. Memory stays. `exit_code`: the argument of exit(); -1: unknown.
  Status Close(const std::string& reason, std::int32_t exit_code = -1);

  // ---- driver calls of NCCL
  // `for_application`: memory for the program (ncclMemAlloc), which may hand it to libraries that ask the driver about it. So
  // it is never part of a slab; its tag says that it is the program's, and SessionOptions say what a pause does with it.
  // `tag`: it is another library's, under that tag. kRefused: the tag is paused.
  Result<AllocationId> Create(Bytes bytes, const AllocationProperties& properties, std::uint64_t flags, const Origin& origin,
                              bool for_application = false, const std::string& tag = {});
  Status Release(AllocationId allocation);
  Result<AllocationId> Retain(Address address);  // kNotFound: not an address of ours
  Result<Address> Reserve(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site);
  Status FreeRange(Address address, Bytes bytes);  // kNotFound: not a range of ours
  Status Map(Address address, Bytes bytes, Bytes offset, AllocationId allocation, std::uint64_t flags);
  Status Unmap(Address address, Bytes bytes);  // kNotFound: not a mapping of ours
  Status SetAccess(Address address, Bytes bytes, std::span<const AccessDescriptor> access);
  Result<AllocationProperties> Properties(AllocationId allocation);
  // The base and size of our allocation or mapping that contains `address`; kNotFound: none (cuMemGetAddressRange).
  Result<std::pair<Address, Bytes>> AddressRange(Address address);
  // The driver handle behind an allocation, and the allocation's offset in it; handle zero: none.
  [[nodiscard]] std::pair<DriverHandle, Bytes> Backing(AllocationId allocation);

  // A sealed memfd that holds a token. Memory of a tag lives as long as such a descriptor is open in any process, as the
  // driver's would; that the last one was closed is noticed when something else of the tags' memory is let go of.
  Result<UniqueFd> Export(AllocationId allocation);
  // `descriptor` stays the caller's. `of_others`: by another library than NCCL, whose pauses do not concern it. kNotFound: it
  // is the driver's, so pass it through. kInvalid: neither ours nor the driver's.
  Result<AllocationId> Import(int descriptor, const Origin& origin, bool of_others = false);

  // cuMemAlloc and its IPC handles (64 bytes). kUnsupported: the driver should serve it, because it is the program's and is
  // kept.
  Result<Address> LegacyAllocate(Bytes bytes, DeviceOrdinal device, const Origin& origin, bool for_application = false);
  Status LegacyFree(Address address);  // kNotFound: not ours
  Result<std::array<std::byte, 64>> LegacyExport(Address address);
  // Opened again, a handle gives the same address, and must be closed as often. kNotFound: not a token.
  Result<Address> LegacyImport(std::span<const std::byte, 64> handle, DeviceOrdinal device, const Origin& origin,
                               bool of_others = false);
  Status LegacyClose(Address address);
  // The same handle for memory of a tag: for the whole part that contains the address, as cudaMalloc memory is shared.
  Result<std::array<std::byte, 64>> ExportPart(Address address);  // kNotFound: not a tag's
  struct TagPart {
    Address address;
    Bytes bytes = 0;
    DeviceOrdinal device;
    bool opened = false;  // by an IPC handle of another process
  };
  Result<TagPart> PartOfTag(Address address);  // that part; kNotFound
  Result<TagPart> OpenedAt(Address address);   // what an IPC handle of a tag's memory opened there; kNotFound
  [[nodiscard]] SessionId id();
  // Makes a call that gives up a reference to the primary context of a device, without one of AMem's behind it: so the context
  // goes with the last that is the program's. Then what is AMem's there is forgotten as with ForgetDevice.
  Driver::Released ReleaseContext(DeviceOrdinal device, const std::function<int()>& release);
  // How much of [address, address + bytes) is mapped memory of handles that another library made or imported under a tag.
  Bytes HandlesOfTags(Address address, Bytes bytes);

  // ---- memory that stays the driver's, and is recorded
  // Records a call that the driver has answered (host memory, driver pools, multicast, passed through).
  void Note(EventBody event);
  // Records that memory will be freed, before the driver frees it, because another thread may get the same address right after.
  // Returns the event that takes this back if the driver refuses; nullopt: the memory is not known, and nothing was recorded.
  // LegacyFreed: only for cuMemAlloc memory of the driver's.
  std::optional<HostAllocated> NoteFree(HostFreed freed);
  std::optional<AsyncAllocated> NoteFree(AsyncFreed freed);
  std::optional<LegacyAllocated> NoteFree(LegacyFreed freed);
  // Records a registration. False: none of that memory is AMem's, and nothing was recorded.
  bool NoteRegistration(const Registered& registered);
  // Why a pause could not undo a registration of that memory, so that it must be recorded without a region; empty: it could.
  std::string WhyPins(const Extent& part);
  // ---- what other libraries hold of AMem's memory, NCCL's or a tag's
  [[nodiscard]] bool Manages(const Extent& part);  // whether AMem has mapped memory somewhere in it
  // The whole mapping that contains the address; no bytes: it is not AMem's.
  [[nodiscard]] Extent MappingAt(Address address);
  [[nodiscard]] AllocationId AllocationOf(DriverHandle handle);  // zero: it is not AMem's. Looks through all
  // Records that a library shared the pages there, or bound them, in a way whose end is never seen: they stay from now on.
  void NoteHandedOut(AllocationId allocation, std::uint32_t handle_type, const std::string& library);
  void NoteHandedOut(Address address, std::uint32_t handle_type, const std::string& library);
  // The program, whose work on the device has ended, is about to reset it (cudaDeviceReset): the parts of tags there are freed,
  // as the driver frees what cudaMalloc gave. What is AMem's there apart from that may be gone, too, and contents of paused
  // memory are pinned in the context; then the session breaks, so that pauses say why they are refused.
  void ForgetDevice(DeviceOrdinal device);
  // From the next pause on, this session and all that pause with it keep all memory. Waits for a cycle that is under way.
  void KeepEverything(const std::string& why);

  // ---- multicast objects (counted.cpp)
  // The caller makes the driver's calls itself, with handles from Backing, and records them (Note) while it holds the gate.
  [[nodiscard]] std::shared_lock<CallGate> EnterCall() { return std::shared_lock(gates_.Of({})); }
  // Records a multicast object that the driver made. The fresh id becomes NCCL's handle.
  AllocationId NoteMulticast(MulticastCreated created);
  // Call it before memory is bound: an allocation in a slab that has no address leaves the slab, because bound memory must not
  // move.
  void PrepareBind(AllocationId memory);
  // Call it before memory is unbound. True: do not ask the driver, because a pause unbound the memory, or a resume could not
  // make the object again; this is recorded.
  bool ForgetUnbound(AllocationId multicast, DeviceOrdinal device, Bytes offset, Bytes bytes);

  // ---- pause and resume
  // Idempotent; collective over the sessions that share memory with this one.
  Status Pause();
  Status PauseOfIdleHosts();  // CycleOptions::hosts_idle
  // While the program may run: the caller keeps NCCL from launching, and has waited for what it had launched (AwaitStreams).
  Status PauseBesideProgram();
  Status AwaitIdle();  // what a pause waits for first: the devices that NCCL uses here are idle
  // Waits until all is done that was submitted to these streams so far. kRefused: it is not in time, or a stream is captured.
  Status AwaitStreams(std::span<const std::pair<DeviceOrdinal, void*>> streams);
  // Waits for the other sessions as long as they live and stay paused: a program resumes when it needs the memory.
  Status Resume();
  Status ResumeInTime();  // with a deadline like a pause; for callers whose ranks have agreed to resume
  // kOutOfMemory: a device has too little free memory for a resume of all these scopes (zero: NCCL's memory). Asks nobody else.
  Status HasRoomFor(std::span<const PoolId> scopes);
  [[nodiscard]] bool ReleasesUserMemory() const { return options_.user_memory == UserMemory::kRelease; }
  [[nodiscard]] bool paused() const { return paused_.load(std::memory_order_acquire); }
  // Paused, or left so by a pause or resume that could not be undone. False while one is under way.
  [[nodiscard]] bool StaysPaused();
  // Of this session's journal; empty: there is none, or it is not known now. Waits for a moment only.
  [[nodiscard]] std::filesystem::path JournalDirectory();
  // Held over a launch, copy or fill by NCCL, so that no pause begins meanwhile. Waits for a pause or resume that is under way.
  // Not owned: memory is paused, so refuse the call. `call` and `stream` are for messages of a pause that waits for the call in
  // vain.
  [[nodiscard]] std::shared_lock<CallGate> EnterLaunch(const char* call = "a launch", void* stream = nullptr);
  // Held over a call that touches those addresses, so that no cycle of their tags begins meanwhile; waits for one that is under
  // way. `paused`: a tag of that memory is paused; `away`: some of it is not on the device.
  struct InTags {
    std::vector<std::shared_lock<CallGate>> gates;
    bool paused = false, away = false;
  };
  [[nodiscard]] InTags EnterTags(std::span<const Extent> touched, const char* call);
  [[nodiscard]] InTags EnterTags(const Extent& touched, const char* call) { return EnterTags(std::span(&touched, 1), call); }
  [[nodiscard]] InTags EnterTagOf(AllocationId allocation);     // if it is a tag's chunk
  [[nodiscard]] bool HasTags() const { return pools_->any(); }  // if not, EnterTags does nothing
  // Records a call that was refused because memory is paused (RefusedCalls). `call` must outlive the session.
  void NoteRefused(const char* call);
  // Own memory that a pause took from under an address. kNotFound: none is missing there.
  Result<AllocationProperties> PausedAt(Address address);
  // Whether [address, address + bytes) touches memory that a pause took away, or NCCL's memory that a pause is taking now.
  bool TouchesPaused(Address address, Bytes bytes);
  // kRefused while paused, or in a pause or resume, whose members have one group. The same group again is always allowed.
  Status SetGroup(std::int64_t group);
  [[nodiscard]] std::int64_t group();

  // Memory of the program under tags of its own.
  [[nodiscard]] Pools& pools() { return *pools_; }

  State CopyState();
  // look(state), with the ledger's lock held; it must not call the session.
  template <class Look>
  decltype(auto) Inspect(const Look& look) {
    const LedgerLock lock(ledger_);
    return look(ledger_.state());
  }
  [[nodiscard]] SessionStatistics statistics() { return {options_, driver_, ledger_, slabs_, *coordinator_, *pools_}; }
  void TrimPinned(Bytes keep);  // unpins host memory that holds no contents; waits for a cycle's end

  // ---- PeerDelegate
  Result<SharedAllocation> OnImport(const PeerIdentity& by, AllocationId as, const Token& token) override;
  Result<SharedAllocation> OnReimport(const PeerIdentity& by, const ShareRequest& request) override;
  bool OnReferenceDropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) override;
  bool OnPeerConnected(const PeerIdentity& peer) override;
  bool OnPeerLost(const PeerIdentity& peer, const std::string& reason) override;
  Result<std::vector<SessionId>> Neighbours(const std::string& tag, Deadline until) override;
  CycleProgress Progress(const std::string& tag = {}) override;
  bool OnWitnessed(std::span<const EventBody> facts, std::chrono::milliseconds patience) override;

 private:
  [[nodiscard]] std::vector<Address> PartsOn(DeviceOrdinal device);  // of tags
  void ForgetParts(DeviceOrdinal device, std::span<const Address> parts, std::string_view did);
  void TrimPinnedUntil(Bytes keep, Deadline until);  // nothing, if a cycle has not ended until then
  Session(const SessionOptions& options, Driver& driver, std::unique_ptr<JournalWriter> journal);

  // The ledger's lock. When it is released, the owners of imports that were dropped meanwhile are told.
  class SCOPED_CAPABILITY Locked : NoCopies {
   public:
    explicit Locked(Session& session) ACQUIRE(session.ledger_) : session_(session) { session.ledger_.lock(); }
    Locked(Session& session, std::adopt_lock_t) REQUIRES(session.ledger_) : session_(session) {}
    ~Locked() RELEASE();

   private:
    Session& session_;
  };

  Status Cycle(CycleKind kind, const CycleOptions& how);
  Status DropChunk(const ChunkSpace::Chunk& chunk);
  Status RefuseWhilePaused(std::string_view call, Address at = {}) const;
  static Status RefuseInTag(std::string_view call, Address at);  // because the tag is paused
  void EnterTag(PoolId tag, InTags& in);
  [[nodiscard]] MemoryTag TagOf(bool for_application) const;
  void RememberLastHandle(AllocationId allocation) const;  // this thread's next reservation is meant for it
  static void ForgetLastHandle(AllocationId allocation);
  Result<UniqueFd> ExportWhole(AllocationId allocation);
  void Dropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) REQUIRES(ledger_);
  AllocationId NewLegacyPart(Bytes bytes, DeviceOrdinal device, const Origin& origin);
  // Lets go of the gate while the owner is in the middle of a pause or resume.
  Result<AllocationId> ImportToken(const Token& token, const Origin& origin, std::shared_lock<CallGate>& gate);
  Result<AllocationId> TryImport(const Token& token, const Origin& origin);
  Result<AllocationId> ImportWhole(const Token& token, AllocationId as, const SharedAllocation& shared, const Origin& origin);
  Result<Address> OpenAgain(const Token& token, DeviceOrdinal device);  // zero: its memory is not open here
  Result<UniqueFd> CountedDescriptor(AllocationId allocation, const Token& token) REQUIRES(ledger_);
  // Lets go of what only descriptors held that are all closed. What the driver refuses is tried again by the next call,
  // or at the end of a tag's cycle.
  void DropClosed(AllocationId touched = {}) REQUIRES(ledger_);
  void TagCycleEnded();
  Result<PoolId> JoinTag(const std::string& tag, PoolPolicy policy, InTags& in);
  Result<Address> ReservePart(Bytes bytes, Bytes alignment, Address hint, std::uint64_t flags, const CallSite& site);
  Status PutBackPart(Address address, Bytes bytes, AllocationId allocation);
  Result<Address> MapLegacyImport(AllocationId id, DeviceOrdinal device, const Token& token, const CallSite& site);
  Status MapOnce(Address address, Bytes bytes, Bytes offset, AllocationId allocation, std::uint64_t flags);
  bool CutUpSlabOf(AllocationId allocation);  // false: not possible

  // Called before NCCL or a peer lets go of an allocation for the last time: gives its driver handle back, or an import to its
  // owner.
  Status LetGo(AllocationId allocation) REQUIRES(ledger_);
  void LetGoOrBreak(AllocationId allocation) REQUIRES(ledger_);
  Result<Secret> SecretOf(AllocationId allocation) REQUIRES(ledger_);
  Result<SharedAllocation> Resolve(const PeerIdentity& by, const Token& token) REQUIRES(ledger_);  // what a peer's token opens
  [[nodiscard]] Incarnation IncarnationOf(AllocationId allocation) const REQUIRES(ledger_);        // as peers import it now
  // Refuses because of a pause or resume of that scope.
  [[nodiscard]] Status RefuseImport(const PeerIdentity& by, AllocationId allocation, PoolId pool) const REQUIRES(ledger_);
  void GiveOwnHandle(AllocationId allocation) REQUIRES(ledger_);  // to a part of a slab that NCCL has no address of
  Status ReleaseOne(AllocationId allocation) REQUIRES(ledger_);
  Status UnmapOne(Address address) REQUIRES(ledger_);
  // These calls for parts of slabs.
  Status FreePart(Address address, Bytes bytes, AllocationId slab) REQUIRES(ledger_);
  Result<bool> MapPart(Address address, Bytes bytes, Bytes offset, AllocationId allocation)
      REQUIRES(ledger_);  // false: the driver must map it
  Status MoveTo(Address address, AllocationId allocation, AllocationId other) REQUIRES(ledger_);
  Status UnmapPart(Address address, Bytes bytes, AllocationId slab) REQUIRES(ledger_);
  const std::vector<AllocationId>& PartsAt(Address address) REQUIRES(ledger_);
  AllocationId MappedPartAt(Address address) REQUIRES(ledger_);
  Result<AllocationId> WholePartAt(std::string_view call, Address address, Bytes bytes)
      REQUIRES(ledger_);  // mapped there with that size
  void RetireIfEmpty(AllocationId slab) REQUIRES(ledger_);
  void RetireEmptySlabs() REQUIRES(ledger_);
  void RetireSpareSlabs() REQUIRES(ledger_);
  Result<ChunkSpace::Chunk> NewLegacyChunk(Bytes bytes, DeviceOrdinal device, const Origin& origin)
      REQUIRES(ledger_);  // releases the lock meanwhile
  Result<Address> TakeLegacy(Bytes bytes, DeviceOrdinal device, const Origin& origin) REQUIRES(ledger_);  // as NewLegacyChunk
  void RecordRegion(AllocationId allocation, Address address, Bytes bytes, std::vector<AccessDescriptor> access,
                    const CallSite& site) REQUIRES(ledger_);
  Result<std::array<std::byte, 64>> LegacyToken(Address address, AllocationId backing, Bytes offset, Bytes beyond = 0)
      REQUIRES(ledger_);
  Status DropLegacyRegion(Address address, Bytes bytes, AllocationId allocation) REQUIRES(ledger_);
  void OpenLegacyTo(DeviceOrdinal device) REQUIRES(ledger_);

  SessionOptions options_;
  Driver& driver_;
  Ledger ledger_;
  std::vector<DroppedImport> dropped_ GUARDED_BY(ledger_);  // whose owners must be told (Locked)
  Slabs slabs_{options_, driver_, ledger_, dropped_};
  PinnedSupply pinned_;
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Pools> pools_;
  std::map<AllocationId, Secret> secrets_ GUARDED_BY(ledger_);     // of exported allocations, and of tags' imports
  std::map<AllocationId, UniqueFd> exported_ GUARDED_BY(ledger_);  // tokens of tags' memory, whose descriptors hold a reference
  std::set<AllocationId> left_to_descriptors_ GUARDED_BY(ledger_);  // of these, what nothing else may hold any more
  std::set<Address> others_ranges_ GUARDED_BY(ledger_);             // recorded for one mapping, because others reserve unseen
  std::map<DeviceOrdinal, ChunkSpace> legacy_ GUARDED_BY(ledger_);  // chunks for cuMemAlloc
  std::set<DeviceOrdinal> legacy_devices_ GUARDED_BY(ledger_);      // devices that may access them
  // How often IPC handles were opened again, by address.
  std::map<Address, std::uint64_t> legacy_opened_again_ GUARDED_BY(ledger_);
  // Chunks that IPC handles opened, by owner and its id: the import, where it is mapped, and how much of it its owner asked
  // for.
  struct OpenedChunk {
    AllocationId allocation;
    Address address;
    Bytes asked = 0;
    DeviceOrdinal device;
  };
  std::map<std::pair<SessionId, AllocationId>, OpenedChunk> legacy_chunks_ GUARDED_BY(ledger_);
  Mutex cycle_mutex_{LockRank::kCycle};  // one pause or resume at a time
  ScopeGates gates_;
  std::atomic<bool> paused_{false};
  RefusedCalls refused_ GUARDED_BY(ledger_);
  bool closed_ = false;
};

}  // namespace amem
