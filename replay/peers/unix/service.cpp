#include "replay/peers/unix/service.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <exception>

#include "replay/peers/unix/pages.h"

namespace amem {

constexpr auto kHelloPatience = std::chrono::seconds(5);
constexpr auto kSendRetry = std::chrono::milliseconds(1);
constexpr auto kAcceptRetry = std::chrono::milliseconds(100);
constexpr std::size_t kUnauthenticatedMax = 64;  // connections that have not said hello
constexpr std::size_t kConnectionsMax = 1024;
constexpr std::size_t kQueueMax = 64;                           // messages that wait for a slow peer
constexpr int kMessagesATurn = 16;                              // from one peer, before the others have theirs
constexpr std::size_t kFactsMax = 8192;                         // that wait for the journal; more are let go
constexpr auto kFullForLong = std::chrono::milliseconds(1000);  // descriptors may be had again before that
constexpr auto kFlushAgain = std::chrono::milliseconds(5);
constexpr auto kAnswerWithin = std::chrono::milliseconds(20);

static Result<SharedAllocation> Checked(Result<SharedAllocation> shared) {
  if (shared && !shared->descriptor && !shared->part) return Status{Code::kInvalid, "the export gave no descriptor"};
  return shared;
}

static UniqueFd SpareDescriptor() { return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

PeerService::PeerService(const ConnectionContext& context, Listeners listeners, const PeerIdentity& self,
                         PeerDelegate& delegate, control::RequestServer* requests)
    : context_(context),
      delegate_(delegate),
      requests_(requests),
      listeners_(std::move(listeners)),
      loop_(*this),
      sessions_(
          context, loop_, self, delegate, notices_,
          // All its connections: of a process that died they may be held open by children that it forked.
          [this](SessionId session, const std::string& reason) {
            for (auto& [id, connection] : inbound_)
              if (connection->peer.session == session) MarkForClose(*connection, reason);
          },
          [this](EventBody fact) { Witness(std::move(fact)); }),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(kMessageBytesMax)) {}

PeerService::~PeerService() { Stop(); }

Status PeerService::Start() {
  spare_ = SpareDescriptor();
  AMEM_TRY(loop_.Open());
  for (const Listener* listener : {&listeners_.in_directory, &listeners_.by_name}) {
    if (!*listener) continue;
    const auto key =
        loop_.Add(listener->get(), EPOLLIN, [this, listener](ServiceLoop::Key, std::uint32_t) { Accept(*listener); });
    if (key == 0) return {Code::kIo, "starting the service of peers: epoll: " + ErrnoText(errno)};
    listener_keys_.push_back(key);
  }
  AMEM_TRY(loop_.Start());
  if (requests_ != nullptr) requests_->NotifyOfChanges([this] { loop_.Post([this] { ReportToRequester(); }); });
  return {};
}

void PeerService::Stop(std::optional<std::chrono::milliseconds> patience) {
  if (requests_ != nullptr) requests_->NotifyOfChanges({});
  if (!loop_.Stop(patience)) return;
  if (!facts_.empty() || !notices_.empty()) FlushToDelegate();
  for (auto& [id, connection] : inbound_) MarkForClose(*connection, "");
  inbound_.clear();
  sessions_.ForgetConnections();
  listeners_ = {};
}

// ---- time ------------------------------------------------------------------------------------------------------------------

std::optional<PeerService::Clock::time_point> PeerService::NextDeadline() const {
  std::optional<Clock::time_point> next;
  const auto consider = [&](Clock::time_point at) {
    if (!next || at < *next) next = at;
  };
  for (const auto& [id, connection] : inbound_) {
    if (!connection->welcome) consider(connection->accepted + kHelloPatience);
    if (connection->retry) consider(*connection->retry);
    if (connection->note_awaiting) consider(*connection->note_awaiting);
  }
  if (const auto at = sessions_.NextCheck()) consider(*at);
  if (listen_again_) consider(*listen_again_);
  if (flush_again_) consider(*flush_again_);
  return next;
}

void PeerService::Timers(Clock::time_point now) {
  for (auto& [id, connection] : inbound_) {
    if (!connection->welcome && now >= connection->accepted + kHelloPatience) EndUnlessHelloCame(*connection);
    if (connection->retry && now >= *connection->retry) WriteQueue(*connection);
    if (connection->note_awaiting && now >= *connection->note_awaiting) NoteWaiting(*connection, now);
  }
  if (listen_again_ && now >= *listen_again_) {
    listen_again_.reset();
    Listen(EPOLLIN);
  }
  sessions_.CheckAgain(now);
}

// Its journal is the only one that tells what the others wait for, if this process is the one that does not come. It is
// recorded again, ever more seldom, because nothing else in that journal would tell how long they have waited.
void PeerService::NoteWaiting(Inbound& connection, Clock::time_point now) {
  connection.note_awaiting = now + connection.awaits_for;
  connection.awaits_for *= 2;
  const Lifecycle lifecycle = delegate_.Progress({}).lifecycle;
  const bool pause = lifecycle == Lifecycle::kRunning;
  if (connection.marked || (!pause && lifecycle != Lifecycle::kPaused)) return;
  const PeerIdentity& who = connection.peer;
  Witness(MemberHeard{.member = who.session,
                      .kind = pause ? CycleKind::kPause : CycleKind::kResume,
                      .phase = pause ? PhaseKind::kPauseArrive : PhaseKind::kResumeArrive,
                      .rank = who.rank,
                      .pid = who.pid,
                      .asks = true});
}

// ---- facts -----------------------------------------------------------------------------------------------------------------

void PeerService::Witness(EventBody fact) {
  if (facts_.size() < kFactsMax) facts_.push_back(std::move(fact));
}

void PeerService::FlushToDelegate() {
  const bool told = notices_.Flush() && (facts_.empty() || delegate_.OnWitnessed(facts_, std::chrono::milliseconds(0)));
  flush_again_ = told ? std::nullopt : std::optional(Clock::now() + kFlushAgain);
  if (!told) return;
  facts_.clear();
  AnswerNote();
}

// Connections are closed here and nowhere else, so that no function loses the one it is working on.
void PeerService::Sweep() {
  const auto marked = [](const auto& item) { return item.second->marked.has_value(); };
  for (auto at = inbound_.begin(); (at = std::ranges::find_if(inbound_, marked)) != inbound_.end();) {
    const std::unique_ptr<Inbound> gone = std::move(at->second);
    inbound_.erase(at);
    if (gone->welcome && gone->purpose == Purpose::kData) sessions_.GreetedEnded(gone->peer.session);
  }
  // Once a turn, for all that was heard in it; and again later, if the journal was in use.
  const bool to_tell = !facts_.empty() || !notices_.empty();
  if (to_tell && (!flush_again_ || Clock::now() >= *flush_again_)) FlushToDelegate();
}

Status PeerService::DeliverNotices() {
  if (notices_.Flush()) return {};
  return {Code::kTimeout, "a driver call of another thread of that process has not returned", kNotReady};
}

// ---- connections that come in ----------------------------------------------------------------------------------------------

void PeerService::Listen(std::uint32_t events) {
  for (const auto key : listener_keys_) loop_.Modify(key, events);
}

void PeerService::Accept(const Listener& listener) {
  for (int i = 0; i < kMessagesATurn; ++i) {
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      const bool no_descriptor = errno == EMFILE || errno == ENFILE;
      if (no_descriptor || errno == ENOMEM || errno == ENOBUFS) {
        Listen(0);  // or the loop would spin on it
        listen_again_ = Clock::now() + kAcceptRetry;
      }
      if (no_descriptor) RefuseForWantOfDescriptors(listener);
      if (!no_descriptor) full_since_.reset();
      return;
    }
    full_since_.reset();
    const auto peer = CredentialsOf(socket.get());
    if (!peer || peer->uid != context_.uid) continue;  // closed: another user is none of ours
    MakeRoom();
    if (inbound_.size() >= kConnectionsMax) continue;
    auto connection = std::make_unique<Inbound>();
    const std::uint64_t id = connection->id = ++last_id_;
    connection->socket = std::move(socket);
    connection->pid = peer->pid;
    connection->accepted = Clock::now();
    connection->by_name = &listener == &listeners_.by_name;
    connection->interest = EPOLLIN;
    connection->key =
        loop_.Add(connection->socket.get(), EPOLLIN, [this, id](ServiceLoop::Key, std::uint32_t events) { Ready(id, events); });
    if (connection->key != 0) inbound_.emplace(id, std::move(connection));
  }
}

// Peers would wait for an answer until their deadline, and learn nothing. One descriptor is kept to tell them.
void PeerService::RefuseForWantOfDescriptors(const Listener& listener) {
  if (!full_since_) full_since_ = Clock::now();
  if (Clock::now() < *full_since_ + kFullForLong) return;
  for (int i = 0; i < kMessagesATurn && spare_; ++i) {
    spare_.Reset();
    {
      const UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) i = kMessagesATurn;  // there is none any more; one is opened again all the same
      const auto peer = CredentialsOf(socket.get());
      if (peer && peer->uid == context_.uid) SendWantOfDescriptors(socket);
    }
    spare_ = SpareDescriptor();
  }
}

void PeerService::SendWantOfDescriptors(const UniqueFd& socket) {
  const auto bytes =
      EncodeMessage({0, FailureMessage{{Code::kNoDescriptors,
                                        "it has no descriptor left to answer with: raise its limit of open files "
                                        "(ulimit -n)"}}});
  if (!bytes) return;
  (void)SendPacket(socket.get(), *bytes, {});
  // What has come and was not read would make the kernel drop the answer.
  (void)::shutdown(socket.get(), SHUT_RD);
  while (ReceivePacket(socket.get(), {buffer_.get(), kMessageBytesMax}, false).state == Packet::State::kMessage) {
  }
}

// Peers say hello at once, so the unauthenticated connection that has been silent longest goes first.
void PeerService::MakeRoom() {
  std::size_t unauthenticated = 0;
  Inbound* oldest = nullptr;
  for (auto& [id, connection] : inbound_) {
    if (connection->welcome || connection->marked) continue;
    ++unauthenticated;
    if (oldest == nullptr) oldest = connection.get();
  }
  if (unauthenticated < kUnauthenticatedMax) return;
  EndUnlessHelloCame(*oldest);
}

// The hello may lie there unread: this process may have been stopped, or in another peer's driver call, since it was accepted.
void PeerService::EndUnlessHelloCame(Inbound& connection) {
  if (!connection.marked) Readable(connection);
  if (!connection.welcome) MarkForClose(connection, "said nothing");
}

void PeerService::Ready(std::uint64_t id, std::uint32_t events) {
  const auto at = inbound_.find(id);
  if (at == inbound_.end()) return;
  Inbound& connection = *at->second;
  try {
    const bool ended = (events & (EPOLLHUP | EPOLLERR)) != 0;
    if ((events & EPOLLOUT) != 0) WriteQueue(connection);
    if (ended && connection.purpose == Purpose::kRequest) return DrainClosedRequester(connection);
    if (!connection.marked && connection.queue.empty()) Readable(connection);
    // Nothing is read from a peer that does not take its answers, but its end counts.
    if (!connection.marked && !connection.queue.empty() && ended) MarkForClose(connection, WhyEnded(connection));
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
  if (requester_ == connection.id) {
    requester_ = note_ = 0;
    requests_->OnToolGone();
  }
  connection.queue.clear();
  connection.retry.reset();
  connection.process.End();
  loop_.Remove(connection.key);
  (void)::shutdown(connection.socket.get(), SHUT_RDWR);
  connection.socket.Reset();
}

bool PeerService::Readable(Inbound& connection) {
  for (int i = 0; i < kMessagesATurn; ++i) {
    if (connection.marked || !connection.queue.empty()) return false;
    const Packet packet = ReceivePacket(connection.socket.get(), {buffer_.get(), kMessageBytesMax}, !connection.welcome);
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
  if (!connection.welcome) return Greet(connection, message, packet);
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
  if (connection.by_name && hello->purpose != Purpose::kRequest) context_.elsewhere->Add(hello->self.session);
  if (hello->purpose == Purpose::kData) {
    if (Status connected = sessions_.Greeted(hello->self, connection.pid); !connected.ok())
      return refuse(connected.code(), connected.message());
  } else {
    connection.process.Begin(loop_, connection.pid, [this, id = connection.id] { ProcessDied(id); });
  }
  connection.welcome = true;
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
    notices_.Add([this, by = connection.peer, reference] {
      return delegate_.OnReferenceDropped(by, reference.allocation, reference.as);
    });
  }
}

// ---- rounds ----------------------------------------------------------------------------------------------------------------

void PeerService::HandleRound(Inbound& connection, const Message& message) {
  if (std::holds_alternative<AwaitingMessage>(message.body)) {
    if (!connection.note_awaiting) connection.note_awaiting = Clock::now() + connection.awaits_for;
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
  if (connection.queue.size() >= kQueueMax) return MarkForClose(connection, "does not take its answers");
  connection.queue.push_back({*std::move(bytes), std::move(descriptors)});
  if (connection.queue.size() == 1) WriteQueue(connection);
}

void PeerService::WriteQueue(Inbound& connection) {
  connection.retry.reset();
  while (!connection.marked && !connection.queue.empty()) {
    const Outgoing& next = connection.queue.front();
    std::vector<int> descriptors;
    for (const auto& fd : next.descriptors) descriptors.push_back(fd.get());
    const Sent sent = SendPacket(connection.socket.get(), next.bytes, descriptors);
    if (sent == Sent::kClosed &&
        connection.purpose == Purpose::kRequest) {  // what it has asked for counts (DrainClosedRequester)
      connection.queue.clear();
      break;
    }
    if (sent == Sent::kClosed) return MarkForClose(connection, WhyEnded(connection));
    if (sent == Sent::kTooManyInFlight) connection.retry = Clock::now() + kSendRetry;
    if (sent != Sent::kDone) break;
    connection.queue.pop_front();
  }
  if (reports_again_ && connection.id == requester_ && connection.queue.empty()) ReportToRequester();
  if (!connection.marked) SetInterest(connection);
}

void PeerService::SetInterest(Inbound& connection) {
  const std::uint32_t interest = connection.queue.empty() ? EPOLLIN : connection.retry ? 0u : std::uint32_t{EPOLLOUT};
  if (interest == connection.interest) return;
  connection.interest = interest;
  loop_.Modify(connection.key, interest);
}

}  // namespace amem
