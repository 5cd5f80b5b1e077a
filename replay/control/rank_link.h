// The tool's end of a connection to one rank. Nothing here waits for the rank; callers wait for several ranks at once (Await).
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "journal/base/no_copies.h"
#include "replay/control/job.h"
#include "replay/peers/unix/connection.h"
#include "statemachine/event.h"

namespace amem::control {

// A session that is to be asked, as its journal has it.
struct RankPlace {
  SessionId session{};
  std::filesystem::path directory{};  // of its journal
  std::int32_t rank = -1;             // -1: no launcher gave it one
};

// What all connections of a tool have in common. Outlives them.
struct ToolSockets : NoCopies {
  explicit ToolSockets(const std::filesystem::path& directory);  // AMEM_SOCKET_DIR; ranks are found by abstract names as well

  UniqueFd directory;
  Elsewhere elsewhere;
  ConnectionContext context;
  PeerIdentity self;
};

class RankLink {
 public:
  // Nothing: its process has ended. kRefused: it lives, and cannot be asked from here.
  static Result<std::optional<RankLink>> Connect(const ToolSockets& sockets, const RankPlace& place);

  void Give(const Order& order);  // in place of one that had no room yet
  bool Ask();                     // for its status; false: it owes an answer already
  bool SendNote(EventBody note);  // false: there is no room now
  void Take();                    // all that has come, its end included

  [[nodiscard]] const RankView& view() const { return view_; }
  const RankView* operator->() const { return &view_; }
  [[nodiscard]] const std::string& name() const { return view_.process.name; }
  [[nodiscard]] bool has_room() const { return !unsent_; }
  [[nodiscard]] bool answered() const { return has_room() && answered_ >= sent_; }  // all that it was sent
  [[nodiscard]] const Status& refused() const { return refused_; }                  // what it has answered, or ok
  // Of one that did not come: what it does, its main thread, and what its journal says; takes some milliseconds, or more.
  [[nodiscard]] std::string DoingInDetail() const;

 private:
  RankLink(const RankPlace& place, pid_t pid, std::unique_ptr<PeerConnection> connection);
  bool Send(MessageBody body);
  void TakeMessage(const Message& message);
  friend void Await(std::span<RankLink> links, Deadline until, const std::function<bool()>& done);

  void SetRank(std::int32_t rank);

  RankView view_;
  std::unique_ptr<PeerConnection> connection_;
  std::optional<Order> unsent_;
  std::uint64_t sent_ = 0, answered_ = 0;  // by the numbers of messages
  Status refused_;
};

// The status of that session; waits for a moment. kPeerLost: it has ended, or cannot be asked. kTimeout: it does not answer.
Result<RankStatus> StatusOf(const ToolSockets& sockets, SessionId session);

// Takes what comes until `done` or until then.
void Await(std::span<RankLink> links, Deadline until, const std::function<bool()>& done);
// Asks all for their status, and takes the answers. Those that owe an answer already are not waited for.
void AskAll(std::span<RankLink> links);
inline constexpr std::chrono::milliseconds kAnswerSoon{1000};  // a rank that lives and is not stopped has answered by then

}  // namespace amem::control
