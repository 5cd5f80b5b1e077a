#include "replay/peers/unix/connection.h"

#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <thread>

namespace amem {
namespace {

constexpr auto kSpin = std::chrono::microseconds(300);  // polls awake for so long before it sleeps
constexpr auto kRetryPause = std::chrono::milliseconds(1);

Status TimedOut() { return {Code::kTimeout, "no answer in time"}; }

Result<UniqueFd> ConnectBefore(const ConnectionContext& context, SessionId to, Deadline deadline) {
  while (true) {
    auto socket = ConnectTo(context, to);
    if (socket || socket.status().code() != Code::kTimeout || Passed(deadline)) return socket;
    std::this_thread::sleep_for(kRetryPause);
  }
}

}  // namespace

Result<UniqueFd> ConnectTo(const ConnectionContext& context, SessionId to) {
  auto socket = ConnectTo(context.directory, to);
  if (socket || socket.status().code() != Code::kPeerLost) return socket;
  if (context.elsewhere == nullptr || SocketExists(context.directory, to)) return socket;
  auto by_name = ConnectByName(to);
  if (!by_name && by_name.status().code() != Code::kTimeout) return socket;
  context.elsewhere->Add(to);
  return by_name;
}

std::string HowItEnded(const ConnectionContext& context, SessionId session) {
  if (context.elsewhere != nullptr && context.elsewhere->Contains(session))
    return HasSaidFarewell(session) ? "has closed" : kPeerDied;
  // A session that closes in order removes its socket first.
  return SocketExists(context.directory, session) ? kPeerDied : "has closed";
}

bool IsGone(const ConnectionContext& context, SessionId session, std::chrono::milliseconds patience) {
  const Deadline deadline = In(patience);
  while (true) {
    if (ConnectTo(context, session).status().code() == Code::kPeerLost) return true;
    if (Passed(deadline)) return false;
    std::this_thread::sleep_for(kRetryPause);
  }
}

PeerConnection::PeerConnection(const ConnectionContext& context, SessionId to, UniqueFd socket, UniqueFd process)
    : context_(context),
      to_(to),
      socket_(std::move(socket)),
      process_(std::move(process)),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(kMessageBytesMax)) {}

PeerConnection::~PeerConnection() { (void)::shutdown(socket_.get(), SHUT_RDWR); }

Result<std::unique_ptr<PeerConnection>> PeerConnection::Begin(const ConnectionContext& context, SessionId to, Purpose purpose,
                                                              const PeerIdentity& self, Deadline deadline) {
  auto socket = ConnectBefore(context, to, deadline);
  if (!socket) return socket.status();
  AMEM_ASSIGN(const auto owner, CredentialsOf(socket->get()));
  if (owner.uid != context.uid) {
    return Status{Code::kRefused, fmt::format("its socket belongs to user {} and not to user {}", owner.uid, context.uid)};
  }
  std::unique_ptr<PeerConnection> connection(new PeerConnection(context, to, *std::move(socket), WatchProcess(owner.pid)));
  AMEM_TRY(connection->Send({connection->NextRequest(), HelloMessage{kPeerProtocol, kPeerProtocolLeast, purpose, self, to}},
                            deadline));
  return connection;
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
  return {Code::kPeerLost, "it " + HowItEnded(context_, to_) + (error != 0 ? " (" + ErrnoText(error) + ")" : "")};
}

Result<bool> PeerConnection::TrySend(const Message& message) {
  AMEM_ASSIGN(const auto bytes, EncodeMessage(message));
  switch (SendPacket(socket_.get(), bytes, {})) {
    case Sent::kDone:
      return true;
    case Sent::kClosed:
      return Lost(0);
    default:
      return false;
  }
}

Status PeerConnection::Send(const Message& message, Deadline deadline) {
  while (true) {
    AMEM_ASSIGN(const auto sent, TrySend(message));
    if (sent) return {};
    AMEM_TRY(Wait(Until::kWritable, deadline));
  }
}

Result<std::optional<PeerConnection::Incoming>> PeerConnection::TryReceive() {
  Packet packet = ReceivePacket(socket_.get(), {buffer_.get(), kMessageBytesMax}, true);
  switch (packet.state) {
    case Packet::State::kNothing:
      return std::optional<Incoming>();
    case Packet::State::kClosed:
      return Lost(packet.error);
    case Packet::State::kMalformed:
      return Status{Code::kCorrupt, "it sent a message that is too long"};
    case Packet::State::kMessage:
      break;
  }
  auto message = DecodeMessage({buffer_.get(), packet.bytes});
  if (!message) return message.status().Within("it sent");
  if (auto* failure = std::get_if<FailureMessage>(&message->body)) failure->status = failure->status.ReportedBy(to_);
  if (packet.descriptors_lost) {
    // Reported as a failure of that request, so that a caller can still take its other answers.
    message->body =
        FailureMessage{{Code::kNoDescriptors,
                        "this process has no room for the descriptors that came: raise its limit of open files (ulimit -n)"}};
    packet.descriptors.clear();
  }
  return std::optional<Incoming>(Incoming{*std::move(message), std::move(packet.descriptors)});
}

Result<PeerConnection::Incoming> PeerConnection::Receive(Deadline deadline) {
  // An answer usually comes before a sleeping thread could be woken.
  for (const Deadline spin = std::min(deadline, std::chrono::steady_clock::now() + (HasIdleCores() ? kSpin : kSpin.zero()));
       std::chrono::steady_clock::now() < spin; ::sched_yield()) {
    AMEM_ASSIGN(auto incoming, TryReceive());
    if (incoming.has_value()) return std::move(*incoming);
  }
  while (true) {
    AMEM_ASSIGN(auto incoming, TryReceive());
    if (incoming.has_value()) return std::move(*incoming);
    AMEM_TRY(Wait(Until::kReadable, deadline));
  }
}

Status PeerConnection::Wait(Until until, Deadline deadline, int or_readable) {
  const int events = until == Until::kReadable ? POLLIN : until == Until::kWritable ? POLLOUT : POLLIN | POLLOUT;
  std::array<pollfd, 4> polled{{{socket_.get(), static_cast<short>(events), 0},
                                {context_.stop, POLLIN, 0},
                                {process_.get(), POLLIN, 0},
                                {or_readable, POLLIN, 0}}};
  while (true) {
    const int n = ::poll(polled.data(), polled.size(), MillisecondsUntil(deadline));
    if (n < 0 && errno != EINTR) return {Code::kIo, "poll: " + ErrnoText(errno)};
    if (n <= 0) {
      if (Passed(deadline)) return TimedOut();
      continue;
    }
    if (polled[0].revents != 0 || polled[3].revents != 0) return {};  // its last message counts, even if it is dead by now
    if (polled[1].revents != 0) return {Code::kRefused, "this process has stopped serving its peers"};
    if (polled[2].revents != 0) return Lost(0);
  }
}

}  // namespace amem
