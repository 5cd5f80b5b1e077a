// Requests from outside: a service hands the orders of one tool at a time to the rank's side, and answers all who ask for its
// status.
#include <fmt/format.h>

#include "replay/peers/unix/service.h"

namespace amem {

Inbound* PeerService::TheRequester() {
  const auto at = inbound_.find(requester_.connection);
  return at == inbound_.end() ? nullptr : at->second.get();
}

// A tool that has ended takes no answers any more, and all that it has sent counts.
void PeerService::DrainClosedRequester(Inbound& tool) {
  do {
    tool.outbox.messages.clear();
  } while (Readable(tool));
}

// Before anybody else is answered, all that the tool has sent counts, and so does its end.
void PeerService::DrainRequester() {
  for (Inbound* requester = TheRequester(); requester != nullptr; requester = TheRequester()) {
    WriteQueue(*requester);  // nothing is read from one that does not take its answers, unless it has ended
    if (!Readable(*requester)) return;
  }
}

Status PeerService::AcceptRequester(Inbound& connection) {
  if (requester_.connection == connection.id) return {};
  DrainRequester();
  if (const Inbound* other = TheRequester())
    return {Code::kRefused, fmt::format("another request is under way, by pid {}", other->peer.pid)};
  requester_.connection = connection.id;
  return {};
}

void PeerService::HandleRequest(Inbound& connection, const Message& message) {
  if (const auto* order = std::get_if<OrderMessage>(&message.body)) {
    if (const Status taken = AcceptRequester(connection); !taken.ok())
      return Reply(connection, message.request, FailureMessage{taken});
    requests_->OnOrder(order->order);
  } else if (const auto* note = std::get_if<NoteMessage>(&message.body);
             note != nullptr && requester_.connection == connection.id) {
    pending_.AddNote(note->event);
    requester_.note = message.request;
    return FlushToDelegate();
  } else if (std::holds_alternative<AskStatusMessage>(message.body)) {
    if (requester_.connection != connection.id) DrainRequester();
  } else {
    return MarkForClose(connection, "sent a message that has no place on a connection for requests");
  }
  Reply(connection, message.request, RankStatusMessage{requests_->CurrentStatus()});
}

void PeerService::AnswerNote() {
  Inbound* requester = TheRequester();
  if (requester_.note != 0 && requester != nullptr)
    Reply(*requester, requester_.note, RankStatusMessage{requests_->CurrentStatus()});
  requester_.note = 0;
}

// Of what changes while earlier messages wait, the tool needs the last only: a tool that is slow must not be taken for one that
// takes no answers.
void PeerService::ReportToRequester() {
  Inbound* const requester = TheRequester();
  requester_.report_again = requester != nullptr && !requester->outbox.messages.empty();
  if (requester != nullptr && !requester_.report_again) Reply(*requester, 0, RankStatusMessage{requests_->CurrentStatus()});
}

}  // namespace amem
