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
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "journal/base/no_copies.h"
#include "replay/peers/messages.h"
#include "replay/peers/peers.h"
#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/entrance.h"
#include "replay/peers/unix/inbound.h"
#include "replay/peers/unix/loop.h"
#include "replay/peers/unix/pending_calls.h"
#include "replay/peers/unix/registry.h"

namespace amem {

class PeerService final : private ServiceLoop::Client, NoCopies {
 public:
  // `requests` may be null: this session takes none from outside.
  PeerService(const ConnectionContext& context, Entrance::Listeners listeners, const PeerIdentity& self, PeerDelegate& delegate,
              control::RequestServer* requests, std::chrono::milliseconds hello_patience);
  ~PeerService() override;

  Status Start();
  // Ends the thread and closes what it held; the stop descriptor of the context must be readable by then. If the thread is
  // inside a delegate call that does not return in `patience`, Stop gives up and leaves everything as it is.
  void Stop(std::optional<std::chrono::milliseconds> patience = std::nullopt);

  [[nodiscard]] SessionRegistry& sessions() { return sessions_; }
  [[nodiscard]] ServiceLoop& loop() { return loop_; }  // for work on the service thread
  void CallDelegateLater(PendingDelegateCalls::Call call) {
    loop_.Post([this, call = std::move(call)] { pending_.Add(call); });
  }
  // For work that came to nothing.
  static Status NotServed() {
    return {Code::kRefused, "this process has stopped serving its peers, or its service thread hangs in a driver call"};
  }
  // On the service thread, before the delegate is asked for anything: ok, unless calls that came before are still to be made.
  Status DeliverNotices();

 private:
  using Clock = ServiceLoop::Clock;
  // A tool whose orders this session takes.
  struct Requester {
    std::uint64_t connection = 0;  // 0: there is none
    bool report_again = false;     // what has changed, once its outbox is empty
    std::uint64_t note = 0;        // the number of its last note, to be answered when that is in the journal; 0: none is owed
  };

  // ServiceLoop::Client
  void Begin() override;
  void End() override;
  [[nodiscard]] std::optional<Clock::time_point> NextDeadline() const override;
  void Timers(Clock::time_point now) override;
  void Woken() override { ReportToRequester(); }
  void Sweep() override;

  void FlushToDelegate();

  void Admit(Entrance::Visitor visitor);
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
  Inbound* TheRequester();
  void DrainRequester();
  void DrainClosedRequester(Inbound& tool);
  void ReportToRequester();
  void AnswerNote();
  void JournalWaiting(Inbound& connection, Clock::time_point now);
  void Import(Inbound& connection, std::uint64_t request, const ImportMessage& import);
  void Reimport(Inbound& connection, std::uint64_t request, const ReimportMessage& reimport);
  void Dropped(Inbound& connection, const DroppedMessage& dropped);

  void Reply(Inbound& connection, std::uint64_t request, MessageBody body, std::vector<UniqueFd> descriptors = {});
  void WriteQueue(Inbound& connection);
  void SetInterest(Inbound& connection);

  const ConnectionContext context_;
  PeerDelegate& delegate_;
  control::RequestServer* const requests_;
  const std::chrono::milliseconds hello_patience_;  // with a connection that is silent
  ServiceLoop loop_;
  const std::unique_ptr<std::byte[]> buffer_;  // of a message
  Entrance entrance_;

  // The service thread's own.
  PendingDelegateCalls pending_;
  SessionRegistry sessions_;
  std::map<std::uint64_t, std::unique_ptr<Inbound>> inbound_;  // by id
  std::uint64_t last_id_ = 0;
  Requester requester_;
};

}  // namespace amem
