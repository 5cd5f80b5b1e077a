// Handles that are not descriptors: the driver's own go to NCCL and to whoever imports them, and their memory stays in place.
#include <cstring>

#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem {
namespace {

class FabricHandles : public test::Intercepted {
 protected:
  void SetUp() override {
    Intercepted::SetUp();
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
    properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    ASSERT_EQ(Driver<decltype(cuMemCreate)>("cuMemCreate")(&ours_, kBytes, &properties_, 0), CUDA_SUCCESS);
    mine_ = Map(ours_, Driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve"), Driver<decltype(cuMemMap)>("cuMemMap"),
                Driver<decltype(cuMemSetAccess)>("cuMemSetAccess"));
  }
  void TearDown() override {
    EXPECT_TRUE(session().Resume().ok());
    Drop(ours_, mine_, Driver<decltype(cuMemUnmap)>("cuMemUnmap"), Driver<decltype(cuMemRelease)>("cuMemRelease"),
         Driver<decltype(cuMemAddressFree)>("cuMemAddressFree"));
    Intercepted::TearDown();
  }
  int Export() {
    return Driver<decltype(cuMemExportToShareableHandle)>("cuMemExportToShareableHandle")(fabric_, ours_,
                                                                                          CU_MEM_HANDLE_TYPE_FABRIC, 0);
  }
  static unsigned char* Map(CUmemGenericAllocationHandle handle, decltype(cuMemAddressReserve)* reserve,
                            decltype(cuMemMap)* map, decltype(cuMemSetAccess)* set_access) {
    CUdeviceptr address = 0;
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    EXPECT_EQ(reserve(&address, kBytes, 0, 0, 0), CUDA_SUCCESS);
    EXPECT_EQ(map(address, kBytes, 0, handle, 0), CUDA_SUCCESS);
    EXPECT_EQ(set_access(address, kBytes, &access, 1), CUDA_SUCCESS);
    return reinterpret_cast<unsigned char*>(address);
  }
  static void Drop(CUmemGenericAllocationHandle handle, unsigned char* memory, decltype(cuMemUnmap)* unmap,
                   decltype(cuMemRelease)* release, decltype(cuMemAddressFree)* free_range) {
    const auto address = reinterpret_cast<CUdeviceptr>(memory);
    EXPECT_EQ(unmap(address, kBytes), CUDA_SUCCESS);
    EXPECT_EQ(release(handle), CUDA_SUCCESS);
    EXPECT_EQ(free_range(address, kBytes), CUDA_SUCCESS);
  }
  [[nodiscard]] Allocation Mine() const {
    const State state = session().CopyState();
    return state.allocations.at(state.MappingAt(Address{reinterpret_cast<std::uint64_t>(mine_)})->second.allocation);
  }

  CUmemAllocationProp properties_{};
  CUmemGenericAllocationHandle ours_ = 0;
  unsigned char* mine_ = nullptr;
  unsigned char fabric_[64] = {};
};

TEST_F(FabricHandles, reach_other_hosts_whose_memory_stays_the_same_over_a_pause) {
  ASSERT_EQ(Export(), CUDA_SUCCESS);
  EXPECT_TRUE(Runtime::Get().SharesForeign());
  // Another host has no AMem that knows this one.
  CUmemGenericAllocationHandle theirs = 0;
  ASSERT_EQ(PLAIN(cuMemImportFromShareableHandle)(&theirs, fabric_, CU_MEM_HANDLE_TYPE_FABRIC), CUDA_SUCCESS);
  unsigned char* there = Map(theirs, PLAIN(cuMemAddressReserve), PLAIN(cuMemMap), PLAIN(cuMemSetAccess));
  mine_[7] = 1;
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(session().Pause().ok());
    EXPECT_TRUE(Mine().resident);
    EXPECT_EQ(WhyKept(Mine()), KeepReason::kHandedOut);
    EXPECT_NE(session().statistics().Json().find("shared by a fabric handle"), std::string::npos);
    EXPECT_FALSE(AllocationOfMemory().resident) << "the rest goes";
    ASSERT_TRUE(session().Resume().ok());
    there[7] = static_cast<unsigned char>(there[7] + 41);
    EXPECT_EQ(mine_[7], there[7]);
  }
  Drop(theirs, there, PLAIN(cuMemUnmap), PLAIN(cuMemRelease), PLAIN(cuMemAddressFree));
}

TEST_F(FabricHandles, that_nccl_imports_are_the_drivers_and_stay) {
  mine_[3] = 9;
  ASSERT_EQ(Export(), CUDA_SUCCESS);
  CUmemGenericAllocationHandle imported = 0;
  ASSERT_EQ(Driver<decltype(cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle")(&imported, fabric_,
                                                                                               CU_MEM_HANDLE_TYPE_FABRIC),
            CUDA_SUCCESS);
  unsigned char* there = Map(imported, Driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve"),
                             Driver<decltype(cuMemMap)>("cuMemMap"), PLAIN(cuMemSetAccess));
  ASSERT_TRUE(session().Pause().ok());
  EXPECT_EQ(there[3], 9);
  ASSERT_TRUE(session().Resume().ok());
  Drop(imported, there, Driver<decltype(cuMemUnmap)>("cuMemUnmap"), Driver<decltype(cuMemRelease)>("cuMemRelease"),
       Driver<decltype(cuMemAddressFree)>("cuMemAddressFree"));
}

TEST_F(FabricHandles, are_not_made_of_memory_that_is_paused_and_what_was_not_shared_goes) {
  ASSERT_TRUE(session().Pause().ok());
  EXPECT_FALSE(Mine().resident);
  EXPECT_EQ(Export(), CUDA_ERROR_ILLEGAL_STATE);
  ASSERT_TRUE(session().Resume().ok());
  EXPECT_EQ(Export(), CUDA_SUCCESS);
}

// The driver says what it would say without AMem.
TEST_F(FabricHandles, are_refused_by_the_driver_where_memory_was_not_made_for_them) {
  CUmemGenericAllocationHandle plain = 0;
  properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  ASSERT_EQ(Driver<decltype(cuMemCreate)>("cuMemCreate")(&plain, kBytes, &properties_, 0), CUDA_SUCCESS);
  const std::uint64_t exported = Count<Exported>();
  EXPECT_EQ(Driver<decltype(cuMemExportToShareableHandle)>("cuMemExportToShareableHandle")(fabric_, plain,
                                                                                           CU_MEM_HANDLE_TYPE_FABRIC, 0),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Count<Exported>(), exported) << "nobody has it, and a pause may take the memory";
  EXPECT_EQ(Driver<decltype(cuMemRelease)>("cuMemRelease")(plain), CUDA_SUCCESS);
}

}  // namespace
}  // namespace amem
