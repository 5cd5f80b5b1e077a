// Where connections to a session come in: its listening sockets, and what is done while the process can take none.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "journal/base/no_copies.h"
#include "replay/peers/unix/loop.h"
#include "replay/peers/unix/socket.h"

namespace amem {

// The service thread's own, but for Open.
class Entrance : NoCopies {
 public:
  using Time = ServiceLoop::Clock::time_point;
  struct Listeners {
    Listener in_directory, by_name;  // at least one of them
  };
  struct Visitor {  // of the user whose processes may connect
    UniqueFd socket;
    pid_t pid = 0;  // 0: in another pid namespace
    bool by_name = false;
  };
  using Admit = std::function<void(Visitor visitor)>;

  // `buffer`: for a whole message, of which nothing is read.
  Entrance(ServiceLoop& loop, Listeners listeners, uid_t uid, std::span<std::byte> buffer, Admit admit)
      : loop_(loop), listeners_(std::move(listeners)), uid_(uid), buffer_(buffer), admit_(std::move(admit)) {}

  Status Open();
  void Close() { listeners_ = {}; }
  [[nodiscard]] std::optional<Time> NextDeadline() const;
  void Timers(Time now);

 private:
  void Accept(const Listener& listener);
  void HaveSpare();
  void RefuseForWantOfDescriptors(const Listener& listener, bool of_host);  // no process has one
  void SendWantOfDescriptors(const UniqueFd& socket);
  void Listen(std::uint32_t events);

  ServiceLoop& loop_;
  Listeners listeners_;
  const uid_t uid_;
  const std::span<std::byte> buffer_;
  const Admit admit_;
  std::vector<ServiceLoop::Key> keys_;
  std::optional<Time> listen_again_;
  UniqueFd nothing_;                 // of which `spare_` is a duplicate
  UniqueFd spare_;                   // closed to accept a peer and tell it that no descriptor is left
  std::optional<Time> spare_again_;  // the spare one was lost to another thread, or could not be had
  // Since and until when all visits found no descriptor left.
  std::optional<Time> full_since_;
  Time full_last_{};
};

}  // namespace amem
