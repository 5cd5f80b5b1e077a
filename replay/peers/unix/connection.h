// The calling end of a connection to another session: one thread at a time sends, waits and receives, with deadlines.
#pragma once

#include <poll.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "journal/base/deadline.h"
#include "journal/base/no_copies.h"
#include "replay/peers/messages.h"
#include "replay/peers/unix/socket.h"

namespace amem {

class SharedPageTable;

inline int MillisecondsUntil(Deadline deadline) { return static_cast<int>(LeftUntil(deadline).count()); }  // for poll
// Like poll, but with a deadline. If cores are idle it first spins, polling only the first descriptor, because an answer
// usually comes before a sleeping thread could be woken.
int PollUntil(std::span<pollfd> polled, Deadline until);

// A dying process ends its connections a moment before its socket refuses.
inline constexpr std::chrono::milliseconds kDyingPatience{500};

// Shared by all connections of a process, which must not outlive the descriptors.
struct ConnectionContext {
  int directory = -1;                // -1: there is none
  Elsewhere* elsewhere = nullptr;    // null: sessions are not reached by abstract names
  int stop = -1;                     // an eventfd that is readable once this process stops serving
  uid_t uid = 0;                     // of the processes that may be at the other end
  SharedPageTable* pages = nullptr;  // null: none is sent, and none is taken (tools)
};

// Connects in the directory, or else by the abstract name. Does not wait; see ConnectTo in socket.h.
Result<Connected> ConnectTo(const ConnectionContext& context, SessionId to);

inline constexpr std::chrono::milliseconds kToCallAgain{300};  // for members whose call failed by a death
// How a session ended, of one that has: kPeerDied or kPeerClosed. Of one that lives and ended a connection: kConnectionClosed.
inline constexpr const char *kPeerClosed = "has closed", *kConnectionClosed = "closed the connection";
std::string HowItEnded(const ConnectionContext& context, SessionId session);
[[nodiscard]] bool HasSaidFarewell(const ConnectionContext& context, SessionId session);

// Whether neither a name of the session nor a word of its end is found. It may live: somebody may have removed its socket.
[[nodiscard]] bool IsNameless(const ConnectionContext& context, SessionId session);

class PeerConnection : NoCopies {
 public:
  struct Incoming {
    Message message;
    std::vector<UniqueFd> descriptors;
  };

  ~PeerConnection();  // ends it for the peer even if a forked child holds the socket

  // Connects and says hello; does not wait for the answer. kPeerLost: the session is gone.
  static Result<std::unique_ptr<PeerConnection>> Begin(const ConnectionContext& context, SessionId to, Purpose purpose,
                                                       const PeerIdentity& self, Deadline deadline);
  // The answer to the hello, once per connection.
  Result<PeerIdentity> AwaitWelcome(Deadline deadline);

  // All below may fail with kTimeout, kPeerLost (closed, or the process died), kRefused (this process stops) and kCorrupt.
  Status Send(const Message& message, Deadline deadline);
  // Does not wait. False: there is no room now.
  Result<bool> TrySend(const Message& message) {
    AMEM_ASSIGN(const Sent sent, TrySend(message, {}));
    return sent == Sent::kDone;
  }
  Result<Incoming> Receive(Deadline deadline);
  Result<std::optional<Incoming>> TryReceive();
  // For `events` of poll.
  Status Wait(int events, Deadline deadline);

  // Nothing is sent to the other end any more, or taken from it, except what it has sent already.
  void HangUp();

  [[nodiscard]] int fd() const { return peer_.socket.get(); }
  [[nodiscard]] int process_fd() const { return peer_.process.get(); }  // a pidfd, or -1
  [[nodiscard]] pid_t pid() const { return peer_.owner.pid; }           // 0: cannot be seen from here
  [[nodiscard]] SessionId to() const { return to_; }
  std::uint64_t NextRequest() { return ++last_request_; }

 private:
  PeerConnection(const ConnectionContext& context, SessionId to, Connected peer);
  [[nodiscard]] Status Lost(int error) const;
  Result<Sent> TrySend(const Message& message, std::span<const int> descriptors);  // not kClosed
  Status SendHello(const HelloMessage& hello, Deadline deadline);

  ConnectionContext context_;
  SessionId to_;
  Connected peer_;
  std::uint64_t last_request_ = 0;
  std::unique_ptr<std::byte[]> buffer_;  // kMessageBytesMax
};

// ---- what this process sees of another session's process that it waits for or has lost

// The process at the other end of a socket. `pid` is the kernel's, in this pid namespace, not the peer's word.
ProcessSeen SeeProcessOf(const PeerIdentity& who, pid_t pid, int pidfd, std::chrono::nanoseconds waited);
// The process at the end of a connection that is `open`; null: connects to find it, without waiting. "gone": nobody listens.
ProcessSeen SeeProcessOf(const PeerIdentity& who, const PeerConnection* open, const ConnectionContext& context,
                         std::chrono::nanoseconds waited);

}  // namespace amem
