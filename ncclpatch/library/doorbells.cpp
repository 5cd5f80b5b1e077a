#include "ncclpatch/library/doorbells.h"

#include <spdlog/fmt/fmt.h>

#include "ncclpatch/hook/own_names.h"
#include "ncclpatch/nccl/types.h"
#include "ncclpatch/runtime/last_error.h"
#include "ncclpatch/runtime/runtime.h"

namespace amem::doorbells {
namespace {

template <class F, class... A>
int Ring(const char* name, F* own, const void* caller, const A&... arguments) noexcept {
  try {
    Runtime::Get().LookForNames();
    if (void* function = hook::WithoutUs(name, reinterpret_cast<const void*>(own), caller))
      return reinterpret_cast<F*>(function)(arguments...);
    return Fail(kInvalidUsage, fmt::format("{}: the program calls it, and there is no NCCL in this process that has it", name));
  } catch (...) {
    return kSystemError;
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
