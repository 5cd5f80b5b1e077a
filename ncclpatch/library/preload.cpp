// Only in libamem_nccl.so: runs when the loader loads it.
#include <spdlog/fmt/fmt.h>

#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/intercept/registrations.h"
#include "ncclpatch/library/doorbells.h"
#include "ncclpatch/runtime/log.h"
#include "ncclpatch/runtime/runtime.h"

namespace {

__attribute__((constructor)) void OnLoad() {
  try {
    amem::replacements::Install(amem::intercept::Tables());
    amem::replacements::Install(&amem::intercept::WrapPlugin);
    amem::Runtime::Get().AfterPauses(&amem::intercept::TrimPools);
    amem::Runtime::Get().Load(amem::doorbells::kNames);
  } catch (const std::exception& error) {
    amem::log::Error(fmt::format("loading: {}; AMem is off in this process", error.what()));
  }
}

}  // namespace
