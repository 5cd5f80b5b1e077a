#include "ncclpatch/intercept/card_buffers.h"

#include <optional>

namespace amem::intercept {
namespace {

thread_local bool t_uses_card = false;

// By which path NCCL made its own memory at that address; nullopt: it is not NCCL's own.
std::optional<CallSite> PathTo(const State& state, Address address) {
  if (const auto legacy = state.LegacyAt(address); legacy != state.legacy.end()) return legacy->second.site;
  AllocationId id = state.PartAt(address);
  if (const auto mapping = state.MappingAt(address); !id && mapping != state.mappings.end()) id = mapping->second.allocation;
  const Allocation* const made = FindIn(state.allocations, id);
  if (made == nullptr || !made->own() || made->pool || made->tag != MemoryTag::kNccl) return std::nullopt;
  return made->site;
}

}  // namespace

void CardBuffers::ThreadUsesCard() { t_uses_card = true; }

bool CardBuffers::Takes(const CallSite& path) {
  const std::lock_guard lock(mutex_);
  if (const Path* const known = FindIn(paths_, path); known != nullptr && known->registers) return true;
  return t_uses_card && paths_[path].trials++ < kTrials;
}

void CardBuffers::Registered(Session& session, Address address) {
  const auto path = session.Inspect([&](const State& state) { return PathTo(state, address); });
  if (!path) return;
  const std::lock_guard lock(mutex_);
  paths_[*path].registers = true;
}

}  // namespace amem::intercept
