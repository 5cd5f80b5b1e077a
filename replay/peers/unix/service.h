// The service of a session: its thread answers peers, hands out its page and boards, and sees which sessions are lost.
//
// It never waits for a peer: sockets are non-blocking, what does not fit is queued (bounded), and nothing more is read from a
// peer that does not take its answers. A connection has little time to say hello, and few may wait without having said it. All
// calls to the delegate come from the service thread, one after the other.
//
// The loop (loop.h) waits, the registry (registry.h) remembers sessions, and this class speaks the protocol on the connections
// that come in.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "journal/base/no_copies.h"
#include "replay/peers/messages.h"
#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/loop.h"
#include "replay/peers/unix/registry.h"

namespace amem {

class PeerService final : private ServiceLoop::Client, NoCopies {
 public:
  struct Listeners {
    Listener in_directory, by_name;  // at least one of them
  };
  // `requests` may be null: this session takes none from outside.
  PeerService(const ConnectionContext& context, Listeners listeners, const PeerIdentity& self, PeerDelegate& delegate,
              control::RequestServer* requests = nullptr);
  ~PeerService() override;

  Status Start();
  // Ends the thread and closes what it held; the stop descriptor of the context must be readable by then. With patience it may
  // find the thread inside a call of the delegate that does not return, and leaves everything as it is.
  void Stop(std::optional<std::chrono::milliseconds> patience = std::nullopt);

  [[nodiscard]] SessionRegistry& sessions() { return sessions_; }
  [[nodiscard]] ServiceLoop& loop() { return loop_; }  // for work on the service thread
  void CallDelegateLater(PendingDelegateCalls::Call tell) {
    loop_.Post([this, tell = std::move(tell)] { notices_.Add(tell); });
  }
  // For work that came to nothing.
  static Status NotServed() {
    return {Code::kRefused, "this process has stopped serving its peers, or its service thread hangs in a driver call"};
  }
  // On the service thread, before the delegate is asked for anything: ok, unless it has yet to be told of what came before.
  Status DeliverNotices();

 private:
  using Clock = ServiceLoop::Clock;
  struct Outgoing {
    std::vector<std::byte> bytes;
    std::vector<UniqueFd> descriptors;
  };
  // In a pause or resume that goes well all have come sooner.
  static constexpr std::chrono::milliseconds kAwaitsForLong{500};

  struct Inbound {
    std::uint64_t id = 0;  // never used again
    ServiceLoop::Key key = 0;
    UniqueFd socket;
    pid_t pid = 0;
    ProcessWatch process;  // of a session's connections for data the registry watches it
    Clock::time_point accepted;
    bool by_name = false;  // it came to the abstract socket
    bool welcome = false;  // it has said hello, and may go on
    Purpose purpose = Purpose::kData;
    PeerIdentity peer;
    std::deque<Outgoing> queue;
    std::uint32_t interest = 0;                             // the events that epoll watches
    std::optional<Clock::time_point> retry;                 // of a send that the kernel refused for now
    std::optional<std::string> marked;                      // why it will be closed at the end of this turn
    std::optional<Clock::time_point> note_awaiting;         // it waits for this session's call; when that will be recorded
    std::chrono::milliseconds awaits_for = kAwaitsForLong;  // since it was recorded last, or since it began
  };

  // ServiceLoop::Client
  void Begin() override;
  void End() override;
  [[nodiscard]] std::optional<Clock::time_point> NextDeadline() const override;
  void Timers(Clock::time_point now) override;
  void Sweep() override;

  // Facts for the journal. They wait here while the session's thread has the journal to itself.
  void Witness(EventBody fact);
  void FlushToDelegate();

  void Accept(const Listener& listener);
  void RefuseForWantOfDescriptors(const Listener& listener);
  void SendWantOfDescriptors(const UniqueFd& socket);
  void Listen(std::uint32_t events);
  void MakeRoom();
  void EndUnlessHelloCame(Inbound& connection);
  void Ready(std::uint64_t id, std::uint32_t events);
  bool Readable(Inbound& connection);  // true: there may be more to read
  void ProcessDied(std::uint64_t id);
  void MarkForClose(Inbound& connection, std::string why);
  [[nodiscard]] std::string WhyEnded(const Inbound& connection) const;

  void Handle(Inbound& connection, const Message& message, const Packet& packet);
  void Greet(Inbound& connection, const Message& message, const Packet& packet);
  void HandleData(Inbound& connection, const Message& message);
  void HandleRound(Inbound& connection, const Message& message);
  std::vector<UniqueFd> ExchangePages(const HelloMessage& hello, const Packet& packet);
  void HandOutBoard(Inbound& connection, std::uint64_t request, const AskBoardMessage& ask);
  void HandleRequest(Inbound& connection, const Message& message);
  Status AcceptRequester(Inbound& connection);
  Inbound* Requester();
  void DrainRequester();
  void DrainClosedRequester(Inbound& tool);
  void ReportToRequester();
  void AnswerNote();
  void NoteWaiting(Inbound& connection, Clock::time_point now);
  void Import(Inbound& connection, std::uint64_t request, const ImportMessage& import);
  void Reimport(Inbound& connection, std::uint64_t request, const ReimportMessage& reimport);
  void Dropped(Inbound& connection, const DroppedMessage& dropped);

  void Reply(Inbound& connection, std::uint64_t request, MessageBody body, std::vector<UniqueFd> descriptors = {});
  void WriteQueue(Inbound& connection);
  void SetInterest(Inbound& connection);

  const ConnectionContext context_;
  PeerDelegate& delegate_;
  control::RequestServer* const requests_;
  Listeners listeners_;
  ServiceLoop loop_;
  PendingDelegateCalls notices_;
  SessionRegistry sessions_;

  // The service thread's own.
  std::vector<ServiceLoop::Key> listener_keys_;
  std::optional<Clock::time_point> listen_again_;
  UniqueFd spare_;                               // given up to tell a peer that there is no other
  std::optional<Clock::time_point> full_since_;  // no connection could be taken since then, for want of descriptors
  std::map<std::uint64_t, std::unique_ptr<Inbound>> inbound_;  // by id
  std::uint64_t last_id_ = 0;
  std::uint64_t requester_ = 0;  // the connection whose orders this session takes; 0: there is none
  bool reports_again_ = false;   // what has changed, once the requester's queue is empty
  std::uint64_t note_ = 0;       // the number of its last note, to be answered when that is in the journal; 0: none is owed
  std::unique_ptr<std::byte[]> buffer_;
  std::vector<EventBody> facts_;
  std::optional<Clock::time_point> flush_again_;
};

}  // namespace amem
