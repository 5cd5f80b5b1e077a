// A session: one process whose libnccl is under AMem.
//
// NCCL's driver calls arrive in AMem's terms, with allocation ids for driver handles. Each is made on the driver, recorded
// (state, then journal), and answered. Pause and resume work on the same ledger. ncclpatch/intercept/ translates the driver's C
// types; tests and the demo call this class directly.
//
// The session is a façade over parts. Each part says in its header what it owns and which lock a method needs, and calls only
// parts below it.
//
//   devices                                                              idleness, room, contexts
//   legacy           peer_answers     statistics                         cuMemAlloc; what peers ask; figures
//   nccl   sharing                                                       NCCL's calls; exports and imports
//   pools  (and the Coordinator of NCCL's memory)                        memory under tags; a pause or resume
//   Allocations  Slabs  Tokens  calls  records                           with the ledger's lock, or for a moment of it
//
// Locks, in the order in which a thread takes them: the gates of scopes (CallAdmission), the mutex of NCCL's cycles, the
// pools', the slabs', the ledger's. Any thread may call any method. Status::driver_result of a failure is the CUresult for
// NCCL.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "journal/base/mutex.h"
#include "replay/cycle/coordinator.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/peers/peers.h"
#include "replay/session/allocations.h"
#include "replay/session/call_admission.h"
#include "replay/session/dropped_imports.h"
#include "replay/session/legacy_memory.h"
#include "replay/session/lower_parts.h"
#include "replay/session/nccl_memory.h"
#include "replay/session/peer_answers.h"
#include "replay/session/pools/pools.h"
#include "replay/session/records.h"
#include "replay/session/session_devices.h"
#include "replay/session/session_options.h"
#include "replay/session/sharing.h"
#include "replay/session/slabs/slabs.h"
#include "replay/session/statistics.h"
#include "replay/session/tokens.h"
#include "statemachine/event.h"

namespace amem {

class Session final : NoCopies {
 public:
  using StartPeers = std::function<Result<std::unique_ptr<Peers>>(const PeerIdentity& self, PeerDelegate& delegate)>;

  // `driver` must outlive the session. `journal` may be null (tests without files). `start_peers` is called once.
  static Result<std::unique_ptr<Session>> Start(const SessionOptions& options, Driver& driver, SessionOpened who,
                                                std::unique_ptr<JournalWriter> journal, const StartPeers& start_peers);
  ~Session();
  // Closes the journal in order and stops serving peers. Memory stays. `exit_code`: the argument of exit(); -1: unknown.
  Status Close(const std::string& reason, std::int32_t exit_code = -1);

  [[nodiscard]] SessionId id() const { return tokens_.session(); }

  // ---- parts
  [[nodiscard]] NcclMemory& nccl() { return *nccl_; }
  [[nodiscard]] LegacyMemory& legacy() { return *legacy_; }
  [[nodiscard]] Sharing& sharing() { return *sharing_; }
  [[nodiscard]] Pools& pools() { return *pools_; }
  [[nodiscard]] CallAdmission& calls() { return calls_; }
  [[nodiscard]] Records& records() { return records_; }
  [[nodiscard]] SessionDevices& devices() { return *devices_; }
  [[nodiscard]] PeerAnswers& peer_answers() { return answers_; }
  [[nodiscard]] SessionStatistics statistics() { return {options_, driver_, ledger_, slabs_, *coordinator_, *pools_}; }

  // ---- pause and resume of NCCL's memory
  // Idempotent; collective over the sessions that share memory with this one.
  Status Pause();
  Status PauseOfIdleHosts();  // CycleOptions::hosts_idle
  // While the program may run: the caller has stopped NCCL's launches, and has waited for what it had launched
  // (SessionDevices::AwaitStreams).
  Status PauseBesideProgram();
  // Waits for the other sessions as long as they live and stay paused: a program resumes when it needs the memory.
  Status Resume();
  Status ResumeInTime();  // with a deadline like a pause; for callers whose ranks have agreed to resume
  [[nodiscard]] bool paused() const { return calls_.paused(); }
  // Paused, or left so by a pause or resume that could not be undone. False while one is under way.
  [[nodiscard]] bool StaysPaused();
  [[nodiscard]] CycleProgress Progress() { return answers_.Progress(); }  // takes no lock
  // From the next pause on, this session and all that pause with it keep all memory. Waits for a cycle that is under way.
  void NoteEverythingKept(const std::string& why);

  // kRefused while paused, or in a pause or resume, whose members have one group. The same group again is always allowed.
  Status SetGroup(std::int64_t group);
  [[nodiscard]] std::int64_t group();

  State CopyState();
  // use(state), with the ledger's lock held; it must not call the session.
  template <class Use>
  decltype(auto) Inspect(const Use& use) {
    return amem::Inspect(ledger_, use);
  }

 private:
  Session(const SessionOptions& options, Driver& driver, const SessionOpened& who, std::unique_ptr<JournalWriter> journal);
  [[nodiscard]] LowerParts Parts();
  Status Cycle(CycleKind kind, const CycleOptions& how);
  void CycleEnded(CycleKind kind);
  void CheckEnd(CycleKind kind);  // of one that succeeded

  const SessionOptions options_;
  Driver& driver_;
  Ledger ledger_;
  std::unique_ptr<Peers> peers_;
  CallAdmission calls_{driver_, ledger_};
  Records records_{ledger_, calls_};
  DroppedImports dropped_{peers_};
  Tokens tokens_;
  Slabs slabs_{options_, driver_, ledger_, dropped_};
  Allocations allocations_{driver_, slabs_, tokens_, dropped_};
  PeerAnswers answers_;
  PinnedSupply pinned_;
  Mutex cycle_mutex_{LockRank::kCycle};  // one pause or resume at a time
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Pools> pools_;
  std::unique_ptr<NcclMemory> nccl_;
  std::unique_ptr<Sharing> sharing_;
  std::unique_ptr<LegacyMemory> legacy_;
  std::unique_ptr<SessionDevices> devices_;
  bool closed_ = false;
};

}  // namespace amem
