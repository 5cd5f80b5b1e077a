#include "replay/peers/unix/entrance.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "replay/peers/messages.h"

namespace amem {

constexpr auto kAcceptRetry = std::chrono::milliseconds(100);
constexpr int kVisitorsATurn = 16;                              // before others than the listener have their turn
constexpr auto kFullForLong = std::chrono::milliseconds(1000);  // descriptors may be had again before that

constexpr auto kSpareRetry = std::chrono::milliseconds(1000);

static bool IsVisited(const Listener& listener) {
  pollfd polled{listener.get(), POLLIN, 0};
  return ::poll(&polled, 1, 0) == 1 && (polled.revents & POLLIN) != 0;
}

Status Entrance::Open() {
  HaveSpare();
  for (const Listener* listener : {&listeners_.in_directory, &listeners_.by_name}) {
    if (!*listener) continue;
    const auto key =
        loop_.Add(listener->get(), EPOLLIN, [this, listener](ServiceLoop::Key, std::uint32_t) { Accept(*listener); });
    if (key == 0) return {Code::kIo, "starting the service of peers: epoll: " + ErrnoText(errno)};
    keys_.push_back(key);
  }
  return {};
}

std::optional<Entrance::Time> Entrance::NextDeadline() const {
  if (listen_again_ && spare_again_) return std::min(*listen_again_, *spare_again_);
  return listen_again_ ? listen_again_ : spare_again_;
}

void Entrance::Timers(Time now) {
  if (spare_again_ && now >= *spare_again_) HaveSpare();
  if (!listen_again_ || now < *listen_again_) return;
  listen_again_.reset();
  Listen(EPOLLIN);
}

void Entrance::HaveSpare() {
  if (!nothing_) nothing_ = UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!spare_) spare_ = UniqueFd(::fcntl(nothing_.get(), F_DUPFD_CLOEXEC, 0));
  spare_again_.reset();
  if (!spare_) spare_again_ = ServiceLoop::Clock::now() + kSpareRetry;
}

void Entrance::Listen(std::uint32_t events) {
  for (const auto key : keys_) loop_.Modify(key, events);
}

void Entrance::Accept(const Listener& listener) {
  for (int i = 0; i < kVisitorsATurn; ++i) {
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      const bool of_host = errno == ENFILE, no_descriptor = of_host || errno == EMFILE;
      if (no_descriptor || errno == ENOMEM || errno == ENOBUFS) {
        Listen(0);  // or the loop would spin on it
        listen_again_ = ServiceLoop::Clock::now() + kAcceptRetry;
      }
      if (no_descriptor) RefuseForWantOfDescriptors(listener, of_host);
      if (!no_descriptor) full_since_.reset();
      return;
    }
    full_since_.reset();
    const auto peer = CredentialsOf(socket.get());
    if (!peer || peer->uid != uid_) continue;  // closed: another user is none of ours
    admit_({std::move(socket), peer->pid, &listener == &listeners_.by_name});
  }
}

// Peers would wait for an answer until their deadline, and learn nothing. One descriptor is reserved to answer them.
void Entrance::RefuseForWantOfDescriptors(const Listener& listener, bool of_host) {
  if (!IsVisited(listener)) return full_since_.reset();  // the kernel wants a descriptor before it looks for a visitor
  const Time now = ServiceLoop::Clock::now();
  if (!full_since_ || now > full_last_ + kFullForLong) full_since_ = now;  // what was so long ago says nothing of today
  full_last_ = now;
  if (now < *full_since_ + kFullForLong) return;
  HaveSpare();
  // Any thread of the process may take the descriptor while it is free, which is why it is so only for somebody who waits.
  for (int i = 0; i < kVisitorsATurn && spare_ && IsVisited(listener); ++i) {
    spare_.Reset();
    if (of_host) nothing_.Reset();  // the two are one open file of the host's
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      const auto peer = CredentialsOf(socket.get());
      if (peer && peer->uid == uid_) SendWantOfDescriptors(socket);
      // Closed and the spare one again in one step: who has the answer may be a thread that waits for a free descriptor.
      if (nothing_ && ::dup3(nothing_.get(), socket.get(), O_CLOEXEC) >= 0) spare_ = std::move(socket);
    }
    socket.Reset();  // before that is asked for which it may have taken
    HaveSpare();
  }
}

void Entrance::SendWantOfDescriptors(const UniqueFd& socket) {
  const auto bytes =
      EncodeMessage({0, FailureMessage{{Code::kNoDescriptors,
                                        "it has no descriptor left to answer with: raise its limit of open files "
                                        "(ulimit -n)"}}});
  if (!bytes) return;
  (void)SendPacket(socket.get(), *bytes, {});
  // What has come and was not read would make the kernel drop the answer.
  (void)::shutdown(socket.get(), SHUT_RD);
  while (ReceivePacket(socket.get(), buffer_, false).state == Packet::State::kMessage) {
  }
}

}  // namespace amem
