// What is counted of other libraries' calls that share memory.
#include "ncclpatch/intercept/others.h"

#include <unistd.h>

#include <set>

#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem::test {
namespace {

class Others : public Intercepted {
 protected:
  static void SetUpTestSuite() {
    Intercepted::SetUpTestSuite();
    replacements::Install(intercept::CountingTables(), replacements::Caller::kOther);
    intercept::JournalOthers(session());
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

// What another library holds of a tag's memory, with AMEM_SCOPE=nccl, too. This program has AMem in it, so the library is its
// caller.
class Guarded : public Others {
 protected:
  static std::string Library() { return CallingLibrary(); }

  void SetUp() override {
    Others::SetUp();
    pool_ = *session().pools().Open("guarded", PoolPolicy::kPreserve);
    part_ = *session().pools().Allocate(pool_, kBytes, DeviceOrdinal{0});
    const State state = session().CopyState();
    chunk_ = state.MappingAt(part_)->second.allocation;
  }
  void TearDown() override {
    EXPECT_TRUE(session().pools().Free(part_, std::nullopt).ok());
    EXPECT_EQ(session().CopyState().allocations.count(chunk_), 0U);
    Others::TearDown();
  }
  [[nodiscard]] void* at() const { return reinterpret_cast<void*>(part_.value); }
  [[nodiscard]] CUdeviceptr address() const { return part_.value; }
  [[nodiscard]] std::set<std::string> Holding() const { return LibrariesHolding(session().CopyState(), chunk_); }
  // Pauses and resumes; whether the chunk stayed where it was.
  [[nodiscard]] bool Stays() const {
    EXPECT_TRUE(session().pools().Pause(pool_, {}).ok());
    const bool resident = session().CopyState().allocations.at(chunk_).resident;
    EXPECT_TRUE(session().pools().Resume(pool_, {}).ok());
    return resident;
  }
  void IsHeld() const {
    EXPECT_EQ(WhyKept(session().CopyState().allocations.at(chunk_)), KeepReason::kHeld);
    EXPECT_EQ(Holding(), std::set<std::string>{Library()});
    EXPECT_TRUE(Stays());
  }
  void IsFree() const {
    EXPECT_EQ(Holding(), std::set<std::string>());
    EXPECT_FALSE(Stays());
  }
  template <class F>
  static F* Verbs(const char* name, F* real) {
    bool replaced = false;
    void* entry = replacements::BindExported(name, reinterpret_cast<void*>(real), &replaced, Caller::kOther);
    EXPECT_TRUE(replaced) << name;
    return reinterpret_cast<F*>(entry);
  }
  static CUmemGenericAllocationHandle Retain(void* address) {
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(OF_DRIVER(cuMemRetainAllocationHandle)(&handle, address), CUDA_SUCCESS);
    return handle;
  }

  PoolId pool_;
  Address part_;
  AllocationId chunk_;
};

TEST_F(Guarded, memory_whose_handle_a_library_retains_stays_until_each_reference_and_mapping_is_gone) {
  const auto release = OF_DRIVER(cuMemRelease);
  const CUmemGenericAllocationHandle handle = Retain(at());
  EXPECT_FALSE(intercept::IsGuest(handle)) << "it works wherever the library may use it";
  ASSERT_EQ(Retain(at()), handle);
  IsHeld();
  ASSERT_EQ(release(handle), CUDA_SUCCESS);
  IsHeld();
  const Bytes whole = session().records().MappingAt(part_).bytes;
  CUdeviceptr second = 0;
  ASSERT_EQ(PLAIN(cuMemAddressReserve)(&second, whole, 0, 0, 0), CUDA_SUCCESS);
  ASSERT_EQ(OF_DRIVER(cuMemMap)(second, whole, 0, handle, 0), CUDA_SUCCESS);
  ASSERT_EQ(release(handle), CUDA_SUCCESS);
  IsHeld();
  ASSERT_EQ(OF_DRIVER(cuMemUnmap)(second, whole), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuMemAddressFree)(second, whole), CUDA_SUCCESS);
  IsFree();
}

TEST_F(Guarded, a_release_that_the_driver_refuses_ends_nothing) {
  const CUmemGenericAllocationHandle handle = Retain(at());
  const auto refused =
      ForOthers<decltype(cuMemRelease)>("cuMemRelease", [](CUmemGenericAllocationHandle) { return Refused(); });
  EXPECT_NE(refused(handle), CUDA_SUCCESS);
  IsHeld();
  ASSERT_EQ(OF_DRIVER(cuMemRelease)(handle), CUDA_SUCCESS);
  IsFree();
}

TEST_F(Guarded, exported_memory_stays_because_nobody_says_who_opens_it) {
  const CUmemGenericAllocationHandle handle = Retain(at());
  int descriptor = -1;
  const auto share = OF_DRIVER(cuMemExportToShareableHandle);
  ASSERT_NE(share(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 7), CUDA_SUCCESS);
  EXPECT_FALSE(session().CopyState().allocations.at(chunk_).handed_out) << "the driver refused";
  ASSERT_EQ(share(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), CUDA_SUCCESS);
  ::close(descriptor);
  ASSERT_EQ(OF_DRIVER(cuMemRelease)(handle), CUDA_SUCCESS);
  IsHeld();
}

TEST_F(Guarded, memory_behind_a_dma_buf_stays_until_its_registration_ends_and_its_descriptor_is_closed) {
  const auto enroll = Verbs(
      "ibv_reg_dmabuf_mr", +[](void*, std::uint64_t, size_t, std::uint64_t, int, int) -> void* {
        static int region;
        return &region;
      });
  const auto end = Verbs(
      "ibv_dereg_mr", +[](void*) { return 0; });
  int descriptor = -1;
  ASSERT_EQ(OF_DRIVER(cuMemGetHandleForAddressRange)(&descriptor, address(), kBytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
            CUDA_SUCCESS);
  IsHeld();
  void* const region = enroll(nullptr, 0, kBytes, 0, descriptor, 1);
  IsHeld();
  ASSERT_EQ(end(region), 0);
  intercept::JournalOthers(session());
  IsHeld();
  ::close(descriptor);
  intercept::JournalOthers(session());
  IsFree();
}

TEST_F(Guarded, memory_that_a_library_registers_stays_under_the_librarys_name_until_it_is_deregistered) {
  const auto end = Verbs(
      "ibv_dereg_mr", +[](void*) { return 0; });
  static int g_region;
  const auto registered = [&](void* region) {
    EXPECT_EQ(region, &g_region);
    IsHeld();
    EXPECT_EQ(end(region), 0);
    IsFree();
  };
  registered(Verbs(
      "ibv_reg_mr", +[](void*, void*, size_t, int) -> void* { return &g_region; })(nullptr, at(), kBytes, 1));
  registered(Verbs(
      "ibv_reg_mr_iova", +[](void*, void*, size_t, std::uint64_t, int) -> void* { return &g_region; })(nullptr, at(), 1, 0, 1));
  registered(Verbs(
      "ibv_reg_mr_iova2", +[](void*, void*, size_t, std::uint64_t, unsigned) -> void* { return &g_region; })(nullptr, at(), 1,
                                                                                                             0, 1));
  // From an address before it, as a library registers its whole arena.
  const Extent whole = session().records().MappingAt(part_);
  registered(Verbs(
      "ibv_reg_mr", +[](void*, void*, size_t, int) -> void* { return &g_region; })(
      nullptr, reinterpret_cast<void*>(whole.address.value - 4096), whole.bytes, 1));
  struct Attributes {
    size_t bytes;
    int access;
    std::uint64_t mask, iova;
    void* address;
    int descriptor;
    std::uint64_t offset;
    void* hints;
  } attributes{kBytes, 1, 2, 0, at(), -1, 0, nullptr};
  registered(Verbs(
      "ibv_reg_mr_ex", +[](void*, void*) -> void* { return &g_region; })(nullptr, &attributes));
}

TEST_F(Guarded, a_registration_that_is_given_other_memory_holds_that) {
  static int g_region;
  int host = 0;
  const auto again = Verbs(
      "ibv_rereg_mr", +[](void*, int, void*, void*, size_t, int) { return 0; });
  void* const region = Verbs(
      "ibv_reg_mr", +[](void*, void*, size_t, int) -> void* { return &g_region; })(nullptr, at(), kBytes, 1);
  EXPECT_EQ(again(region, 2, nullptr, nullptr, 0, 1), 0) << "only its access";
  IsHeld();
  EXPECT_EQ(again(region, 1, nullptr, &host, sizeof host, 1), 0);
  IsFree();
  EXPECT_EQ(again(region, 1, nullptr, at(), kBytes, 1), 0);
  IsHeld();
  EXPECT_EQ(Verbs(
                "ibv_dereg_mr", +[](void*) { return 0; })(region),
            0);
  IsFree();
}

TEST_F(Guarded, memory_registered_for_storage_stays_until_it_is_deregistered) {
  struct FileError {
    int file, driver;
  };
  const auto enroll = Verbs(
      "cuFileBufRegister", +[](const void*, size_t, int) {
        return FileError{0, 0};
      });
  const auto end = Verbs(
      "cuFileBufDeregister", +[](const void*) {
        return FileError{0, 0};
      });
  EXPECT_EQ(enroll(at(), kBytes, 0).file, 0);
  IsHeld();
  EXPECT_EQ(end(at()).file, 0);
  IsFree();
}

TEST_F(Guarded, memory_bound_to_a_multicast_object_stays_whichever_way_it_is_bound) {
  CUmulticastObjectProp properties{};
  properties.numDevices = 1;
  properties.size = session().records().MappingAt(part_).bytes;
  properties.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle object = 0;
  ASSERT_EQ(OF_DRIVER(cuMulticastCreate)(&object, &properties), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuMulticastAddDevice)(object, 0), CUDA_SUCCESS);
  ASSERT_EQ(OF_DRIVER(cuMulticastBindAddr)(object, 0, session().records().MappingAt(part_).address.value, properties.size, 0),
            CUDA_SUCCESS);
  IsHeld();
  ASSERT_EQ(PLAIN(cuMulticastUnbind)(object, 0, 0, properties.size), CUDA_SUCCESS);
  ASSERT_EQ(OF_DRIVER(cuMemRelease)(object), CUDA_SUCCESS);
}

TEST_F(Guarded, memory_bound_by_a_retained_handle_stays) {
  const CUmemGenericAllocationHandle handle = Retain(at());
  const auto bind = ForOthers<decltype(cuMulticastBindMem)>(
      "cuMulticastBindMem", [](CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t,
                               unsigned long long) { return CUDA_SUCCESS; });
  ASSERT_EQ(bind(0x71, 0, handle, 0, kBytes, 0), CUDA_SUCCESS);
  ASSERT_EQ(OF_DRIVER(cuMemRelease)(handle), CUDA_SUCCESS);
  IsHeld();
}

TEST_F(Guarded, a_pause_waits_until_the_driver_has_answered_a_library_that_retains) {
  using Real = decltype(cuMemRetainAllocationHandle);
  Held<Real>::Reset();
  const auto slow = ForOthers<Real>("cuMemRetainAllocationHandle", &Held<Real>::Real);
  CUmemGenericAllocationHandle handle = 0x77;
  std::thread retains([&] { EXPECT_EQ(slow(&handle, at()), CUDA_SUCCESS); });
  Held<Real>::AwaitInside(1);
  std::atomic<bool> paused{false};
  std::thread pauses([&] {
    EXPECT_TRUE(session().pools().Pause(pool_, {}).ok());
    paused = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(paused);
  Held<Real>::Release();
  retains.join();
  pauses.join();
  EXPECT_TRUE(session().CopyState().allocations.at(chunk_).resident);
  EXPECT_TRUE(session().pools().Resume(pool_, {}).ok());
  ASSERT_EQ(
      ForOthers<decltype(cuMemRelease)>("cuMemRelease", [](CUmemGenericAllocationHandle) { return CUDA_SUCCESS; })(handle),
      CUDA_SUCCESS);
  IsFree();
}

TEST_F(Guarded, registering_paused_memory_is_refused_and_other_memory_is_not_even_during_a_pause) {
  static int g_region;
  const auto enroll = Verbs(
      "ibv_reg_mr", +[](void*, void*, size_t, int) -> void* { return &g_region; });
  ASSERT_TRUE(session().pools().Pause(pool_, {}).ok());
  EXPECT_EQ(enroll(nullptr, at(), kBytes, 1), nullptr);
  int host = 0;
  EXPECT_EQ(enroll(nullptr, &host, sizeof host, 1), &g_region);
  ASSERT_TRUE(session().pools().Resume(pool_, {}).ok());
  IsFree();
}

TEST_F(Guarded, statistics_and_memory_name_the_library_and_what_it_holds) {
  const CUmemGenericAllocationHandle handle = Retain(at());
  const std::string named =
      "\"held_by\":{\"" + Library() + "\":" + std::to_string(session().records().MappingAt(part_).bytes) + "}";
  EXPECT_NE(session().statistics().MemoryJson().find(named), std::string::npos) << session().statistics().MemoryJson();
  EXPECT_NE(session().statistics().Json().find(named), std::string::npos);
  EXPECT_NE(session().statistics().Text().find("held by " + Library()), std::string::npos);
  ASSERT_EQ(OF_DRIVER(cuMemRelease)(handle), CUDA_SUCCESS);
}

TEST_F(Guarded, the_default_scope_replaces_each_name_that_its_guards_need) {
  for (const char* name : {"cuMemRetainAllocationHandle",
                           "cuMemExportToShareableHandle",
                           "cuMemGetHandleForAddressRange",
                           "cuMemRelease",
                           "cuMemMap",
                           "cuMemUnmap",
                           "cuMemMapArrayAsync",
                           "cuMulticastBindMem",
                           "cuMulticastBindMem_v2",
                           "cuMulticastBindAddr",
                           "cuMulticastBindAddr_v2",
                           "cuIpcGetMemHandle",
                           "cuLogicalEndpointBindAddr",
                           "cuGetProcAddress_v2",
                           "ibv_reg_mr",
                           "ibv_reg_mr_iova",
                           "ibv_reg_mr_iova2",
                           "ibv_reg_mr_ex",
                           "ibv_rereg_mr",
                           "ibv_reg_dmabuf_mr",
                           "ibv_dereg_mr",
                           "mlx5dv_reg_dmabuf_mr",
                           "mlx5dv_devx_umem_reg",
                           "mlx5dv_devx_umem_reg_ex",
                           "mlx5dv_devx_umem_dereg",
                           "gdr_pin_buffer",
                           "gdr_pin_buffer_v2",
                           "gdr_unpin_buffer",
                           "cuFileBufRegister",
                           "cuFileBufDeregister"}) {
    EXPECT_TRUE(replacements::Replaces(name, Caller::kOther)) << name;
    EXPECT_TRUE(replacements::Has(intercept::GuardTables(), name)) << name;
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
  EXPECT_EQ(session().records().HandlesOfTags(Address{range}, 2 * kBytes), kBytes);
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
  EXPECT_EQ(WhyKept(session().CopyState().allocations.at(intercept::ToAllocation(memory))), KeepReason::kHeld);
  ASSERT_TRUE(session().pools().Resume(Tag(), {}).ok());
  EXPECT_EQ(PLAIN(cuMulticastUnbind)(object, 0, 0, kBytes), CUDA_SUCCESS);
  for (const CUmemGenericAllocationHandle one : {memory, free, object}) EXPECT_EQ(release(one), CUDA_SUCCESS);
}

// Calls that give the driver its own handle of a tag's memory. Each has it only while no pause of that tag can take it.
class HandsOver : public SharedHandles {
 protected:
  using Handle = CUmemGenericAllocationHandle;
  using BindMem = CUresult(cuuint32_t, CUdevice, cuuint64_t, Handle, cuuint64_t, cuuint64_t, unsigned long long);

  // `F` is the driver's function, which `call` gets a handle to by way of AMem.
  template <class F, class Call>
  static void NoPauseComesBetween(const Call& call, Handle handle) {
    constexpr std::chrono::milliseconds kLong{50};
    Held<F>::Reset();
    std::thread calls([&] { EXPECT_EQ(call(handle), CUDA_SUCCESS); });
    Held<F>::AwaitInside(1);
    std::atomic<bool> paused = false;
    std::thread pauses([&] {
      EXPECT_TRUE(session().pools().Pause(Tag(), {}).ok());
      paused = true;
    });
    const auto until = std::chrono::steady_clock::now() + kLong;
    while (!paused && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    EXPECT_FALSE(paused) << "the driver has a handle that a pause releases";
    Held<F>::Release();
    calls.join();
    pauses.join();
    EXPECT_NE(WhyKept(session().CopyState().allocations.at(intercept::ToAllocation(handle))), KeepReason::kNone);
  }
  // The tag is paused. The driver would end the process if it got a handle of memory that is away.
  template <class F, class Call>
  static void ItIsRefused(const Call& call, Handle handle) {
    Held<F>::Reset();
    Held<F>::Release();
    EXPECT_EQ(call(handle), CUDA_ERROR_ILLEGAL_STATE);
    EXPECT_EQ(Held<F>::inside, 0);
  }
  template <class F, class Call>
  void OneThatStaysAndOneThatLeaves(const Call& call) {
    const Handle first = Create(), second = Create();
    NoPauseComesBetween<F>(call, first);
    ItIsRefused<F>(call, second);
    ASSERT_TRUE(session().pools().Resume(Tag(), {}).ok());
    EXPECT_EQ(call(second), CUDA_SUCCESS);
    for (const Handle one : {first, second}) EXPECT_EQ(release(one), CUDA_SUCCESS);
  }
};

TEST_F(HandsOver, an_export_to_another_host) {
  using F = decltype(cuMemExportToShareableHandle);
  F* const real = ForOthers("cuMemExportToShareableHandle", &Held<F>::Real);
  unsigned char fabric[64] = {};
  OneThatStaysAndOneThatLeaves<F>([&](Handle handle) { return real(fabric, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0); });
}

TEST_F(HandsOver, pages_of_a_sparse_array) {
  using F = decltype(cuMemMapArrayAsync);
  F* const real = ForOthers("cuMemMapArrayAsync", &Held<F>::Real);
  OneThatStaysAndOneThatLeaves<F>([&](Handle handle) {
    CUarrayMapInfo one{};
    one.memOperationType = CU_MEM_OPERATION_TYPE_MAP;
    one.memHandleType = CU_MEM_HANDLE_TYPE_GENERIC;
    one.memHandle.memHandle = handle;
    return real(&one, 1, nullptr);
  });
}

TEST_F(HandsOver, a_binding_to_a_logical_endpoint) {
  BindMem* const real = Replace("cuLogicalEndpointBindMem", &Held<BindMem>::Real, 13030, Caller::kOther);
  const auto unbind = Replace<CUresult(cuuint32_t, CUdevice, cuuint64_t, cuuint64_t)>(
      "cuLogicalEndpointUnbind", [](cuuint32_t, CUdevice, cuuint64_t, cuuint64_t) { return CUDA_SUCCESS; }, 13030,
      Caller::kOther);
  const Handle first = Create(), second = Create();
  const CUdeviceptr places[] = {Map(first), Map(second)};
  const auto call = [&](Handle handle) { return real(3, 0, handle == first ? 0 : kBytes, handle, 0, kBytes, 0); };
  NoPauseComesBetween<BindMem>(call, first);
  ItIsRefused<BindMem>(call, second);
  ASSERT_TRUE(session().pools().Resume(Tag(), {}).ok());
  EXPECT_EQ(call(second), CUDA_SUCCESS);
  EXPECT_EQ(unbind(3, 0, 0, 2 * kBytes), CUDA_SUCCESS);
  EXPECT_EQ(WhyKept(session().CopyState().allocations.at(intercept::ToAllocation(first))), KeepReason::kNone);
  for (const CUdeviceptr place : places) EXPECT_EQ(unmap(place, kBytes), CUDA_SUCCESS);
  for (const Handle one : {first, second}) EXPECT_EQ(release(one), CUDA_SUCCESS);
}

}  // namespace
}  // namespace amem::test
