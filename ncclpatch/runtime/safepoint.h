// Safe points, and requests from outside: what connects the page that this rank shares with the tool (replay/control) to the
// session's memory. Without a session, without a journal and in a forked child a safe point is counted, and nothing else.
#pragma once

#include "replay/session/session.h"
#include "statemachine/types.h"

namespace amem::safepoint {

// Once, when the session has started: makes its page. Without one the rank cannot be asked, which is said once in the log.
void Begin(Session& session);
void ForgetInChild();

// Around a pause or resume of NCCL's memory that the program makes. Before a resume: waits while a request from outside stands.
void BeforeOwnResume(Session& session);
void OwnCycleEnded(Session& session, CycleKind kind, bool was_paused, bool succeeded);

}  // namespace amem::safepoint
