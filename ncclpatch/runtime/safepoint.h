// Safe points, and requests from outside: what connects this rank's side of them (replay/control) to the session's memory.
// Without a session and in a forked child a safe point is counted, and nothing else. Where the program has begun to use CUDA, a
// safe point starts the session, so that the rank can be asked before it has used NCCL or a tag.
#pragma once

#include <filesystem>

#include "journal/base/no_copies.h"
#include "replay/peers/requests.h"
#include "replay/session/session.h"
#include "statemachine/types.h"

namespace amem::safepoint {

control::RequestServer& Requests();  // never destroyed
// Once, when the session has started.
void Begin(Session& session, const std::filesystem::path& socket_directory);
void ForgetInChild();

// Of a thread of the program: waits while a pause of its own would wait for a request.
void AwaitRequest();

// Around a pause or resume of NCCL's memory that the program makes; nothing where a request makes it. It begins when a request
// from outside that holds the rank has ended.
class OwnCycle : NoCopies {
 public:
  OwnCycle(Session& session, CycleKind kind);
  ~OwnCycle();  // without Ended: it has failed
  void Ended(const Status& status) { succeeded_ = status.ok(); }

 private:
  Session& session_;
  const CycleKind kind_;
  bool succeeded_ = false;
};

}  // namespace amem::safepoint
