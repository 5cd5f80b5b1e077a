// Tags as in the C interface: names, several in one call, and "nccl" among them.
#pragma once

#include <optional>
#include <span>

#include "ncclpatch/runtime/runtime.h"

namespace amem::tags {

// Pauses or resumes the tags in order. If one fails, the earlier ones are undone. kNotFound, kInvalid: a name is wrong, and
// nothing was done.
struct Asked {
  std::optional<WantId> want = kPlainWant;  // none: a request from outside
  CycleKind kind{};
  bool wait = true;
  std::optional<void*> after;  // a stream (HowToPause)
  int priority = 0;
  bool patient = false;  // Runtime::RunCycle
  bool keeps = false;    // a pause saves contents, whatever a tag's policy
  IdleNow idle{};        // of a pause of NCCL's memory
};
Status Cycle(std::span<const char* const> names, const Asked& asked);

// The want names these tags no more, and their memory stays as it is (Wants).
Status LetGo(std::span<const char* const> names, WantId want);

// kOutOfMemory: a device has too little free memory for a resume of all these tags; nothing is done in any case.
Status HasRoomFor(std::span<const char* const> names);

Status Wait(const char* name, std::optional<void*> stream);  // the host, or a stream

}  // namespace amem::tags
