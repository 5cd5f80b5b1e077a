#include "replay/peers/unix/service.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <exception>
#include <system_error>

#include "replay/peers/token.h"

namespace amem {
namespace {

constexpr std::uint64_t kListenerKey = 1, kCommandKey = 2, kStopKey = 3, kFirstKey = 16;
constexpr auto kHelloPatience = std::chrono::seconds(5);
constexpr auto kServiceSpin = std::chrono::milliseconds(1);  // awake, after the last event
constexpr auto kSendRetry = std::chrono::milliseconds(1);
constexpr auto kAcceptRetry = std::chrono::milliseconds(100);
constexpr std::size_t kStrangersMax = 64;  // connections that have not said hello
constexpr std::size_t kConnectionsMax = 1024;
constexpr std::size_t kQueueMax = 64;  // messages that wait for a slow peer
constexpr int kMessagesATurn = 16;     // from one peer, before the others have theirs

void Signal(int event_fd) {
  const std::uint64_t one = 1;
  (void)!::write(event_fd, &one, sizeof(one));
}

void Drain(int event_fd) {
  std::uint64_t count = 0;
  (void)!::read(event_fd, &count, sizeof(count));
}

bool Add(int epoll, int fd, std::uint64_t key, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  return ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

void Modify(int epoll, int fd, std::uint64_t key, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  (void)::epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event);
}

// No memory in the middle of something: the turn is cut short, the guest's process goes on.
template <class Work>
void Guarded(const Work& work) {
  try {
    work();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

void Remove(int epoll, int fd) { (void)::epoll_ctl(epoll, EPOLL_CTL_DEL, fd, nullptr); }

}  // namespace

PeerService::PeerService(const ConnectionContext& context, UniqueFd listener, const PeerIdentity& self, PeerDelegate& delegate)
    : context_(context),
      listener_(std::move(listener)),
      delegate_(delegate),
      self_(self),
      last_key_(kFirstKey),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(kMessageBytesMax)),
      board_([this](std::uint64_t connection, MessageBody body) {
        if (auto at = inbound_.find(connection); at != inbound_.end()) Reply(*at->second, 0, std::move(body));
      }) {}

PeerService::~PeerService() { Stop(); }

Status PeerService::Start() {
  epoll_.Reset(::epoll_create1(EPOLL_CLOEXEC));
  command_.Reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  change_.Reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !command_ || !change_ || !Add(epoll_.get(), listener_.get(), kListenerKey, EPOLLIN) ||
      !Add(epoll_.get(), command_.get(), kCommandKey, EPOLLIN)) {
    return {Code::kIo, "starting the service of peers: epoll and eventfd: " + ErrnoText(errno)};
  }
  // Signals are for the guest's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status started;
  try {
    thread_ = std::thread([this] { Loop(); });
    pthread_setname_np(thread_.native_handle(), "amem-peers");
  } catch (const std::system_error& e) {
    started = {Code::kIo, std::string("starting the service of peers: thread: ") + e.what()};
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void PeerService::Stop() {
  {
    const std::lock_guard lock(command_mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) {
    Signal(command_.get());
    thread_.join();
  }
  RunCommands();  // whoever came last must not wait for ever
  for (auto& [id, connection] : inbound_) MarkForClose(*connection, "");
  inbound_.clear();
  watched_.clear();
  listener_.Reset();
}

PeerIdentity PeerService::Self() const {
  const std::lock_guard lock(self_mutex_);
  return self_;
}

void PeerService::SetGroup(std::int64_t group) {
  {
    const std::lock_guard lock(self_mutex_);
    self_.group = group;
  }
  Changed();
}

std::optional<PeerIdentity> PeerService::Known(SessionId session) const {
  const std::lock_guard lock(self_mutex_);
  const auto at = known_.find(session);
  return at == known_.end() ? std::nullopt : std::optional(at->second);
}

void PeerService::SetLoss(const std::optional<PeerIdentity>& who) {
  const std::lock_guard lock(self_mutex_);
  loss_ = who;
  if (who) failed_by_.insert(who->session);
}

bool PeerService::HasFailedBy(SessionId session) const {
  const std::lock_guard lock(self_mutex_);
  return failed_by_.contains(session);
}

void PeerService::Changed() { Signal(change_.get()); }

// ---- commands --------------------------------------------------------------------------------------------------------------

bool PeerService::Run(const std::function<void()>& work) {
  struct Wait {
    std::mutex mutex;
    std::condition_variable done_changed;
    bool done = false, ran = false;
  };
  const auto wait = std::make_shared<Wait>();
  {
    const std::lock_guard lock(command_mutex_);
    if (stopping_) return false;
    commands_.emplace_back([this, wait, &work] {
      const bool stopping = Stopping();
      if (!stopping) work();
      const std::lock_guard inner(wait->mutex);
      wait->done = true;
      wait->ran = !stopping;
      wait->done_changed.notify_all();
    });
  }
  Signal(command_.get());
  std::unique_lock lock(wait->mutex);
  wait->done_changed.wait(lock, [&] { return wait->done; });
  return wait->ran;
}

void PeerService::RunCommands() {
  std::deque<std::function<void()>> commands;
  {
    const std::lock_guard lock(command_mutex_);
    commands.swap(commands_);
  }
  for (const auto& command : commands) command();
}

void PeerService::Post(std::function<void()> work) {
  {
    const std::lock_guard lock(command_mutex_);
    if (stopping_) return;
    commands_.emplace_back([this, work = std::move(work)] {
      if (!Stopping()) work();
    });
  }
  Signal(command_.get());
}

void PeerService::FlushLater(std::shared_ptr<WatchedConnection> connection) {
  Post([this, connection = std::move(connection)] {
    for (const auto& [key, item] : watched_) {
      if (item.second == connection) Modify(epoll_.get(), connection->fd(), key, EPOLLRDHUP | EPOLLOUT);
    }
  });
}

bool PeerService::Stopping() {
  const std::lock_guard lock(command_mutex_);
  return stopping_;
}

// ---- the loop --------------------------------------------------------------------------------------------------------------

void PeerService::Loop() {
  while (!Stopping()) Turn();
}

void PeerService::Turn() {
  std::array<epoll_event, 32> events;
  // Imports come in rows: whoever asked a moment ago asks again before this thread could fall asleep and be woken.
  const bool spin = HasIdleCores() && Clock::now() - last_event_ < kServiceSpin;
  const int n = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), spin ? 0 : WaitMilliseconds());
  if (n > 0) last_event_ = Clock::now();
  if (n == 0 && spin) ::sched_yield();
  for (int i = 0; i < n; ++i) {
    if (Stopping()) return;
    Guarded([&] { Dispatch(events[static_cast<std::size_t>(i)].data.u64, events[static_cast<std::size_t>(i)].events); });
  }
  Guarded([&] { Timers(Clock::now()); });
  Guarded([&] { Sweep(); });
}

void PeerService::Dispatch(std::uint64_t key, std::uint32_t events) {
  if (key == kListenerKey) return Accept();
  if (key == kCommandKey) {
    Drain(command_.get());
    return RunCommands();
  }
  if (watched_.contains(key)) return WatchedReady(key, events);
  if (processes_.contains(key)) return ProcessDied(key);
  const auto at = inbound_.find(key);
  if (at == inbound_.end()) return;
  Inbound& connection = *at->second;
  try {
    if ((events & EPOLLOUT) != 0) WriteQueue(connection);
    if (!connection.marked && connection.queue.empty()) Readable(connection);
    // Nothing is read from a peer that does not take its answers, but its end counts.
    if (!connection.marked && !connection.queue.empty() && (events & (EPOLLHUP | EPOLLERR)) != 0)
      MarkForClose(connection, HowItEnded(context_, connection.peer.session));
  } catch (const std::exception& e) {  // no memory: this peer pays, the process goes on
    MarkForClose(connection, std::string("was dropped: ") + e.what());
  }
}

int PeerService::WaitMilliseconds() const {
  std::optional<Clock::time_point> next = board_.NextDeadline();
  const auto consider = [&](Clock::time_point at) {
    if (!next || at < *next) next = at;
  };
  for (const auto& [id, connection] : inbound_) {
    if (!connection->welcome) consider(connection->accepted + kHelloPatience);
    if (connection->retry) consider(*connection->retry);
  }
  if (listen_again_) consider(*listen_again_);
  return next ? MillisecondsUntil(*next) : -1;
}

void PeerService::Timers(Clock::time_point now) {
  for (auto& [id, connection] : inbound_) {
    if (!connection->welcome && now >= connection->accepted + kHelloPatience) MarkForClose(*connection, "said nothing");
    if (connection->retry && now >= *connection->retry) WriteQueue(*connection);
  }
  if (listen_again_ && now >= *listen_again_) {
    listen_again_.reset();
    Modify(epoll_.get(), listener_.get(), kListenerKey, EPOLLIN);
  }
  board_.Tick(now);
}

// Closings happen here and nowhere else, so that nobody loses the connection it is working on.
void PeerService::Sweep() {
  for (bool found = true; found;) {
    found = false;
    for (auto at = inbound_.begin(); at != inbound_.end(); ++at) {
      if (!at->second->marked) continue;
      const std::unique_ptr<Inbound> gone = std::move(at->second);
      inbound_.erase(at);
      found = true;
      if (gone->welcome && gone->purpose == Purpose::kRound) board_.Closed(gone->id, *gone->marked);
      if (gone->welcome && gone->purpose == Purpose::kData) Lose(gone->peer.session, *gone->marked);
      break;
    }
  }
}

// ---- connections that come in ----------------------------------------------------------------------------------------------

void PeerService::Accept() {
  for (int i = 0; i < kMessagesATurn; ++i) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        Modify(epoll_.get(), listener_.get(), kListenerKey, 0);  // or the loop would spin on it
        listen_again_ = Clock::now() + kAcceptRetry;
      }
      return;
    }
    auto who = CredentialsOf(socket.get());
    if (!who || who->uid != context_.uid) continue;  // closed: not ours to talk to
    MakeRoom();
    if (inbound_.size() >= kConnectionsMax) continue;
    auto connection = std::make_unique<Inbound>();
    connection->id = ++last_key_;
    connection->socket = std::move(socket);
    connection->pid = who->pid;
    connection->accepted = Clock::now();
    connection->interest = EPOLLIN;
    if (!Add(epoll_.get(), connection->socket.get(), connection->id, EPOLLIN)) continue;
    inbound_.emplace(connection->id, std::move(connection));
  }
}

// Peers say hello at once, so the unauthenticated peer who has been silent longest goes first.
void PeerService::MakeRoom() {
  std::size_t unauthenticated = 0;
  Inbound* oldest = nullptr;
  for (auto& [id, connection] : inbound_) {
    if (connection->welcome || connection->marked) continue;
    ++unauthenticated;
    if (oldest == nullptr) oldest = connection.get();
  }
  if (unauthenticated < kStrangersMax) return;
  Readable(*oldest);  // its hello may have come by now
  if (!oldest->welcome) MarkForClose(*oldest, "said nothing");
}

void PeerService::MarkForClose(Inbound& connection, std::string why) {
  if (connection.marked) return;
  connection.marked = std::move(why);
  connection.queue.clear();
  connection.retry.reset();
  UnwatchProcess(connection.process);
  Remove(epoll_.get(), connection.socket.get());  // closing is not enough where forked children hold it open too
  (void)::shutdown(connection.socket.get(), SHUT_RDWR);
  connection.socket.Reset();
}

void PeerService::Readable(Inbound& connection) {
  for (int i = 0; i < kMessagesATurn && !connection.marked && connection.queue.empty(); ++i) {
    const Packet packet = ReceivePacket(connection.socket.get(), {buffer_.get(), kMessageBytesMax}, false);
    if (packet.state == Packet::State::kNothing) return;
    if (packet.state == Packet::State::kClosed) return MarkForClose(connection, HowItEnded(context_, connection.peer.session));
    if (packet.state == Packet::State::kMalformed) return MarkForClose(connection, "sent a message that is too long");
    const auto message = DecodeMessage({buffer_.get(), packet.bytes});
    if (!message) return MarkForClose(connection, "sent " + message.status().message());
    Handle(connection, *message);
  }
}

void PeerService::Handle(Inbound& connection, const Message& message) {
  if (!connection.welcome) return Greet(connection, message);
  if (connection.purpose == Purpose::kData) return HandleData(connection, message);
  HandleRound(connection, message);
}

void PeerService::Greet(Inbound& connection, const Message& message) {
  const auto* hello = std::get_if<HelloMessage>(&message.body);
  if (hello == nullptr) return MarkForClose(connection, "did not say hello");
  const auto refuse = [&](Code code, const std::string& why) {
    Reply(connection, message.request, FailureMessage{{code, why}});
    MarkForClose(connection, why);
  };
  const PeerIdentity self = Self();
  if (hello->least_version > kPeerProtocol || hello->version < kPeerProtocolLeast) {
    return refuse(Code::kUnsupported, ToText(self) + " speaks versions " + std::to_string(kPeerProtocolLeast) + " to " +
                                          std::to_string(kPeerProtocol) + " of AMem's protocol, " + ToText(hello->self) +
                                          " speaks " + std::to_string(hello->least_version) + " to " +
                                          std::to_string(hello->version) + ": use one version of AMem in the whole job");
  }
  if (hello->to != self.session || !hello->self.session)
    return refuse(Code::kNotFound, "this is session " + Hex(self.session.value));
  connection.peer = hello->self;
  connection.purpose = hello->purpose;
  if (hello->purpose == Purpose::kData) {
    if (Status connected = Connected(hello->self); !connected.ok()) return refuse(connected.code(), connected.message());
  }
  connection.welcome = true;
  connection.process = WatchProcessOf(connection.pid, connection.id, {});
  Reply(connection, message.request, WelcomeMessage{std::min(hello->version, kPeerProtocol), self});
}

// ---- sharing ---------------------------------------------------------------------------------------------------------------

void PeerService::HandleData(Inbound& connection, const Message& message) {
  if (const auto* import = std::get_if<ImportMessage>(&message.body)) return Import(connection, message.request, *import);
  if (const auto* reimport = std::get_if<ReimportMessage>(&message.body))
    return Reimport(connection, message.request, *reimport);
  if (const auto* dropped = std::get_if<DroppedMessage>(&message.body)) return Dropped(connection, *dropped);
  MarkForClose(connection, "sent a message that has no place on a connection for data");
}

namespace {

Result<SharedAllocation> Checked(Result<SharedAllocation> shared) {
  if (shared && !shared->descriptor && !shared->part) return Status{Code::kInvalid, "the export gave no descriptor"};
  return shared;
}

}  // namespace

void PeerService::Import(Inbound& connection, std::uint64_t request, const ImportMessage& import) {
  if (import.token.session != Self().session) {
    return Reply(connection, request,
                 FailureMessage{{Code::kInvalid, "the token names another session, " + Hex(import.token.session.value)}});
  }
  auto shared = Checked(delegate_.OnImport(connection.peer, import.as, import.token));
  if (!shared) return Reply(connection, request, FailureMessage{shared.status()});
  sessions_[connection.peer.session].references.emplace(import.token.allocation.value, import.as.value);
  std::vector<UniqueFd> descriptors;
  if (!shared->part) descriptors.push_back(std::move(shared->descriptor));
  Reply(connection, request, SharedMessage{{{shared->bytes, shared->properties, shared->part}}}, std::move(descriptors));
  Changed();
}

void PeerService::Reimport(Inbound& connection, std::uint64_t request, const ReimportMessage& reimport) {
  SharedMessage answer;
  std::vector<UniqueFd> descriptors;
  for (const auto& reference : reimport.references) {
    auto shared = Checked(delegate_.OnReimport(connection.peer, reference));
    if (!shared) return Reply(connection, request, FailureMessage{shared.status()});
    if (shared->part)
      return Reply(connection, request, FailureMessage{{Code::kInvalid, "a part of a slab is not imported again"}});
    answer.items.push_back({shared->bytes, shared->properties, {}});
    descriptors.push_back(std::move(shared->descriptor));
  }
  Reply(connection, request, std::move(answer), std::move(descriptors));
}

void PeerService::Dropped(Inbound& connection, const DroppedMessage& dropped) {
  auto& references = sessions_[connection.peer.session].references;
  for (const auto& reference : dropped.references) {
    // Only what was given away here; a drop may also follow an import that was refused.
    if (references.erase({reference.allocation.value, reference.as.value}) == 0) continue;
    delegate_.OnReferenceDropped(connection.peer, reference.allocation, reference.as);
  }
}

// ---- rounds ----------------------------------------------------------------------------------------------------------------

NeighbourhoodMessage PeerService::Neighbourhood() {
  NeighbourhoodMessage answer{Self(), {}, delegate_.Progress()};
  for (const SessionId session : delegate_.Neighbours()) {
    PeerIdentity unknown;
    unknown.session = session;
    answer.neighbours.push_back(Known(session).value_or(unknown));
  }
  const std::lock_guard lock(self_mutex_);
  answer.lost = loss_;
  return answer;
}

void PeerService::HandleRound(Inbound& connection, const Message& message) {
  if (std::holds_alternative<AskNeighboursMessage>(message.body)) return Reply(connection, message.request, Neighbourhood());
  if (const auto* arrival = std::get_if<ArriveMessage>(&message.body))
    return board_.Arrived(connection.id, connection.peer, *arrival);
  if (std::holds_alternative<WithdrawMessage>(message.body)) return board_.Withdrew(connection.id);
  if (const auto* vote = std::get_if<VoteMessage>(&message.body)) return board_.Voted(connection.id, *vote, Clock::now());
  if (const auto* leave = std::get_if<LeaveMessage>(&message.body)) return board_.Left(connection.id, leave->round);
  MarkForClose(connection, "sent a message that has no place on a connection for rounds");
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
    if (sent == Sent::kClosed) return MarkForClose(connection, HowItEnded(context_, connection.peer.session));
    if (sent == Sent::kTooManyInFlight) connection.retry = Clock::now() + kSendRetry;
    if (sent != Sent::kDone) break;
    connection.queue.pop_front();
  }
  if (!connection.marked) SetInterest(connection);
}

void PeerService::SetInterest(Inbound& connection) {
  const std::uint32_t interest = connection.queue.empty() ? EPOLLIN : connection.retry ? 0u : std::uint32_t{EPOLLOUT};
  if (interest == connection.interest) return;
  connection.interest = interest;
  Modify(epoll_.get(), connection.socket.get(), connection.id, interest);
}

// ---- sessions --------------------------------------------------------------------------------------------------------------

Status PeerService::Connected(const PeerIdentity& peer) {
  SessionRecord& record = sessions_[peer.session];
  if (record.lost) {
    return {Code::kPeerLost,
            ToText(peer) + " was lost before by " + ToText(Self()) + " (it " + *record.lost + "), its references are gone"};
  }
  record.identity = peer;
  {
    const std::lock_guard lock(self_mutex_);
    known_[peer.session] = peer;
  }
  if (record.connected) return {};
  record.connected = true;
  delegate_.OnPeerConnected(peer);
  return {};
}

bool PeerService::IsConnected(SessionId session) const {
  const auto at = sessions_.find(session);
  return at != sessions_.end() && at->second.connected && !at->second.lost;
}

void PeerService::NoteGone(SessionId session) {
  if (IsConnected(session)) Lose(session, HowItEnded(context_, session));
  if (const auto at = sessions_.find(session); at != sessions_.end()) at->second.doubtful = false;
}

std::vector<PeerIdentity> PeerService::Doubtful() const {
  std::vector<PeerIdentity> doubtful;
  for (const auto& [session, record] : sessions_) {
    if (record.doubtful) doubtful.push_back(record.identity);
  }
  return doubtful;
}

Status PeerService::Watch(const PeerIdentity& peer, std::shared_ptr<WatchedConnection> connection) {
  AMEM_TRY(Connected(peer));
  const std::uint64_t key = ++last_key_;
  if (!Add(epoll_.get(), connection->fd(), key, EPOLLRDHUP)) return {Code::kIo, "watching a connection: " + ErrnoText(errno)};
  SessionRecord& record = sessions_[peer.session];
  record.watched.insert(key);
  const auto who = CredentialsOf(connection->fd());
  if (who && record.process == 0) record.process = WatchProcessOf(who->pid, 0, peer.session);
  watched_[key] = {peer.session, std::move(connection)};
  Changed();
  return {};
}

std::uint64_t PeerService::WatchProcessOf(pid_t pid, std::uint64_t inbound, SessionId session) {
  WatchedProcess process{WatchProcess(pid), inbound, session};
  if (!process.descriptor) return 0;
  const std::uint64_t key = ++last_key_;
  if (!Add(epoll_.get(), process.descriptor.get(), key, EPOLLIN)) return 0;
  processes_[key] = std::move(process);
  return key;
}

void PeerService::UnwatchProcess(std::uint64_t& key) {
  if (const auto at = processes_.find(key); at != processes_.end()) {
    Remove(epoll_.get(), at->second.descriptor.get());
    processes_.erase(at);
  }
  key = 0;
}

void PeerService::ProcessDied(std::uint64_t key) {
  const WatchedProcess& process = processes_.at(key);
  const SessionId session = process.session;
  const auto at = inbound_.find(process.inbound);
  if (at == inbound_.end()) return Lose(session, HowItEnded(context_, session));
  Readable(*at->second);  // what it said last counts
  MarkForClose(*at->second, HowItEnded(context_, at->second->peer.session));
}

void PeerService::WatchedReady(std::uint64_t key, std::uint32_t events) {
  const auto& [session, connection] = watched_.at(key);
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) return Lose(SessionId{session}, HowItEnded(context_, session));
  if ((events & EPOLLOUT) != 0 && connection->Flush()) Modify(epoll_.get(), connection->fd(), key, EPOLLRDHUP);
}

void PeerService::Lose(SessionId session, const std::string& reason) {
  SessionRecord& record = sessions_[session];
  if (record.lost) return;
  record.lost = reason;
  record.doubtful = record.connected && (!record.references.empty() || !record.watched.empty());
  for (const std::uint64_t key : record.watched) {
    const auto connection = watched_.at(key).second;
    Remove(epoll_.get(), connection->fd());
    connection->Lost(reason);
    watched_.erase(key);
  }
  record.watched.clear();
  UnwatchProcess(record.process);
  // All its connections: of a process that died they may be held open by children that it forked.
  for (auto& [id, connection] : inbound_) {
    if (connection->peer.session == session) MarkForClose(*connection, reason);
  }
  record.references.clear();
  if (record.connected) delegate_.OnPeerLost(record.identity, reason);
  Changed();
}

}  // namespace amem
