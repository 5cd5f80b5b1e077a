// The service thread of a session: answers peers, counts votes (unix_peers_board.h), sees who is lost.
//
// It never waits for a peer: sockets are non-blocking, what does not fit is queued (bounded), and nothing more is read from a
// peer that does not take its answers. Strangers have little time to say hello and few places to wait in. All calls to the
// delegate come from here, one after the other.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "replay/peers/messages.h"
#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/vote_counter.h"

namespace amem {

// A connection that this process made to an owner, as the service sees it.
class WatchedConnection {
 public:
  virtual ~WatchedConnection() = default;
  [[nodiscard]] virtual int fd() const = 0;
  // Sends what had to wait for room; true: nothing is left to send.
  virtual bool Flush() = 0;
  // The session is gone; wake whoever waits. Called once, before the delegate hears of it.
  virtual void Lost(const std::string& reason) = 0;
};

class PeerService {
 public:
  PeerService(const ConnectionContext& context, UniqueFd listener, const PeerIdentity& self, PeerDelegate& delegate);
  ~PeerService();
  PeerService(const PeerService&) = delete;
  PeerService& operator=(const PeerService&) = delete;

  Status Start();
  // Ends the thread and closes what it held; the stop descriptor of the context must be readable by then.
  void Stop();

  [[nodiscard]] PeerIdentity Self() const;
  void SetGroup(std::int64_t group);
  // Readable when something happened that may change who shares memory with whom; for Arrive.
  [[nodiscard]] int change_fd() const { return change_.get(); }
  [[nodiscard]] std::optional<PeerIdentity> Known(SessionId session) const;
  // Whose end failed this session's call to Arrive, for peers that come to that call later; nothing: it calls again.
  void SetLoss(const std::optional<PeerIdentity>& who);
  [[nodiscard]] bool HasFailedBy(SessionId session) const;  // SetLoss was called with it

  // Runs `work` on the service thread and waits until it is done; false: the service has stopped and it did not run.
  bool Run(const std::function<void()>& work);
  // The same without waiting; dropped if the service has stopped.
  void Post(std::function<void()> work);
  // On the service thread only (through Run): a connection to `peer` is open; from now on its end is noticed. The reason if the
  // session had been lost before.
  Status Watch(const PeerIdentity& peer, std::shared_ptr<WatchedConnection> connection);
  // On the service thread only, all three.
  [[nodiscard]] bool IsConnected(SessionId session) const;  // and not lost
  void NoteGone(SessionId session);                         // it was seen that nobody listens for that session any more
  // Sessions that were lost while they shared memory, and of which NoteGone was not told.
  [[nodiscard]] std::vector<PeerIdentity> Doubtful() const;
  // From any thread: `connection` has something to flush.
  void FlushLater(std::shared_ptr<WatchedConnection> connection);

 private:
  using Clock = std::chrono::steady_clock;
  struct Outgoing {
    std::vector<std::byte> bytes;
    std::vector<UniqueFd> descriptors;
  };
  struct Inbound {
    std::uint64_t id = 0;
    UniqueFd socket;
    pid_t pid = 0;
    std::uint64_t process = 0;  // key in processes_, 0: not watched
    Clock::time_point accepted;
    bool welcome = false;  // it has said hello, and may go on
    Purpose purpose = Purpose::kData;
    PeerIdentity peer;
    std::deque<Outgoing> queue;
    std::uint32_t interest = 0;              // what epoll watches
    std::optional<Clock::time_point> retry;  // of a send that the kernel refused for now
    std::optional<std::string> marked;       // why it will be closed at the end of this turn
  };
  struct SessionRecord {
    PeerIdentity identity;
    bool connected = false;
    std::optional<std::string> lost;
    bool doubtful = false;  // it shared memory, its connection ended, and nobody has looked whether its process did
    std::set<std::pair<std::uint64_t, std::uint64_t>> references;  // allocation of ours, the peer's id
    std::set<std::uint64_t> watched;                               // keys in watched_
    std::uint64_t process = 0;                                     // key in processes_, 0: not watched
  };
  struct WatchedProcess {  // of a connection that came in, or of a session
    UniqueFd descriptor;
    std::uint64_t inbound = 0;
    SessionId session;
  };

  bool Stopping();
  void Loop();
  void Turn();
  void Dispatch(std::uint64_t key, std::uint32_t events);
  void RunCommands();
  void Timers(Clock::time_point now);
  [[nodiscard]] int WaitMilliseconds() const;
  void Sweep();

  void Accept();
  void MakeRoom();
  void Readable(Inbound& connection);
  void Handle(Inbound& connection, const Message& message);
  void Greet(Inbound& connection, const Message& message);
  void HandleData(Inbound& connection, const Message& message);
  void HandleRound(Inbound& connection, const Message& message);
  void Import(Inbound& connection, std::uint64_t request, const ImportMessage& import);
  void Reimport(Inbound& connection, std::uint64_t request, const ReimportMessage& reimport);
  void Dropped(Inbound& connection, const DroppedMessage& dropped);
  [[nodiscard]] NeighbourhoodMessage Neighbourhood();

  void Reply(Inbound& connection, std::uint64_t request, MessageBody body, std::vector<UniqueFd> descriptors = {});
  void WriteQueue(Inbound& connection);
  void SetInterest(Inbound& connection);
  void MarkForClose(Inbound& connection, std::string why);

  Status Connected(const PeerIdentity& peer);
  void Lose(SessionId session, const std::string& reason);
  void WatchedReady(std::uint64_t key, std::uint32_t events);
  std::uint64_t WatchProcessOf(pid_t pid, std::uint64_t inbound, SessionId session);
  void UnwatchProcess(std::uint64_t& key);
  void ProcessDied(std::uint64_t key);
  void Changed();

  ConnectionContext context_;
  UniqueFd listener_;
  PeerDelegate& delegate_;
  UniqueFd epoll_, command_, change_;
  Clock::time_point last_event_;
  std::thread thread_;

  mutable std::mutex self_mutex_;
  PeerIdentity self_;
  std::map<SessionId, PeerIdentity> known_;  // with self_mutex_: everybody that was ever connected, for messages
  std::optional<PeerIdentity> loss_;         // with self_mutex_, both
  std::set<SessionId> failed_by_;

  std::mutex command_mutex_;
  std::deque<std::function<void()>> commands_;
  bool stopping_ = false;  // with command_mutex_

  // The service thread's own.
  std::map<std::uint64_t, std::unique_ptr<Inbound>> inbound_;
  std::map<std::uint64_t, std::pair<SessionId, std::shared_ptr<WatchedConnection>>> watched_;
  std::map<std::uint64_t, WatchedProcess> processes_;
  std::map<SessionId, SessionRecord> sessions_;
  std::uint64_t last_key_;
  bool listening_ = true;
  std::optional<Clock::time_point> listen_again_;
  std::unique_ptr<std::byte[]> buffer_;
  VoteCounter board_;
};

}  // namespace amem
