// IPC handles of the stand-in, of cuMemAlloc memory.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "tests/stand_ins/cuda/stand_in.h"

using amem::Bytes;
using amem::stand_in::LegacyBlock;
using amem::stand_in::Result;

namespace {
// In the 64 bytes: where the descriptor can be found. Opened through /proc, so it needs the same user and the owner alive.
struct IpcContents {
  std::uint64_t magic;
  std::int32_t pid, descriptor;
  Bytes asked, offset;
};
constexpr std::uint64_t kIpcMagic = 0x6370692d656b6166;
static_assert(sizeof(IpcContents) <= sizeof(CUipcMemHandle));
}  // namespace

// Of any address in an allocation, for all of it; UCX relies on that.
CUDA_CALL CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  STARTED_OR_RETURN(stand_in);
  const std::lock_guard lock(stand_in->mutex);
  const auto it = amem::stand_in::Containing(stand_in->legacy, pointer);
  if (handle == nullptr || it == stand_in->legacy.end()) return CUDA_ERROR_INVALID_VALUE;
  LegacyBlock& block = it->second;
  auto* const common = block.common ? &stand_in->common.at(it->first - block.offset) : nullptr;
  int& exported = common != nullptr ? common->exported : block.exported;
  if (exported < 0) {
    auto descriptor = stand_in->simulator->Export(common != nullptr ? common->handle : block.handle);
    if (!descriptor.ok()) return Result(descriptor.status());
    exported = descriptor->Release();
  }
  const IpcContents contents{kIpcMagic, getpid(), exported, block.asked, block.offset};
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &contents, sizeof(contents));
  return CUDA_SUCCESS;
}

// Opened again, it is where it was, and must be closed as often.
CUDA_CALL CUresult cuIpcOpenMemHandle(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned int) {
  STARTED_OR_RETURN(stand_in);
  CONTEXT_OR_RETURN(device);
  IpcContents contents{};
  std::memcpy(&contents, &handle, sizeof(contents));
  if (pointer == nullptr || contents.magic != kIpcMagic) return CUDA_ERROR_INVALID_VALUE;
  if (contents.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;  // a process cannot open its own
  const std::tuple<int, int, Bytes> origin{contents.pid, contents.descriptor, contents.offset};
  {
    const std::lock_guard lock(stand_in->mutex);
    for (auto& [address, block] : stand_in->opened) {
      if (block.origin != origin) continue;
      ++block.uses;
      *pointer = address;
      return CUDA_SUCCESS;
    }
  }
  const std::string path = "/proc/" + std::to_string(contents.pid) + "/fd/" + std::to_string(contents.descriptor);
  const amem::UniqueFd descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC));
  const auto imported = stand_in->simulator->Import(descriptor);
  if (!imported.ok()) return Result(imported.status());
  const off_t bytes = lseek(descriptor.get(), 0, SEEK_END);
  const CUresult result = amem::stand_in::MapAnywhere(*stand_in, *imported, static_cast<Bytes>(bytes), pointer);
  if (result != CUDA_SUCCESS) {
    static_cast<void>(stand_in->simulator->Release(*imported));
    return result;
  }
  *pointer += contents.offset;
  const std::lock_guard lock(stand_in->mutex);
  stand_in->opened.emplace(*pointer, LegacyBlock{.asked = contents.asked,
                                                 .bytes = static_cast<Bytes>(bytes),
                                                 .handle = *imported,
                                                 .device = device,
                                                 .context = amem::stand_in::CurrentContext(),
                                                 .offset = contents.offset,
                                                 .origin = origin});
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  STARTED_OR_RETURN(stand_in);
  {
    const std::lock_guard lock(stand_in->mutex);
    const auto found = stand_in->opened.find(pointer);
    if (found != stand_in->opened.end() && --found->second.uses > 0) return CUDA_SUCCESS;
  }
  return amem::stand_in::Free(*stand_in, stand_in->opened, pointer);
}
