// Which sessions this one knows, is connected to, or has lost.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "journal/base/process_sight.h"
#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/loop.h"
#include "replay/peers/unix/pending_calls.h"

namespace amem {

// A connection to an owner, as the service sees it.
class WatchedConnection {
 public:
  virtual ~WatchedConnection() = default;
  [[nodiscard]] virtual int fd() const = 0;
  // Sends what waited for room. True: nothing is left.
  virtual bool Flush() = 0;
  // The session is lost; wakes threads that wait for it. Called once, before the delegate is called.
  virtual void Lost(const std::string& reason) = 0;
  // This connection has ended, and the session has not, as far as is known.
  virtual void Broken() = 0;
};

// The end of a connection is not the end of its session: the peer may have given up its first import, or had no memory for the
// connection. A session is lost when it is known that it has closed or that its process has ended, once and for all; until then
// nothing of it is let go, and it is connected anew when it is next asked for something.
class SessionRegistry {
 public:
  // `lost` closes the connections that the lost session made to this one.
  using LossHandler = std::function<void(SessionId session, const std::string& reason)>;
  SessionRegistry(const ConnectionContext& context, ServiceLoop& loop, const PeerIdentity& self, PeerDelegate& delegate,
                  PendingDelegateCalls& pending, LossHandler lost)
      : context_(context), loop_(loop), delegate_(delegate), pending_(pending), lost_(std::move(lost)), self_(self) {}

  // ---- from any thread
  [[nodiscard]] PeerIdentity Self() const;
  void ChangeSelf(const std::function<void(PeerIdentity&)>& change);
  [[nodiscard]] std::optional<PeerIdentity> Known(SessionId session) const;  // connected at some time
  // That session's end has failed a call of this one about that tag.
  void FailedBy(const std::string& tag, SessionId lost);
  // Whether that session is known to have ended; checks again for `patience`, and a moment longer if it may be about to close.
  [[nodiscard]] bool IsGone(SessionId session, std::chrono::milliseconds patience) const;
  // What a connection that ended, or could not be made, means: `why` if the session is gone; else a status that IsBusy, or
  // kRefused.
  [[nodiscard]] Status WhyLost(SessionId session, const Status& why) const;
  // Ok, unless the session cannot be found and yet may live: then why, as a status that IsBusy if that may change by itself.
  [[nodiscard]] Status Hidden(SessionId session) const;
  [[nodiscard]] bool HasFailedBy(const std::string& tag, SessionId session) const;
  void FlushLater(SessionId owner);  // a connection to it has something to flush

  // ---- on the service thread only
  // A connection for data from this session is open, of that process (0: it cannot be seen). kPeerLost: it was lost before.
  Status Greeted(const PeerIdentity& peer, pid_t pid);
  void GreetedEnded(SessionId session);  // that connection has ended
  // A connection for data to an owner is open; from now on its end is noticed.
  Status Watch(const PeerIdentity& peer, std::shared_ptr<WatchedConnection> connection);
  void AddReference(SessionId by, AllocationId allocation, AllocationId as);
  bool RemoveReference(SessionId by, AllocationId allocation, AllocationId as);  // false: there is none
  [[nodiscard]] bool IsConnected(SessionId session) const;                       // and not lost
  bool HasDelivered() { return pending_.MakeCalls(); }                           // the delegate knows all
  void NoteGone(SessionId session);                                              // IsGone
  // Connections of sessions may have ended before their processes did. When to check them next, and the check.
  [[nodiscard]] std::optional<ServiceLoop::Clock::time_point> NextCheck() const;
  void CheckAgain(ServiceLoop::Clock::time_point now);
  void ForgetConnections();  // when the service stops

 private:
  struct Record {
    PeerIdentity identity;
    bool connected = false;
    std::optional<std::string> lost;
    std::set<std::pair<AllocationId, AllocationId>> references;              // our allocation, the peer's id
    int greeted = 0;                                                         // connections for data that it has made
    std::map<ServiceLoop::Key, std::shared_ptr<WatchedConnection>> watched;  // those that this session has made
    ProcessWatch process;
    // All its connections have ended, and it was not known to have: when to check again, at growing intervals.
    std::optional<ServiceLoop::Clock::time_point> check_again;
    ServiceLoop::Clock::duration between_checks{};
  };
  Status Connected(const PeerIdentity& peer, pid_t pid);
  void WatchedReady(SessionId session, ServiceLoop::Key key, std::uint32_t events);
  void ConnectionsChanged(SessionId session, Record& record);
  void LoseIfEnded(SessionId session, Record& record);
  void Lose(SessionId session);

  struct Contact {
    PeerIdentity identity;
    bool open = false;        // a connection for data with it
    ProcessIdentity process;  // in this pid namespace
  };
  [[nodiscard]] Contact ContactWith(SessionId session) const;
  // One check. `unserved`: no process listens under the session's name; it may live all the same, if somebody removed its
  // socket.
  [[nodiscard]] bool HasEnded(SessionId session, bool* unserved = nullptr) const;

  const ConnectionContext context_;
  ServiceLoop& loop_;
  PeerDelegate& delegate_;
  PendingDelegateCalls& pending_;
  const LossHandler lost_;

  mutable std::mutex mutex_;  // guards the next three
  PeerIdentity self_;
  std::map<SessionId, Contact> known_;                     // ever connected
  std::set<std::pair<std::string, SessionId>> failed_by_;  // tags and sessions

  std::map<SessionId, Record> records_;  // the service thread's own
};

}  // namespace amem
