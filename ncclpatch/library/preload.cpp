// Only in libamem_nccl.so: its constructor, and the functions that LD_PRELOAD shows to everybody.
#include <spdlog/fmt/fmt.h>

#include <array>

#include "ncclpatch/hook/own_names.h"
#include "ncclpatch/intercept/cards.h"
#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/intercept/others.h"
#include "ncclpatch/intercept/registrations.h"
#include "ncclpatch/nccl/communicators.h"
#include "ncclpatch/runtime/border.h"
#include "ncclpatch/runtime/log.h"
#include "ncclpatch/runtime/runtime.h"

namespace amem::doorbells {
namespace {

// With LD_PRELOAD these precede NCCL's own in the search order. Each takes newly loaded NCCLs and their callers under AMem, and
// leads on to the function that the caller would have reached without AMem. Without LD_PRELOAD nobody finds them.
constexpr std::array kNames = {"ncclGetUniqueId",          "ncclCommInitRank", "ncclCommInitRankConfig",
                               "ncclCommInitRankScalable", "ncclCommInitAll",  "ncclCommGrow"};

template <class F, class... A>
int Ring(const char* name, F* own, const void* caller, const A&... arguments) noexcept {
  try {
    Runtime::Get().PatchIfLoaded();
    if (void* function = hook::WithoutUs(name, reinterpret_cast<const void*>(own), caller))
      return reinterpret_cast<F*>(function)(arguments...);
    return Fail(kInvalidUsage, fmt::format("{}: the program calls it, and there is no NCCL in this process that has it", name));
  } catch (...) {
    return kSystemError;
  }
}

void ReachOthers(LibraryScope scope) {
  intercept::Widen(scope);
  hook::ReachOthers(intercept::WiderTables(scope));
}

__attribute__((constructor)) void OnLoad() {
  try {
    replacements::Install(intercept::Tables());
    replacements::Install(&intercept::WrapPlugin);
    replacements::Install(intercept::CountingTables(), replacements::Caller::kOther);
    Runtime::Get().SetAbove(
        {&intercept::TrimPools, &intercept::JournalOthers, &ReachOthers, &intercept::Renew, &intercept::Guard});
    Runtime::Get().Load(kNames);
  } catch (const std::exception& error) {
    log::Error(fmt::format("loading: {}; AMem is off in this process", error.what()));
  }
}

}  // namespace
}  // namespace amem::doorbells

using amem::nccl::Config;
using amem::nccl::UniqueId;

#define AMEM_DOORBELL(name, parameters, ...)                             \
  extern "C" __attribute__((visibility("default"))) int name parameters; \
  int name parameters { return amem::doorbells::Ring(#name, &name, __builtin_return_address(0), __VA_ARGS__); }

AMEM_DOORBELL(ncclGetUniqueId, (UniqueId * id), id)
AMEM_DOORBELL(ncclCommInitRank, (ncclComm * *comm, int ranks, UniqueId id, int rank), comm, ranks, id, rank)
AMEM_DOORBELL(ncclCommInitRankConfig, (ncclComm * *comm, int ranks, UniqueId id, int rank, Config* config), comm, ranks, id,
              rank, config)
AMEM_DOORBELL(ncclCommInitRankScalable, (ncclComm * *comm, int ranks, int rank, int count, UniqueId* ids, Config* config), comm,
              ranks, rank, count, ids, config)
AMEM_DOORBELL(ncclCommInitAll, (ncclComm * *comms, int count, const int* devices), comms, count, devices)
AMEM_DOORBELL(ncclCommGrow, (ncclComm * comm, int ranks, const UniqueId* id, int rank, ncclComm** grown, Config* config), comm,
              ranks, id, rank, grown, config)
