// Stream memory operations: a stream writes a flag in device memory, or waits for one. They pass the gate like copies.
#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {
namespace {

// `Exported` is the second version, with the first one's signature.
template <Text Name, Text Exported, class Value>
struct OneFlag {
  static constexpr const char *kName = Name.data, *kExported = Exported.data;
  using Function = CUresult(CUstream, CUdeviceptr, Value, unsigned int);
  static CUresult Call(Function* real, CUstream stream, CUdeviceptr address, Value value, unsigned int flags) {
    const auto touches = [](Touch touch, CUstream, CUdeviceptr flag, auto...) { return touch(flag, sizeof(Value)); };
    return ThroughTheGate(kName, touches, real, stream, address, value, flags);
  }
};

using WriteValue32 = OneFlag<"cuStreamWriteValue32", "cuStreamWriteValue32_v2", cuuint32_t>;
using WriteValue64 = OneFlag<"cuStreamWriteValue64", "cuStreamWriteValue64_v2", cuuint64_t>;
using WaitValue32 = OneFlag<"cuStreamWaitValue32", "cuStreamWaitValue32_v2", cuuint32_t>;
using WaitValue64 = OneFlag<"cuStreamWaitValue64", "cuStreamWaitValue64_v2", cuuint64_t>;

struct BatchMemOp : Named<"cuStreamBatchMemOp", "cuStreamBatchMemOp_v2"> {
  using Function = CUresult(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);
  static CUresult Call(Function* real, CUstream stream, unsigned int count, CUstreamBatchMemOpParams* operations,
                       unsigned int flags) {
    // An operation that AMem does not know is refused while anything is paused.
    const auto one = [](Touch touch, const CUstreamBatchMemOpParams& operation) {
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
    };
    const auto touches = [&](Touch touch, auto...) {
      return operations != nullptr &&
             std::any_of(operations, operations + count, [&](const auto& operation) { return one(touch, operation); });
    };
    return ThroughTheGate(kName, touches, real, stream, count, operations, flags);
  }
};

}  // namespace

std::span<const replacements::Replacement> StreamMemoryReplacements() {
  return replacements::Table<WriteValue32, WriteValue64, WaitValue32, WaitValue64, BatchMemOp>();
}
}  // namespace amem::intercept
