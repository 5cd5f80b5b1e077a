#include "ncclpatch/runtime/suspend.h"

#include <spdlog/fmt/fmt.h>

#include "ncclpatch/hook/own_names.h"
#include "ncclpatch/runtime/last_error.h"
#include "ncclpatch/runtime/runtime.h"

namespace amem::suspend {
namespace {

int NotBuilt(const char* call) {
  return Fail(kInvalidUsage, fmt::format("{}: not built yet; call ncclPause and ncclResume instead", call));
}

int Suspend(ncclComm* /*comm*/, int /*flags*/) { return NotBuilt("ncclCommSuspend"); }
int Resume(ncclComm* /*comm*/) { return NotBuilt("ncclCommResume"); }
int MemoryStatistics(ncclComm* /*comm*/, int /*stat*/, std::uint64_t* /*value*/) { return NotBuilt("ncclCommMemStats"); }

struct SuspendCall {
  static constexpr const char* kName = "ncclCommSuspend";
  using Function = int(ncclComm*, int);
  template <class Real>
  static int Call(std::size_t, Real, ncclComm* comm, int flags) {
    return Suspend(comm, flags);
  }
};

struct ResumeCall {
  static constexpr const char* kName = "ncclCommResume";
  using Function = int(ncclComm*);
  template <class Real>
  static int Call(std::size_t, Real, ncclComm* comm) {
    return Resume(comm);
  }
};

struct MemStatsCall {
  static constexpr const char* kName = "ncclCommMemStats";
  using Function = int(ncclComm*, int, std::uint64_t*);
  template <class Real>
  static int Call(std::size_t, Real, ncclComm* comm, int stat, std::uint64_t* value) {
    return MemoryStatistics(comm, stat, value);
  }
};

// An export that AMem does not answer in this process.
template <class F, class... A>
int LeadOn(const char* name, F* own, const void* caller, A... arguments) noexcept {
  try {
    if (void* function = hook::WithoutUs(name, reinterpret_cast<const void*>(own), caller))
      return reinterpret_cast<F*>(function)(arguments...);
    return Fail(kInvalidUsage, fmt::format("{}: AMem does not serve it in this process (AMEM_ENABLE, AMEM_SUSPEND, or a fork), "
                                           "and this NCCL has no such function",
                                           name));
  } catch (...) {
    return kSystemError;
  }
}

}  // namespace

redirects::Table Calls() { return redirects::MakeTable<SuspendCall, ResumeCall, MemStatsCall>(); }

}  // namespace amem::suspend

#define AMEM_EXPORTED __attribute__((visibility("default")))

AMEM_EXPORTED int ncclCommSuspend(ncclComm* comm, int flags) {
  if (amem::Runtime::Get().ServesSuspend()) return amem::suspend::Suspend(comm, flags);
  return amem::suspend::LeadOn("ncclCommSuspend", &ncclCommSuspend, __builtin_return_address(0), comm, flags);
}

AMEM_EXPORTED int ncclCommResume(ncclComm* comm) {
  if (amem::Runtime::Get().ServesSuspend()) return amem::suspend::Resume(comm);
  return amem::suspend::LeadOn("ncclCommResume", &ncclCommResume, __builtin_return_address(0), comm);
}

AMEM_EXPORTED int ncclCommMemStats(ncclComm* comm, int stat, std::uint64_t* value) {
  if (amem::Runtime::Get().ServesSuspend()) return amem::suspend::MemoryStatistics(comm, stat, value);
  return amem::suspend::LeadOn("ncclCommMemStats", &ncclCommMemStats, __builtin_return_address(0), comm, stat, value);
}
