// Requests from outside: a service hands the orders of one tool at a time to the rank's side, and answers whoever looks.
#include <fmt/format.h>

#include "replay/peers/unix/service.h"

namespace amem {

PeerService::Inbound* PeerService::Asker() {
  const auto at = inbound_.find(asker_);
  return at == inbound_.end() ? nullptr : at->second.get();
}

// A tool that has ended takes no answers any more, and all that it has sent counts.
void PeerService::HearOut(Inbound& tool) {
  do {
    tool.queue.clear();
  } while (Readable(tool));
}

// Before anybody else is answered, all that the tool has sent counts, and so does its end.
void PeerService::HearAsker() {
  for (Inbound* asker = Asker(); asker != nullptr; asker = Asker()) {
    WriteQueue(*asker);  // nothing is read from one that does not take its answers, unless it has ended
    if (!Readable(*asker)) return;
  }
}

Status PeerService::TakeAsker(Inbound& connection) {
  if (asker_ == connection.id) return {};
  HearAsker();
  if (const Inbound* other = Asker())
    return {Code::kRefused, fmt::format("another request is under way, by pid {}", other->peer.pid)};
  asker_ = connection.id;
  return {};
}

void PeerService::HandleRequest(Inbound& connection, const Message& message) {
  if (const auto* order = std::get_if<OrderMessage>(&message.body)) {
    if (const Status taken = TakeAsker(connection); !taken.ok())
      return Reply(connection, message.request, FailureMessage{taken});
    requests_->OnOrder(order->order);
  } else if (const auto* note = std::get_if<NoteMessage>(&message.body); note != nullptr && asker_ == connection.id) {
    facts_.push_back(note->event);  // whatever else waits: the tool does nothing before it is written
    note_ = message.request;
    return TellDelegate();
  } else if (std::holds_alternative<LookMessage>(message.body)) {
    if (asker_ != connection.id) HearAsker();
  } else {
    return MarkForClose(connection, "sent a message that has no place on a connection for requests");
  }
  Reply(connection, message.request, StandingMessage{requests_->Look()});
}

void PeerService::AnswerNote() {
  Inbound* asker = Asker();
  if (note_ != 0 && asker != nullptr) Reply(*asker, note_, StandingMessage{requests_->Look()});
  note_ = 0;
}

// Of what changes while earlier messages wait, the tool needs the last only: a tool that is slow must not be taken for one that
// takes no answers.
void PeerService::TellAsker() {
  Inbound* const asker = Asker();
  tells_again_ = asker != nullptr && !asker->queue.empty();
  if (asker != nullptr && !tells_again_) Reply(*asker, 0, StandingMessage{requests_->Look()});
}

}  // namespace amem
