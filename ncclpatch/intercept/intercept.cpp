#include "ncclpatch/intercept/intercept.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "ncclpatch/nccl/attribution.h"
#include "ncclpatch/nccl/communicators.h"
#include "ncclpatch/runtime/border.h"
#include "ncclpatch/runtime/last_error.h"
#include "ncclpatch/runtime/log.h"

namespace amem::intercept {
using replacements::Caller;
namespace {

// Names that take, give back, reach or name memory. tests/wheels/known_names.py has the same list, with what AMem does with
// each.
bool IsAboutMemory(std::string_view name) {
  constexpr std::string_view kFragments[] = {"Mem",      "Alloc", "Map",    "Unmap",  "Multicast",       "Ipc",   "Pointer",
                                             "Host",     "Reg",   "Unreg",  "Handle", "LogicalEndpoint", "Value", "Launch",
                                             "External", "Array", "Export", "Import", "Fabric"};
  return std::ranges::any_of(kFragments, [&](std::string_view fragment) { return name.find(fragment) != name.npos; });
}

// cuGetProcAddress, by which NCCL and CUDA runtimes get every other driver function. Only NCCL's look-ups are journaled,
// because others look up all that the driver has.
template <Caller caller, Text Exported, int since, int before, class... More>
struct GetProcAddress : Named<"cuGetProcAddress", Exported, since, before> {
  using Function = CUresult(const char*, void**, int, cuuint64_t, More...);
  static CUresult Call(Function* real, const char* symbol, void** function, int version, cuuint64_t flags, More... more) {
    const CUresult result = real(symbol, function, version, flags, more...);
    if (result != CUDA_SUCCESS || symbol == nullptr || function == nullptr || *function == nullptr) return result;
    bool replaced = false;
    *function = replacements::Bind(symbol, version, *function, &replaced, caller);
    if (caller == Caller::kNccl && (replaced || IsAboutMemory(symbol)))
      Runtime::Get().Note(DriverSymbolBound{symbol, version, replaced});
    return result;
  }
};

template <Caller caller>
std::span<const replacements::Replacement> LookUps() {
  return replacements::Table<
      GetProcAddress<caller, "cuGetProcAddress_v2", 12000, replacements::kNoBound, CUdriverProcAddressQueryResult*>,
      GetProcAddress<caller, "cuGetProcAddress", 11030, 12000>>();
}

}  // namespace

CUresult ToDriver(const char* call, const Status& status) {
  if (status.ok()) return CUDA_SUCCESS;
  const bool of_driver = status.driver_result() != 0, refused = status.code() == Code::kRefused;
  const CUresult result = of_driver ? static_cast<CUresult>(status.driver_result()) : AnswersFor(status.code()).driver;
  if (of_driver && !refused) return result;
  static constinit log::Limited refusals;  // a program may try again and again
  const std::string caller = OfAnother::now > 0 ? CallingLibrary() : "NCCL",
                    line = fmt::format("{} by {}: {} ({} gets CUresult {})", call, caller, status.message(), caller,
                                       static_cast<int>(result));
  refused ? refusals.Error(line) : log::Error(line);
  if (OfAnother::now == 0) last_error::NoteRefusal(line);
  return result;
}

Origin OriginOfCall(bool* for_application, bool* for_window) noexcept {
  const CallSite site = CaptureCallSite(for_application, for_window);
  const bool is_programs = for_application != nullptr && *for_application;
  return {site, is_programs ? CommunicatorId{} : nccl::CurrentCommunicator()};
}

CUresult PassedOn(Session& session, const char* call, std::uint64_t subject, CUresult result) {
  session.records().Note(PassedThrough{call, "not AMem's: " + Hex(subject), static_cast<std::int32_t>(result)});
  return result;
}

CUresult OrPassOn(Session& session, const char* call, std::uint64_t subject, const Status& status, const Pass<>& pass) {
  return status.code() == Code::kNotFound ? PassedOn(session, call, subject, pass()) : ToDriver(call, status);
}

CUresult AnswerPaused(const char* call) { return ToDriver(call, {Code::kRefused, "memory is paused; call ncclResume first"}); }

bool BesideAPause(Session& session) {
  if (!session.paused()) return false;
  const std::uint64_t aside = nccl::AsideNow();
  return aside != 0 && aside == session.Progress().cycle;
}

CUresult RefusedWhilePaused(const char* call) {
  static constinit log::Limited refused;
  if (Session* session = Runtime::Get().started()) session->calls().NoteRefused(call);
  if (OfAnother::now > 0) {
    refused.Error(fmt::format("{} by {} is refused: its memory is paused; resume it first", call, CallingLibrary()));
    return CUDA_ERROR_ILLEGAL_STATE;
  }
  const std::string line = fmt::format(
      "{} by NCCL is refused (CUDA_ERROR_ILLEGAL_STATE): it needs memory that is paused; call ncclResume first", call);
  refused.Error(line);
  last_error::NoteRefusal(line);
  return CUDA_ERROR_ILLEGAL_STATE;
}

std::span<const replacements::Replacement> GetProcAddressReplacements(Caller caller) {
  return caller == Caller::kNccl ? LookUps<Caller::kNccl>() : LookUps<Caller::kOther>();
}

const replacements::Tables& Tables() {
  static const std::array all = {CaptureReplacements(),
                                 CountedReplacements(),
                                 CudaIpcReplacements(),
                                 GatedReplacements(),
                                 GetProcAddressReplacements(Caller::kNccl),
                                 LogicalEndpointReplacements(),
                                 MemoryReplacements(),
                                 MulticastReplacements(),
                                 VerbsReplacements()};
  static const replacements::Tables tables(all);
  return tables;
}

}  // namespace amem::intercept
