// What the calls of virtual memory answer, and what is made of their handles.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <string>

#include "tests/gpu/walk/walk.h"

namespace amem::walk {
namespace {

constexpr std::size_t kBytes = std::size_t{2} << 20;

CUmemAllocationProp Properties(bool shared) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  properties.requestedHandleTypes = shared ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  return properties;
}

// A descriptor, imported into the same process and as a graphics library's memory.
void Share(CUmemGenericAllocationHandle handle, CUdeviceptr mapped) {
  int descriptor = -1;
  SAY("export", CALL(cuMemExportToShareableHandle, &descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  SAY("export with flags",
      CALL(cuMemExportToShareableHandle, &descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 7));
  if (descriptor < 0) return;
  SayText("close on exec: " + std::to_string(fcntl(descriptor, F_GETFD) & FD_CLOEXEC));
  CUmemGenericAllocationHandle imported = 0;
  SAY("import", CALL(cuMemImportFromShareableHandle, &imported, Pointer(static_cast<CUdeviceptr>(descriptor)),
                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  CUmemAllocationProp properties{};
  SAY("properties of the import", CALL(cuMemGetAllocationPropertiesFromHandle, &properties, imported),
      "device " + std::to_string(properties.location.id));
  CUdeviceptr second = 0;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  SAY("reserve", CALL(cuMemAddressReserve, &second, kBytes, 0, 0, 0));
  SAY("map the import", CALL(cuMemMap, second, kBytes, 0, imported, 0));
  SAY("open the import", CALL(cuMemSetAccess, second, kBytes, &access, 1));
  Know("i", second, kBytes);
  SayRange("of the import", second + 5);
  unsigned char byte = 0;
  SAY("fill", CALL(cuMemsetD8, mapped, 0x33, kBytes));
  SAY("read by the import", CALL(cuMemcpyDtoH, &byte, second + kBytes - 1, 1), std::to_string(byte));
  SAY("unmap the import", CALL(cuMemUnmap, second, kBytes));
  SAY("release the import", CALL(cuMemRelease, imported));
  SAY("release the import twice", CALL(cuMemRelease, imported));
  SAY("free the import's range", CALL(cuMemAddressFree, second, kBytes));
  Forget(second);

  CUDA_EXTERNAL_MEMORY_HANDLE_DESC wanted{};
  wanted.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD;
  wanted.handle.fd = dup(descriptor);
  wanted.size = kBytes;
  CUexternalMemory external = nullptr;
  const CUresult taken = CALL(cuImportExternalMemory, &external, &wanted);
  SAY("import as external memory", taken);
  if (taken != CUDA_SUCCESS) {
    close(wanted.handle.fd);
  } else {
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC part{};
    part.size = kBytes;
    CUdeviceptr buffer = 0;
    SAY("map external memory", CALL(cuExternalMemoryGetMappedBuffer, &buffer, external, &part));
    SAY("read external memory", CALL(cuMemcpyDtoH, &byte, buffer + 9, 1), std::to_string(byte));
    SAY("free external memory's buffer", CALL(cuMemFree, buffer));
    SAY("destroy external memory", CALL(cuDestroyExternalMemory, external));
  }
  close(descriptor);
}

void One(bool shared) {
  const std::string kind = shared ? "shared" : "private";
  const CUmemAllocationProp properties = Properties(shared);
  std::size_t granularity = 0;
  SAY("granularity " + kind, CALL(cuMemGetAllocationGranularity, &granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      std::to_string(granularity));
  CUmemGenericAllocationHandle handle = 0;
  SAY("create an odd size " + kind, CALL(cuMemCreate, &handle, kBytes + 1, &properties, 0));
  SAY("create nothing " + kind, CALL(cuMemCreate, &handle, 0, &properties, 0));
  SAY("create too much " + kind, CALL(cuMemCreate, &handle, std::size_t{1} << 50, &properties, 0));
  SAY("create without properties " + kind, CALL(cuMemCreate, &handle, kBytes, nullptr, 0));
  SAY("create " + kind, CALL(cuMemCreate, &handle, kBytes, &properties, 0));
  CUmemAllocationProp found{};
  SAY("properties " + kind, CALL(cuMemGetAllocationPropertiesFromHandle, &found, handle),
      "type " + std::to_string(found.type) + ", device " + std::to_string(found.location.id) + ", handle types " +
          std::to_string(found.requestedHandleTypes));
  CUdeviceptr range = 0;
  SAY("reserve " + kind, CALL(cuMemAddressReserve, &range, 4 * kBytes, 0, 0, 0));
  Know("r", range, 4 * kBytes);
  SAY("map at an offset " + kind, CALL(cuMemMap, range, kBytes, kBytes, handle, 0));
  SAY("map half " + kind, CALL(cuMemMap, range, kBytes / 2, 0, handle, 0));
  SAY("map " + kind, CALL(cuMemMap, range, kBytes, 0, handle, 0));
  SAY("map there again " + kind, CALL(cuMemMap, range, kBytes, 0, handle, 0));
  SAY("map elsewhere " + kind, CALL(cuMemMap, range + 2 * kBytes, kBytes, 0, handle, 0));
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  SayRange("before access " + kind, range);
  unsigned long long flags = 9;
  const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, 0};
  SAY("get access before " + kind, CALL(cuMemGetAccess, &flags, &location, range), std::to_string(flags));
  SAY("access " + kind, CALL(cuMemSetAccess, range, kBytes, &access, 1));
  SAY("access of what is not mapped " + kind, CALL(cuMemSetAccess, range + kBytes, kBytes, &access, 1));
  SAY("access elsewhere " + kind, CALL(cuMemSetAccess, range + 2 * kBytes, kBytes, &access, 1));
  SAY("get access " + kind, CALL(cuMemGetAccess, &flags, &location, range), std::to_string(flags));
  SayRange("of it " + kind, range + kBytes - 1);
  SayRange("behind it " + kind, range + kBytes);
  SAY("fill " + kind, CALL(cuMemsetD8, range, 0x21, kBytes));
  unsigned char byte = 0;
  SAY("read elsewhere " + kind, CALL(cuMemcpyDtoH, &byte, range + 2 * kBytes + 1, 1), std::to_string(byte));
  for (const auto& [text, which] :
       {std::pair{"MEMORY_TYPE", CU_POINTER_ATTRIBUTE_MEMORY_TYPE}, std::pair{"RANGE_SIZE", CU_POINTER_ATTRIBUTE_RANGE_SIZE},
        std::pair{"LEGACY_IPC", CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE},
        std::pair{"HANDLE_TYPES", CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES}}) {
    const CUpointer_attribute attribute = which;
    std::uint64_t value = 0;
    SAY(std::string(text) + " " + kind, CALL(cuPointerGetAttribute, &value, attribute, range + 7), std::to_string(value));
  }
  const int on = 1;
  SAY("set SYNC_MEMOPS " + kind, CALL(cuPointerSetAttribute, &on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, range));
  CUipcMemHandle ipc{};
  SAY("IPC handle " + kind, CALL(cuIpcGetMemHandle, &ipc, range));
  SAY("cuMemFree " + kind, CALL(cuMemFree, range));
  CUmemGenericAllocationHandle retained = 0;
  SAY("retain " + kind, CALL(cuMemRetainAllocationHandle, &retained, Pointer(range + 4096)),
      retained == handle ? "the same handle" : "another handle");
  SAY("release what was retained " + kind, CALL(cuMemRelease, retained));
  SAY("retain where nothing is " + kind, CALL(cuMemRetainAllocationHandle, &retained, Pointer(range + kBytes)));
  if (shared) Share(handle, range);
  SAY("unmap half " + kind, CALL(cuMemUnmap, range, kBytes / 2));
  SAY("free the range while mapped " + kind, CALL(cuMemAddressFree, range, 4 * kBytes));
  SAY("unmap " + kind, CALL(cuMemUnmap, range, kBytes));
  SAY("unmap elsewhere " + kind, CALL(cuMemUnmap, range + 2 * kBytes, kBytes));
  SAY("unmap what is not mapped " + kind, CALL(cuMemUnmap, range, kBytes));
  SAY("release " + kind, CALL(cuMemRelease, handle));
  SAY("release twice " + kind, CALL(cuMemRelease, handle));
  SAY("free the range " + kind, CALL(cuMemAddressFree, range, 4 * kBytes));
  SAY("free the range twice " + kind, CALL(cuMemAddressFree, range, 4 * kBytes));
  Forget(range);
}

}  // namespace

void Handles() {
  Chapter("handles");
  One(false);
  One(true);
}

// A tile of a sparse array gets its memory by a handle.
void Sparse() {
  Chapter("sparse arrays");
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp properties = Properties(false);
  SAY("create", CALL(cuMemCreate, &handle, kBytes, &properties, 0));
  CUDA_ARRAY3D_DESCRIPTOR shape{};
  shape.Width = 2048;
  shape.Height = 1024;
  shape.Format = CU_AD_FORMAT_UNSIGNED_INT8;
  shape.NumChannels = 1;
  shape.Flags = CUDA_ARRAY3D_SPARSE;
  CUarray array = nullptr;
  const CUresult made = CALL(cuArray3DCreate, &array, &shape);
  SAY("cuArray3DCreate", made);
  CUarrayMapInfo part{};
  part.resourceType = CU_RESOURCE_TYPE_ARRAY;
  part.resource.array = array;
  part.subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL;
  part.subresource.sparseLevel.extentWidth = 2048;
  part.subresource.sparseLevel.extentHeight = 1024;
  part.subresource.sparseLevel.extentDepth = 1;
  part.memOperationType = CU_MEM_OPERATION_TYPE_MAP;
  part.memHandleType = CU_MEM_HANDLE_TYPE_GENERIC;
  part.memHandle.memHandle = handle;
  part.deviceBitMask = 1;
  if (made == CUDA_SUCCESS) {
    SAY("cuMemMapArrayAsync", CALL(cuMemMapArrayAsync, &part, 1, nullptr));
    SAY("cuMemMapArrayAsync of nothing", CALL(cuMemMapArrayAsync, nullptr, 0, nullptr));
    part.memOperationType = CU_MEM_OPERATION_TYPE_UNMAP;
    part.memHandle.memHandle = 0;
    SAY("cuMemMapArrayAsync, unmapping", CALL(cuMemMapArrayAsync, &part, 1, nullptr));
    SAY("cuStreamSynchronize", CALL(cuStreamSynchronize, nullptr));
    SAY("cuArrayDestroy", CALL(cuArrayDestroy, array));
  }
  SAY("release", CALL(cuMemRelease, handle));
}

}  // namespace amem::walk
