#include "replay/peers/unix/service.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <exception>

#include "replay/peers/unix/pages.h"

namespace amem {

constexpr auto kSendRetry = std::chrono::milliseconds(1);
constexpr std::size_t kUnauthenticatedMax = 64;  // connections that have not said hello
constexpr std::size_t kConnectionsMax = 1024;
constexpr std::size_t kQueueMax = 64;  // messages that wait for a slow peer
constexpr int kMessagesATurn = 16;     // from one peer, before the others have theirs
constexpr auto kAnswerWithin = std::chrono::milliseconds(20);

static Result<SharedAllocation> Checked(Result<SharedAllocation> shared) {
  if (shared && !shared->descriptor && !shared->part) return Status{Code::kInvalid, "the export gave no descriptor"};
  return shared;
}

PeerService::PeerService(const ConnectionContext& context, Entrance::Listeners listeners, const PeerIdentity& self,
                         PeerDelegate& delegate, control::RequestServer* requests, std::chrono::milliseconds hello_patience)
    : context_(context),
      delegate_(delegate),
      requests_(requests),
      hello_patience_(hello_patience),
      loop_(*this),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(kMessageBytesMax)),
      entrance_(loop_, std::move(listeners), context.uid, {buffer_.get(), kMessageBytesMax},
                [this](Entrance::Visitor visitor) { Admit(std::move(visitor)); }),
      pending_(delegate),
      sessions_(context, loop_, self, delegate, pending_,
                // All its connections: of a process that died they may be held open by children that it forked.
                [this](SessionId session, const std::string& reason) {
                  for (auto& [id, connection] : inbound_)
                    if (connection->peer.session == session) MarkForClose(*connection, reason);
                }) {}

PeerService::~PeerService() { Stop(); }

Status PeerService::Start() {
  AMEM_TRY(loop_.Open());
  AMEM_TRY(entrance_.Open());
  AMEM_TRY(loop_.Start());
  if (requests_ != nullptr) requests_->NotifyOfChanges([this] { loop_.Wake(); });
  return {};
}

void PeerService::Stop(std::optional<std::chrono::milliseconds> patience) {
  if (requests_ != nullptr) requests_->NotifyOfChanges({});
  if (!loop_.Stop(patience)) return;
  if (!pending_.empty()) FlushToDelegate();
  for (auto& [id, connection] : inbound_) MarkForClose(*connection, "");
  inbound_.clear();
  sessions_.ForgetConnections();
  entrance_.Close();
}

// ---- time ------------------------------------------------------------------------------------------------------------------

std::optional<PeerService::Clock::time_point> PeerService::NextDeadline() const {
  std::optional<Clock::time_point> next;
  const auto consider = [&](Clock::time_point at) {
    if (!next || at < *next) next = at;
  };
  for (const auto& [id, connection] : inbound_) {
    if (connection->silent) consider(connection->silent->since + hello_patience_);
    if (connection->outbox.retry) consider(*connection->outbox.retry);
    if (connection->awaiting.note_at) consider(*connection->awaiting.note_at);
  }
  for (const auto at : {sessions_.NextCheck(), entrance_.NextDeadline(), pending_.again()})
    if (at) consider(*at);
  return next;
}

void PeerService::Timers(Clock::time_point now) {
  for (auto& [id, connection] : inbound_) {
    if (connection->silent && now >= connection->silent->since + hello_patience_) EndUnlessHelloCame(*connection);
    if (connection->outbox.retry && now >= *connection->outbox.retry) WriteQueue(*connection);
    if (connection->awaiting.note_at && now >= *connection->awaiting.note_at) JournalWaiting(*connection, now);
  }
  entrance_.Timers(now);
  sessions_.CheckAgain(now);
}

// Its journal is the only one that has what the others wait for, if this process is the one that does not come. It is
// recorded again, at growing intervals, because nothing else in that journal would show how long they have waited.
void PeerService::JournalWaiting(Inbound& connection, Clock::time_point now) {
  connection.awaiting.note_at = now + connection.awaiting.interval;
  connection.awaiting.interval *= 2;
  const Lifecycle lifecycle = delegate_.Progress({}).lifecycle;
  const bool pause = lifecycle == Lifecycle::kRunning;
  if (connection.marked || (!pause && lifecycle != Lifecycle::kPaused)) return;
  const PeerIdentity& who = connection.peer;
  pending_.AddFact(MemberHeard{.member = who.session,
                               .kind = pause ? CycleKind::kPause : CycleKind::kResume,
                               .phase = pause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive,
                               .rank = who.rank,
                               .pid = who.pid,
                               .asks = true});
}

// ---- facts -----------------------------------------------------------------------------------------------------------------

void PeerService::FlushToDelegate() {
  if (pending_.Flush()) AnswerNote();
}

// Connections are closed here and nowhere else, so that no function loses the one it is working on.
void PeerService::Sweep() {
  const auto marked = [](const auto& item) { return item.second->marked.has_value(); };
  for (auto at = inbound_.begin(); (at = std::ranges::find_if(inbound_, marked)) != inbound_.end();) {
    const std::unique_ptr<Inbound> gone = std::move(at->second);
    inbound_.erase(at);
    if (!gone->silent && gone->purpose == Purpose::kData) sessions_.GreetedEnded(gone->peer.session);
  }
  // Once a turn, for all that came in it; and again later, if the journal was in use.
  if (pending_.IsDue(Clock::now())) FlushToDelegate();
}

Status PeerService::DeliverNotices() {
  if (pending_.MakeCalls()) return {};
  return {Code::kTimeout, "a driver call of another thread of that process has not returned", kNotReady};
}

// ---- connections that come in ----------------------------------------------------------------------------------------------

void PeerService::Admit(Entrance::Visitor visitor) {
  MakeRoom();
  if (inbound_.size() >= kConnectionsMax) return;
  auto connection = std::make_unique<Inbound>();
  const std::uint64_t id = connection->id = ++last_id_;
  connection->socket = std::move(visitor.socket);
  connection->pid = visitor.pid;
  connection->silent = {.since = Clock::now(), .by_name = visitor.by_name};
  connection->outbox.interest = EPOLLIN;
  connection->key =
      loop_.Add(connection->socket.get(), EPOLLIN, [this, id](ServiceLoop::Key, std::uint32_t events) { Ready(id, events); });
  if (connection->key != 0) inbound_.emplace(id, std::move(connection));
}

// Peers say hello at once, so the unauthenticated connection that has been silent longest goes first.
void PeerService::MakeRoom() {
  std::size_t unauthenticated = 0;
  Inbound* oldest = nullptr;
  for (auto& [id, connection] : inbound_) {
    if (!connection->silent || connection->marked) continue;
    ++unauthenticated;
    if (oldest == nullptr) oldest = connection.get();
  }
  if (unauthenticated < kUnauthenticatedMax) return;
  EndUnlessHelloCame(*oldest);
}

// The hello may lie there unread: this process may have been stopped, or in another peer's driver call, since it was accepted.
void PeerService::EndUnlessHelloCame(Inbound& connection) {
  if (!connection.marked) Readable(connection);
  if (connection.silent) MarkForClose(connection, "said nothing");
}

void PeerService::Ready(std::uint64_t id, std::uint32_t events) {
  const auto at = inbound_.find(id);
  if (at == inbound_.end()) return;
  Inbound& connection = *at->second;
  try {
    const bool ended = (events & (EPOLLHUP | EPOLLERR)) != 0;
    if ((events & EPOLLOUT) != 0) WriteQueue(connection);
    if (ended && connection.purpose == Purpose::kRequest) return DrainClosedRequester(connection);
    if (!connection.marked && connection.outbox.messages.empty()) Readable(connection);
    // Nothing is read from a peer that does not take its answers, but its end counts.
    if (!connection.marked && !connection.outbox.messages.empty() && ended) MarkForClose(connection, WhyEnded(connection));
  } catch (const std::exception& e) {  // no memory: this peer pays, the process goes on
    MarkForClose(connection, std::string("was dropped: ") + e.what());
  }
}

void PeerService::ProcessDied(std::uint64_t id) {
  const auto at = inbound_.find(id);
  if (at == inbound_.end()) return;
  if (context_.pages != nullptr) context_.pages->NoteEnd(at->second->peer.session);
  at->second->purpose == Purpose::kRequest ? DrainClosedRequester(*at->second)
                                           : void(Readable(*at->second));  // what it said last counts
  MarkForClose(*at->second, WhyEnded(*at->second));
}

// For messages. A member that gives up waiting ends its connection, and lives.
std::string PeerService::WhyEnded(const Inbound& connection) const {
  std::string how = HowItEnded(context_, connection.peer.session);
  const bool lives = how == kPeerDied && LifeOf({connection.pid}, connection.process.process()).IsAlive();
  return lives ? kConnectionClosed : how;
}

void PeerService::MarkForClose(Inbound& connection, std::string why) {
  if (connection.marked) return;
  connection.marked = std::move(why);
  if (requester_.connection == connection.id) {
    requester_ = {};
    requests_->OnToolGone();
  }
  connection.outbox.messages.clear();
  connection.outbox.retry.reset();
  connection.process.End();
  loop_.Remove(connection.key);
  (void)::shutdown(connection.socket.get(), SHUT_RDWR);
  connection.socket.Reset();
}

bool PeerService::Readable(Inbound& connection) {
  for (int i = 0; i < kMessagesATurn; ++i) {
    if (connection.marked || !connection.outbox.messages.empty()) return false;
    const Packet packet =
        ReceivePacket(connection.socket.get(), {buffer_.get(), kMessageBytesMax}, connection.silent.has_value());
    if (packet.state == Packet::State::kNothing) return false;
    // Of a tool that ended with answers unread the kernel says so once, and then gives what had come before.
    if (packet.error == ECONNRESET && connection.purpose == Purpose::kRequest) continue;
    const auto message = packet.state == Packet::State::kMessage
                             ? DecodeMessage({buffer_.get(), packet.bytes})
                             : Result<Message>(Status(Code::kCorrupt, "a message that is too long"));
    if (packet.state == Packet::State::kClosed) {
      MarkForClose(connection, WhyEnded(connection));
    } else if (!message) {
      MarkForClose(connection, "sent " + message.status().message());
    } else {
      Handle(connection, *message, packet);
    }
  }
  return !connection.marked;
}

void PeerService::Handle(Inbound& connection, const Message& message, const Packet& packet) {
  if (connection.silent) return Greet(connection, message, packet);
  if (connection.purpose == Purpose::kData) return HandleData(connection, message);
  if (connection.purpose == Purpose::kRequest) return HandleRequest(connection, message);
  HandleRound(connection, message);
}

void PeerService::Greet(Inbound& connection, const Message& message, const Packet& packet) {
  const auto* hello = std::get_if<HelloMessage>(&message.body);
  if (hello == nullptr) return MarkForClose(connection, "did not say hello");
  const auto refuse = [&](Code code, const std::string& why) {
    Reply(connection, message.request, FailureMessage{{code, why}});
    MarkForClose(connection, why);
  };
  const PeerIdentity self = sessions_.Self();
  if (hello->least_version > kPeerProtocol || hello->version < kPeerProtocolLeast) {
    return refuse(Code::kUnsupported,
                  fmt::format("{} speaks versions {} to {} of AMem's protocol, {} speaks {} to {}: use one version of AMem in "
                              "the whole job",
                              ToText(self), kPeerProtocolLeast, kPeerProtocol, ToText(hello->self), hello->least_version,
                              hello->version));
  }
  if (hello->to != self.session || !hello->self.session)
    return refuse(Code::kNotFound, "this is session " + Hex(self.session.value));
  connection.peer = hello->self;
  connection.purpose = hello->purpose;
  if (hello->purpose == Purpose::kRequest && requests_ == nullptr) return refuse(Code::kRefused, "it takes no requests");
  if (connection.silent->by_name && hello->purpose != Purpose::kRequest) context_.elsewhere->Add(hello->self.session);
  if (hello->purpose == Purpose::kData) {
    if (Status connected = sessions_.Greeted(hello->self, connection.pid); !connected.ok())
      return refuse(connected.code(), connected.message());
  } else {
    connection.process.Begin(loop_, connection.pid, [this, id = connection.id] { ProcessDied(id); });
  }
  connection.silent.reset();
  Reply(connection, message.request, WelcomeMessage{std::min(hello->version, kPeerProtocol), self},
        ExchangePages(*hello, packet));
}

// ---- sharing ---------------------------------------------------------------------------------------------------------------

void PeerService::HandleData(Inbound& connection, const Message& message) {
  if (const auto* import = std::get_if<ImportMessage>(&message.body)) return Import(connection, message.request, *import);
  if (const auto* reimport = std::get_if<ReimportMessage>(&message.body))
    return Reimport(connection, message.request, *reimport);
  if (const auto* dropped = std::get_if<DroppedMessage>(&message.body)) return Dropped(connection, *dropped);
  MarkForClose(connection, "sent a message that has no place on a connection for data");
}

void PeerService::Import(Inbound& connection, std::uint64_t request, const ImportMessage& import) {
  if (import.token.session != sessions_.Self().session) {
    return Reply(connection, request,
                 FailureMessage{{Code::kInvalid, "the token names another session, " + Hex(import.token.session.value)}});
  }
  const Status settled = DeliverNotices();
  auto shared = settled.ok() ? Checked(delegate_.OnImport(connection.peer, import.as, import.token)) : settled;
  if (!shared) return Reply(connection, request, FailureMessage{shared.status()});
  sessions_.AddReference(connection.peer.session, import.token.allocation, import.as);
  std::vector<UniqueFd> descriptors;
  if (!shared->part) descriptors.push_back(std::move(shared->descriptor));
  Reply(connection, request, SharedMessage{{*shared}}, std::move(descriptors));
}

void PeerService::Reimport(Inbound& connection, std::uint64_t request, const ReimportMessage& reimport) {
  SharedMessage answer;
  std::vector<UniqueFd> descriptors;
  if (const Status settled = DeliverNotices(); !settled.ok()) return Reply(connection, request, FailureMessage{settled});
  for (const auto& reference : reimport.references) {
    auto shared = Checked(delegate_.OnReimport(connection.peer, reference));
    if (!shared) return Reply(connection, request, FailureMessage{shared.status()});
    if (shared->part)
      return Reply(connection, request, FailureMessage{{Code::kInvalid, "a part of a slab is not imported again"}});
    answer.items.push_back(*shared);
    descriptors.push_back(std::move(shared->descriptor));
  }
  Reply(connection, request, std::move(answer), std::move(descriptors));
}

void PeerService::Dropped(Inbound& connection, const DroppedMessage& dropped) {
  for (const auto& reference : dropped.references) {
    // A drop may also follow an import that was refused, which left no reference.
    if (!sessions_.RemoveReference(connection.peer.session, reference.allocation, reference.as)) continue;
    pending_.Add([this, by = connection.peer, reference] {
      return delegate_.OnReferenceDropped(by, reference.allocation, reference.as);
    });
  }
}

// ---- rounds ----------------------------------------------------------------------------------------------------------------

void PeerService::HandleRound(Inbound& connection, const Message& message) {
  if (std::holds_alternative<AwaitingMessage>(message.body)) {
    if (!connection.awaiting.note_at) connection.awaiting.note_at = Clock::now() + connection.awaiting.interval;
    Reply(connection, message.request, FailureMessage{delegate_.Neighbours({}, In(kAnswerWithin)).status()});
  } else if (const auto* board = std::get_if<AskBoardMessage>(&message.body)) {
    HandOutBoard(connection, message.request, *board);
  } else {
    MarkForClose(connection, "sent a message that has no place on a connection for rounds");
  }
}

// ---- answers ---------------------------------------------------------------------------------------------------------------

void PeerService::Reply(Inbound& connection, std::uint64_t request, MessageBody body, std::vector<UniqueFd> descriptors) {
  if (connection.marked) return;
  auto bytes = EncodeMessage({request, std::move(body)});
  if (!bytes) return MarkForClose(connection, bytes.status().message());
  if (connection.outbox.messages.size() >= kQueueMax) return MarkForClose(connection, "does not take its answers");
  connection.outbox.messages.push_back({*std::move(bytes), std::move(descriptors)});
  if (connection.outbox.messages.size() == 1) WriteQueue(connection);
}

void PeerService::WriteQueue(Inbound& connection) {
  connection.outbox.retry.reset();
  while (!connection.marked && !connection.outbox.messages.empty()) {
    const Inbound::Outgoing& next = connection.outbox.messages.front();
    std::vector<int> descriptors;
    for (const auto& fd : next.descriptors) descriptors.push_back(fd.get());
    const Sent sent = SendPacket(connection.socket.get(), next.bytes, descriptors);
    if (sent == Sent::kClosed &&
        connection.purpose == Purpose::kRequest) {  // what it has asked for counts (DrainClosedRequester)
      connection.outbox.messages.clear();
      break;
    }
    if (sent == Sent::kClosed) return MarkForClose(connection, WhyEnded(connection));
    if (sent == Sent::kTooManyInFlight) connection.outbox.retry = Clock::now() + kSendRetry;
    if (sent != Sent::kDone) break;
    connection.outbox.messages.pop_front();
  }
  if (requester_.report_again && connection.id == requester_.connection && connection.outbox.messages.empty())
    ReportToRequester();
  if (!connection.marked) SetInterest(connection);
}

void PeerService::SetInterest(Inbound& connection) {
  const std::uint32_t interest = connection.outbox.messages.empty() ? EPOLLIN
                                 : connection.outbox.retry          ? 0u
                                                                    : std::uint32_t{EPOLLOUT};
  if (interest == connection.outbox.interest) return;
  connection.outbox.interest = interest;
  loop_.Modify(connection.key, interest);
}

}  // namespace amem
