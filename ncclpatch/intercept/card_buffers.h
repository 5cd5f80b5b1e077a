// Which of NCCL's allocations a network card will probably hold. They get a driver handle of their own when they are made.
//
// A registered part of a slab keeps the whole slab in every pause. It cannot be taken out: the driver maps handles whole, so
// all other parts would be unmapped for a moment, while the GPU may run a graph of the program's that AMem cannot hold off.
//
// NCCL connects to a card, makes the buffer of that connection and registers it, one after the other on one thread, and always
// by the same path through its code. So a path from which memory was registered once is known from then on. What comes from
// another path on a thread that has to do with a card is given a handle of its own as well, but only so often, because
// buffers between GPUs of one host are made on these threads too. (Before 2.22, or with NCCL_RUNTIME_CONNECT=0, NCCL makes the
// buffer that connections share long before it registers it.) A process without a card is as if this did not exist.
#pragma once

#include <map>
#include <mutex>

#include "replay/session/session.h"

namespace amem::intercept {

class CardBuffers {
 public:
  // This thread has connected to a card, or has registered memory with one, perhaps of the host.
  static void ThreadUsesCard();
  // Whether memory that NCCL makes now by this path gets a handle of its own. Call it once for each allocation.
  bool Takes(const CallSite& path);
  // A card holds the memory at that address now.
  void Registered(Session& session, Address address);

 private:
  static constexpr unsigned kTrials = 8;  // so many communicators may be made before their shared buffers are registered
  struct Path {
    unsigned trials = 0;
    bool registers = false;
  };
  std::mutex mutex_;
  std::map<CallSite, Path> paths_;
};

}  // namespace amem::intercept
