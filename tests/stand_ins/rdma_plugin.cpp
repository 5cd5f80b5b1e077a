// A network plugin as nccl-rdma-sharp in mode ib: NCCL's own code over libibverbs, which it imports. Its table has another
// name, and no functions, before NCCL initialises it. STAND_IN_PLUGIN_NAME: what it calls itself then (IBext_v8).
#include <cstdlib>

#include "tests/stand_ins/nccl/net.h"

namespace {
int Init(void* log);
}

#define SHOWN extern "C" __attribute__((visibility("default")))
SHOWN stand_in::NetTable ncclNetPlugin_v8;
stand_in::NetTable ncclNetPlugin_v8 = {.name = "NCCL RDMA Plugin", .init = &Init};

namespace {

int Init(void* log) {
  const char* const name = std::getenv("STAND_IN_PLUGIN_NAME");
  ncclNetPlugin_v8 = stand_in::kNetIb;
  ncclNetPlugin_v8.name = name == nullptr ? "IBext_v8" : name;
  return stand_in::kNetIb.init(log);
}

}  // namespace
