// Preloaded, it kills the process (SIGKILL) at the nth message that it sends over a socket: before the message is sent for odd
// numbers, after it for even ones. STAND_IN_KILL_AT_MESSAGE is that number, from 1 on.
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>

namespace {

std::atomic<int> moments{0};

void Moment() {
  const char* wanted = std::getenv("STAND_IN_KILL_AT_MESSAGE");
  if (wanted != nullptr && ++moments == std::atoi(wanted)) kill(getpid(), SIGKILL);
}

}  // namespace

extern "C" [[gnu::visibility("default")]] ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  Moment();
  const ssize_t sent = syscall(SYS_sendmsg, socket, message, flags);
  Moment();
  return sent;
}
