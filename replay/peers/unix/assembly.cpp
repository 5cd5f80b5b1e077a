#include "replay/peers/unix/assembly.h"

#include <fmt/format.h>

#include <utility>

#include "statemachine/check.h"

namespace amem {

using board::Board;

constexpr std::chrono::milliseconds kForAnAnswer{100};  // of a service thread that waits for its ledger for a fifth of it

UnixAssembly::UnixAssembly(const ConnectionContext& context, PeerService& service, PeerDelegate& delegate, Sayer say,
                           CycleKind kind, std::string tag)
    : context_(context), service_(service), say_(std::move(say)), members_(context, service, delegate, kind, std::move(tag)) {}

Status UnixAssembly::Find(Deadline until) {
  board_.reset();
  if (pages().HasLetGo()) return PeerService::NotServed();
  if (!pages().WhyNone().ok()) service_.loop().Run([table = &pages()] { return table->Hold(), true; }, until);
  if (const Status none = pages().WhyNone(); !none.ok()) return none.Within("this session has no shared page");
  AMEM_ASSIGN(const auto members, members_.Find(until));
  return HaveBoard(members, until);
}

Result<std::shared_ptr<Board>> UnixAssembly::AskForBoard(const std::vector<SessionId>& members, Deadline until) {
  AMEM_ASSIGN(PeerConnection* const maker, members_.ConnectionTo(members.front(), until));
  const std::uint64_t question = maker->NextRequest();
  AMEM_TRY(maker->Send({question, AskBoardMessage{BoardName(), members, damaged_}}, until));
  while (true) {
    AMEM_ASSIGN(const auto answer, maker->Receive(until));
    if (answer.message.request != question) continue;
    if (const auto* failure = std::get_if<FailureMessage>(&answer.message.body)) return failure->status;
    if (!std::holds_alternative<BoardMessage>(answer.message.body) || answer.descriptors.empty())
      return Status{Code::kCorrupt, "it answered the question for a board otherwise than AMem does"};
    return pages().Adopt(answer.descriptors.front().get(), BoardName(), members);
  }
}

Status UnixAssembly::HaveBoard(const std::vector<SessionId>& members, Deadline until) {
  const Deadline began = Now();
  board_ = pages().Find(BoardName(), members);
  if (board_ != nullptr && board_->id() == damaged_) board_.reset();
  if (board_ == nullptr && members.front() == members_.self()) {
    AMEM_ASSIGN(board_, pages().HaveOwn(BoardName(), members, members_.self(), damaged_));
  }
  if (board_ == nullptr) {
    auto asked = AskForBoard(members, until);
    if (!asked) {
      members_.Disconnect(members.front());
      return members_.About(members.front(), "the board of its set",
                            service_.sessions().WhyLost(members.front(), asked.status()), began);
    }
    board_ = *std::move(asked);
  }
  AMEM_CHECK(board_->members() == members);
  const std::optional<std::size_t> seat = board_->SeatOf(members_.self());
  AMEM_CHECK(seat.has_value());
  seat_ = *seat;
  return {};
}

std::vector<PeerIdentity> UnixAssembly::Members() const {
  std::vector<PeerIdentity> all;
  for (const SessionId session : board_->members()) all.push_back(members_.IdentityOf(session));
  return all;
}

// A pause and a resume never meet on one board.
std::string UnixAssembly::BoardName() const { return fmt::format("{} {}", ToText(members_.kind()), members_.tag()); }

void UnixAssembly::Begun() {
  notified_.clear();
  members_.EndCall();
}

std::string UnixAssembly::Hindrance(SessionId session) {
  NotifyAbsent({session});
  const auto notified = notified_.find(session);
  if (notified == notified_.end() || notified->second == nullptr) return {};
  PeerConnection& connection = *notified->second;
  const Deadline until = In(kForAnAnswer);
  const std::uint64_t question = connection.NextRequest();
  if (!connection.Send({question, AwaitingMessage{}}, until).ok()) return {};
  while (true) {
    const auto answer = connection.Receive(until);
    if (!answer) return {};
    const auto* const says = std::get_if<FailureMessage>(&answer->message.body);
    if (answer->message.request == question) return says != nullptr ? says->status.message() : std::string();
  }
}

// Its service journals who waits, for as long as the connection lasts.
void UnixAssembly::NotifyAbsent(const std::vector<SessionId>& absent) {
  if (!members_.tag().empty()) return;  // no journal says anything of it
  for (const SessionId session : absent) {
    if (session == members_.self() || notified_.contains(session)) continue;
    const Deadline until = In(kForOwnNeighbours);
    auto begun = PeerConnection::Begin(context_, session, Purpose::kRound, service_.sessions().Self(), until);
    std::unique_ptr<PeerConnection>& connection = notified_[session];
    if (!begun || !(*begun)->Send({(*begun)->NextRequest(), AwaitingMessage{}}, until).ok()) continue;
    connection = *std::move(begun);
  }
}

void UnixAssembly::Say(const std::string& waiting) {
  if (say_) say_(waiting);
}

void UnixAssembly::Discard() {
  damaged_ = board_->id();
  pages().Forget(board_);
  board_.reset();
}

}  // namespace amem
