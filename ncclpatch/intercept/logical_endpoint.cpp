// Logical endpoints (CUDA 13.3): bound memory is reached past its mappings, so it stays in place until it is unbound or its
// endpoint is destroyed (Registered).
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "ncclpatch/intercept/registrations.h"

namespace amem::intercept {
namespace {

using EndpointId = cuuint32_t;  // CUlogicalEndpointId, which older headers lack

class Endpoints {
 public:
  void Bound(EndpointId id, CUdevice device, cuuint64_t offset, Extent part) {
    const std::string library = OtherLibrary();
    const std::lock_guard lock(mutex_);
    if (!Registrations::Note(part, "logical endpoint", library)) return;
    Registrations::Held& bound = bound_[{id, device, offset}];
    bound.parts.push_back(part);
    bound.library = library;
  }
  void Unbound(EndpointId id, CUdevice device, cuuint64_t offset, cuuint64_t bytes) {
    Forget([&](const Key& key) { return key >= Key{id, device, offset} && key < Key{id, device, offset + bytes}; });
  }
  void Destroyed(EndpointId id) {
    Forget([&](const Key& key) { return std::get<0>(key) == id; });
  }

 private:
  using Key = std::tuple<EndpointId, CUdevice, cuuint64_t>;  // with the offset in the endpoint

  template <class Match>
  void Forget(const Match& match) {
    const std::lock_guard lock(mutex_);
    std::erase_if(bound_, [&](const auto& binding) {
      if (!match(binding.first)) return false;
      Registrations::Forget(binding.second.parts, binding.second.library);
      return true;
    });
  }

  std::mutex mutex_;
  std::map<Key, Registrations::Held> bound_;
};

// Undoes every binding of this process to the endpoint; other processes may still use it.
constexpr auto kDestroyed = [](CUresult result, EndpointId id) {
  if (result == CUDA_SUCCESS) Forever<Endpoints>().Destroyed(id);
};
using EndpointDestroy = Then<kDestroyed, CUresult(EndpointId), "cuLogicalEndpointDestroy">;

struct EndpointBindAddr : Instead<EndpointBindAddr, "cuLogicalEndpointBindAddr"> {
  static CUresult With(const Pass<>& pass, EndpointId id, CUdevice device, cuuint64_t offset, void* address, cuuint64_t bytes,
                       unsigned long long) {
    const Extent part = PartAt(address, bytes);
    const Registering gate(kName, part);
    if (gate.refused()) return CUDA_ERROR_ILLEGAL_STATE;
    const CUresult result = pass();
    if (result == CUDA_SUCCESS) Forever<Endpoints>().Bound(id, device, offset, part);
    return result;
  }
};

// Where an allocation of AMem is mapped; zero: nowhere.
Address PlaceOf(Session& session, AllocationId allocation) {
  return session.Inspect([&](const State& state) {
    auto* const found = FindIn(state.allocations, allocation);
    if (found != nullptr && found->placed()) return state.PlaceOf(*found);
    for (const auto& [address, mapping] : state.mappings)
      if (mapping.allocation == allocation) return address;
    return Address{};
  });
}

struct EndpointBindMem : Named<"cuLogicalEndpointBindMem"> {
  using Function = CUresult(EndpointId, CUdevice, cuuint64_t, CUmemGenericAllocationHandle, cuuint64_t, cuuint64_t,
                            unsigned long long);
  static CUresult Call(Function* real, EndpointId id, CUdevice device, cuuint64_t offset, CUmemGenericAllocationHandle memory,
                       cuuint64_t memory_offset, cuuint64_t bytes, unsigned long long flags) {
    Session* session = Runtime::Get().started();
    if (session == nullptr || !IsGuest(memory)) return real(id, device, offset, memory, memory_offset, bytes, flags);
    const AllocationId allocation = ToAllocation(memory);
    const auto nccl = session->calls().EnterCall();
    const InTags tag = session->calls().EnterTagOf(allocation);
    if (tag.paused) return RefusedWhilePaused(kName);
    if (tag.gates.empty() && session->paused()) return AnswerPaused(kName);
    const auto [handle, begin] = session->nccl().Backing(allocation);
    if (handle.value == 0) return CUDA_ERROR_INVALID_HANDLE;
    const Address address = PlaceOf(*session, allocation);
    const Extent part{address + memory_offset, bytes};
    const CUresult result = real(id, device, offset, handle.value, begin + memory_offset, bytes, flags);
    if (result != CUDA_SUCCESS) return result;
    if (address)
      Forever<Endpoints>().Bound(id, device, offset, part);
    else
      Runtime::Get().LeaveAllInPlace("memory without an address is bound to a logical endpoint (cuLogicalEndpointBindMem)");
    return result;
  }
};

constexpr auto kUnbound = [](CUresult result, auto... what) {
  if (result == CUDA_SUCCESS) Forever<Endpoints>().Unbound(what...);
};
using EndpointUnbind = Then<kUnbound, CUresult(EndpointId, CUdevice, cuuint64_t, cuuint64_t), "cuLogicalEndpointUnbind">;

// Of another library. Of the driver's own handle nobody asks in which way the binding ends: that memory stays.
struct BindMemByAnother : EndpointBindMem {
  template <class... Rest>
  static CUresult Call(Function* real, EndpointId id, CUdevice device, cuuint64_t offset, CUmemGenericAllocationHandle memory,
                       Rest... rest) {
    const OfAnother caller;
    if (IsGuest(memory)) return EndpointBindMem::Call(real, id, device, offset, memory, rest...);
    const HandingOut out(memory);
    return out.Done(real(id, device, offset, memory, rest...));
  }
};

}  // namespace

std::span<const replacements::Replacement> LogicalEndpointReplacements() {
  return replacements::Table<EndpointBindAddr, EndpointBindMem, EndpointUnbind, EndpointDestroy>();
}
std::span<const replacements::Replacement> EndpointsOfOthers() {
  return replacements::Table<ByAnother<EndpointBindAddr>, BindMemByAnother, ByAnother<EndpointUnbind>,
                             ByAnother<EndpointDestroy>>();
}
}  // namespace amem::intercept
