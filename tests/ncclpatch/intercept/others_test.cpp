// What is counted of other libraries' calls that share memory.
#include "ncclpatch/intercept/others.h"

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
  // What another library gets in place of `real`.
  template <class F>
  static F* Counted(const char* name, F* real) {
    bool replaced = false;
    void* const entry = replacements::Bind(name, 13000, reinterpret_cast<void*>(real), &replaced, replacements::Caller::kOther);
    EXPECT_TRUE(replaced) << name;
    return reinterpret_cast<F*>(entry);
  }
  template <class F>
  static F* OfDriver(const char* name, const char* exported) {
    return Counted(name, Plain<F>(exported));
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
  const auto get = OfDriver<decltype(cuIpcGetMemHandle)>("cuIpcGetMemHandle", "cuIpcGetMemHandle");
  const auto free = OfDriver<decltype(cuMemFree)>("cuMemFree", "cuMemFree_v2");
  CUdeviceptr memory[2] = {};
  CUipcMemHandle handle{};
  for (CUdeviceptr& one : memory) ASSERT_EQ(Plain<decltype(cuMemAlloc)>("cuMemAlloc_v2")(&one, kBytes), CUDA_SUCCESS);
  ASSERT_EQ(get(&handle, memory[0]), CUDA_SUCCESS);
  ASSERT_EQ(get(&handle, memory[0]), CUDA_SUCCESS) << "for one more process";
  EXPECT_EQ(Now(OutsideKind::kIpcExport), (OutsideShare{1, kBytes}));
  ASSERT_EQ(free(memory[1]), CUDA_SUCCESS);
  EXPECT_EQ(Pieces(OutsideKind::kIpcExport), 1U);
  EXPECT_NE(Counted<decltype(cuMemFree)>("cuMemFree", [](CUdeviceptr) { return Refused(); })(memory[0]), CUDA_SUCCESS);
  EXPECT_EQ(Now(OutsideKind::kIpcExport), (OutsideShare{1, kBytes})) << "the driver refused to free it";
  ASSERT_EQ(free(memory[0]), CUDA_SUCCESS);
  EXPECT_EQ(Pieces(OutsideKind::kIpcExport), 0U);
}

TEST_F(Others, what_was_opened_twice_is_closed_twice) {
  static constexpr CUdeviceptr kOpened = 0x7000'0000;
  const auto open =
      Counted<decltype(cuIpcOpenMemHandle)>("cuIpcOpenMemHandle", [](CUdeviceptr* pointer, CUipcMemHandle, unsigned) {
        *pointer = kOpened;
        return CUDA_SUCCESS;
      });
  const auto close = Counted<decltype(cuIpcCloseMemHandle)>("cuIpcCloseMemHandle", [](CUdeviceptr) { return CUDA_SUCCESS; });
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
  const auto map = OfDriver<decltype(cuMemMap)>("cuMemMap", "cuMemMap");
  const auto unmap = OfDriver<decltype(cuMemUnmap)>("cuMemUnmap", "cuMemUnmap");
  const auto retain =
      OfDriver<decltype(cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle", "cuMemRetainAllocationHandle");
  const auto release = OfDriver<decltype(cuMemRelease)>("cuMemRelease", "cuMemRelease");
  const auto share =
      OfDriver<decltype(cuMemExportToShareableHandle)>("cuMemExportToShareableHandle", "cuMemExportToShareableHandle");
  for (const bool released_first : {true, false}) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CUmemGenericAllocationHandle handle = 0, again = 0;
    CUdeviceptr address = 0;
    int descriptor = -1;
    ASSERT_EQ(Plain<decltype(cuMemCreate)>("cuMemCreate")(&handle, kBytes, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(Plain<decltype(cuMemAddressReserve)>("cuMemAddressReserve")(&address, kBytes, 0, 0, 0), CUDA_SUCCESS);
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
    ASSERT_EQ(Plain<decltype(cuMemAddressFree)>("cuMemAddressFree")(address, kBytes), CUDA_SUCCESS);
  }
}

TEST_F(Others, imports_and_multicast_objects_and_pools_are_counted_until_they_are_gone) {
  static constexpr CUmemGenericAllocationHandle kImported = 0x71, kObject = 0x72;
  static const auto kPool = reinterpret_cast<CUmemoryPool>(0x7300);
  const auto import = Counted<decltype(cuMemImportFromShareableHandle)>(
      "cuMemImportFromShareableHandle", [](CUmemGenericAllocationHandle* handle, void*, CUmemAllocationHandleType) {
        *handle = kImported;
        return CUDA_SUCCESS;
      });
  const auto create = Counted<decltype(cuMulticastCreate)>(
      "cuMulticastCreate", [](CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp*) {
        *handle = kObject;
        return CUDA_SUCCESS;
      });
  const auto release =
      Counted<decltype(cuMemRelease)>("cuMemRelease", [](CUmemGenericAllocationHandle) { return CUDA_SUCCESS; });
  const auto share = Counted<decltype(cuMemPoolExportToShareableHandle)>(
      "cuMemPoolExportToShareableHandle",
      [](void*, CUmemoryPool, CUmemAllocationHandleType, unsigned long long) { return CUDA_SUCCESS; });
  const auto destroy = Counted<decltype(cuMemPoolDestroy)>("cuMemPoolDestroy", [](CUmemoryPool) { return CUDA_SUCCESS; });
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

}  // namespace
}  // namespace amem::test
