// The tool's end of a connection to one rank. Nothing here waits for the rank; who waits does so for several at once (Await).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "replay/peers/requests.h"
#include "replay/peers/unix/connection.h"
#include "statemachine/event.h"

namespace amem::control {

// A session that is to be asked, as its journal tells of it.
struct RankPlace {
  SessionId session{};
  std::filesystem::path directory{};  // of its journal
  std::int32_t rank = -1;             // -1: no launcher gave it one
};

// What all connections of a tool have in common. Outlives them.
class ToolSockets {
 public:
  explicit ToolSockets(const std::filesystem::path& directory);  // AMEM_SOCKET_DIR; ranks are found by abstract names as well
  ToolSockets(const ToolSockets&) = delete;
  ToolSockets& operator=(const ToolSockets&) = delete;
  [[nodiscard]] const ConnectionContext& context() const { return context_; }
  [[nodiscard]] const PeerIdentity& self() const { return self_; }

 private:
  UniqueFd directory_;
  Elsewhere elsewhere_;
  ConnectionContext context_;
  PeerIdentity self_;
};

class RankLink {
 public:
  // Nothing: its process has ended. kRefused: it lives, and cannot be asked from here.
  static Result<std::optional<RankLink>> Connect(const ToolSockets& sockets, RankPlace place);

  void Give(const Order& order);  // in place of one that had no room yet
  bool Ask();                     // how it stands; false: it owes an answer already
  bool Tell(EventBody note);      // false: there is no room now
  void Take();                    // all that has come, its end included

  [[nodiscard]] const RankPlace& place() const { return place_; }
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] std::uint64_t start_ticks() const { return start_ticks_; }
  [[nodiscard]] std::string name() const;                               // "rank 2", or "pid 4711"
  [[nodiscard]] const Standing& standing() const { return standing_; }  // as it told last
  [[nodiscard]] bool heard() const { return heard_; }                   // it has told that at least once
  [[nodiscard]] bool alive() const { return alive_; }
  [[nodiscard]] bool has_room() const { return !unsent_; }
  [[nodiscard]] bool answered() const { return has_room() && answered_ >= sent_; }  // all that it was sent
  [[nodiscard]] const Status& refused() const { return refused_; }                  // what it has answered, or ok
  // What it does, in words: "is paused, waits in safe point 12 for a resume".
  [[nodiscard]] std::string Doing() const;
  // Of one that did not come also its main thread, and what its journal says; takes some milliseconds, or more.
  [[nodiscard]] std::string DoingInDetail() const;

 private:
  RankLink(RankPlace place, pid_t pid, std::unique_ptr<PeerConnection> connection);
  bool Send(MessageBody body);
  void Hear(const Message& message);
  friend void Await(std::span<RankLink> links, Deadline until, const std::function<bool()>& done);

  RankPlace place_;
  pid_t pid_ = 0;
  std::uint64_t start_ticks_ = 0;
  std::unique_ptr<PeerConnection> connection_;
  std::optional<Order> unsent_;
  std::uint64_t sent_ = 0, answered_ = 0;  // by the numbers of messages
  Standing standing_;
  bool heard_ = false, alive_ = true;
  Status refused_;
};

// How that session stands; waits for a moment. kPeerLost: it has ended, or cannot be asked. kTimeout: it does not answer.
Result<Standing> StandingOf(const ToolSockets& sockets, SessionId session);

// Takes what comes until `done` or until then.
void Await(std::span<RankLink> links, Deadline until, const std::function<bool()>& done);

}  // namespace amem::control
