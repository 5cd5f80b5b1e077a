// Memory of the program under tags.
#include <fmt/format.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "tests/world/action.h"
#include "tests/world/findings.h"

namespace amem::world {
namespace {

void Allocate(Worker& worker, Tag& tag, Bytes bytes) {
  if (worker.places.size() >= 24) return;
  Rank& rank = worker.rank;
  const auto address = rank.session->pools().Allocate(tag.id, bytes, rank.device);
  if (!rank.Ok(address.status(), "allocate in a tag")) return;
  auto place = std::make_unique<Place>();
  place->kind = Kind::kTag;
  place->address = *address;
  place->memory = std::make_shared<Memory>(Memory{.bytes = bytes, .device = rank.device, .tag = &tag});
  Trace(fmt::format("{} bytes at {:#x} of tag {}", bytes, address->value, tag.id.value));
  worker.places.push_back(std::move(place));
  Use(worker, *worker.places.back(), true);
}

PoolSnapshot StandingOf(Rank& rank, const Tag& tag) {
  for (PoolSnapshot& one : rank.session->pools().Snapshot()) {
    if (one.id == tag.id) return one;
  }
  Found("a tag is not known any more");
}

// With the tag's lock.
void PauseTag(Worker& worker, Tag& tag) {
  Rank& rank = worker.rank;
  HowToPause how;
  how.wait = worker.Pick(3) != 0;
  if (!rank.settings.Without("after") && worker.Pick(4) == 0) how.after = tag.stream;
  Rank::PinnedBefore pinned(rank);
  if (!how.wait) ++rank.pausing;
  tag.usable = false;
  const Status paused = rank.session->pools().Pause(tag.id, how);
  Trace(fmt::format("tag {} paused, {}", tag.id.value, how.wait ? "waited for" : "not waited for"));
  if (!tag.preserves) ++tag.losses;
  tag.behind = !how.wait;
  if (rank.Ok(paused, "pause a tag")) return;
  if (std::exchange(tag.behind, false)) --rank.pausing;
  tag.usable = StandingOf(rank, tag).state == "resident";
  pinned.Check(paused, !tag.usable);
}

// The stream waits for the contents, and not the host. False: it failed.
bool ResumeBehind(Rank& rank, Tag& tag) {
  if (!rank.Ok(rank.session->pools().Resume(tag.id, {.wait = false}), "resume a tag without waiting")) return false;
  return rank.Ok(rank.session->pools().WaitOn(tag.id, tag.stream), "wait for a tag on a stream");
}

}  // namespace

// With the tag's lock. Something else may fail a call of the driver meanwhile, and a stream may be captured for a moment.
void ResumeTag(Rank& rank, Tag& tag) {
  for (int tries = 30; tries > 0 && !tag.usable; --tries) {
    const bool behind = tries % 2 == 0 && ResumeBehind(rank, tag);
    tag.usable = behind || rank.Ok(rank.session->pools().Resume(tag.id, {}), "resume a tag");
    if (!tag.usable) rank.simulator->ForgetPlannedFailures();
    if (!tag.usable && rank.settings.starves) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (!tag.usable) Found("a tag cannot be resumed");
  if (std::exchange(tag.behind, false)) --rank.pausing;
  Trace(fmt::format("tag {} resumed", tag.id.value));
}

void AllocateInTag(Worker& worker) { Allocate(worker, worker.rank.AnyTag(worker), 1 + worker.Pick(40 * kPage)); }
// More than one piece of pinned host memory.
void AllocateMuchInTag(Worker& worker) {
  if (!HasMuch(worker)) Allocate(worker, *worker.rank.tags[0], (Bytes{33} << 20) + worker.Pick(kPage));
}

void PauseOrResumeTag(Worker& worker) {
  Tag& tag = worker.rank.AnyTag(worker);
  const std::unique_lock lock(tag.use, std::try_to_lock);
  if (!lock.owns_lock()) return;
  if (tag.usable) {
    PauseTag(worker, tag);
  } else {
    ResumeTag(worker.rank, tag);
  }
}

void TrimOrLook(Worker& worker) {
  Session& session = *worker.rank.session;
  switch (worker.Pick(4)) {
    case 0:
      return session.devices().TrimPinned(worker.Pick(2) << 20);
    case 1:
      if (session.statistics().Json().empty()) Found("there are no statistics");
      break;
    case 2:
      if (session.statistics().MemoryJson().empty()) Found("there are no statistics of memory");
      break;
    default:
      if (session.statistics().Text().empty()) Found("there is no text of the statistics");
  }
}

}  // namespace amem::world
