// Tags as in the C interface: names, several in one call, and "nccl" among them.
#pragma once

#include <optional>
#include <span>
#include <variant>

#include "ncclpatch/runtime/runtime.h"

namespace amem::tags {

// A pause or a resume of tags, and for whom. NCCL's memory is always waited for.
struct Request {
  std::optional<WantId> want = kPlainWant;  // none: a request from outside
  std::variant<HowToPause, HowToResume> how;
  IdleNow idle{};  // of a pause of NCCL's memory

  [[nodiscard]] CycleKind kind() const { return pause() != nullptr ? CycleKind::kPause : CycleKind::kResume; }
  [[nodiscard]] const HowToPause* pause() const { return std::get_if<HowToPause>(&how); }
  [[nodiscard]] const HowToResume* resume() const { return std::get_if<HowToResume>(&how); }
  // Whether the call returns once all is done; and whether a resume waits as long as others stay paused.
  [[nodiscard]] bool waits() const {
    return std::visit([](const auto& one) { return one.wait; }, how);
  }
  [[nodiscard]] bool is_patient() const { return resume() != nullptr && resume()->patient; }
};

// Carries it out for the tags in order. If one fails, the earlier ones are undone. kNotFound, kInvalid: a name is wrong, and
// nothing was done.
Status Cycle(std::span<const char* const> names, const Request& request);

// The want names these tags no more, and their memory stays as it is (Wants). kNotFound, kInvalid: a name is wrong; the want
// has ended for the others. kRefused: in a forked child.
Status LetGo(std::span<const char* const> names, WantId want);

// kOutOfMemory: a device has too little free memory for a resume of all these tags; nothing is done in any case.
Status HasRoomFor(std::span<const char* const> names);

Status Wait(const char* name, std::optional<void*> stream);  // the host, or a stream

}  // namespace amem::tags
