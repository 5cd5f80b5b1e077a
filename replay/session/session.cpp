// The life of a session, and its pauses and resumes.
#include "replay/session/session.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

namespace amem {

// Host memory is registered with the driver only after NCCL left it alone for so long, because a start-up is full of calls.
constexpr std::chrono::milliseconds kQuiet{10};

Session::Session(const SessionOptions& options, Driver& driver, std::unique_ptr<JournalWriter> journal)
    : options_(options),
      driver_(driver),
      ledger_(std::move(journal)),
      pinned_(driver, {.unpins_for = options.unpins_for,
                       .quiet = kQuiet,
                       .nccl_limit = options.pinned_bytes,
                       .pools_limit = options.pool_pinned_bytes,
                       .prepare_threads = 2,
                       .claims = options.host_claims}) {}

Result<std::unique_ptr<Session>> Session::Start(const SessionOptions& options, Driver& driver, SessionOpened who,
                                                std::unique_ptr<JournalWriter> journal, const StartPeers& start_peers) {
  std::unique_ptr<Session> session(new Session(options, driver, std::move(journal)));
  const PeerIdentity self{who.session, who.host, who.pid, who.group, who.rank};
  session->Note(std::move(who));
  AMEM_ASSIGN(session->peers_, start_peers(self, *session));
  const CycleContext context{session->ledger_,  driver,          *session->peers_, session->pinned_,
                             options.deadlines, options.network, options.compare};
  session->coordinator_ = std::make_unique<Coordinator>(context, session->gates_.Of({}));
  session->pools_ = std::make_unique<Pools>(
      context, session->gates_, [self = session.get()](const ChunkSpace::Chunk& c) { return self->DropChunk(c); },
      [self = session.get()] { self->TagCycleEnded(); }, options.first_tag);
  return session;
}

Session::~Session() {
  pools_.reset();  // its threads may be inside a pause
  if (peers_ != nullptr) peers_->Stop();
}

Status Session::Close(const std::string& reason, std::int32_t exit_code) {
  if (std::exchange(closed_, true)) return {};
  peers_->Stop();
  constexpr std::chrono::milliseconds kPatience{2000};
  if (!ledger_.TryLockFor(kPatience))
    return ledger_.Held().Within("close the session; its journal ends as if the process had been killed");
  const LedgerLock lock(ledger_, std::adopt_lock);
  refused_.EndPause(ledger_);
  ledger_.Record(SessionClosed{reason, exit_code});
  return ledger_.journal() == nullptr ? Status{} : ledger_.journal()->Close();
}

Session::Locked::~Locked() {
  const std::vector<DroppedImport> dropped = std::exchange(session_.dropped_, {});
  session_.ledger_.unlock();
  for (const DroppedImport& d : dropped) session_.peers_->DropReference(d.remote, d.as);
}

Status Session::RefuseWhilePaused(std::string_view call, Address at) const {
  if (!paused()) return {};
  return {Code::kRefused,
          fmt::format("{}{}: refused, this process's NCCL memory is paused; call ncclResume first", call,
                      at ? " " + Hex(at) : std::string()),
          cuda::kIllegalState};
}

Status Session::RefuseInTag(std::string_view call, Address at) {
  return {Code::kRefused, fmt::format("{} {}: refused, the tag of that memory is paused; resume the tag first", call, Hex(at)),
          cuda::kIllegalState};
}

void Session::TrimPinned(Bytes keep) { TrimPinnedUntil(keep, Deadline::max()); }

void Session::TrimPinnedUntil(Bytes keep, Deadline until) {
  if (!TryLockUntil(cycle_mutex_, until)) return;
  cycle_mutex_.AssertHeld();
  const MutexLock cycle(cycle_mutex_, std::adopt_lock);
  coordinator_->FreeUnfinished();
  pools_->FreeUnfinished();
  slabs_.FreeUnfinished();
  pinned_.Trim(keep);
}

std::vector<Address> Session::PartsOn(DeviceOrdinal device) {
  return Inspect([&](const State& state) {
    std::vector<Address> found;
    for (const auto& [id, pool] : state.pools)
      for (const auto& [address, part] : pool.parts)
        if (part.device == device) found.push_back(address);
    return found;
  });
}

void Session::ForgetDevice(DeviceOrdinal device) {
  ForgetParts(device, PartsOn(device), fmt::format("reset device {} (cudaDeviceReset)", device.value));
}

void Session::ForgetParts(DeviceOrdinal device, std::span<const Address> parts, std::string_view did) {
  for (const Address address : parts) static_cast<void>(pools_->Free(address, std::nullopt));
  TrimPinnedUntil(0, In(options_.deadlines.call()));  // a cycle may wait for other ranks for as long as those like
  driver_.ForgetContext(device);
  const Bytes left = Inspect([&](const State& state) {
    Bytes sum = 0;
    for (const auto& [id, a] : state.allocations)
      if (a.on_device() && a.properties.location.id == device.value && !a.placed() && !a.multicast) sum += a.bytes;
    return sum;
  });
  if (left == 0 && pinned_.Count().pinned_bytes == 0) return;
  Note(SessionBroken{fmt::format("the program {} while {}", did,
                                 left == 0 ? "contents of paused memory were in host memory that was pinned there"
                                           : FormatBytes(left) + " there were AMem's or NCCL's")});
}

Driver::Released Session::ReleaseContext(DeviceOrdinal device, const std::function<int()>& release) {
  // Contents that are away, or on their way, need AMem's reference: then it stays. Nobody waits here, because a cycle may wait
  // for other ranks.
  if (!TryLockUntil(cycle_mutex_, Now())) return {release(), false};
  std::optional<Driver::Released> released;
  std::vector<Address> parts;  // those of before: another thread may make the context anew at once
  {
    cycle_mutex_.AssertHeld();
    const MutexLock cycle(cycle_mutex_, std::adopt_lock);
    parts = PartsOn(device);
    const auto let_go = [&] {
      released = driver_.ReleaseContext(device, release);
      if (released->gone) pinned_.Trim(0);  // before a cycle takes what was pinned there
    };
    if (!paused()) pools_->IfAllRun(let_go);
  }
  if (!released) return {release(), false};
  if (released->gone)
    ForgetParts(device, parts,
                fmt::format("gave up the primary context of device {} (cuDevicePrimaryCtxRelease)", device.value));
  return *released;
}

// NCCL or a peer may still hold the memory.
Status Session::DropChunk(const ChunkSpace::Chunk& chunk) {
  AMEM_TRY(Unmap(chunk.address, chunk.bytes));
  AMEM_TRY(Release(chunk.allocation));
  return FreeRange(chunk.address, chunk.bytes);
}

Status Session::Cycle(CycleKind kind, const CycleOptions& how) {
  const Deadlines::Time patience = options_.deadlines.call() - options_.deadlines.margin();
  if (!TryLockUntil(cycle_mutex_, how.patient ? Deadline::max() : In(patience)))
    return {Code::kRefused,
            fmt::format("{} refused: another thread's pause or resume has not ended within {} ms; it waits for other ranks, or "
                        "for the driver",
                        ToText(kind), patience.count()),
            cuda::kNotReady};
  cycle_mutex_.AssertHeld();
  const MutexLock one(cycle_mutex_, std::adopt_lock);
  CycleHooks hooks;
  // Nothing may be launched until everything is back.
  hooks.gate_closed = [this] { paused_.store(true, std::memory_order_release); };
  hooks.gate_opens = [this, kind] {
    if (ledger_.TryLockFor(kToTidyUp)) {
      const Locked lock(*this, std::adopt_lock);
      RetireEmptySlabs();  // slabs that emptied during the cycle, because peers died or let go late
      if (kind == CycleKind::kResume) refused_.EndPause(ledger_);
    }
    const bool runs = Progress().lifecycle == Lifecycle::kRunning;
    if (runs && options_.network != nullptr) options_.network->Open();
    paused_.store(!runs, std::memory_order_release);
  };
  return coordinator_->Cycle(kind, how, hooks);
}

bool Session::StaysPaused() {
  if (!cycle_mutex_.try_lock()) return false;
  const MutexLock between_cycles(cycle_mutex_, std::adopt_lock);
  return paused();
}

Status Session::HasRoomFor(std::span<const PoolId> scopes) {
  std::map<DeviceOrdinal, Bytes> needed;
  for (const PoolId scope : scopes) {
    const LedgerLock lock(ledger_);
    if (ledger_.state().LifecycleOf(scope) != Lifecycle::kPaused) continue;
    const Plan plan = PlanResume(ledger_.state(), scope);
    for (const PlannedPhase& phase : plan.phases) {
      for (const Step& step : phase.steps)
        if (step.kind == StepKind::kCheckMemory) needed[step.device] += step.bytes;
    }
  }
  for (const auto& [device, bytes] : needed) AMEM_TRY(CheckFreeMemory(driver_, device, bytes, "resume again"));
  return {};
}

std::filesystem::path Session::JournalDirectory() {
  constexpr std::chrono::milliseconds kPatience{100};
  if (!ledger_.TryLockFor(kPatience)) return {};
  const LedgerLock lock(ledger_, std::adopt_lock);
  return ledger_.journal() == nullptr || !ledger_.JournalLost().ok() ? std::filesystem::path() : ledger_.journal()->Directory();
}

Status Session::Pause() { return Cycle(CycleKind::kPause, {}); }
Status Session::PauseOfIdleHosts() { return Cycle(CycleKind::kPause, {.hosts_idle = true}); }
Status Session::PauseBesideProgram() {
  const StreamMoment nothing;
  return Cycle(CycleKind::kPause, {.after = &nothing});
}
Status Session::AwaitStreams(std::span<const std::pair<DeviceOrdinal, void*>> streams) {
  const Deadline until = In(options_.deadlines.call());
  std::vector<std::pair<DeviceOrdinal, std::unique_ptr<StreamMoment>>> moments;
  for (const auto& [device, stream] : streams) {
    AMEM_ASSIGN(auto moment, driver_.MomentOf(device, stream));
    moments.emplace_back(device, std::move(moment));
  }
  for (const auto& [device, moment] : moments) AMEM_TRY(driver_.AwaitMoment(device, *moment, until));
  return {};
}
Status Session::AwaitIdle() {
  const Deadline until = In(options_.deadlines.call());
  Plan pause;
  {
    const LedgerLock lock(ledger_);
    if (ledger_.state().lifecycle == Lifecycle::kPaused) return {};  // nothing of NCCL's can run
    pause = PlanPause(ledger_.state(), {});
  }
  for (const Step& step : pause.phases.front().steps)
    if (step.kind == StepKind::kQuiesce) AMEM_TRY(driver_.Synchronize(step.device, until));
  return {};
}
Status Session::Resume() { return Cycle(CycleKind::kResume, {.patient = true}); }
Status Session::ResumeInTime() { return Cycle(CycleKind::kResume, {}); }

std::shared_lock<CallGate> Session::EnterLaunch(const char* call, void* stream) {
  driver_.NoteStream(call, stream);
  CallGate::Announce(call, stream);
  auto entered = EnterCall();
  if (paused()) entered.unlock();
  return entered;
}

void Session::EnterTag(PoolId tag, InTags& in) {
  in.gates.emplace_back(gates_.Of(tag));
  in.paused = in.paused || Inspect([&](const State& state) { return state.LifecycleOf(tag) != Lifecycle::kRunning; });
}

// Memory that a network card holds stayed in place.
Session::InTags Session::EnterTags(std::span<const Extent> touched, const char* call) {
  InTags in;
  if (!HasTags()) return in;
  std::set<PoolId> tags;
  for (const Extent& extent : touched)
    tags.merge(Inspect([&](const State& state) { return state.PoolsIn(extent.address, extent.bytes); }));
  for (const PoolId tag : tags) {
    CallGate::Announce(call, nullptr);
    EnterTag(tag, in);
  }
  in.away = in.paused && std::ranges::any_of(touched, [&](const Extent& e) { return TouchesPaused(e.address, e.bytes); });
  return in;
}

Session::InTags Session::EnterTagOf(AllocationId allocation) {
  InTags in;
  if (!HasTags()) return in;
  const PoolId tag = Inspect([&](const State& state) {
    const auto* const found = FindIn(state.allocations, allocation);
    return found == nullptr ? PoolId{} : found->pool;
  });
  if (tag) EnterTag(tag, in);
  return in;
}

void Session::NoteRefused(const char* call) {
  constexpr std::chrono::milliseconds kPatience{10};  // NCCL waits for the answer
  if (!ledger_.TryLockFor(kPatience)) return;
  const LedgerLock lock(ledger_, std::adopt_lock);
  if (ledger_.state().lifecycle == Lifecycle::kClosed) return;
  refused_.Add(call, ledger_);
}

bool Session::OnWitnessed(std::span<const EventBody> facts, std::chrono::milliseconds patience) {
  if (!ledger_.TryLockFor(patience)) return false;
  const LedgerLock lock(ledger_, std::adopt_lock);
  if (ledger_.state().lifecycle == Lifecycle::kClosed) return true;  // nothing follows the journal's last event
  for (const EventBody& fact : facts) ledger_.Record(fact);
  return true;
}

bool Session::TouchesPaused(Address address, Bytes bytes) {
  if (!paused() && !HasTags()) return false;
  const LedgerLock lock(ledger_);
  const State& state = ledger_.state();
  // During a cycle, mapped memory may be about to leave or may not have its contents yet.
  const bool settled = !paused() || state.lifecycle == Lifecycle::kPaused;
  for (const auto& [at, mapping] : Touching(state.mappings, address, bytes)) {
    if (!mapping.present) return true;
    const auto* const allocation = FindIn(state.allocations, mapping.allocation);
    if (settled || allocation == nullptr || allocation->pool) continue;
    if (WhyKept(*allocation) == KeepReason::kNone) return true;
  }
  return false;
}

Result<AllocationProperties> Session::PausedAt(Address address) {
  const Status none{Code::kNotFound, Hex(address) + ": no memory of NCCL's is missing there", cuda::kInvalidValue};
  const LedgerLock lock(ledger_);
  const auto mapping = ledger_.state().MappingAt(address);
  if (mapping == ledger_.state().mappings.end() || mapping->second.present) return none;
  const Allocation* a = ledger_.Entry(mapping->second.allocation);
  return a == nullptr || !a->own() || a->multicast ? Result<AllocationProperties>(none) : a->properties;
}

Status Session::SetGroup(std::int64_t group) {
  if (group == this->group()) return {};
  const Status refused{Code::kRefused, fmt::format("change the group to {}: refused, this process is paused, or about to be, "
                                                   "together with its group; call ncclResume first",
                                                   group)};
  if (!cycle_mutex_.try_lock()) return refused;
  const MutexLock between_cycles(cycle_mutex_, std::adopt_lock);
  if (paused()) return refused;
  peers_->SetGroup(group);
  Note(GroupChanged{group});
  return {};
}

std::int64_t Session::group() {
  return Inspect([](const State& state) { return state.session.group; });
}

State Session::CopyState() {
  return Inspect([](const State& state) { return state; });
}

}  // namespace amem
