#include "ncclpatch/nccl/communicators.h"

#include <atomic>
#include <map>
#include <mutex>

#include "ncclpatch/nccl/attribution.h"

namespace amem::nccl {
namespace {

struct Registry {
  std::mutex mutex;
  std::uint64_t last = 0;
  std::map<CommunicatorId, Communicator> all;
  std::map<const ncclComm*, CommunicatorId> by_address;
  Observer* observer = nullptr;
  std::atomic<int> unready{0}, suspended{0};
};

// Never destroyed, because NCCL's threads may call after main has returned.
Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

bool IsUnready(const Communicator& one) { return one.stage == Stage::kMaking && one.address != nullptr; }

// With the lock held.
void Erase(Registry& registry, std::map<CommunicatorId, Communicator>::iterator at, const char* how) {
  const CommunicatorId id = at->first;
  if (IsUnready(at->second)) --registry.unready;
  if (at->second.suspended) --registry.suspended;
  if (const auto known = registry.by_address.find(at->second.address);
      known != registry.by_address.end() && known->second == id)
    registry.by_address.erase(known);
  registry.all.erase(at);
  if (registry.observer != nullptr) registry.observer->Ended(id, how);
}

// Runs `body` with the lock held. If the lock or memory cannot be had, the fact stays unknown.
template <class Body>
void Locked(const Body& body) noexcept {
  try {
    Registry& registry = TheRegistry();
    const std::lock_guard lock(registry.mutex);
    body(registry);
  } catch (...) {
  }
}

}  // namespace

void SetObserver(Observer* observer) {
  Locked([&](Registry& registry) { registry.observer = observer; });
}

std::optional<Communicator> Find(const ncclComm* address) {
  std::optional<Communicator> found;
  Locked([&](Registry& registry) {
    const auto at = registry.by_address.find(address);
    if (at != registry.by_address.end()) found = registry.all.at(at->second);
  });
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
  const CommunicatorId id = CurrentCommunicator();
  Locked([&](Registry& registry) {
    if (const auto at = registry.all.find(id); at != registry.all.end()) aside = at->second.aside;
  });
  return aside;
}

void BeforeFork() { TheRegistry().mutex.lock(); }
void AfterFork() { TheRegistry().mutex.unlock(); }

CommunicatorId registry::Begin(const Communicator& known) noexcept {
  CommunicatorId id;
  Locked([&](Registry& registry) {
    Communicator begun = known;
    begun.id = CommunicatorId{registry.last + 1};
    registry.all.emplace(begun.id, begun);
    id = CommunicatorId{++registry.last};
    if (registry.observer != nullptr) registry.observer->Begun(begun);
  });
  return id;
}

void registry::Bind(CommunicatorId id, ncclComm* address) noexcept {
  Locked([&](Registry& registry) {
    const auto at = registry.all.find(id);
    if (at == registry.all.end() || at->second.address == address) return;
    if (const auto old = registry.by_address.find(address); old != registry.by_address.end())
      Erase(registry, registry.all.find(old->second), "destroyed");
    registry.by_address[address] = id;
    at->second.address = address;
    if (IsUnready(at->second)) ++registry.unready;
  });
}

void registry::MarkReady(const Communicator& now) noexcept {
  Locked([&](Registry& registry) {
    const auto at = registry.all.find(now.id);
    if (at == registry.all.end() || at->second.stage != Stage::kMaking) return;
    if (IsUnready(at->second)) --registry.unready;
    at->second.stage = Stage::kReady;
    at->second.hash = now.hash;
    at->second.rank = now.rank;
    at->second.ranks = now.ranks;
    at->second.device = now.device;
    if (registry.observer != nullptr) registry.observer->Ready(at->second);
  });
}

void registry::MarkStage(const ncclComm* address, Stage stage) noexcept {
  Locked([&](Registry& registry) {
    const auto at = registry.by_address.find(address);
    if (at == registry.by_address.end()) return;
    Communicator& communicator = registry.all.at(at->second);
    if (IsUnready(communicator)) --registry.unready;
    communicator.stage = stage;
  });
}

void registry::End(CommunicatorId id, const char* how) noexcept {
  Locked([&](Registry& registry) {
    if (const auto at = registry.all.find(id); at != registry.all.end()) Erase(registry, at, how);
  });
}

CommunicatorId registry::Detach(const ncclComm* address) noexcept {
  CommunicatorId id;
  Locked([&](Registry& registry) {
    const auto at = registry.by_address.find(address);
    if (at == registry.by_address.end()) return;
    id = at->second;
    Communicator& communicator = registry.all.at(id);
    if (IsUnready(communicator)) --registry.unready;
    communicator.address = nullptr;
    registry.by_address.erase(at);
  });
  return id;
}

CommunicatorId registry::IdOf(const ncclComm* address) noexcept {
  CommunicatorId id;
  if (address == nullptr) return id;
  Locked([&](Registry& registry) {
    if (const auto at = registry.by_address.find(address); at != registry.by_address.end()) id = at->second;
  });
  return id;
}

bool registry::SetSuspended(CommunicatorId id, bool suspended) noexcept {
  bool changed = false;
  Locked([&](Registry& registry) {
    const auto at = registry.all.find(id);
    if (at == registry.all.end() || at->second.suspended == suspended) return;
    at->second.suspended = suspended;
    registry.suspended += suspended ? 1 : -1;
    changed = true;
    if (registry.observer != nullptr) registry.observer->Suspended(id, suspended);
  });
  return changed;
}

void registry::SetAside(CommunicatorId id, std::uint64_t pause) noexcept {
  Locked([&](Registry& registry) {
    if (const auto at = registry.all.find(id); at != registry.all.end()) at->second.aside = pause;
  });
}

bool registry::AnySuspended() noexcept { return TheRegistry().suspended.load(std::memory_order_relaxed) > 0; }

bool registry::AnyUnready() noexcept { return TheRegistry().unready.load(std::memory_order_relaxed) > 0; }

}  // namespace amem::nccl
