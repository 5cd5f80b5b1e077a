// A connection that came in to a session's service.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "journal/base/unique_fd.h"
#include "replay/peers/messages.h"
#include "replay/peers/unix/loop.h"

namespace amem {

struct Inbound {
  using Time = ServiceLoop::Clock::time_point;
  struct Silent {  // it has not said hello
    Time since;
    bool by_name = false;  // it came to the abstract socket
  };
  struct Outgoing {
    std::vector<std::byte> bytes;
    std::vector<UniqueFd> descriptors;
  };
  struct Outbox {
    std::deque<Outgoing> messages;
    std::uint32_t interest = 0;   // the events that epoll watches, which follow from the others
    std::optional<Time> retry{};  // of a send that the kernel refused for now
  };
  // The session at the other end waits for this session to come to its call.
  struct Awaiting {
    std::optional<Time> note_at{};            // when that will be recorded; none: it does not wait
    std::chrono::milliseconds interval{500};  // to the next record; in a call that goes well all have come sooner
  };

  std::uint64_t id = 0;  // never used again
  ServiceLoop::Key key = 0;
  UniqueFd socket;
  pid_t pid = 0;
  ProcessWatch process;          // of a session's connections for data the registry watches it
  std::optional<Silent> silent;  // none: it may go on
  Purpose purpose = Purpose::kData;
  PeerIdentity peer;
  Outbox outbox;
  Awaiting awaiting;
  std::optional<std::string> marked;  // why it will be closed at the end of this turn
};

}  // namespace amem
