// What the replaced driver functions of this folder share.
//
// Rules: NCCL gets the driver's answers unless the memory is AMem's. A call on other memory passes through and is journaled. A
// null argument is answered with CUDA_ERROR_INVALID_VALUE and never crashes. What other libraries call is others.h's.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <span>
#include <thread>
#include <type_traits>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/hook/replacements.h"
#include "ncclpatch/runtime/runtime.h"
#include "replay/session/session.h"
#include "replay/session/session_options.h"

namespace amem::intercept {

using replacements::Named;
using replacements::Text;

// Replaces a call by `Self::With(pass, arguments...)`; pass() makes the original call and returns its answer.
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

// A call that is made as it is, and then done(result, arguments...).
template <auto done, class F, Text Name, Text Exported = Name>
struct Then : Named<Name, Exported> {
  using Function = F;
  template <class... A>
  static CUresult Call(F* real, A... arguments) {
    const CUresult result = real(arguments...);
    done(result, arguments...);
    return result;
  }
};
template <auto done, class F, Text Name, Text Exported, int since, int before>
struct AtVersion : Then<done, F, Name, Exported> {
  static constexpr int kSince = since, kBefore = before;
};
#define AMEM_THEN(done, name) Then<done, decltype(name), #name, AMEM_TEXT(name)>

// As Instead, with a session: `Self::With(session, pass, arguments...)`. Without one the original call is made.
template <class Self, Text Name, Text Exported = Name>
struct InSession : Named<Name, Exported> {
  template <class... A>
  static CUresult Call(CUresult (*real)(A...), std::type_identity_t<A>... arguments) {
    Session* session = Runtime::Get().session();
    const auto pass = [&] { return real(arguments...); };
    return session == nullptr ? pass() : Self::With(*session, std::ref(pass), arguments...);
  }
};

// NCCL's handles: an allocation id under a tag. A driver's handle is a host pointer, whose top bits are clear.
inline constexpr std::uint64_t kTagMask = 0xFFFF'0000'0000'0000, kHandleTag = 0xA3E3'0000'0000'0000;

inline CUmemGenericAllocationHandle ToGuest(AllocationId allocation) { return kHandleTag | allocation.value; }
inline bool IsGuest(CUmemGenericAllocationHandle handle) { return (handle & kTagMask) == kHandleTag; }
inline AllocationId ToAllocation(CUmemGenericAllocationHandle handle) { return AllocationId{handle & ~kTagMask}; }

// This thread is in a call of another library than NCCL: for messages, and so that what it holds is known by its name.
struct OfAnother : NoCopies {
  static inline thread_local int now = 0;
  OfAnother() { ++now; }
  ~OfAnother() { --now; }
};

// A replacement that NCCL gets, for another library.
template <class Ours>
struct ByAnother : Ours {
  template <class R, class... A>
  static R Call(R (*real)(A...), std::type_identity_t<A>... arguments) {
    const OfAnother caller;
    return Ours::Call(real, arguments...);
  }
};
// The same where the call is about memory of AMem's; otherwise as `Theirs`, or void: the original call.
template <class Ours, auto is_ours, class Theirs = void>
struct Either : Ours {
  template <class R, class... A>
  static R Call(R (*real)(A...), std::type_identity_t<A>... arguments) {
    Session* const session = Runtime::Get().started();
    if (session != nullptr && is_ours(*session, arguments...)) return ByAnother<Ours>::Call(real, arguments...);
    if constexpr (std::is_void_v<Theirs>) {
      return real(arguments...);
    } else {
      return Theirs::Call(real, arguments...);
    }
  }
};

// The result for NCCL: the driver's own, or the nearest to the class of failure. A failure that is not the driver's, or a
// refusal, is logged, because NCCL reports only the number.
CUresult ToDriver(const char* call, const Status& status);

// The call site and communicator of NCCL's current allocation. What ncclMemAlloc makes is the program's and has no
// communicator. Arguments as in CaptureCallSite.
Origin OriginOfCall(bool* for_application = nullptr, bool* for_window = nullptr) noexcept;

// Records a call about memory that is not AMem's, and returns its result.
CUresult PassedOn(Session& session, const char* call, std::uint64_t subject, CUresult result);

// Answers a call that AMem has carried out; what AMem does not know (kNotFound) passes through.
CUresult OrPassOn(Session& session, const char* call, std::uint64_t subject, const Status& status, const Pass<>& pass);

// A call that gives back what a part of the session knows by its address: (part.*give_back)(address, bytes...).
template <Text Name, auto part, auto give_back, class... Sizes>
struct GivesBack : InSession<GivesBack<Name, part, give_back, Sizes...>, Name> {
  static CUresult With(Session& session, const Pass<>& pass, CUdeviceptr address, Sizes... bytes) {
    return OrPassOn(session, Name.data, address, ((session.*part)().*give_back)(Address{address}, bytes...), pass);
  }
};

// Why nothing can be added to memory that is paused, said in the name of `call`.
CUresult AnswerPaused(const char* call);

// Whether this call is for a communicator made beside a pause in which others are suspended: its memory is the driver's, and
// its kernels touch no paused memory.
bool BesideAPause(Session& session);

// Frees memory that AMem only counts, with the driver's answer in `result`. Records the free before the driver makes it
// (Records::NoteFree); if the driver refuses, records the allocation again. False: that is not known, and nothing was done.
template <class Freed>
bool FreeNoted(Session& session, const Freed& freed, const Pass<>& pass, CUresult& result) {
  const auto take_back = session.records().NoteFree(freed);
  if (!take_back) return false;
  if (result = pass(); result != CUDA_SUCCESS) session.records().Note(*take_back);
  return true;
}

// Called for each address range that a call touches. Collects it, or says whether a pause took memory there away or is taking
// it.
struct Touch {
  Session& session;
  std::vector<Extent>* collected = nullptr;
  bool operator()(CUdeviceptr address, Bytes bytes) const {
    if (collected == nullptr) return session.calls().TouchesPaused(Address{address}, bytes);
    collected->push_back({Address{address}, bytes});
    return false;
  }
};

// Journals that a call was refused because it needs paused memory; logs at most once a second for all calls.
CUresult RefusedWhilePaused(const char* call);

// The stream among a call's arguments, if any.
inline CUstream StreamIn() { return nullptr; }
template <class First, class... Rest>
CUstream StreamIn(First first, Rest... rest) {
  if constexpr (std::is_same_v<First, CUstream>) return first;
  if constexpr (std::is_same_v<First, const CUlaunchConfig*> || std::is_same_v<First, CUDA_LAUNCH_PARAMS*>)
    return first == nullptr ? nullptr : first->hStream;
  return StreamIn(rest...);
}

// A call that works on a device, or reads or writes device memory, made with the gate held, so that no pause begins before it
// returns. Refused if it touches paused memory: `touches(touch, arguments...)`. What a launch touches is unknown, so it passes
// while only tags are paused, like the program's own launches.
template <class Touches, class F, class... A>
CUresult ThroughTheGate(const char* call, const Touches& touches, F* real, A... arguments) {
  Session* session = Runtime::Get().started();
  if (session == nullptr) return real(arguments...);
  for (;; std::this_thread::yield()) {  // again if a pause or resume ended in between
    const auto entered = session->calls().EnterLaunch(call, StreamIn(arguments...));
    if (entered.owns_lock() && !session->calls().HasTags()) [[likely]]
      return real(arguments...);
    if (!entered.owns_lock() && !session->paused()) continue;
    std::vector<Extent> touched;
    if (session->calls().HasTags()) static_cast<void>(touches(Touch{*session, &touched}, arguments...));
    const auto tags = session->calls().EnterTags(touched, call);
    const bool away = tags.away || (!entered.owns_lock() && touches(Touch{*session}, arguments...));
    return away ? RefusedWhilePaused(call) : real(arguments...);
  }
}

// A replacement that passes the gate and changes nothing else.
template <auto touches, class F, Text Name, Text Exported = Name, int since = replacements::kFirst,
          int before = replacements::kNoBound>
struct Gated : Named<Name, Exported, since, before> {
  using Function = F;
  template <class... A>
  static CUresult Call(F* real, A... arguments) {
    return ThroughTheGate(Name.data, touches, real, arguments...);
  }
};
// The same for a function that cuda.h declares, under the name that libcuda exports (cuMemcpyDtoD_v2).
#define AMEM_GATED(touches, name) Gated<touches, decltype(name), #name, AMEM_TEXT(name)>

// The driver's answer about memory of AMem's as if it were there, with the width that the driver writes. False: only the driver
// knows that attribute.
bool AnswerPointer(CUpointer_attribute attribute, CUdeviceptr pointer, DeviceOrdinal device, const Extent& range, void* data);
template <class T>
bool SetTo(void* data, T value) {
  return *static_cast<T*>(data) = value, true;
}

// One file for each family of driver calls, with a table; Tables() has all, for replacements::Install.
std::span<const replacements::Replacement> CaptureReplacements();
std::span<const replacements::Replacement> CountedReplacements();
std::span<const replacements::Replacement> CudaIpcReplacements();
std::span<const replacements::Replacement> GatedReplacements();
std::span<const replacements::Replacement> GetProcAddressReplacements(replacements::Caller caller);
std::span<const replacements::Replacement> LogicalEndpointReplacements();
std::span<const replacements::Replacement> MemoryReplacements();
std::span<const replacements::Replacement> MulticastReplacements();
std::span<const replacements::Replacement> VerbsReplacements();
std::span<const replacements::Replacement> CountedCardReplacements();  // with AMEM_NETWORK=renew only
const replacements::Tables& Tables();

// The same for other libraries. Binds by handle and by address translate AMem's handles; what is bound to an object of the
// driver's stays in place.
std::span<const replacements::Replacement> BindsOfOthers();
std::span<const replacements::Replacement> EndpointsOfOthers();
std::span<const replacements::Replacement> VerbsOfOthers();

// Gives back to the driver what pools made by NCCL keep unused, for Runtime::Above: NCCL's release threshold is so high
// that the driver would never take it. A pool that cannot be trimmed keeps its memory, and the journal says so.
void TrimPools(Session& session);

}  // namespace amem::intercept
