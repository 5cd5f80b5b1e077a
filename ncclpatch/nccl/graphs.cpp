#include "ncclpatch/nccl/graphs.h"

#include "ncclpatch/nccl/gate.h"

namespace amem::nccl::launches::graphs {
namespace {

using Kind = Captured::Kind;

constinit std::atomic<bool> g_followed{false}, g_some{false};  // g_some: something of this is remembered

// None can be told from what ran past AMem from now on.
void CannotFollow(All& all, const Captured& captured, const char* why) {
  for (const CapturedLaunch& one : captured.launches)
    if (const auto of = all.by_id.find(one.id); of != all.by_id.end()) of->second->captured.store(why);
}

void CannotFollowThose(All& all, const char* why, const auto& are_meant) {
  for (const auto& [handle, captured] : all.captured)
    if (are_meant(captured)) CannotFollow(all, captured, why);
}

template <class Body>
void IfSome(const Body& body) noexcept {
  if (g_some.load(std::memory_order_relaxed)) Locked(body);
}

// A clone, or what it was made of, may have the launches still.
void Forget(All& all, const void* handle) {
  const auto found = all.captured.find(handle);
  if (found == all.captured.end()) return;
  const Captured& captured = found->second;
  if (!*captured.instantiated && captured.instantiated.use_count() == 1) CannotFollow(all, captured, kDestroyed);
  all.captured.erase(found);
}

void Rename(All& all, const void* handle, const void* other) {
  auto captured = all.captured.extract(handle);
  if (captured.empty()) return;
  captured.key() = other;
  all.captured.insert(std::move(captured));
}

void Make(All& all, const void* made, const void* graph, bool by_the_device) {
  Captured of_graph;
  if (const auto found = all.captured.find(graph); found != all.captured.end()) {
    if (found->second.is_open) CannotFollow(all, found->second, kStillOpen);
    *found->second.instantiated = true;
    of_graph.launches = found->second.launches;
  }
  *of_graph.instantiated = true;
  of_graph.kind = by_the_device ? Kind::kByTheDevice : Kind::kMade;
  if (by_the_device) CannotFollow(all, of_graph, kByTheDevice);
  if (of_graph.launches.empty() && !by_the_device) return static_cast<void>(all.captured.erase(made));
  all.captured[made] = std::move(of_graph);
}

}  // namespace

void Follow() noexcept { g_followed.store(true); }

bool Remember(const Launched& one, const Capture& into) noexcept {
  if (!g_followed.load() || into.graph == nullptr || into.id == 0 || into.several || !one.on_stream) return false;
  Locked([&](All& all) {
    Captured& captured = all.captured[into.graph];
    if (captured.capture != into.id) {
      CannotFollow(all, captured, kAnothers);
      captured = {};
    }
    captured.capture = into.id;
    captured.is_open = true;
    captured.instantiated = std::make_shared<bool>(false);
    captured.launches.push_back({one.counted->member.id, one.shape, one.peer});
    g_some.store(true);
  });
  return true;
}

void CaptureEnded(const void* graph, std::uint64_t id) noexcept {
  IfSome([&](All& all) {
    for (const auto& [handle, captured] : all.captured)
      if (handle != graph && id != 0 && captured.is_open && captured.capture == id) CannotFollow(all, captured, kAnothers);
    const auto found = all.captured.find(graph);
    if (found == all.captured.end()) return;
    found->second.is_open = false;
    if (id != 0 && found->second.capture == id) return;
    CannotFollow(all, found->second, kAnothers);
    all.captured.erase(found);
  });
}

void CaptureFailed(std::uint64_t id) noexcept {
  IfSome([&](All& all) {
    std::erase_if(all.captured, [&](const auto& one) {
      const bool failed = one.second.is_open && (id == 0 || one.second.capture == id);
      if (failed) CannotFollow(all, one.second, kCaptureFailed);
      return failed;
    });
  });
}

void Created(const void* graph) noexcept {
  IfSome([&](All& all) { Forget(all, graph); });
}

void Cloned(const void* clone, const void* graph) noexcept {
  IfSome([&](All& all) {
    Forget(all, clone);
    const auto found = all.captured.find(graph);
    if (found == all.captured.end()) return;
    Captured copy = found->second;
    copy.capture = 0;
    all.captured[clone] = std::move(copy);
  });
}

void Added(const void* to, const void* part) noexcept {
  IfSome([&](All& all) {
    const auto found = all.captured.find(part);
    if (found == all.captured.end()) return;
    if (found->second.is_open) CannotFollow(all, found->second, kStillOpen);
    *found->second.instantiated = true;  // as a part of the other
    const std::vector<CapturedLaunch> launches = found->second.launches;
    Captured& into = all.captured[to];
    into.instantiated = std::make_shared<bool>(false);
    into.has_parts = true;
    into.launches.insert(into.launches.end(), launches.begin(), launches.end());
  });
}

void Instantiated(const void* made, const void* graph, bool by_the_device) noexcept {
  if (by_the_device && g_followed.load()) g_some.store(true);  // a graph with launches may update it later
  IfSome([&](All& all) { Make(all, made, graph, by_the_device); });
}

void Updated(const void* made, const void* graph) noexcept {
  IfSome([&](All& all) {
    const auto known = all.captured.find(made);
    Make(all, made, graph, known != all.captured.end() && known->second.kind == Kind::kByTheDevice);
  });
}

// Meanwhile it is known by an address that no handle has.
Destroying::Destroying(const void* graph) noexcept : graph_(graph) {
  IfSome([&](All& all) { Rename(all, graph_, this); });
}
void Destroying::Done(bool is_gone) noexcept {
  IfSome([&](All& all) { is_gone ? Forget(all, this) : Rename(all, this, graph_); });
}

void Lost(const void* graph_or_made, const char* why) noexcept {
  IfSome([&](All& all) {
    const auto found = all.captured.find(graph_or_made);
    if (found != all.captured.end()) CannotFollow(all, found->second, why);
  });
}

void NodeEdited() noexcept {
  IfSome([](All& all) { CannotFollowThose(all, kEdited, [](const Captured& one) { return one.kind == Kind::kGraph; }); });
}

void NodeRead() noexcept {
  IfSome([](All& all) { CannotFollowThose(all, kRead, [](const Captured& one) { return one.kind == Kind::kGraph; }); });
}

void PartGiven() noexcept {
  IfSome([](All& all) {
    CannotFollowThose(all, kNotFollowed, [](const Captured& one) { return one.kind == Kind::kGraph && one.has_parts; });
  });
}

std::vector<Launched> LaunchesOf(const void* made, Stream stream) noexcept {
  std::vector<Launched> launched;
  IfSome([&](All& all) {
    const auto found = all.captured.find(made);
    if (found == all.captured.end()) return;
    launched.reserve(found->second.launches.size());
    for (const CapturedLaunch& one : found->second.launches) {
      const auto of = all.by_id.find(one.id);
      if (of == all.by_id.end() || of->second->ended()) continue;  // one that has ended may be forgotten at any time
      launched.push_back({.counted = of->second.get(), .shape = one.shape, .peer = one.peer, .stream = stream});
    }
  });
  return launched;
}

}  // namespace amem::nccl::launches::graphs
