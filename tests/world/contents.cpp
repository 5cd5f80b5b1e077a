// Kernels: they write to memory, and look whether it holds what it should.
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "tests/world/action.h"
#include "tests/world/findings.h"
#include "tests/world/launches.h"

namespace amem::world {
namespace {

// Nothing is known of contents that were never written, that a pause discarded, or whose owner has died.
bool Known(const Rank& rank, const Memory& memory) {
  const bool lost = memory.tag != nullptr && memory.losses != memory.tag->losses;
  return memory.value != 0 && !lost && !rank.OwnerDied(memory);
}

void SubmitUse(Rank& rank, Stream& stream, const Place& place, bool write) {
  Memory& memory = *place.memory;
  write = write && !memory.fixed;
  if (write) {
    memory.value = rank.NewValue();
    memory.losses = memory.tag != nullptr ? memory.tag->losses.load() : 0;
  }
  if (write || Known(rank, memory)) rank.Submit(stream, place, write, memory.value);
}

}  // namespace

// NCCL's kernels pass the gate; those of the program on memory of a tag do not, and nobody pauses the tag meanwhile.
void Use(Worker& worker, Place& place, bool write) {
  Memory& memory = *place.memory;
  Stream& stream = memory.tag != nullptr ? *memory.tag->stream : *worker.stream;
  if (memory.freed || stream.capturing()) return;
  std::shared_lock<std::shared_mutex> of_tag;
  if (memory.tag != nullptr) {
    of_tag = std::shared_lock(memory.tag->use, std::try_to_lock);
    if (!of_tag.owns_lock() || !memory.tag->usable) return;
  }
  if (place.kind == Kind::kTag) return SubmitUse(worker.rank, stream, place, write);
  if (Launches* const launches = worker.rank.launches)
    return launches->Alone(worker, &stream, [&] { UseAsKernel(worker, stream, place, write); });
  const auto entered = worker.rank.session->calls().EnterLaunch("a kernel", &stream);
  if (entered.owns_lock()) SubmitUse(worker.rank, stream, place, write);
}

// While ranks are stopped between launches nothing is paused before the call of NCCL's that makes this one has returned.
void UseAsKernel(Worker& worker, Stream& stream, Place& place, bool write) {
  const auto entered = worker.rank.session->calls().EnterLaunch("a kernel", &stream);
  if (!entered.owns_lock()) Found("NCCL's memory is paused inside a call that launches");
  SubmitUse(worker.rank, stream, place, write);
}

void Write(Worker& worker) {
  if (Place* const place = worker.Any([](const Place&) { return true; })) Use(worker, *place, true);
}

void Check(Worker& worker) {
  Place* const place = worker.Any([](const Place&) { return true; });
  if (place != nullptr) Use(worker, *place, false);
}

// Its own stream, or that of a tag, so that what is freed meanwhile is given back late.
void Capture(Worker& worker) {
  Stream& stream = worker.Pick(2) == 0 ? *worker.stream : *worker.rank.AnyTag(worker).stream;
  if (stream.capturing()) return;
  stream.SetCapturing(true);
  for (std::uint64_t i = worker.Pick(4); i > 0; --i) FreeSome(worker);
  std::this_thread::sleep_for(std::chrono::milliseconds(worker.Pick(4)));
  stream.SetCapturing(false);
}

}  // namespace amem::world
