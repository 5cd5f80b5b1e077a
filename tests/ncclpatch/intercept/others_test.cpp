// What is counted of other libraries' calls that share memory.
#include "ncclpatch/intercept/others.h"

#include <unistd.h>

#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem::test {
namespace {

class Others : public Intercepted {
 protected:
  static void SetUpTestSuite() {
    Intercepted::SetUpTestSuite();
    replacements::Install(intercept::CountingTables(), replacements::Caller::kOther);
    intercept::TellOfOthers(session());
  }
  static OutsideShare Now(OutsideKind kind) {
    OutsideShare sum;
    for (const auto& [what, share] : session().CopyState().outside) {
      if (what.second != kind) continue;
      sum.pieces += share.pieces;
      sum.bytes += share.bytes;
    }
    return sum;
  }
  static std::uint64_t Pieces(OutsideKind kind) { return Now(kind).pieces; }
  static CUresult Refused() { return CUDA_ERROR_INVALID_VALUE; }
};

TEST_F(Others, an_export_by_cudaipc_lasts_until_its_memory_is_freed) {
  const auto get = OF_DRIVER(cuIpcGetMemHandle);
  const auto free = OF_DRIVER(cuMemFree);
  CUdeviceptr memory[2] = {};
  CUipcMemHandle handle{};
  for (CUdeviceptr& one : memory) ASSERT_EQ(PLAIN(cuMemAlloc)(&one, kBytes), CUDA_SUCCESS);
  ASSERT_EQ(get(&handle, memory[0]), CUDA_SUCCESS);
  ASSERT_EQ(get(&handle, memory[0]), CUDA_SUCCESS) << "for one more process";
  EXPECT_EQ(Now(OutsideKind::kIpcExport), (OutsideShare{1, kBytes}));
  ASSERT_EQ(free(memory[1]), CUDA_SUCCESS);
  EXPECT_EQ(Pieces(OutsideKind::kIpcExport), 1U);
  EXPECT_NE(ForOthers<decltype(cuMemFree)>("cuMemFree", [](CUdeviceptr) { return Refused(); })(memory[0]), CUDA_SUCCESS);
  EXPECT_EQ(Now(OutsideKind::kIpcExport), (OutsideShare{1, kBytes})) << "the driver refused to free it";
  ASSERT_EQ(free(memory[0]), CUDA_SUCCESS);
  EXPECT_EQ(Pieces(OutsideKind::kIpcExport), 0U);
}

TEST_F(Others, what_was_opened_twice_is_closed_twice) {
  static constexpr CUdeviceptr kOpened = 0x7000'0000;
  const auto open =
      ForOthers<decltype(cuIpcOpenMemHandle)>("cuIpcOpenMemHandle", [](CUdeviceptr* pointer, CUipcMemHandle, unsigned) {
        *pointer = kOpened;
        return CUDA_SUCCESS;
      });
  const auto close = ForOthers<decltype(cuIpcCloseMemHandle)>("cuIpcCloseMemHandle", [](CUdeviceptr) { return CUDA_SUCCESS; });
  CUdeviceptr pointer = 0;
  ASSERT_EQ(open(&pointer, {}, 1), CUDA_SUCCESS);
  ASSERT_EQ(open(&pointer, {}, 1), CUDA_SUCCESS);
  for (const std::uint64_t left : {1U, 1U, 0U}) {
    EXPECT_EQ(Pieces(OutsideKind::kIpcImport), left);
    if (left == 0) continue;
    ASSERT_EQ(close(kOpened), CUDA_SUCCESS);
  }
}

// As PyTorch and NVSHMEM do, in any order.
TEST_F(Others, a_handle_is_shared_until_its_last_reference_and_mapping_are_gone) {
  const auto map = OF_DRIVER(cuMemMap);
  const auto unmap = OF_DRIVER(cuMemUnmap);
  const auto retain = OF_DRIVER(cuMemRetainAllocationHandle);
  const auto release = OF_DRIVER(cuMemRelease);
  const auto share = OF_DRIVER(cuMemExportToShareableHandle);
  for (const bool released_first : {true, false}) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CUmemGenericAllocationHandle handle = 0, again = 0;
    CUdeviceptr address = 0;
    int descriptor = -1;
    ASSERT_EQ(PLAIN(cuMemCreate)(&handle, kBytes, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(PLAIN(cuMemAddressReserve)(&address, kBytes, 0, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(map(address, kBytes, 0, handle, 0), CUDA_SUCCESS);
    EXPECT_EQ(Pieces(OutsideKind::kHandleExport), 0U);
    for (int process = 0; process < 2; ++process) {
      ASSERT_EQ(share(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), CUDA_SUCCESS);
      close(descriptor);
      EXPECT_EQ(Now(OutsideKind::kHandleExport), (OutsideShare{1, kBytes}));
    }
    ASSERT_EQ(retain(&again, reinterpret_cast<void*>(address)), CUDA_SUCCESS);
    ASSERT_EQ(release(again), CUDA_SUCCESS);
    EXPECT_EQ(Pieces(OutsideKind::kHandleExport), 1U);
    ASSERT_EQ(released_first ? release(handle) : unmap(address, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(Now(OutsideKind::kHandleExport), (OutsideShare{1, kBytes}));
    ASSERT_EQ(released_first ? unmap(address, kBytes) : release(handle), CUDA_SUCCESS);
    EXPECT_EQ(Pieces(OutsideKind::kHandleExport), 0U);
    ASSERT_EQ(PLAIN(cuMemAddressFree)(address, kBytes), CUDA_SUCCESS);
  }
}

TEST_F(Others, imports_and_multicast_objects_and_pools_are_counted_until_they_are_gone) {
  static constexpr CUmemGenericAllocationHandle kImported = 0x71, kObject = 0x72;
  static const auto kPool = reinterpret_cast<CUmemoryPool>(0x7300);
  const auto import = ForOthers<decltype(cuMemImportFromShareableHandle)>(
      "cuMemImportFromShareableHandle", [](CUmemGenericAllocationHandle* handle, void*, CUmemAllocationHandleType) {
        *handle = kImported;
        return CUDA_SUCCESS;
      });
  const auto create = ForOthers<decltype(cuMulticastCreate)>(
      "cuMulticastCreate", [](CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp*) {
        *handle = kObject;
        return CUDA_SUCCESS;
      });
  const auto release =
      ForOthers<decltype(cuMemRelease)>("cuMemRelease", [](CUmemGenericAllocationHandle) { return CUDA_SUCCESS; });
  const auto share = ForOthers<decltype(cuMemPoolExportToShareableHandle)>(
      "cuMemPoolExportToShareableHandle",
      [](void*, CUmemoryPool, CUmemAllocationHandleType, unsigned long long) { return CUDA_SUCCESS; });
  const auto destroy = ForOthers<decltype(cuMemPoolDestroy)>("cuMemPoolDestroy", [](CUmemoryPool) { return CUDA_SUCCESS; });
  CUmemGenericAllocationHandle handle = 0;
  ASSERT_EQ(import(&handle, nullptr, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), CUDA_SUCCESS);
  ASSERT_EQ(create(&handle, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(share(nullptr, kPool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), CUDA_SUCCESS);
  for (const OutsideKind kind : {OutsideKind::kHandleImport, OutsideKind::kMulticast, OutsideKind::kPoolExport})
    EXPECT_EQ(Pieces(kind), 1U) << ToText(kind);
  ASSERT_EQ(release(kImported), CUDA_SUCCESS);
  EXPECT_EQ(Pieces(OutsideKind::kHandleImport), 0U);
  EXPECT_EQ(Pieces(OutsideKind::kMulticast), 1U);
  ASSERT_EQ(release(kObject), CUDA_SUCCESS);
  ASSERT_EQ(destroy(kPool), CUDA_SUCCESS);
  for (const OutsideKind kind : {OutsideKind::kHandleImport, OutsideKind::kMulticast, OutsideKind::kPoolExport})
    EXPECT_EQ(Pieces(kind), 0U) << ToText(kind);
}

TEST_F(Others, a_process_without_the_preload_says_that_it_does_not_see_them) {
  EXPECT_EQ(session().CopyState().outside.count({"", OutsideKind::kUnseen}), 1U);
}

TEST_F(Others, what_is_no_sharing_is_left_to_the_driver) {
  bool replaced = true;
  for (const char* name : {"cuMemCreate", "cuMemAlloc", "cuMemSetAccess", "cuLaunchKernel", "cuMemcpyAsync"}) {
    int real = 0;
    EXPECT_EQ(replacements::Bind(name, 13000, &real, &replaced, replacements::Caller::kOther), &real) << name;
    EXPECT_FALSE(replaced) << name;
  }
}

// What another library gets with AMEM_SCOPE=shared.
class SharedHandles : public Others {
 protected:
  static void SetUpTestSuite() {
    Others::SetUpTestSuite();
    replacements::Install(intercept::WiderTables(LibraryScope::kShared), replacements::Caller::kOther);
  }
  static void TearDownTestSuite() { replacements::Install(intercept::CountingTables(), replacements::Caller::kOther); }
  static CUmemAllocationProp Properties(CUmemAllocationHandleType type) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = type;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    return properties;
  }
  CUmemGenericAllocationHandle Create(CUmemAllocationHandleType type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) const {
    const CUmemAllocationProp properties = Properties(type);
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(create(&handle, kBytes, &properties, 0), CUDA_SUCCESS);
    return handle;
  }
  CUdeviceptr Map(CUmemGenericAllocationHandle handle, CUdeviceptr at = 0) const {
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    if (at == 0) {
      EXPECT_EQ(PLAIN(cuMemAddressReserve)(&at, kBytes, 0, 0, 0), CUDA_SUCCESS);
    }
    EXPECT_EQ(map(at, kBytes, 0, handle, 0), CUDA_SUCCESS);
    EXPECT_EQ(set_access(at, kBytes, &access, 1), CUDA_SUCCESS);
    return at;
  }
  static PoolId Tag() {
    const State state = session().CopyState();
    for (const auto& [id, a] : state.allocations)
      if (a.pool && state.pools.at(a.pool).tag != "program") return a.pool;
    return {};
  }
  static Bytes InUse() { return Plain<std::uint64_t(int)>("stand_in_cuda_bytes_in_use")(0); }

  decltype(cuMemCreate)* create = OF_DRIVER(cuMemCreate);
  decltype(cuMemMap)* map = OF_DRIVER(cuMemMap);
  decltype(cuMemUnmap)* unmap = OF_DRIVER(cuMemUnmap);
  decltype(cuMemSetAccess)* set_access = OF_DRIVER(cuMemSetAccess);
  decltype(cuMemRelease)* release = OF_DRIVER(cuMemRelease);
};

TEST_F(SharedHandles, are_a_tags_from_their_creation_until_the_last_of_them_is_gone) {
  const Bytes before = InUse();
  const CUmemGenericAllocationHandle handle = Create();
  ASSERT_TRUE(intercept::IsGuest(handle));
  const CUdeviceptr address = Map(handle);
  *reinterpret_cast<int*>(address) = 4711;
  CUmemAllocationProp told{};
  EXPECT_EQ(OF_DRIVER(cuMemGetAllocationPropertiesFromHandle)(&told, handle), CUDA_SUCCESS);
  EXPECT_EQ(told.requestedHandleTypes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  CUmemGenericAllocationHandle retained = 0, imported = 0;
  EXPECT_EQ(OF_DRIVER(cuMemRetainAllocationHandle)(&retained, reinterpret_cast<void*>(address)), CUDA_SUCCESS);
  EXPECT_EQ(retained, handle);
  int descriptor = -1;
  ASSERT_EQ(OF_DRIVER(cuMemExportToShareableHandle)(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            CUDA_SUCCESS);
  ASSERT_EQ(
      OF_DRIVER(cuMemImportFromShareableHandle)(&imported, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
      CUDA_SUCCESS);
  ::close(descriptor);
  const CUdeviceptr again = Map(imported);
  const PoolId tag = Tag();
  ASSERT_TRUE(session().pools().Pause(tag, {}).ok());
  EXPECT_EQ(InUse(), before);
  const CUmemGenericAllocationHandle meanwhile = Create();
  EXPECT_FALSE(intercept::IsGuest(meanwhile)) << "the tag is paused, and the library goes on with the driver's";
  ASSERT_TRUE(session().pools().Resume(tag, {}).ok());
  EXPECT_EQ(*reinterpret_cast<int*>(again), 4711);
  for (const OutsideKind kind : {OutsideKind::kHandleExport, OutsideKind::kHandleImport}) EXPECT_EQ(Pieces(kind), 0U);
  for (const CUmemGenericAllocationHandle one : {handle, retained, imported, meanwhile}) EXPECT_EQ(release(one), CUDA_SUCCESS);
  for (const CUdeviceptr one : {address, again}) EXPECT_EQ(unmap(one, kBytes), CUDA_SUCCESS);
  for (int waited = 0; InUse() != before && waited < 2000; ++waited) usleep(1000);  // for the message about the import
  EXPECT_EQ(InUse(), before);
}

TEST_F(SharedHandles, cannot_be_had_of_what_cudaMalloc_gave) {
  const PoolId pool = *session().pools().Open("cache", PoolPolicy::kPreserve);
  const Address part = *session().pools().Allocate(pool, kBytes, DeviceOrdinal{0});
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(OF_DRIVER(cuMemRetainAllocationHandle)(&handle, reinterpret_cast<void*>(part.value + 512)),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_TRUE(session().pools().Free(part, nullptr).ok());
}

TEST_F(SharedHandles, what_nobody_is_to_share_is_the_drivers_also_beside_a_tags) {
  const CUmemGenericAllocationHandle theirs = Create(CU_MEM_HANDLE_TYPE_NONE), ours = Create();
  ASSERT_FALSE(intercept::IsGuest(theirs));
  CUdeviceptr range = 0;
  ASSERT_EQ(PLAIN(cuMemAddressReserve)(&range, 2 * kBytes, 0, 0, 0), CUDA_SUCCESS);
  Map(ours, range);
  Map(theirs, range + kBytes);
  EXPECT_EQ(session().HandlesOfTags(Address{range}, 2 * kBytes), kBytes);
  EXPECT_EQ(unmap(range, 2 * kBytes), CUDA_SUCCESS) << "both at once";
  EXPECT_EQ(PLAIN(cuMemAddressFree)(range, 2 * kBytes), CUDA_SUCCESS);
  for (const CUmemGenericAllocationHandle one : {ours, theirs}) EXPECT_EQ(release(one), CUDA_SUCCESS);
}

TEST_F(SharedHandles, what_is_bound_to_a_multicast_object_stays_and_the_object_is_counted) {
  CUmulticastObjectProp properties{};
  properties.numDevices = 1;
  properties.size = kBytes;
  properties.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle object = 0;
  ASSERT_EQ(OF_DRIVER(cuMulticastCreate)(&object, &properties), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuMulticastAddDevice)(object, 0), CUDA_SUCCESS);
  const Bytes before = InUse();
  const CUmemGenericAllocationHandle memory = Create(), free = Create();
  ASSERT_EQ(OF_DRIVER(cuMulticastBindMem)(object, 0, memory, 0, kBytes, 0), CUDA_SUCCESS);
  EXPECT_EQ(Pieces(OutsideKind::kMulticast), 1U);
  ASSERT_TRUE(session().pools().Pause(Tag(), {}).ok());
  EXPECT_EQ(InUse(), before + kBytes) << "the object holds those very pages";
  EXPECT_EQ(WhyKept(session().CopyState().allocations.at(intercept::ToAllocation(memory))), KeepReason::kHandedOut);
  ASSERT_TRUE(session().pools().Resume(Tag(), {}).ok());
  EXPECT_EQ(PLAIN(cuMulticastUnbind)(object, 0, 0, kBytes), CUDA_SUCCESS);
  for (const CUmemGenericAllocationHandle one : {memory, free, object}) EXPECT_EQ(release(one), CUDA_SUCCESS);
}

}  // namespace
}  // namespace amem::test
