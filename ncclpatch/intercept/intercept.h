// Interception: what the replaced driver functions of this folder have in common.
//
// Rules for every function in this folder: NCCL gets the driver's answers unless the memory is AMem's; a call on other memory
// passes through and is journaled as such; a null argument is answered with CUDA_ERROR_INVALID_VALUE and never crashes; only
// NCCL's own calls are seen.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>

#include "ncclpatch/hook/replacements.h"
#include "ncclpatch/runtime/runtime.h"
#include "replay/session/origin.h"
#include "replay/session/session.h"

namespace amem::intercept {

using replacements::Named;
using replacements::Text;

// What happens in place of a call: `Self::With(pass, arguments...)`, where pass() makes the call as it is and returns its
// answer.
template <class R = CUresult>
using Pass = std::function<R()>;
template <class Self, Text Name, Text Exported = Name>
struct Instead : Named<Name, Exported> {
  template <class R, class... A>
  static R Call(R (*real)(A...), std::type_identity_t<A>... arguments) {
    const auto pass = [&] { return real(arguments...); };
    return Self::With(std::ref(pass), arguments...);
  }
};

// The same while there is a session: `Self::With(session, pass, arguments...)`. Without one the call is made as it is.
template <class Self, Text Name, Text Exported = Name>
struct InSession : Named<Name, Exported> {
  template <class... A>
  static CUresult Call(CUresult (*real)(A...), std::type_identity_t<A>... arguments) {
    Session* session = Runtime::Get().session();
    const auto pass = [&] { return real(arguments...); };
    return session == nullptr ? pass() : Self::With(*session, std::ref(pass), arguments...);
  }
};

// The handles that NCCL holds: an allocation id under a tag. A driver's handle is a host pointer, whose top bits are clear.
inline constexpr std::uint64_t kTagMask = 0xFFFF'0000'0000'0000, kHandleTag = 0xA3E3'0000'0000'0000;

inline CUmemGenericAllocationHandle ToGuest(AllocationId allocation) { return kHandleTag | allocation.value; }
inline bool IsGuest(CUmemGenericAllocationHandle handle) { return (handle & kTagMask) == kHandleTag; }
inline AllocationId ToAllocation(CUmemGenericAllocationHandle handle) { return AllocationId{handle & ~kTagMask}; }

// The result for NCCL: the driver's own if the driver failed, and otherwise the nearest to the class of failure. A failure that
// is not the driver's is logged, because NCCL will report only its number.
CUresult ToDriver(const char* call, const Status& status);

// Where NCCL's call under way on this thread makes memory, and for which communicator. What ncclMemAlloc makes is the
// program's, and for none. The arguments are those of CaptureCallSite.
Origin OriginOfCall(bool* for_application = nullptr, bool* for_window = nullptr) noexcept;

// Records a call that was about memory that is not AMem's, and returns its result.
CUresult PassedOn(Session& session, const char* call, std::uint64_t subject, CUresult result);

// Whether this call is for a communicator that is made, or runs, beside a pause in which others are suspended: its memory is
// the driver's own, and its kernels touch none that is paused.
bool BesideAPause(Session& session);

// Frees memory that AMem only counts. The free is recorded before the driver makes it (Session::NoteFree); if the driver
// refuses, the memory is recorded as allocated again.
template <class Freed, class MakeCall>
CUresult FreeNoted(const Freed& freed, const MakeCall& make_call) {
  Session* session = Runtime::Get().session();
  if (session == nullptr) return make_call();
  const auto take_back = session->NoteFree(freed);
  const CUresult result = make_call();
  if (take_back && result != CUDA_SUCCESS) session->Note(*take_back);
  return result;
}

// Asked of each range of addresses that a call touches. Collects them, or else says whether a pause took memory there away, or
// is taking it.
struct Touch {
  Session& session;
  std::vector<Extent>* collected = nullptr;
  bool operator()(CUdeviceptr address, Bytes bytes) const {
    if (collected == nullptr) return session.TouchesPaused(Address{address}, bytes);
    collected->push_back({Address{address}, bytes});
    return false;
  }
};

// Journals that a call was refused because it needs memory that is paused, and logs it at most once a second for all calls.
CUresult RefusedWhilePaused(const char* call);

// The stream among the arguments of a call, if there is one.
inline CUstream StreamIn() { return nullptr; }
template <class First, class... Rest>
CUstream StreamIn(First first, Rest... rest) {
  if constexpr (std::is_same_v<First, CUstream>) return first;
  if constexpr (std::is_same_v<First, const CUlaunchConfig*> || std::is_same_v<First, CUDA_LAUNCH_PARAMS*>)
    return first == nullptr ? nullptr : first->hStream;
  return StreamIn(rest...);
}

// A call that puts work on a device, or reads or writes device memory at once: made with the gate held, so that no pause begins
// before it has returned. While memory is paused it is refused if it touches that memory: `touches(touch, arguments...)`. What
// a launch touches is not known, so it passes while only tags are paused, as the program's own launches do.
template <class Touches, class F, class... A>
CUresult ThroughTheGate(const char* call, const Touches& touches, F* real, A... arguments) {
  Session* session = Runtime::Get().started();
  if (session == nullptr) return real(arguments...);
  for (;; std::this_thread::yield()) {  // again if a pause or resume ended between the two questions
    const auto entered = session->EnterLaunch(call, StreamIn(arguments...));
    if (entered.owns_lock() && !session->HasTags()) [[likely]]
      return real(arguments...);
    if (!entered.owns_lock() && !session->paused()) continue;
    std::vector<Extent> touched;
    if (session->HasTags()) static_cast<void>(touches(Touch{*session, &touched}, arguments...));
    const auto tags = session->EnterTags(touched, call);
    const bool away = tags.away || (!entered.owns_lock() && touches(Touch{*session}, arguments...));
    return away ? RefusedWhilePaused(call) : real(arguments...);
  }
}

AllocationProperties FromDriver(const CUmemAllocationProp& properties);
CUmemAllocationProp ToDriver(const AllocationProperties& properties);

// One file for each family of driver calls, with a table; Tables() has them all, for replacements::Install.
std::span<const replacements::Replacement> CopyReplacements();
std::span<const replacements::Replacement> CudaIpcReplacements();
std::span<const replacements::Replacement> GetProcAddressReplacements();
std::span<const replacements::Replacement> HostMemoryReplacements();
std::span<const replacements::Replacement> LaunchReplacements();
std::span<const replacements::Replacement> LogicalEndpointReplacements();
std::span<const replacements::Replacement> MemoryReplacements();
std::span<const replacements::Replacement> MulticastReplacements();
std::span<const replacements::Replacement> PointerReplacements();
std::span<const replacements::Replacement> PoolReplacements();
std::span<const replacements::Replacement> SharingReplacements();
std::span<const replacements::Replacement> StreamMemoryReplacements();
std::span<const replacements::Replacement> VerbsReplacements();
const replacements::Tables& Tables();

// Gives back to the driver what the pools that NCCL created keep and do not use, for Runtime::AfterPauses: NCCL sets their
// release threshold so high that the driver would never take it back by itself. A pool that cannot be trimmed keeps its memory,
// and the journal says so.
void TrimPools(Session& session);

}  // namespace amem::intercept
