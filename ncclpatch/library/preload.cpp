// Only in libamem_nccl.so: what happens when the loader brings it in.
#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/runtime/log.h"
#include "ncclpatch/runtime/runtime.h"

namespace {

__attribute__((constructor)) void OnLoad() {
  try {
    amem::symbols::Install(amem::intercept::Tables());
    amem::Runtime::Get().Load();
  } catch (const std::exception& error) {
    amem::log::Error(std::string("loading: ") + error.what() + "; AMem is off in this process");
  }
}

}  // namespace
