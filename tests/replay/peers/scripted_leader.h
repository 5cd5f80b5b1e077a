// A leader whose decisions a test writes: a session's socket, and answers to greetings, questions and arrivals as AMem gives
// them. Votes are answered by the test.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "replay/peers/messages.h"
#include "replay/peers/unix/socket.h"
#include "tests/replay/peers/peers_fixture.h"

namespace amem::test {

class ScriptedLeader {
 public:
  static constexpr std::uint64_t kRound = 7;
  // What to say to a member that has voted, in this order.
  using OnVote = std::function<std::vector<MessageBody>(const PeerIdentity& member, const VoteMessage& vote)>;

  // Whether a message ends its connection, in place of an answer.
  using Closes = std::function<bool(const MessageBody& body)>;

  ScriptedLeader(const TemporaryDirectory& directory, std::vector<PeerIdentity> members, OnVote on_vote, Closes closes = {})
      : members_(std::move(members)), on_vote_(std::move(on_vote)), closes_(std::move(closes)) {
    directory_ = *OpenSocketDirectory(directory.sockets());
    listener_ = *ListenAt(directory_.get(), members_.front().session);
    thread_ = std::thread([this] {
      while (!dead_) Turn();
    });
  }
  ~ScriptedLeader() { Die(); }
  ScriptedLeader(const ScriptedLeader&) = delete;
  ScriptedLeader& operator=(const ScriptedLeader&) = delete;

  std::atomic<Lifecycle> lifecycle = Lifecycle::kPausing;  // as it says when it is asked
  // Whether the member that arrived last did so by the connection by which it had asked for the set.
  [[nodiscard]] bool arrived_as_it_asked() const { return arrived_as_it_asked_; }
  // As a process that is killed: its connections end, and its socket stays where it was and refuses.
  void Die() {
    dead_ = true;
    if (thread_.joinable()) thread_.join();
    connections_.clear();
    listener_ = {};
  }

 private:
  struct Connection {
    UniqueFd socket;
    PeerIdentity peer;
    bool asked = false, arrived = false;
  };

  void Turn() {
    UniqueFd fresh(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fresh) {
      connections_.push_back(std::make_unique<Connection>());
      connections_.back()->socket = std::move(fresh);
    }
    for (const auto& connection : connections_) {
      const Packet packet = ReceivePacket(connection->socket.get(), buffer_, false);
      if (packet.state != Packet::State::kMessage) continue;
      const auto message = DecodeMessage(std::span(buffer_).first(packet.bytes));
      if (message && closes_ && closes_(message->body)) {
        connection->socket.Reset();
        connection->arrived = false;
      } else if (message) {
        Answer(*connection, *message);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void Answer(Connection& to, const Message& message) {
    if (const auto* hello = std::get_if<HelloMessage>(&message.body)) {
      to.peer = hello->self;
      Say(to, message.request, WelcomeMessage{kPeerProtocol, members_.front()});
    } else if (std::holds_alternative<AskNeighboursMessage>(message.body)) {
      to.asked = true;
      Say(to, message.request, NeighbourhoodMessage{members_.front(), members_, {lifecycle, 1}, {}});
    } else if (std::holds_alternative<ArriveMessage>(message.body)) {
      to.arrived = true;
      arrived_as_it_asked_ = to.asked;
      std::vector<Connection*> arrived;
      for (const auto& one : connections_) {
        if (one->arrived) arrived.push_back(one.get());
      }
      if (arrived.size() + 1 < members_.size()) return;
      for (Connection* one : arrived) Say(*one, 0, BegunMessage{kRound, members_});
    } else if (const auto* vote = std::get_if<VoteMessage>(&message.body)) {
      for (MessageBody& body : on_vote_(to.peer, *vote)) Say(to, 0, std::move(body));
    }
  }

  static void Say(const Connection& to, std::uint64_t request, MessageBody body) {
    (void)SendPacket(to.socket.get(), *EncodeMessage({request, std::move(body)}), {});
  }

  const std::vector<PeerIdentity> members_;
  const OnVote on_vote_;
  const Closes closes_;
  UniqueFd directory_;
  Listener listener_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(kMessageBytesMax);
  std::atomic<bool> dead_{false}, arrived_as_it_asked_{false};
  std::thread thread_;
};

}  // namespace amem::test
