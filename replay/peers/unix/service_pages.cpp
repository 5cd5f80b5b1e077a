// What the service does for the pages and boards of sessions: it holds this session's, takes and hands out descriptors.
#include <fcntl.h>

#include "replay/peers/unix/pages.h"
#include "replay/peers/unix/service.h"

namespace amem {

void PeerService::Begin() {
  if (context_.pages != nullptr) context_.pages->Hold();
}

void PeerService::End() {
  if (context_.pages != nullptr) context_.pages->LetGo();
}

// Takes what came beside a hello; returns what goes beside the welcome. If no descriptor is left, none does, and the other end
// knows that.
std::vector<UniqueFd> PeerService::ExchangePages(const HelloMessage& hello, const Packet& packet) {
  std::vector<UniqueFd> own;
  if (context_.pages == nullptr || hello.purpose == Purpose::kRequest) return own;
  context_.pages->Take(hello.self.session, packet.descriptors, packet.descriptors_lost);
  if (const int fd = context_.pages->fd(); fd >= 0) own.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own.empty() && !own.front()) own.clear();
  return own;
}

void PeerService::HandOutBoard(Inbound& connection, std::uint64_t request, const AskBoardMessage& ask) {
  if (context_.pages == nullptr) return Reply(connection, request, FailureMessage{{Code::kUnsupported, "it has no boards"}});
  auto board = context_.pages->HandOut(ask.scope, ask.members, connection.peer.session, ask.instead_of);
  if (!board) return Reply(connection, request, FailureMessage{board.status()});
  std::vector<UniqueFd> descriptors;
  descriptors.push_back(*std::move(board));
  Reply(connection, request, BoardMessage{}, std::move(descriptors));
}

}  // namespace amem
