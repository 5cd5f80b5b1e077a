// The life of a session, and its pauses and resumes.
#include "replay/session/session.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "replay/session/failures.h"

namespace amem {

Session::Session(const SessionOptions& options, Driver& driver, std::unique_ptr<JournalWriter> journal)
    : options_(options), driver_(driver), ledger_(std::move(journal)) {}

Result<std::unique_ptr<Session>> Session::Start(const SessionOptions& options, Driver& driver, SessionOpened who,
                                                std::unique_ptr<JournalWriter> journal, const StartPeers& start_peers) {
  std::unique_ptr<Session> session(new Session(options, driver, std::move(journal)));
  const PeerIdentity self{who.session, who.host, who.pid, who.group, who.rank};
  session->Note(std::move(who));
  auto peers = start_peers(self, *session);
  if (!peers.ok()) return peers.status();
  session->peers_ = *std::move(peers);
  driver.SetPatience(session->LocalPatience());
  session->coordinator_ = std::make_unique<Coordinator>(session->ledger_, driver, *session->peers_, options.pinned_bytes);
  session->pools_ = std::make_unique<Pools>(driver, session->ledger_, *session->peers_, options.pool_pinned_bytes,
                                            [self = session.get()](const PoolSpace::Chunk& c) { return self->DropChunk(c); });
  return session;
}

Session::~Session() {
  pools_.reset();  // its threads may be in the middle of a pause
  if (peers_ != nullptr) peers_->Stop();
}

Status Session::Close(const std::string& reason, std::int32_t exit_code) {
  if (std::exchange(closed_, true)) return {};
  peers_->Stop();
  constexpr std::chrono::milliseconds kPatience{2000};
  const auto lock = ledger_.LockWithin(kPatience);
  if (!lock.owns_lock()) {
    return {Code::kTimeout, fmt::format("close the session: a driver call of another thread has not returned within {} ms; the "
                                        "journal ends as if the process had been killed",
                                        kPatience.count())};
  }
  FlushRefused();
  ledger_.Record(SessionClosed{reason, exit_code});
  return ledger_.journal() == nullptr ? Status{} : ledger_.journal()->Close();
}

Session::Locked::~Locked() {
  const std::vector<DroppedImport> dropped = std::exchange(session_.dropped_, {});
  lock_.unlock();
  for (const DroppedImport& d : dropped) session_.peers_->DropReference(d.remote, d.as);
}

Status Session::RefuseWhilePaused(std::string_view call, Address at) const {
  if (!paused()) return {};
  return {Code::kRefused,
          fmt::format("{}{}: refused, this process's NCCL memory is paused; call ncclResume first", call,
                      at ? " " + Hex(at.value) : std::string()),
          cuda::kIllegalState};
}

// ---- pause and resume --------------------------------------------------------------------------------------------------

// Pinned host memory for contents follows the memory that is held, in steps of a sixteenth.
void Session::PrepareContents() {
  constexpr Bytes kPrepareFrom = Bytes{64} << 20;
  if (coordinator_ == nullptr) return;
  coordinator_->Busy();
  if (held_bytes_ + dense_bytes_ < prepared_bytes_ + std::max(prepared_bytes_ / 16, kPrepareFrom)) return;
  prepared_bytes_ = held_bytes_ + dense_bytes_;
  coordinator_->Prepare(held_bytes_, dense_bytes_);
}

void Session::TrimPinned(Bytes keep) {
  const std::lock_guard cycle(cycle_mutex_);
  coordinator_->TrimPinned(keep);
  const Bytes kept = coordinator_->Contents().pinned_bytes;
  pools_->Trim(keep - std::min(keep, kept));
}

// NCCL, or a peer, may still hold the memory.
Status Session::DropChunk(const PoolSpace::Chunk& chunk) {
  AMEM_TRY(Unmap(chunk.address, chunk.bytes));
  AMEM_TRY(Release(chunk.allocation));
  return FreeRange(chunk.address, chunk.bytes);
}

Status Session::Cycle(CycleKind kind) {
  const std::lock_guard one(cycle_mutex_);
  const bool pausing = kind == CycleKind::kPause;
  const Lifecycle target = pausing ? Lifecycle::kPaused : Lifecycle::kRunning;
  {
    const auto lock = ledger_.LockWithin(LocalPatience());
    if (!lock.owns_lock()) {
      return {Code::kRefused,
              fmt::format("a driver call of NCCL's that gives memory back has not returned within {} ms; let the "
                          "device become idle before, or raise AMEM_TIMEOUT_MS",
                          LocalPatience().count())};
    }
    // After an undo that failed the lifecycle is neither of the two, so that either call can be tried again.
    if (ledger_.state().lifecycle == target) return {};
  }
  auto round = coordinator_->Arrive(kind);
  if (!round.ok()) return round.status();
  if (const Status closed = gate_.Close(LocalPatience()); !closed.ok()) {
    const Status why{closed.code(), fmt::format("{}; it waits for device{}, where a stream is full of work that does not end: "
                                                "let that end before, or raise AMEM_TIMEOUT_MS",
                                                closed.message(), DevicesText())};
    return coordinator_->Refuse(kind, *std::move(round), why);
  }
  const OpenAtEnd open_at_end{gate_};
  // Nothing may be launched from here until everything is back.
  paused_.store(true, std::memory_order_release);
  const Status status = coordinator_->Run(kind, **round);
  {
    const Locked lock(*this);
    RetireEmptySlabs();  // slabs that emptied during the cycle, because peers died or let go late
    if (!pausing) FlushRefused();
  }
  paused_.store(Progress().lifecycle != Lifecycle::kRunning, std::memory_order_release);
  return status;
}

Session::Failed Session::AboutFailure() {
  constexpr std::chrono::milliseconds kPatience{100};
  Failed failed{{}, {}, coordinator_->speaks()};
  const auto lock = ledger_.LockWithin(kPatience);
  if (!lock.owns_lock() || ledger_.journal() == nullptr || !ledger_.JournalLost().ok()) return failed;
  failed.journal = ledger_.journal()->Directory();
  failed.sessions.push_back(ledger_.state().session.session);
  for (const auto& [session, peer] : ledger_.state().peers) failed.sessions.push_back(session);
  return failed;
}

Session::Whereabouts Session::Where() {
  const auto lock = ledger_.Lock();
  const SessionOpened& who = ledger_.state().session;
  const bool journals = ledger_.journal() != nullptr && ledger_.JournalLost().ok();
  return {journals ? ledger_.journal()->Directory() : std::filesystem::path(), who.session, who.rank};
}

// Shorter than that of the vote of all members, so that the others hear the reason before they give up waiting for this one.
std::chrono::milliseconds Session::LocalPatience() const {
  return std::chrono::milliseconds(options_.timeout_ms - options_.timeout_ms / 8);
}

std::string Session::DevicesText() {
  std::set<std::int32_t> devices;
  Inspect([&](const State& state) {
    for (const auto& [id, a] : state.allocations) {
      if (a.own() && a.on_device()) devices.insert(a.properties.location.id);
    }
  });
  return fmt::format("{} {}", devices.size() > 1 ? "s" : "", fmt::join(devices, " and "));
}

Status Session::Pause() { return Cycle(CycleKind::kPause); }
Status Session::Resume() { return Cycle(CycleKind::kResume); }

std::shared_lock<CallGate> Session::EnterLaunch(const char* call, void* stream) {
  driver_.NoteStream(call, stream);
  gate_.Announce(call, stream);
  std::shared_lock entered(gate_);
  if (paused()) entered.unlock();
  return entered;
}

void Session::NoteRefused(const char* call) {
  constexpr std::chrono::milliseconds kPatience{10};  // the caller is NCCL, which is to get its answer
  const auto lock = ledger_.LockWithin(kPatience);
  if (!lock.owns_lock() || ledger_.state().lifecycle == Lifecycle::kClosed) return;
  Refused& refused = refused_[call];
  ++refused.unrecorded;
  std::uint64_t round = ++refused.all;
  while (round % 10 == 0) round /= 10;
  if (round == 1) ledger_.Record(LaunchRefused{call, std::exchange(refused.unrecorded, 0)});
}

void Session::FlushRefused() {
  for (const auto& [call, refused] : refused_) {
    if (refused.unrecorded != 0) ledger_.Record(LaunchRefused{std::string(call), refused.unrecorded});
  }
  refused_.clear();
}

bool Session::OnWitnessed(std::span<const EventBody> facts, std::chrono::milliseconds patience) {
  const auto lock = ledger_.LockWithin(patience);
  if (!lock.owns_lock()) return false;
  if (ledger_.state().lifecycle == Lifecycle::kClosed) return true;  // its journal has had its last event
  for (const EventBody& fact : facts) ledger_.Record(fact);
  return true;
}

bool Session::TouchesPaused(Address address, Bytes bytes) {
  if (!paused()) return false;
  const auto lock = ledger_.Lock();
  const State& state = ledger_.state();
  // In the middle of a pause or resume, what is mapped may be about to leave, or may not have its contents back yet.
  const bool settled = state.lifecycle == Lifecycle::kPaused;
  auto it = state.MappingAt(address);
  if (it == state.mappings.end()) it = state.mappings.lower_bound(address);
  for (; it != state.mappings.end() && it->first < address + bytes; ++it) {
    if (!it->second.present) return true;
    const auto allocation = state.allocations.find(it->second.allocation);
    if (!settled && allocation != state.allocations.end() && WhyKept(allocation->second) == KeepReason::kNone) return true;
  }
  return false;
}

Result<AllocationProperties> Session::PausedAt(Address address) {
  const Status none = NotOurs(fmt::format("{}: no memory of NCCL's is missing there", Hex(address.value)));
  if (!paused()) return none;
  const auto lock = ledger_.Lock();
  const auto mapping = ledger_.state().MappingAt(address);
  if (mapping == ledger_.state().mappings.end() || mapping->second.present) return none;
  const Allocation* a = ledger_.Entry(ledger_.state().allocations, mapping->second.allocation);
  return a == nullptr || !a->own() || a->multicast ? Result<AllocationProperties>(none) : a->properties;
}

Status Session::SetGroup(std::int64_t group) {
  if (group == this->group()) return {};
  const std::unique_lock between_cycles(cycle_mutex_, std::try_to_lock);
  if (!between_cycles.owns_lock() || paused()) {
    return {Code::kRefused,
            fmt::format("change the group to {}: refused, this process is paused, or about to be, together with "
                        "its group; call ncclResume first",
                        group)};
  }
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

CycleProgress Session::Progress() {
  return Inspect([](const State& state) { return CycleProgress{state.lifecycle, state.cycles}; });
}

}  // namespace amem
