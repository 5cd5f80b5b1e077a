#include "ncclpatch/nccl/communicators.h"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/launches.h"
#include "ncclpatch/nccl/names.h"

namespace amem::nccl {
namespace {

struct Registry {
  std::mutex mutex;
  std::uint64_t last = 0;
  std::map<CommunicatorId, Communicator> all;
  std::map<const ncclComm*, CommunicatorId> by_address;
  std::map<CommunicatorId, std::map<std::uint64_t, std::uint64_t>> parts;  // calls that made parts of it, by their series
  Observer observer = nullptr;
  std::atomic<int> unready{0};

  void Notify(EventBody event) const {
    if (observer != nullptr) observer(std::move(event));
  }
};

bool IsUnready(const Communicator& one) { return one.stage == Stage::kMaking && one.address != nullptr; }

// With the lock held.
void Erase(Registry& registry, CommunicatorId id, const char* how) {
  if (const Communicator* const ended = FindIn(registry.all, id)) {
    if (IsUnready(*ended)) --registry.unready;
    if (ended->suspended) --registry::g_suspended;
    if (const auto* const known = FindIn(registry.by_address, ended->address); known != nullptr && *known == id)
      registry.by_address.erase(ended->address);
  }
  registry.parts.erase(id);
  registry.all.erase(id);
  launches::Ended(id);
  registry.Notify(CommunicatorEnded{id, how});
}

// Runs `body` with the lock held. If the lock or memory cannot be had, the fact stays unknown.
template <class Body>
void Locked(const Body& body) noexcept {
  try {
    Registry& registry = Forever<Registry>();
    const std::lock_guard lock(registry.mutex);
    body(registry);
  } catch (...) {
  }
}
// The same for a communicator, if it is known by that id or address.
template <class Body>
void With(CommunicatorId id, const Body& body) noexcept {
  Locked([&](Registry& registry) {
    if (auto* const known = FindIn(registry.all, id)) body(registry, *known);
  });
}
template <class Body>
void With(const ncclComm* address, const Body& body) noexcept {
  Locked([&](Registry& registry) {
    const auto* const id = FindIn(registry.by_address, address);
    if (auto* const known = id == nullptr ? nullptr : FindIn(registry.all, *id)) body(registry, *known);
  });
}

}  // namespace

void SetObserver(Observer observer) {
  Locked([&](Registry& registry) { registry.observer = observer; });
}

std::optional<Communicator> Find(const ncclComm* address) {
  std::optional<Communicator> found;
  With(address, [&](Registry&, Communicator& known) { found = known; });
  return found;
}

std::vector<Communicator> All() {
  std::vector<Communicator> found;
  Locked([&](Registry& registry) {
    for (const auto& [id, communicator] : registry.all) found.push_back(communicator);
  });
  return found;
}

std::uint64_t AsideNow() noexcept {
  std::uint64_t aside = 0;
  With(CurrentCommunicator(), [&](Registry&, Communicator& known) { aside = known.aside; });
  return aside;
}

void BeforeFork() {
  Forever<Registry>().mutex.lock();
  launches::BeforeFork();
}
void AfterFork() {
  launches::AfterFork();
  Forever<Registry>().mutex.unlock();
}

CommunicatorId registry::Begin(const Communicator& known) noexcept {
  CommunicatorId id;
  Locked([&](Registry& registry) {
    Communicator begun = known;
    begun.id = CommunicatorId{registry.last + 1};
    registry.all.emplace(begun.id, begun);
    id = CommunicatorId{++registry.last};
    launches::Began(begun);
    registry.Notify(CommunicatorBegun{id, begun.parent, begun.how, begun.rank, begun.ranks});
  });
  return id;
}

void registry::Bind(CommunicatorId id, ncclComm* address) noexcept {
  With(id, [&](Registry& registry, Communicator& known) {
    if (known.address == address) return;
    if (const auto* const old = FindIn(registry.by_address, address)) Erase(registry, *old, "destroyed");
    registry.by_address[address] = id;
    known.address = address;
    if (IsUnready(known)) ++registry.unready;
    launches::Bound(id, address);
  });
}

void registry::MarkReady(const Communicator& now) noexcept {
  With(now.id, [&](Registry& registry, Communicator& known) {
    if (known.stage != Stage::kMaking) return;
    if (IsUnready(known)) --registry.unready;
    known.stage = Stage::kReady;
    known.rank = now.rank;
    known.ranks = now.ranks;
    known.device = now.device;
    launches::Ready(known);
    registry.Notify(CommunicatorReady{known.id, known.name, known.rank, known.ranks, known.device});
  });
}

void registry::MarkStage(const ncclComm* address, Stage stage) noexcept {
  With(address, [&](Registry& registry, Communicator& known) {
    if (IsUnready(known)) --registry.unready;
    known.stage = stage;
  });
}

void registry::End(CommunicatorId id, const char* how) noexcept {
  With(id, [&](Registry& registry, Communicator&) { Erase(registry, id, how); });
}

CommunicatorId registry::Detach(const ncclComm* address) noexcept {
  CommunicatorId id;
  With(address, [&](Registry& registry, Communicator& known) {
    id = known.id;
    if (IsUnready(known)) --registry.unready;
    known.address = nullptr;
    registry.by_address.erase(address);
    launches::Unbound(address);
  });
  return id;
}

CommunicatorId registry::IdOf(const ncclComm* address) noexcept {
  CommunicatorId id;
  if (address != nullptr) With(address, [&](Registry&, Communicator& known) { id = known.id; });
  return id;
}

registry::CountedPart registry::CountNextPart(const ncclComm* parent, const names::Part& part) noexcept {
  CountedPart counted;
  if (part.series == 0) return counted;
  With(parent, [&](Registry& registry, Communicator& known) {
    const std::uint64_t number = ++registry.parts[known.id][part.series];
    counted = {.parent = known.id, .series = part.series, .name = names::OfPart(known.name, part, number)};
  });
  return counted;
}

void registry::RetractPart(const CountedPart& part) noexcept {
  With(part.parent, [&](Registry& registry, Communicator& known) { --registry.parts[known.id][part.series]; });
}

bool registry::SetSuspended(CommunicatorId id, bool suspended) noexcept {
  bool changed = false;
  With(id, [&](Registry& registry, Communicator& known) {
    if (known.suspended == suspended) return;
    known.suspended = suspended;
    g_suspended += suspended ? 1 : -1;
    changed = true;
    registry.Notify(CommunicatorSuspended{id, suspended});
  });
  return changed;
}

void registry::SetAside(CommunicatorId id, std::uint64_t pause) noexcept {
  With(id, [&](Registry&, Communicator& known) { known.aside = pause; });
}

bool registry::AnyUnready() noexcept { return Forever<Registry>().unready.load(std::memory_order_relaxed) > 0; }

}  // namespace amem::nccl
