// Unix sockets as AMem uses them: where they live, which users may talk, whole messages with descriptors beside them.
//
// Everything is close-on-exec and non-blocking; waiting is the business of PeerConnection and of the service's epoll.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <filesystem>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "journal/base/unique_fd.h"
#include "statemachine/types.h"

namespace amem {

std::string ErrnoText(int error);

// Whether a thread may wait awake for a moment: not where cores are few, as it would keep the one it waits for from running.
bool HasIdleCores();

// An eventfd as a bell: Signal makes it readable, Read silences it.
void SignalEvent(int event_fd);
void ReadEvent(int event_fd);

// The directory of all sockets of a user, made if it is missing. kRefused unless it belongs to this user, no other may enter
// it, and no other could have put a part of its path there. What comes back is a handle to exactly the directory that was
// checked.
Result<UniqueFd> OpenSocketDirectory(const std::filesystem::path& path);
std::string SocketName(SessionId session);  // 16 hex digits

// A listening socket. Children that this process forks do not hold it: one that only a child holds, such as a worker that
// loads data, would make others wait for a rank that has died.
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

// Listens under that name, which appears only once the socket listens, so that one in the directory that refuses has lost its
// process.
Result<Listener> ListenAt(int directory, SessionId session);
void RemoveSocket(int directory, SessionId session);
[[nodiscard]] bool SocketExists(int directory, SessionId session);
// Removes what processes that died have left. Never touches a socket that still listens.
void SweepSockets(int directory);

// Code::kPeerLost: no process listens there, or only a child of the one that did. Code::kTimeout: its queue is full now; try
// again.
Result<UniqueFd> ConnectTo(int directory, SessionId session);

// Abstract sockets: names of the network namespace, which processes find that have no directory in common, such as containers
// with a /tmp each. Anybody may connect to one, so both ends look at the other's user. A name is gone with its process; that a
// session has closed in order is told by a second name, which stays until the process ends.
Result<Listener> ListenByName(SessionId session);
Result<UniqueFd> ConnectByName(SessionId session);  // as ConnectTo
Result<Listener> SayFarewell(SessionId session);    // the name is there as long as what comes back
[[nodiscard]] bool HasSaidFarewell(SessionId session);

// The sessions that are reached by name, because this process cannot see their directory. From any thread.
class Elsewhere {
 public:
  void Add(SessionId session);
  [[nodiscard]] bool Contains(SessionId session) const;

 private:
  mutable std::mutex mutex_;
  std::set<SessionId> sessions_;
};

struct PeerCredentials {
  pid_t pid = 0;  // 0 when it lives in a pid namespace that cannot be seen from here
  uid_t uid = 0;
};
Result<PeerCredentials> CredentialsOf(int socket);

// A descriptor that becomes readable when that process has died, even while children it forked hold its sockets open; none if
// the process cannot be seen from here.
UniqueFd WatchProcess(pid_t pid);
[[nodiscard]] bool CanBeRead(int fd);  // now; false of -1

enum class Sent { kDone, kWouldBlock, kTooManyInFlight, kClosed };
// `descriptors` stay the caller's. kTooManyInFlight: the kernel holds too many descriptors of this user that are not
// received yet; try again shortly.
Sent SendPacket(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors);

struct Packet {
  enum class State { kMessage, kNothing, kClosed, kMalformed } state = State::kNothing;
  std::size_t bytes = 0;
  std::vector<UniqueFd> descriptors;
  bool descriptors_lost = false;  // this process could not take them all (RLIMIT_NOFILE)
  int error = 0;                  // errno behind kClosed, 0 for an end of file
};
// Without `accept_descriptors` the kernel closes any that come along.
Packet ReceivePacket(int socket, std::span<std::byte> into, bool accept_descriptors);

}  // namespace amem
