#include "replay/peers/unix/entrance.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "replay/peers/messages.h"

namespace amem {

constexpr auto kAcceptRetry = std::chrono::milliseconds(100);
constexpr int kVisitorsATurn = 16;                              // before others than the listener have their turn
constexpr auto kFullForLong = std::chrono::milliseconds(1000);  // descriptors may be had again before that

static UniqueFd SpareDescriptor() { return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

Status Entrance::Open() {
  spare_ = SpareDescriptor();
  for (const Listener* listener : {&listeners_.in_directory, &listeners_.by_name}) {
    if (!*listener) continue;
    const auto key =
        loop_.Add(listener->get(), EPOLLIN, [this, listener](ServiceLoop::Key, std::uint32_t) { Accept(*listener); });
    if (key == 0) return {Code::kIo, "starting the service of peers: epoll: " + ErrnoText(errno)};
    keys_.push_back(key);
  }
  return {};
}

void Entrance::Timers(Time now) {
  if (!listen_again_ || now < *listen_again_) return;
  listen_again_.reset();
  Listen(EPOLLIN);
}

void Entrance::Listen(std::uint32_t events) {
  for (const auto key : keys_) loop_.Modify(key, events);
}

void Entrance::Accept(const Listener& listener) {
  for (int i = 0; i < kVisitorsATurn; ++i) {
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      const bool no_descriptor = errno == EMFILE || errno == ENFILE;
      if (no_descriptor || errno == ENOMEM || errno == ENOBUFS) {
        Listen(0);  // or the loop would spin on it
        listen_again_ = ServiceLoop::Clock::now() + kAcceptRetry;
      }
      if (no_descriptor) RefuseForWantOfDescriptors(listener);
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
void Entrance::RefuseForWantOfDescriptors(const Listener& listener) {
  if (!full_since_) full_since_ = ServiceLoop::Clock::now();
  if (ServiceLoop::Clock::now() < *full_since_ + kFullForLong) return;
  for (int i = 0; i < kVisitorsATurn && spare_; ++i) {
    spare_.Reset();
    {
      const UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) i = kVisitorsATurn;  // there is none any more; one is opened again all the same
      const auto peer = CredentialsOf(socket.get());
      if (peer && peer->uid == uid_) SendWantOfDescriptors(socket);
    }
    spare_ = SpareDescriptor();
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
