// Peers: how sessions of one job find each other, share memory and agree.
//
// The coordinator and the session use Peers, the interface; unix/unix_peers.h implements it with Unix sockets, and
// tests have one in memory. All methods may be called from any thread; those that wait say so and have a
// deadline.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "journal/base/deadline.h"
#include "journal/base/unique_fd.h"
#include "statemachine/event.h"
#include "statemachine/state.h"
#include "statemachine/types.h"

namespace amem {

struct PeerIdentity {
  SessionId session;
  std::string host;
  std::int32_t pid = 0;
  std::int64_t group = 0;
  std::int32_t rank = -1;
  bool keeps = false;  // all its memory in place (EverythingKept), so that all members of a round do
  friend bool operator==(const PeerIdentity&, const PeerIdentity&) = default;
};
std::string ToText(const PeerIdentity&);  // "rank 2 (pid 4711 on host a)"; without a rank: "pid 4711 on host a"

using Secret = std::array<std::uint8_t, 16>;

// What an exported handle carries, as 64 bytes (token.h has the layout). It opens nothing without the owner's socket, the same
// user, and the secret.
struct Token {
  SessionId session;
  AllocationId allocation;
  Secret secret{};
  Bytes offset = 0;  // of the exported address in its allocation (legacy IPC), 0 otherwise
  friend bool operator==(const Token&, const Token&) = default;
};

struct SharedPart {   // where an allocation lies that has no memory of its own
  AllocationId slab;  // the owner's id
  Secret secret{};    // the slab's: Token{owner, slab, secret} imports it, as any other allocation
  Bytes offset = 0;   // in the slab
};

// Which of the driver's objects a multicast object of an owner is now. A device stays with one for as long as that lives, so
// an importer adds its devices again only to another one.
struct Incarnation {
  std::uint64_t number = 0;  // how often the owner has made the object anew
  bool stands_in = false;    // it is a piece of ordinary memory now, because it could not be complete again
  friend bool operator==(const Incarnation&, const Incarnation&) = default;
};

struct SharedAllocation {  // what an owner hands to an importer
  UniqueFd descriptor;     // none for a part of a slab
  Bytes bytes = 0;
  AllocationProperties properties;
  std::optional<SharedPart> part;
  MemoryTag tag{};
  Incarnation incarnation{};  // of a multicast object
  std::string pool{};         // the tag of the pool that it is a chunk of; empty: of none
  PoolPolicy pool_policy{};   // of that
};

struct ShareRequest {       // on resume: "the allocation that I hold a reference to already"
  AllocationId allocation;  // the owner's id
  AllocationId as;          // the importer's id
};

// Where a session stands in its pauses and resumes, as its peers may ask.
struct CycleProgress {
  Lifecycle lifecycle = Lifecycle::kNew;  // kNew: not known
  std::uint64_t cycle = 0;
};

// What a session answers that cannot look at its ledger now, because a driver call of another thread holds it: who asks may
// ask again until its own time is up.
inline constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY: the same call may succeed in a moment
inline bool IsBusy(const Status& status) { return status.code() == Code::kTimeout && status.driver_result() == kNotReady; }

// The other side of the network: calls that come in, on the service thread of this process. Must neither block on a peer nor
// wait for a driver call of another thread for longer than some milliseconds: then requests are answered with a status that
// IsBusy, and what only tells of something returns false and is called again later, in the same order.
class PeerDelegate {
 public:
  virtual ~PeerDelegate() = default;
  // First import: check the secret (constant time), record ReferenceAdded, export. kRefused if the secret is wrong.
  virtual Result<SharedAllocation> OnImport(const PeerIdentity& by, AllocationId as, const Token& token) = 0;
  // Import again after a pause: kRefused unless `by` holds that reference; kNotFound if not resident now.
  virtual Result<SharedAllocation> OnReimport(const PeerIdentity& by, const ShareRequest& request) = 0;
  virtual bool OnReferenceDropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) = 0;
  // Again when the group or the rank of a connected peer has changed.
  virtual bool OnPeerConnected(const PeerIdentity& peer) = 0;
  virtual bool OnPeerLost(const PeerIdentity& peer, const std::string& reason) = 0;
  // Sessions that this one shares memory of that tag with now (NCCL's, if it is empty), in either direction. From any thread,
  // and waits until then at most.
  virtual Result<std::vector<SessionId>> Neighbours(const std::string& tag, Deadline until) = 0;
  virtual CycleProgress Progress(const std::string& /*tag*/) { return {}; }
  // Facts for the journal alone: what members said, what was seen of their processes. False: the journal was in use for that
  // long, and nothing was recorded. The service thread calls it without patience, and again later with the same facts.
  virtual bool OnWitnessed(std::span<const EventBody> /*facts*/, std::chrono::milliseconds /*patience*/) { return true; }
};

// What a session comes for, when it arrives at a round.
struct RoundCall {
  CycleKind kind{};
  std::uint64_t cycle = 0;
  Deadline until{};      // of the wait for the others
  bool patient = false;  // of a resume: waits on for members that live and are paused
  std::string tag{};     // whose memory it is about; empty: NCCL's. Rounds of several tags may be under way beside each other
};
// "ncclPause", "amem_resume of tag weights": for messages.
std::string NameOf(CycleKind kind, const std::string& tag);

// One pause or resume over a set of sessions. Destroying it early withdraws: the others get kPeerLost.
class Round {
 public:
  virtual ~Round() = default;
  [[nodiscard]] virtual std::vector<PeerIdentity> Members() const = 0;  // sorted by session, includes this one
  // When the waits below end, a vote a little later: for all members at the same time, which follows from the deadline of the
  // one that came first (Deadlines). An undo begins with another one.
  [[nodiscard]] virtual Deadline until() const = 0;
  virtual void SetUntil(Deadline until) = 0;
  // Casts this session's vote on a phase and waits for all the others. Ok: all voted ok. Otherwise the first failure, which
  // names the rank, the phase and its reason (kTimeout: it did not vote; kPeerLost: it died), and `culprit` says whose it is.
  virtual Status Vote(PhaseKind phase, const Status& mine, SessionId* culprit) = 0;
  // The member that counts the votes is lost: every vote fails at once, unless Regather succeeds.
  [[nodiscard]] virtual bool Leaderless() const { return false; }
  // Then gathers the members that are left, which go on voting among themselves. With a value: one of them has ended its cycle
  // already, and is now so; it had heard the decision that did not reach this one. Waits; after a failure Leaderless is false.
  virtual Result<std::optional<Lifecycle>> Regather() { return std::optional<Lifecycle>(); }
};

class Peers {
 public:
  virtual ~Peers() = default;
  [[nodiscard]] virtual PeerIdentity Self() const = 0;
  virtual void SetGroup(std::int64_t group) = 0;
  virtual void KeepEverything() = 0;  // from now on its identity says so

  // Asks the owner that `token` names for its allocation, which will be called `as` here. Waits.
  virtual Result<SharedAllocation> Import(const Token& token, AllocationId as) = 0;
  // The same for many allocations of one owner after a pause, in as few messages as possible; all or an error. Waits.
  virtual Result<std::vector<SharedAllocation>> Reimport(SessionId owner, const std::vector<ShareRequest>& requests,
                                                         Deadline until) = 0;
  // Tells the owner that a reference is gone. Does not wait; a dead owner is no failure.
  virtual void DropReference(const RemoteAllocation& remote, AllocationId as) = 0;

  // After a vote said that `session` is lost: waits (a second at most) until this process has noticed it too, and its delegate
  // has heard of it. False: from here it still seems to live.
  virtual bool AwaitLoss(SessionId session) = 0;

  // Finds the set of sessions that share memory of that tag with this one, directly or through others (Neighbours of
  // neighbours), with the same group, and waits until all of them have arrived for the same kind of cycle. kTimeout names the
  // sessions that did not come, and what they are doing as far as that is known. A session that is dead when it is first asked
  // does not belong to the set any more; kPeerLost names one that died, or closed, while this session waited for it - or while
  // others did, which were told and have given up. `culprits`, if not null, after a failure: the sessions because of which it
  // failed, that did not come, ended, refused, or are of another group. Empty: this session itself, or not known.
  virtual Result<std::unique_ptr<Round>> Arrive(const RoundCall& call, std::vector<PeerIdentity>* culprits = nullptr) = 0;

  // Stops serving; no delegate call comes after this returns, but for one that hangs in the driver: nobody waits for that for
  // ever, because the process may be exiting.
  virtual void Stop() = 0;
};

}  // namespace amem
