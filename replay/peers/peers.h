// Peers: how sessions of one job find each other, share memory and agree.
//
// The coordinator and the session use the interface Peers; unix/unix_peers.h implements it with Unix sockets, and tests
// implement it in memory. Any thread may call any method. Methods that wait say so and have a deadline.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
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
  bool keeps = false;  // a pause releases nothing of this session (EverythingKept), so nothing of any member of its rounds
  friend bool operator==(const PeerIdentity&, const PeerIdentity&) = default;
};
std::string ToText(const PeerIdentity&);  // "rank 2 (pid 4711 on host a)"; without a rank: "pid 4711 on host a"

using Secret = std::array<std::uint8_t, 16>;

// The 64 bytes of an exported handle (token.h has the layout). It opens nothing without the owner's socket, the same user, and
// the secret.
struct Token {
  SessionId session;
  AllocationId allocation;
  Secret secret{};
  Bytes offset = 0;          // of the exported address in its allocation (legacy IPC), 0 otherwise
  std::int32_t pid = 0;      // of the process that made it, for messages; 0: not said
  std::uint32_t beyond = 0;  // bytes at the allocation's end that nobody asked for (legacy IPC of a whole allocation)
  friend bool operator==(const Token&, const Token&) = default;
};

struct SharedPart {   // the place of an allocation in a slab
  AllocationId slab;  // the owner's id
  Secret secret{};    // the slab's: Token{owner, slab, secret} imports it, as any other allocation
  Bytes offset = 0;   // in the slab
};

// Which version of a multicast object this is. A device stays with an object as long as the object lives, so an importer adds
// its devices again only to a new one.
struct Incarnation {
  std::uint64_t number = 0;  // how often the owner has made the object anew
  bool stands_in = false;    // ordinary memory stands in for it, because it could not be completed
  friend bool operator==(const Incarnation&, const Incarnation&) = default;
};

struct SharedItem {  // what an owner says of an allocation to an importer
  Bytes bytes = 0;
  AllocationProperties properties;
  std::optional<SharedPart> part;
  MemoryTag tag{};
  Incarnation incarnation{};  // of a multicast object
  std::string pool{};         // the tag of the chunk's pool; empty: no chunk
  PoolPolicy pool_policy{};   // of that pool
};
struct SharedAllocation : SharedItem {
  UniqueFd descriptor{};  // none for a part of a slab
};

struct ShareRequest {       // on resume: "the allocation that I hold a reference to already"
  AllocationId allocation;  // the owner's id
  AllocationId as;          // the importer's id
};

// Where a session is in its pauses and resumes.
struct CycleProgress {
  Lifecycle lifecycle = Lifecycle::kNew;  // kNew: not known
  std::uint64_t cycle = 0;
};

// The answer of a session whose ledger is held by another thread's driver call: whoever asked may ask again until its own time
// is up.
inline constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY
inline bool IsBusy(const Status& status) { return status.code() == Code::kTimeout && status.driver_result() == kNotReady; }

// Calls that come in, on this process's service thread. They must neither block on a peer nor wait longer than some
// milliseconds for another thread's driver call: requests are then answered with a status that IsBusy, and notifications return
// false and are called again later, in the same order.
class PeerDelegate {
 public:
  virtual ~PeerDelegate() = default;
  // First import: check the secret (constant time), record ReferenceAdded, export. kRefused if the secret is wrong.
  virtual Result<SharedAllocation> OnImport(const PeerIdentity& by, AllocationId as, const Token& token) = 0;
  // Import again after a pause. kRefused: `by` does not hold that reference; kNotFound: not resident now.
  virtual Result<SharedAllocation> OnReimport(const PeerIdentity& by, const ShareRequest& request) = 0;
  virtual bool OnReferenceDropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) = 0;
  // Called again when a connected peer's group or rank has changed.
  virtual bool OnPeerConnected(const PeerIdentity& peer) = 0;
  virtual bool OnPeerLost(const PeerIdentity& peer, const std::string& reason) = 0;
  // The sessions that share memory of that tag (empty: NCCL's) with this one now, in either direction. Any thread; waits at
  // most until `until`.
  virtual Result<std::vector<SessionId>> Neighbours(const std::string& tag, Deadline until) = 0;
  virtual CycleProgress Progress(const std::string& /*tag*/) { return {}; }
  // Facts for the journal alone: what members said, and what was seen of their processes. False: the journal was in use for
  // that long, and nothing was recorded. The service thread passes no patience and tries again later.
  virtual bool OnWitnessed(std::span<const EventBody> /*facts*/, std::chrono::milliseconds /*patience*/) { return true; }
};

// "ncclPause", "amem_resume of tag weights": for messages.
std::string NameOf(CycleKind kind, const std::string& tag);

// Where a session is likely to be lost, because a vote or a peer's answer says so.
inline constexpr std::chrono::milliseconds kLossPatience{1000};

class Assembly;  // assembly.h

class Peers {
 public:
  virtual ~Peers() = default;
  [[nodiscard]] virtual PeerIdentity Self() const = 0;
  virtual void SetGroup(std::int64_t group) = 0;
  virtual void SetReleasesNothing() = 0;  // from now on its identity says so

  // Asks the owner that `token` names for its allocation, which is called `as` here. Waits.
  virtual Result<SharedAllocation> Import(const Token& token, AllocationId as) = 0;
  // The same for many allocations of one owner after a pause, in few messages; all or an error. Waits.
  virtual Result<std::vector<SharedAllocation>> Reimport(SessionId owner, const std::vector<ShareRequest>& requests,
                                                         Deadline until) = 0;
  // Says to the owner that a reference is gone. Does not wait; a dead owner is no failure.
  virtual void DropReference(const RemoteAllocation& remote, AllocationId as) = 0;

  // Whether `session` is lost; if so, this process's delegate knows it on return. A process that dies seems to live for a
  // while, so one that seems to live is checked again for as long as `patience`.
  virtual bool AwaitLoss(SessionId session, std::chrono::milliseconds patience) = 0;

  // The members of one call about that tag (empty: NCCL's memory), and their board. It must not outlive the object.
  virtual std::unique_ptr<Assembly> Assemble(CycleKind kind, const std::string& tag) = 0;

  // Stops serving; no delegate call comes after this returns, but for one that hangs in the driver: nobody waits for that for
  // ever, because the process may be exiting.
  virtual void Stop() = 0;
};

}  // namespace amem
