// Only in libamem_nccl.so: runs when the loader loads it.
#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/runtime/log.h"
#include "ncclpatch/runtime/runtime.h"

namespace {

__attribute__((constructor)) void OnLoad() {
  try {
    amem::replacements::Install(amem::intercept::Tables());
    amem::Runtime::Get().Load();
  } catch (const std::exception& error) {
    amem::log::Error(std::string("loading: ") + error.what() + "; AMem is off in this process");
  }
}

}  // namespace
