// Which sessions this one knows, is connected to, or has lost.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/loop.h"

namespace amem {

// A connection to an owner, as the service sees it.
class WatchedConnection {
 public:
  virtual ~WatchedConnection() = default;
  [[nodiscard]] virtual int fd() const = 0;
  // Sends what waited for room. True: nothing is left.
  virtual bool Flush() = 0;
  // The session is lost; wakes threads that wait for it. Called once, before the delegate hears of it.
  virtual void Lost(const std::string& reason) = 0;
};

// What the delegate must still be told, in order, because it cannot always record at once. On the service thread.
class Notices {
 public:
  using Tell = std::function<bool()>;  // false: not now
  void Add(Tell tell) {
    waiting_.push_back(std::move(tell));
    static_cast<void>(Flush());
  }
  bool Flush() {  // true: none is left
    for (; !waiting_.empty(); waiting_.pop_front())
      if (!waiting_.front()()) return false;
    return true;
  }
  [[nodiscard]] bool empty() const { return waiting_.empty(); }

 private:
  std::deque<Tell> waiting_;
};

class SessionRegistry {
 public:
  // `lost` closes the connections that the lost session made to this one.
  using LossHandler = std::function<void(SessionId session, const std::string& reason)>;
  // A fact for the journal, from the service thread.
  using Witness = std::function<void(EventBody fact)>;
  SessionRegistry(const ConnectionContext& context, ServiceLoop& loop, const PeerIdentity& self, PeerDelegate& delegate,
                  Notices& notices, LossHandler lost, Witness witness)
      : context_(context),
        loop_(loop),
        delegate_(delegate),
        notices_(notices),
        lost_(std::move(lost)),
        witness_(std::move(witness)),
        self_(self) {}

  Status Open();

  // ---- from any thread
  [[nodiscard]] PeerIdentity Self() const;
  void ChangeSelf(const std::function<void(PeerIdentity&)>& change);
  [[nodiscard]] std::optional<PeerIdentity> Known(SessionId session) const;  // connected at some time
  // Whose end failed this session's call to Arrive about that tag, for peers that make that call later. Nothing: it calls
  // again.
  void SetLoss(const std::string& tag, const std::optional<PeerIdentity>& lost);
  [[nodiscard]] std::optional<PeerIdentity> Loss(const std::string& tag) const;
  // Whether nobody serves that session any more; keeps looking for `patience`, and a moment longer if it may be about to close.
  [[nodiscard]] bool IsGone(SessionId session, std::chrono::milliseconds patience) const;
  // Ok, unless the session cannot be found and yet may live: then why, as a status that IsBusy if that may change by itself.
  [[nodiscard]] Status Hidden(SessionId session) const;
  [[nodiscard]] bool HasFailedBy(const std::string& tag, SessionId session) const;  // SetLoss was called with it
  // Readable when the set may have changed; for Arrive.
  [[nodiscard]] int change_fd() const { return change_.get(); }
  void Changed();
  // `connection` has something to flush.
  void FlushLater(std::shared_ptr<WatchedConnection> connection);

  // ---- on the service thread only
  // A connection for data with this session is open, of that process (0: it cannot be seen). kPeerLost: it was lost before.
  Status Connected(const PeerIdentity& peer, pid_t pid);
  // It sent this identity: records a changed group or rank.
  void SeenAs(const PeerIdentity& peer);
  // A connection to an owner is open; from now on its end is noticed.
  Status Watch(const PeerIdentity& peer, std::shared_ptr<WatchedConnection> connection);
  void AddReference(SessionId by, AllocationId allocation, AllocationId as);
  bool RemoveReference(SessionId by, AllocationId allocation, AllocationId as);  // false: there is none
  // `seen`: its process, if the caller has looked; otherwise the registry looks if it died.
  void Lose(SessionId session, const std::string& reason, std::optional<ProcessSeen> seen = std::nullopt);
  [[nodiscard]] bool IsConnected(SessionId session) const;  // and not lost
  bool HasTold() { return notices_.Flush(); }               // the delegate knows all
  void NoteGone(SessionId session);                         // nobody listens on its socket any more
  // Sessions that were lost while they shared memory, and that NoteGone was not called for.
  [[nodiscard]] std::vector<PeerIdentity> Doubtful() const;
  void ForgetConnections();  // when the service stops

 private:
  struct Record {
    PeerIdentity identity;
    bool connected = false;
    std::optional<std::string> lost;
    bool doubtful = false;  // it shared memory and its connection ended; nobody has looked whether its process died
    std::set<std::pair<AllocationId, AllocationId>> references;  // our allocation, the peer's id
    std::map<ServiceLoop::Key, std::shared_ptr<WatchedConnection>> watched;
    ProcessWatch process;
  };
  void WatchedReady(SessionId session, ServiceLoop::Key key, std::uint32_t events);

  struct Contact {
    PeerIdentity identity;
    bool connected = false;               // and not lost
    pid_t pid = 0;                        // of its process, in this pid namespace
    std::uint64_t start_ticks = 0;        // 0: it cannot be seen
    [[nodiscard]] bool HasEnded() const;  // or is about to
  };
  [[nodiscard]] Contact ContactWith(SessionId session) const;

  const ConnectionContext context_;
  ServiceLoop& loop_;
  PeerDelegate& delegate_;
  Notices& notices_;
  const LossHandler lost_;
  const Witness witness_;
  UniqueFd change_;

  mutable std::mutex mutex_;  // guards the next four
  PeerIdentity self_;
  std::map<SessionId, Contact> known_;                         // ever connected
  std::map<std::string, std::optional<PeerIdentity>> losses_;  // by tag
  std::set<std::pair<std::string, SessionId>> failed_by_;      // likewise

  std::map<SessionId, Record> records_;  // the service thread's own
};

}  // namespace amem
