// The life of a session, and the pauses and resumes of NCCL's memory.
#include "replay/session/session.h"

#include <spdlog/fmt/fmt.h>

#include <chrono>
#include <mutex>
#include <utility>

#include "journal/base/no_memory.h"

namespace amem {

// Host memory is registered with the driver only after NCCL left it alone for so long, because a start-up is full of calls.
constexpr std::chrono::milliseconds kQuiet{10};

static PeerIdentity IdentityOf(const SessionOpened& who) { return {who.session, who.host, who.pid, who.group, who.rank}; }

Session::Session(const SessionOptions& options, Driver& driver, const SessionOpened& who,
                 std::unique_ptr<JournalWriter> journal)
    : options_(options),
      driver_(driver),
      ledger_(std::move(journal)),
      tokens_(who.session, who.pid),
      answers_(Parts(), records_, IdentityOf(who)),
      pinned_(driver, {.unpins_for = options.unpins_for,
                       .quiet = kQuiet,
                       .nccl_limit = options.pinned_bytes,
                       .pools_limit = options.pool_pinned_bytes,
                       .prepare_threads = 2,
                       .claims = options.host_claims}) {}

LowerParts Session::Parts() {
  return {options_, tokens_.session(), driver_, ledger_, calls_, tokens_, dropped_, slabs_, allocations_};
}

Result<std::unique_ptr<Session>> Session::Start(const SessionOptions& options, Driver& driver, SessionOpened who,
                                                std::unique_ptr<JournalWriter> journal, const StartPeers& start_peers) {
  std::unique_ptr<Session> session(new Session(options, driver, who, std::move(journal)));
  const PeerIdentity self = IdentityOf(who);
  session->records_.Note(std::move(who));
  AMEM_ASSIGN(session->peers_, start_peers(self, session->answers_));
  Session& s = *session;
  const CycleContext context{s.ledger_, driver, *s.peers_, s.pinned_, options.deadlines, options.network, options.compare};
  s.coordinator_ = std::make_unique<Coordinator>(context, s.calls_.GateOf({}));
  s.pools_ = std::make_unique<Pools>(context, s.Parts());
  s.nccl_ = std::make_unique<NcclMemory>(s.Parts(), *s.coordinator_, *s.pools_);
  s.sharing_ = std::make_unique<Sharing>(s.Parts(), *s.peers_, s.pinned_, *s.pools_);
  s.legacy_ = std::make_unique<LegacyMemory>(s.Parts(), *s.coordinator_, s.pinned_, *s.sharing_);
  s.devices_ = std::make_unique<SessionDevices>(s.Parts(), s.cycle_mutex_, s.pinned_, *s.coordinator_, *s.pools_, s.records_);
  return session;
}

Session::~Session() {
  // The parts that hold the pools go before them, and these before what their threads use: they may be inside a pause.
  devices_.reset();
  legacy_.reset();
  sharing_.reset();
  nccl_.reset();
  pools_.reset();
  if (peers_ != nullptr) peers_->Stop();
  coordinator_.reset();
  peers_.reset();  // before what they ask: a question may still be under way
}

Status Session::Close(const std::string& reason, std::int32_t exit_code) {
  if (std::exchange(closed_, true)) return {};
  peers_->Stop();
  constexpr std::chrono::milliseconds kPatience{2000};
  if (!ledger_.TryLockFor(kPatience))
    return ledger_.Held().Within("close the session; its journal ends as if the process had been killed");
  const LedgerLock lock(ledger_, std::adopt_lock);
  calls_.EndRefusals(ledger_);
  ledger_.Record(SessionClosed{reason, exit_code});
  return ledger_.journal() == nullptr ? Status{} : ledger_.journal()->Close();
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
  hooks.gate_closed = [this] { calls_.SetPaused(true); };
  hooks.gate_opens = [this, kind] { CycleEnded(kind); };
  Status done = coordinator_->Cycle(kind, how, hooks);
  if (done.ok()) CheckEnd(kind);
  return done;
}

// A failed check breaks the session: the next pause says so.
void Session::CheckEnd(CycleKind kind) {
  const Lifecycle asked = kind == CycleKind::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
  const Lifecycle now = Progress().lifecycle;
  const bool as_asked = now == asked && paused() == (kind == CycleKind::kPause);
  if (as_asked || now == Lifecycle::kClosed || !ledger_.TryLockFor(kToTidyUp)) return;
  const LedgerLock lock(ledger_, std::adopt_lock);
  ledger_.Check(false, "a " + std::string(ToText(kind)) + " that succeeded left NCCL's memory otherwise");
}

// In the thread of the cycle, with the gate closed and without the ledger's lock. What NCCL waits for comes first: for the rest
// there may be no memory.
void Session::CycleEnded(CycleKind kind) {
  const bool runs = Progress().lifecycle == Lifecycle::kRunning;
  if (runs && options_.network != nullptr) options_.network->Open();
  calls_.SetPaused(!runs);
  static_cast<void>(OrNoMemory([&]() -> Status {
    if (!ledger_.TryLockFor(kToTidyUp)) return {};
    const NotifyingLock lock(ledger_, dropped_, std::adopt_lock);
    allocations_.RetireEmptySlabs(ledger_);  // slabs that emptied during the cycle, because peers died or let go late
    if (kind == CycleKind::kResume) calls_.EndRefusals(ledger_);
    return {};
  }));
}

Status Session::Pause() { return Cycle(CycleKind::kPause, {}); }
Status Session::PauseOfIdleHosts() { return Cycle(CycleKind::kPause, {.hosts_idle = true}); }
Status Session::PauseBesideProgram() {
  const StreamMoment nothing;
  return Cycle(CycleKind::kPause, {.after = &nothing});
}
Status Session::Resume() { return Cycle(CycleKind::kResume, {.patient = true}); }
Status Session::ResumeInTime() { return Cycle(CycleKind::kResume, {}); }

bool Session::StaysPaused() {
  if (!cycle_mutex_.try_lock()) return false;
  const MutexLock between_cycles(cycle_mutex_, std::adopt_lock);
  return paused();
}

void Session::NoteEverythingKept(const std::string& why) {
  const auto gate = calls_.EnterCall();
  records_.Note(EverythingKept{why});
  peers_->SetReleasesNothing();
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
  records_.Note(GroupChanged{group});
  return {};
}

std::int64_t Session::group() {
  return Inspect([](const State& state) { return state.session.group; });
}

State Session::CopyState() {
  return Inspect([](const State& state) { return state; });
}

}  // namespace amem
