#include "ncclpatch/nccl/graphs.h"

#include "ncclpatch/nccl/gate.h"

namespace amem::nccl::launches::graphs {
namespace {

constinit std::atomic<bool> g_followed{false}, g_some{false};  // g_some: some graph has launches of NCCL's

// None can be told from what ran past AMem from now on.
void CannotFollow(All& all, const Captured& captured) {
  for (const CapturedLaunch& one : captured.launches)
    if (const auto of = all.by_id.find(one.id); of != all.by_id.end()) of->second->captured.store(true);
}

template <class Body>
void IfSome(const Body& body) noexcept {
  if (g_some.load(std::memory_order_relaxed)) Locked(body);
}

}  // namespace

void Follow() noexcept { g_followed.store(true); }

bool Remember(const void* graph, std::span<const Launched> launched) noexcept {
  if (graph == nullptr || !g_followed.load()) return false;
  Locked([&](All& all) {
    Captured& captured = all.captured[graph];
    captured.instantiated = false;
    for (const Launched& one : launched)
      if (one.counted != nullptr) captured.launches.push_back({one.counted->id, one.shape, one.peer});
    g_some.store(true);
  });
  return true;
}

void Copied(const void* to, const void* from) noexcept {
  IfSome([&](All& all) {
    const auto found = all.captured.find(from);
    if (found == all.captured.end()) return;
    const std::vector<CapturedLaunch> launches = found->second.launches;
    found->second.instantiated = true;  // as a part of the other
    Captured& into = all.captured[to];
    into.instantiated = false;
    into.launches.insert(into.launches.end(), launches.begin(), launches.end());
  });
}

void Instantiated(const void* made, const void* graph) noexcept {
  IfSome([&](All& all) {
    const auto found = all.captured.find(graph);
    if (found == all.captured.end()) return static_cast<void>(all.captured.erase(made));
    found->second.instantiated = true;
    const Captured captured = found->second;
    all.captured[made] = captured;
  });
}

void Destroyed(const void* graph) noexcept {
  IfSome([&](All& all) {
    const auto found = all.captured.find(graph);
    if (found == all.captured.end()) return;
    if (!found->second.instantiated) CannotFollow(all, found->second);
    all.captured.erase(found);
  });
}

void Lost(const void* graph_or_made) noexcept {
  IfSome([&](All& all) {
    if (const auto found = all.captured.find(graph_or_made); found != all.captured.end()) CannotFollow(all, found->second);
  });
}

std::vector<Launched> LaunchesOf(const void* made, Stream stream) noexcept {
  std::vector<Launched> launched;
  IfSome([&](All& all) {
    const auto found = all.captured.find(made);
    if (found == all.captured.end()) return;
    for (const CapturedLaunch& one : found->second.launches)
      if (const auto of = all.by_id.find(one.id); of != all.by_id.end())
        launched.push_back({.counted = of->second.get(), .shape = one.shape, .peer = one.peer, .stream = stream});
  });
  return launched;
}

}  // namespace amem::nccl::launches::graphs
