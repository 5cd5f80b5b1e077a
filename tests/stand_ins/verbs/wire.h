// What cards send each other: one stream of messages a pair of processes and direction, answered in order.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>

namespace amem::card {

enum class Kind : std::uint32_t { kWrite, kWriteWithImm, kAnswer };

struct Header {
  Kind kind{};
  std::uint32_t to = 0;      // the queue pair
  std::uint32_t key = 0;     // of the region that is written
  std::uint32_t imm = 0;     // as the sender gave it
  std::uint32_t status = 0;  // of an answer: ibv_wc_status
  std::uint32_t unused = 0;
  std::uint64_t address = 0;  // in the region
  std::uint64_t bytes = 0;    // that follow
  std::uint64_t ticket = 0;   // an answer has that of its message
};

// A queue pair's number says on which card it is; a card is a process.
inline constexpr std::uint32_t kPairBits = 14;
inline std::uint32_t CardOf(std::uint32_t pair) { return pair >> kPairBits; }

// The abstract name of a card, which lives in the network namespace as the card's network would.
inline std::pair<sockaddr_un, socklen_t> NameOfCard(std::uint32_t card) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const int length = std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "amem-stand-in-card-%u", card);
  return {name, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length))};
}

inline bool SendAll(int fd, const void* data, std::size_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t sent = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}
inline bool ReceiveAll(int fd, void* data, std::size_t bytes) {
  for (char* at = static_cast<char*>(data); bytes > 0;) {
    const ssize_t received = ::recv(fd, at, bytes, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) return false;
    at += received;
    bytes -= static_cast<std::size_t>(received);
  }
  return true;
}

}  // namespace amem::card
