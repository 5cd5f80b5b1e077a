#include "replay/peers/unix/socket.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

#include "journal/base/directory.h"
#include "replay/peers/messages.h"

namespace amem {
namespace {

constexpr int kBacklog = 512;
constexpr std::string_view kFarewell = "-closed";
constexpr std::size_t kControlBytes = CMSG_SPACE(sizeof(int) * kDescriptorsMax);

// A path of any length fits into a socket's address, and it leads into the directory that was checked, whatever its name means
// by now.
std::string InDirectory(int directory, const std::string& name) { return fmt::format("/proc/self/fd/{}/{}", directory, name); }

class SocketAddress {
 public:
  SocketAddress(int directory, const std::string& name) {
    const std::string path = InDirectory(directory, name);
    std::memcpy(address_.sun_path, path.c_str(), std::min(path.size() + 1, sizeof(address_.sun_path) - 1));
  }
  // An abstract one.
  SocketAddress(SessionId session, std::string_view suffix) {
    const std::string name = "amem-" + SocketName(session) + std::string(suffix);  // after a zero, and without one at its end
    std::memcpy(address_.sun_path + 1, name.data(), name.size());
    length_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address_); }
  [[nodiscard]] socklen_t length() const { return length_; }

 private:
  sockaddr_un address_{.sun_family = AF_UNIX, .sun_path = {}};
  socklen_t length_ = sizeof(address_);
};

Result<UniqueFd> NewSocket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return Status{CodeOfErrno(errno), "socket: " + ErrnoText(errno)};
  return fd;
}

Result<Listener> ListenAt(const SocketAddress& address) {
  AMEM_ASSIGN(auto fd, NewSocket());
  if (::bind(fd.get(), address.get(), address.length()) != 0) return Status{Code::kIo, "bind: " + ErrnoText(errno)};
  if (::listen(fd.get(), kBacklog) != 0) return Status{Code::kIo, "listen: " + ErrnoText(errno)};
  return Listener(std::move(fd));
}

// The sockets that this process listens on. Children get /dev/null in their places, so that closing the number there closes
// nothing else.
class LeftToParent {
 public:
  static LeftToParent& Get() {
    static LeftToParent all;
    return all;
  }
  // Replace(-1, socket) adds one, Replace(socket, -1) removes it. If there is no room, the socket's credentials alone tell
  // (StillListens).
  void Replace(int old, int by) {
    for (std::atomic<int>& place : sockets_) {
      int expected = old;
      if (place.compare_exchange_strong(expected, by)) return;
    }
  }

 private:
  LeftToParent() {
    for (std::atomic<int>& place : sockets_) place = -1;
    ::pthread_atfork(nullptr, nullptr, [] { Get().Leave(); });
  }
  // In a child. A process without a free descriptor opens nothing; the credentials of its sockets tell.
  void Leave() {
    const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    for (std::atomic<int>& place : sockets_)
      if (const int socket = place.exchange(-1); socket >= 0 && nothing) ::dup3(nothing.get(), socket, O_CLOEXEC);
  }
  std::array<std::atomic<int>, 64> sockets_;
};

Result<UniqueFd> ConnectTo(const SocketAddress& address) {
  auto fd = NewSocket();
  if (!fd) return fd;
  while (::connect(fd->get(), address.get(), address.length()) != 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return Status{Code::kTimeout, "its queue of connections is full"};
    if (errno == ENOENT)
      return Status{Code::kPeerLost,
                    "it has no socket that can be seen from here: it has ended, or somebody removed its socket, or it runs on "
                    "another host, or in a container with a network and a /tmp of its own (then name a "
                    "directory that both see in AMEM_SOCKET_DIR)"};
    if (errno == ECONNREFUSED) return Status{Code::kPeerLost, "nobody listens on its socket: its process has died"};
    return Status{Code::kIo, "connect: " + ErrnoText(errno)};
  }
  return fd;
}

Result<Connected> ConnectToLiving(const SocketAddress& address) {
  AMEM_ASSIGN(auto socket, ConnectTo(address));
  AMEM_ASSIGN(const auto owner, CredentialsOf(socket.get()));
  Connected connected{std::move(socket), owner, WatchProcess(owner.pid)};
  if (CanBeRead(connected.process.get()))
    return Status{Code::kPeerLost, "its process has died, and a child that it forked holds its socket"};
  return connected;
}

void TakeDescriptors(msghdr& header, Packet& packet) {
  for (cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
      packet.descriptors.emplace_back(fd);
    }
  }
}

}  // namespace

bool HasIdleCores() {
  static const bool many = std::thread::hardware_concurrency() >= 8;
  return many;
}

void SignalEvent(int event_fd) { (void)::eventfd_write(event_fd, 1); }

void ReadEvent(int event_fd) {
  eventfd_t count = 0;
  (void)::eventfd_read(event_fd, &count);
}

Result<UniqueFd> OpenSocketDirectory(const std::filesystem::path& path) {
  std::error_code failed;
  if (std::filesystem::is_symlink(path, failed))
    return Status{Code::kIo, "socket directory " + path.string() + " is a symbolic link: name the directory itself"};
  auto fd = OpenOwnDirectory("use as socket directory", path);
  if (!fd) return fd;
  struct stat info {};
  if (::fstat(fd->get(), &info) != 0) return Status{Code::kIo, "socket directory " + path.string() + ": " + ErrnoText(errno)};
  if (info.st_uid != ::geteuid()) {
    return Status{Code::kRefused, "socket directory " + path.string() + " belongs to user " + std::to_string(info.st_uid) +
                                      ", this process runs as user " + std::to_string(::geteuid()) +
                                      ": remove it or choose another"};
  }
  if ((info.st_mode & 077) != 0) {
    return Status{Code::kRefused,
                  "socket directory " + path.string() + " is open to other users: chmod 700 it, or choose another"};
  }
  return fd;
}

Listener::Listener(UniqueFd socket) : socket_(std::move(socket)) {
  if (socket_) LeftToParent::Get().Replace(-1, socket_.get());
}

Listener::~Listener() {
  if (socket_) LeftToParent::Get().Replace(socket_.get(), -1);
}

std::string SocketName(SessionId session) { return fmt::format("{:016x}", session.value); }

Result<Listener> ListenAt(int directory, SessionId session) {
  const std::string name = SocketName(session), early = "." + name;
  (void)::unlinkat(directory, early.c_str(), 0);
  auto listener = ListenAt(SocketAddress(directory, early));
  if (!listener) return listener.status().Within("this session's socket " + name);
  // link and unlink, not rename, which would take over another session's socket of that name.
  const bool named = ::linkat(directory, early.c_str(), directory, name.c_str(), 0) == 0;
  const int error = errno;
  (void)::unlinkat(directory, early.c_str(), 0);
  if (!named) return Status{Code::kIo, "naming this session's socket " + name + ": " + ErrnoText(error)};
  return listener;
}

void RemoveSocket(int directory, SessionId session) { (void)::unlinkat(directory, SocketName(session).c_str(), 0); }

bool SocketExists(int directory, SessionId session) {
  struct stat info {};
  if (directory < 0) return false;
  return ::fstatat(directory, SocketName(session).c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT;
}

// By its path, because overlayfs counts one link of any directory.
bool IsRemoved(int directory) { return PathOf(directory).ends_with(" (deleted)"); }

void SweepSockets(int directory) {
  if (!IsOnLocalFileSystem(directory)) return;  // elsewhere a socket that refuses may have its process on another host
  std::error_code failed;
  for (std::filesystem::directory_iterator at(InDirectory(directory, ""), failed), end; at != end; at.increment(failed)) {
    const std::string name = at->path().filename();
    const bool ours = name.size() == SocketName({}).size() && name.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (ours && ConnectToLiving({directory, name}).status().code() == Code::kPeerLost)
      (void)::unlinkat(directory, name.c_str(), 0);
  }
}

Result<Connected> ConnectTo(int directory, SessionId session) { return ConnectToLiving({directory, SocketName(session)}); }

// ---- abstract names --------------------------------------------------------------------------------------------------------

Result<Listener> ListenByName(SessionId session) { return ListenAt({session, ""}); }
Result<Connected> ConnectByName(SessionId session) { return ConnectToLiving({session, ""}); }
Result<Listener> SayFarewell(SessionId session) { return ListenAt({session, kFarewell}); }
bool HasSaidFarewell(SessionId session, uid_t uid) {
  const auto socket = ConnectTo(SocketAddress(session, kFarewell));
  const auto owner = socket ? CredentialsOf(socket->get()) : Result<ucred>(socket.status());
  return owner && owner->uid == uid;
}

void Elsewhere::Add(SessionId session) {
  const std::lock_guard lock(mutex_);
  sessions_.insert(session);
}

bool Elsewhere::Contains(SessionId session) const {
  const std::lock_guard lock(mutex_);
  return sessions_.contains(session);
}

Result<ucred> CredentialsOf(int socket) {
  ucred who{};
  socklen_t size = sizeof(who);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0)
    return Status{Code::kIo, "SO_PEERCRED: " + ErrnoText(errno)};
  return who;
}

UniqueFd WatchProcess(pid_t pid) {
  if (pid <= 0) return {};
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // close-on-exec by itself
}

bool CanBeRead(int fd) {
  pollfd polled{fd, POLLIN, 0};
  return fd >= 0 && ::poll(&polled, 1, 0) > 0;
}

Sent SendPacket(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors) {
  iovec data{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control;
  if (!descriptors.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    std::memset(control.data(), 0, header.msg_controllen);
    cmsghdr* item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(item), descriptors.data(), descriptors.size_bytes());
  }
  while (true) {
    if (::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return Sent::kDone;
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return Sent::kWouldBlock;
    return errno == ENOBUFS || errno == ENOMEM || errno == ETOOMANYREFS ? Sent::kTooManyInFlight : Sent::kClosed;
  }
}

Packet ReceivePacket(int socket, std::span<std::byte> into, bool accept_descriptors) {
  Packet packet;
  iovec data{into.data(), into.size()};
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control;
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (accept_descriptors) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
  ssize_t n = 0;
  while ((n = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return packet;
    packet.state = Packet::State::kClosed;
    packet.error = errno;
    return packet;
  }
  if (accept_descriptors) TakeDescriptors(header, packet);
  if (n == 0) {  // no message of ours is empty, so this is the end
    packet.state = Packet::State::kClosed;
    return packet;
  }
  packet.state = (header.msg_flags & MSG_TRUNC) != 0 ? Packet::State::kMalformed : Packet::State::kMessage;
  packet.descriptors_lost = accept_descriptors && (header.msg_flags & MSG_CTRUNC) != 0;
  packet.bytes = static_cast<std::size_t>(n);
  return packet;
}

}  // namespace amem
