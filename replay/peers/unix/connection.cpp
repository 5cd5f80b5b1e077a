#include "replay/peers/unix/connection.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <thread>

#include "journal/base/process_sight.h"
#include "replay/peers/unix/pages.h"

namespace amem {

constexpr auto kSpin = std::chrono::microseconds(300);
constexpr auto kRetryPause = std::chrono::milliseconds(1);

static Result<Connected> ConnectBefore(const ConnectionContext& context, SessionId to, Deadline deadline) {
  while (true) {
    auto connected = ConnectTo(context, to);
    if (connected || connected.status().code() != Code::kTimeout || Passed(deadline)) return connected;
    std::this_thread::sleep_for(kRetryPause);
  }
}

static Deadline AwakeUntil(Deadline deadline) { return HasIdleCores() ? std::min(Now() + kSpin, deadline) : Deadline{}; }

int PollUntil(std::span<pollfd> polled, Deadline until) {
  const Deadline awake = AwakeUntil(until);
  while (true) {
    const bool spins = Now() < awake;
    const int n = ::poll(polled.data(), spins ? 1 : polled.size(), spins ? 0 : MillisecondsUntil(until));
    if (n > 0 || (n < 0 && errno != EINTR)) return n;
    if (Passed(until)) return 0;
    if (spins) ::sched_yield();
  }
}

Result<Connected> ConnectTo(const ConnectionContext& context, SessionId to) {
  auto connected = ConnectTo(context.directory, to);
  if (connected || connected.status().code() != Code::kPeerLost) return connected;
  if (context.elsewhere == nullptr || SocketExists(context.directory, to)) return connected;
  auto by_name = ConnectByName(to);
  if (by_name.status().code() == Code::kPeerLost) return connected;
  if (!by_name && by_name.status().code() != Code::kTimeout) return by_name;  // nothing is known of it
  context.elsewhere->Add(to);
  return by_name;
}

bool HasSaidFarewell(const ConnectionContext& context, SessionId session) {
  return context.elsewhere != nullptr && HasSaidFarewell(session, context.uid);
}

std::string HowItEnded(const ConnectionContext& context, SessionId session) {
  if (context.elsewhere != nullptr && (context.elsewhere->Contains(session) || IsRemoved(context.directory)))
    return HasSaidFarewell(context, session) ? kPeerClosed : kPeerDied;
  // A session that closes in order removes its socket first.
  return SocketExists(context.directory, session) ? kPeerDied : kPeerClosed;
}

bool IsNameless(const ConnectionContext& context, SessionId session) {
  if (SocketExists(context.directory, session)) return false;
  return context.elsewhere == nullptr || !(context.elsewhere->Contains(session) || HasSaidFarewell(context, session));
}

PeerConnection::PeerConnection(const ConnectionContext& context, SessionId to, Connected peer)
    : context_(context),
      to_(to),
      peer_(std::move(peer)),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(kMessageBytesMax)) {}

PeerConnection::~PeerConnection() { HangUp(); }

void PeerConnection::HangUp() { (void)::shutdown(fd(), SHUT_RDWR); }

Result<std::unique_ptr<PeerConnection>> PeerConnection::Begin(const ConnectionContext& context, SessionId to, Purpose purpose,
                                                              const PeerIdentity& self, Deadline deadline) {
  AMEM_ASSIGN(auto peer, ConnectBefore(context, to, deadline));
  if (const uid_t owner = peer.owner.uid; owner != context.uid)
    return Status{Code::kRefused, fmt::format("its socket belongs to user {} and not to user {}", owner, context.uid)};
  std::unique_ptr<PeerConnection> connection(new PeerConnection(context, to, std::move(peer)));
  AMEM_TRY(connection->SendHello({kPeerProtocol, kPeerProtocolLeast, purpose, self, to}, deadline));
  return connection;
}

// Where the kernel holds too many descriptors of this user that nobody has received, the hello goes without.
Status PeerConnection::SendHello(const HelloMessage& hello, Deadline deadline) {
  const Message message{NextRequest(), hello};
  const int page = context_.pages == nullptr || hello.purpose == Purpose::kRequest ? -1 : context_.pages->fd();
  while (page >= 0) {
    AMEM_ASSIGN(const Sent sent, TrySend(message, {&page, 1}));
    if (sent == Sent::kDone) return {};
    if (sent == Sent::kTooManyInFlight) break;
    AMEM_TRY(Wait(POLLOUT, deadline));
  }
  return Send(message, deadline);
}

Result<PeerIdentity> PeerConnection::AwaitWelcome(Deadline deadline) {
  auto answer = Receive(deadline);
  if (!answer) return answer.status();
  if (const auto* failure = std::get_if<FailureMessage>(&answer->message.body)) return failure->status;
  const auto* welcome = std::get_if<WelcomeMessage>(&answer->message.body);
  if (welcome == nullptr) return Status{Code::kCorrupt, "it did not answer the greeting as AMem does"};
  if (welcome->self.session != to_)
    return Status{Code::kCorrupt, "its socket is answered by another session, " + Hex(welcome->self.session.value)};
  return welcome->self;
}

Status PeerConnection::Lost(int error) const {
  std::string how = HowItEnded(context_, to_);
  if (how == kPeerDied && LifeOf({pid()}, process_fd()).IsAlive()) how = kConnectionClosed;
  return {Code::kPeerLost, "it " + how + (error != 0 ? " (" + ErrnoText(error) + ")" : "")};
}

Result<Sent> PeerConnection::TrySend(const Message& message, std::span<const int> descriptors) {
  AMEM_ASSIGN(const auto bytes, EncodeMessage(message));
  const Sent sent = SendPacket(fd(), bytes, descriptors);
  if (sent == Sent::kClosed) return Lost(0);
  return sent;
}

Status PeerConnection::Send(const Message& message, Deadline deadline) {
  while (true) {
    AMEM_ASSIGN(const auto sent, TrySend(message));
    if (sent) return {};
    AMEM_TRY(Wait(POLLOUT, deadline));
  }
}

Result<std::optional<PeerConnection::Incoming>> PeerConnection::TryReceive() {
  Packet packet = ReceivePacket(fd(), {buffer_.get(), kMessageBytesMax}, true);
  if (packet.state == Packet::State::kNothing) return std::optional<Incoming>();
  if (packet.state == Packet::State::kClosed) return Lost(packet.error);
  if (packet.state == Packet::State::kMalformed) return Status{Code::kCorrupt, "it sent a message that is too long"};
  auto message = DecodeMessage({buffer_.get(), packet.bytes});
  if (!message) return message.status().Within("it sent");
  if (auto* failure = std::get_if<FailureMessage>(&message->body)) failure->status = failure->status.ReportedBy(to_);
  if (std::holds_alternative<WelcomeMessage>(message->body)) {
    if (context_.pages != nullptr) context_.pages->Take(to_, packet.descriptors, packet.descriptors_lost);
  } else if (packet.descriptors_lost) {
    // Reported as a failure of that request, so that a caller can still take its other answers.
    message->body =
        FailureMessage{{Code::kNoDescriptors,
                        "this process has no room for the descriptors that came: raise its limit of open files (ulimit -n)"}};
    packet.descriptors.clear();
  }
  return std::optional<Incoming>(Incoming{*std::move(message), std::move(packet.descriptors)});
}

Result<PeerConnection::Incoming> PeerConnection::Receive(Deadline deadline) {
  // Without a poll, which would make a vote a tenth slower.
  for (const Deadline awake = AwakeUntil(deadline); Now() < awake; ::sched_yield()) {
    AMEM_ASSIGN(auto incoming, TryReceive());
    if (incoming.has_value()) return std::move(*incoming);
  }
  while (true) {
    AMEM_ASSIGN(auto incoming, TryReceive());
    if (incoming.has_value()) return std::move(*incoming);
    AMEM_TRY(Wait(POLLIN, deadline));
  }
}

Status PeerConnection::Wait(int events, Deadline deadline) {
  std::array<pollfd, 3> polled{{{fd(), static_cast<short>(events), 0}, {context_.stop, POLLIN, 0}, {process_fd(), POLLIN, 0}}};
  const int n = PollUntil(polled, deadline);
  if (n < 0) return {Code::kIo, "poll: " + ErrnoText(errno)};
  if (n == 0) return {Code::kTimeout, "no answer in time"};
  if (polled[0].revents != 0) return {};  // its last message counts, even if it is dead by now
  if (polled[1].revents != 0) return {Code::kRefused, "this process has stopped serving its peers"};
  return Lost(0);
}

// ---- processes

ProcessSeen SeeProcessOf(const PeerIdentity& who, pid_t pid, int pidfd, std::chrono::nanoseconds waited) {
  Sight sight = SeeProcess(pid, pidfd);
  ProcessSeen seen{who.session, who.pid, std::move(sight.state), std::move(sight.where), "", sight.exit_code};
  seen.waited_ns = static_cast<std::uint64_t>(std::max<std::chrono::nanoseconds::rep>(waited.count(), 0));
  return seen;
}

ProcessSeen SeeProcessOf(const PeerIdentity& who, const PeerConnection* open, const ConnectionContext& context,
                         std::chrono::nanoseconds waited) {
  if (open != nullptr) return SeeProcessOf(who, open->pid(), open->process_fd(), waited);
  const auto connected = ConnectTo(context, who.session);
  if (connected) return SeeProcessOf(who, connected->owner.pid, connected->process.get(), waited);
  ProcessSeen seen = SeeProcessOf(who, 0, -1, waited);
  if (connected.status().code() == Code::kPeerLost && !IsNameless(context, who.session)) seen.state = "gone";
  return seen;
}

}  // namespace amem
