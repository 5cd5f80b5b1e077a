// Stream memory operations: a stream writes a flag in device memory, or waits for one. They pass the gate like copies.
#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

template <class Value>
constexpr auto kFlag = [](Touch touch, CUstream, CUdeviceptr flag, auto...) { return touch(flag, sizeof(Value)); };

// An operation that AMem does not know is refused while anything is paused.
bool Touches(Touch touch, const CUstreamBatchMemOpParams& operation) {
  switch (operation.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
      return touch(operation.writeValue.address, sizeof(cuuint64_t));
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
    case CU_STREAM_MEM_OP_BARRIER:
      return false;
    default:
      return true;
  }
}
constexpr auto kOperations = [](Touch touch, CUstream, unsigned count, const CUstreamBatchMemOpParams* operations, auto...) {
  return operations != nullptr &&
         std::any_of(operations, operations + count, [&](const auto& operation) { return Touches(touch, operation); });
};

}  // namespace

std::span<const replacements::Replacement> StreamMemoryReplacements() {
  return replacements::Table<AMEM_GATED(kFlag<cuuint32_t>, cuStreamWriteValue32),
                             AMEM_GATED(kFlag<cuuint64_t>, cuStreamWriteValue64),
                             AMEM_GATED(kFlag<cuuint32_t>, cuStreamWaitValue32),
                             AMEM_GATED(kFlag<cuuint64_t>, cuStreamWaitValue64), AMEM_GATED(kOperations, cuStreamBatchMemOp)>();
}
}  // namespace amem::intercept
