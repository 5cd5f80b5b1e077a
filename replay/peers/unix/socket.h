// Unix sockets as AMem uses them: where they are, which users may talk, whole messages with descriptors. Everything is
// close-on-exec and non-blocking; PeerConnection and the service's epoll wait.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <filesystem>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "journal/base/file.h"
#include "statemachine/types.h"

namespace amem {

// Whether a thread may poll for a moment: not with few cores, where it would keep the other side from running.
bool HasIdleCores();

// An eventfd as a bell: Signal makes it readable, Read silences it.
void SignalEvent(int event_fd);
void ReadEvent(int event_fd);

// The directory of all sockets of a user, made if it is missing. kRefused unless it is this user's, closed to others, and no
// other user could have placed a part of its path. Returns a handle to exactly the directory that was checked.
Result<UniqueFd> OpenSocketDirectory(const std::filesystem::path& path);
std::string SocketName(SessionId session);  // 16 hex digits

// A listening socket. Forked children do not hold it: a socket that only a child holds would make others wait for a rank that
// has died.
class Listener {
 public:
  Listener() = default;
  explicit Listener(UniqueFd socket);
  Listener(Listener&&) noexcept = default;
  Listener& operator=(Listener&& other) noexcept {
    std::swap(socket_, other.socket_);
    return *this;
  }
  ~Listener();
  [[nodiscard]] int get() const { return socket_.get(); }
  explicit operator bool() const { return static_cast<bool>(socket_); }

 private:
  UniqueFd socket_;
};

// Listens under that name, which appears only once the socket listens; so one in the directory that refuses has lost its
// process.
Result<Listener> ListenAt(int directory, SessionId session);
void RemoveSocket(int directory, SessionId session);
[[nodiscard]] bool SocketExists(int directory, SessionId session);  // true also where that cannot be seen
[[nodiscard]] bool IsRemoved(int directory);  // which says nothing of the sessions whose sockets were in it
// Removes what dead processes left. Never touches a socket that still listens.
void SweepSockets(int directory);

// Of the process at the other end; pid 0: in a pid namespace that cannot be seen from here.
Result<ucred> CredentialsOf(int socket);
struct Connected {
  UniqueFd socket;
  ucred owner{};     // of the process that listens, not of a child that holds its socket
  UniqueFd process;  // as WatchProcess
};
// kPeerLost: no process listens there, or only a child of the one that did. kTimeout: its queue is full now; try again.
Result<Connected> ConnectTo(int directory, SessionId session);

// Abstract sockets are names of the network namespace, which processes without a common directory find, such as containers with
// a /tmp each. Anybody may connect, so both ends check the other's user. A name ends with its process; a second name, which
// stays until the process ends, says that the session closed in order.
Result<Listener> ListenByName(SessionId session);
Result<Connected> ConnectByName(SessionId session);                // as ConnectTo
Result<Listener> SayFarewell(SessionId session);                   // the name exists as long as the result
[[nodiscard]] bool HasSaidFarewell(SessionId session, uid_t uid);  // a process of that user has, and is seen to

// Sessions that are reached by name, because this process cannot see their directory. Any thread.
class Elsewhere {
 public:
  void Add(SessionId session);
  [[nodiscard]] bool Contains(SessionId session) const;

 private:
  mutable std::mutex mutex_;
  std::set<SessionId> sessions_;
};

// A descriptor that becomes readable when the process has died, even if children it forked hold its sockets; none if the
// process cannot be seen from here.
UniqueFd WatchProcess(pid_t pid);
[[nodiscard]] bool CanBeRead(int fd);  // now; false of -1

enum class Sent { kDone, kWouldBlock, kTooManyInFlight, kClosed };
// `descriptors` stay the caller's. kTooManyInFlight: the kernel holds too many of this user's descriptors that nobody received
// yet; try again shortly.
Sent SendPacket(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors);

struct Packet {
  enum class State { kMessage, kNothing, kClosed, kMalformed } state = State::kNothing;
  std::size_t bytes = 0;
  std::vector<UniqueFd> descriptors;
  bool descriptors_lost = false;  // this process could not take all (RLIMIT_NOFILE)
  int error = 0;                  // errno behind kClosed; 0: end of file
};
// Without `accept_descriptors` the kernel closes any that come.
Packet ReceivePacket(int socket, std::span<std::byte> into, bool accept_descriptors);

}  // namespace amem
