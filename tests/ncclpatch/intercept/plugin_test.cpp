// Network plugins: what one registers with its card stays where it is during a pause, and NCCL does not notice that it is seen.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstring>
#include <filesystem>
#include <set>
#include <string>

#include "ncclpatch/intercept/registrations.h"
#include "tests/journal/temporary.h"
#include "tests/ncclpatch/intercept/intercepted.h"
#include "tests/without_memory.h"

namespace amem {
namespace {

class PluginTest : public test::Intercepted {
 protected:
  using Init = int(void*);
  using RegMr = int(void*, void*, size_t, int, void**);
  using RegDmaBuf = int(void*, void*, size_t, int, std::uint64_t, int, void**);
  using DeregMr = int(void*, void*);

  void SetUp() override {
    Intercepted::SetUp();
    plugin_ = dlopen(AMEM_NET_PLUGIN, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(plugin_, nullptr) << dlerror();
    Switch<int>("stand_in_plugin_result") = 0;
    Switch<void*>("stand_in_plugin_same_handle") = nullptr;
  }
  template <class T>
  T& Switch(const char* name) {
    return *static_cast<T*>(dlsym(plugin_, name));
  }
  // As NCCL looks it up: from its own code.
  void** Table(const char* name) {
    return static_cast<void**>(Nccl<void*(void*, const char*)>("stand_in_nccl_look_up")(plugin_, name));
  }
  template <class F>
  static F* Function(void** table, std::size_t index) {
    return reinterpret_cast<F*>(table[index]);
  }
  [[nodiscard]] void* pointer() const { return reinterpret_cast<void*>(memory()); }
  [[nodiscard]] std::uint32_t Registrations() const { return AllocationOfMemory().pinned; }
  [[nodiscard]] bool APauseKeepsIt() const {
    EXPECT_TRUE(Runtime::Get().Cycle(session(), CycleKind::kPause).ok());
    const bool kept = AllocationOfMemory().resident;
    EXPECT_TRUE(Runtime::Get().Cycle(session(), CycleKind::kResume).ok());
    return kept;
  }

  void* plugin_ = nullptr;
};

TEST_F(PluginTest, what_a_plugin_of_any_known_version_registers_stays) {
  for (const char* name : {"ncclNetPlugin_v5", "ncclNetPlugin_v6", "ncclNetPlugin_v8", "ncclCollNetPlugin_v8"}) {
    SCOPED_TRACE(name);
    void** table = Table(name);
    ASSERT_NE(table, nullptr);
    const bool has_dma_buf = std::strcmp(name, "ncclNetPlugin_v5") != 0;
    const auto deregister = Function<DeregMr>(table, has_dma_buf ? 9 : 8);
    EXPECT_STREQ(static_cast<const char*>(table[0]), static_cast<const char*>(*static_cast<void**>(dlsym(plugin_, name))));
    void* handle = nullptr;
    EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, pointer(), kBytes, 2, &handle), 0);
    EXPECT_EQ(handle, pointer()) << "the plugin's own handle";
    EXPECT_EQ(Switch<std::size_t>("stand_in_plugin_bytes"), kBytes);
    EXPECT_EQ(Registrations(), 1U);
    EXPECT_TRUE(APauseKeepsIt());
    EXPECT_EQ(deregister(nullptr, handle), 0);
    EXPECT_EQ(Registrations(), 0U);
    EXPECT_FALSE(APauseKeepsIt());
    if (!has_dma_buf) continue;
    EXPECT_EQ(Function<RegDmaBuf>(table, 8)(nullptr, pointer(), kBytes, 2, 0, 77, &handle), 0);
    EXPECT_EQ(Registrations(), 1U);
    EXPECT_EQ(deregister(nullptr, handle), 0);
    EXPECT_EQ(Registrations(), 0U);
  }
}

// Networks whose plugin also serves transfers from kernels (GIN) and one-sided ones (RMA), as that for EFA since 1.19: NCCL
// looks their tables up whether it will use them or not.
TEST_F(PluginTest, what_tables_of_gin_and_rma_register_stays_and_all_else_leaves) {
  using Sym = int(void*, void*, size_t, int, std::uint64_t, void**);
  using SymDmaBuf = int(void*, void*, size_t, int, std::uint64_t, int, std::uint64_t, void**);
  using Gin = int(void*, void*, size_t, int, std::uint64_t, void**, void**);
  using GinDmaBuf = int(void*, void*, size_t, int, std::uint64_t, int, std::uint64_t, void**, void**);
  constexpr std::uint64_t kStrong = 5;
  struct Case {
    const char* name;
    std::size_t reg_mr;
    bool gin;
  };
  for (const auto& [name, reg_mr, gin] :
       {Case{"ncclGinPlugin_v11", 7, true}, Case{"ncclGinPlugin_v12", 7, true}, Case{"ncclGinPlugin_v13", 7, true},
        Case{"ncclGinPlugin_v14", 8, true}, Case{"ncclRmaPlugin_v13", 7, true}, Case{"ncclRmaPlugin_v14", 7, false},
        Case{"ncclRmaPlugin_v15", 7, false}}) {
    SCOPED_TRACE(name);
    void** const table = Table(name);
    ASSERT_NE(table, nullptr);
    EXPECT_EQ(table[6], nullptr) << "what the plugin lacks";
    EXPECT_FALSE(APauseKeepsIt()) << "nothing is registered";
    for (const bool dma_buf : {false, true}) {
      void *handle = nullptr, *device = nullptr;
      int registered = 0;
      if (gin) {
        registered =
            dma_buf ? Function<GinDmaBuf>(table, reg_mr + 1)(nullptr, pointer(), kBytes, 2, 0, 77, kStrong, &handle, &device)
                    : Function<Gin>(table, reg_mr)(nullptr, pointer(), kBytes, 2, kStrong, &handle, &device);
      } else {
        registered = dma_buf ? Function<SymDmaBuf>(table, reg_mr + 1)(nullptr, pointer(), kBytes, 2, 0, 77, kStrong, &handle)
                             : Function<Sym>(table, reg_mr)(nullptr, pointer(), kBytes, 2, kStrong, &handle);
      }
      EXPECT_EQ(registered, 0);
      EXPECT_EQ(handle, pointer());
      EXPECT_EQ(device, gin ? pointer() : nullptr);
      EXPECT_EQ(Switch<std::uint64_t>("stand_in_plugin_flags"), kStrong);
      EXPECT_EQ(Registrations(), 1U);
      EXPECT_TRUE(APauseKeepsIt());
      EXPECT_EQ(Function<DeregMr>(table, reg_mr + 2)(nullptr, handle), 0);
      EXPECT_EQ(Registrations(), 0U);
    }
  }
}

TEST_F(PluginTest, one_registered_buffer_keeps_its_own_handle_and_no_slab) {
  using Connect = int(void*, int, void*, void**);
  using Make = int(size_t, CUdeviceptr*);
  void** const table = Table("ncclNetPlugin_v8");
  const auto make = [](const char* path) {
    CUdeviceptr made = 0;
    EXPECT_EQ(Nccl<Make>(path)(64 << 10, &made), 0);
    return made;
  };
  const CUdeviceptr beside = make("stand_in_nccl_peer_buffer");
  EXPECT_EQ(Function<Connect>(table, 5)(nullptr, 0, nullptr, nullptr), 0);
  const CUdeviceptr buffer = make("stand_in_nccl_small_buffer");
  void* handle = nullptr;
  EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, reinterpret_cast<void*>(buffer), 64 << 10, 2, &handle), 0);
  EXPECT_TRUE(Runtime::Get().Cycle(session(), CycleKind::kPause).ok());
  const PoolHoldings held = session().Inspect([](const State& state) { return MeasureTag(state, false); });
  EXPECT_EQ(held.parts, 2 * kBytes);
  EXPECT_EQ(held.own_resident, kBytes);
  EXPECT_EQ(held.kept.at(KeepReason::kRegistered), kBytes);
  EXPECT_TRUE(Runtime::Get().Cycle(session(), CycleKind::kResume).ok());
  EXPECT_EQ(Function<DeregMr>(table, 9)(nullptr, handle), 0);
  for (const CUdeviceptr one : {beside, buffer})
    EXPECT_EQ((Nccl<int(CUdeviceptr, size_t)>("stand_in_nccl_free_buffer")(one, kBytes)), 0);
}

// The function of an old plugin takes an int, and its caller may leave anything in the upper half of the register.
TEST_F(PluginTest, an_old_plugins_registration_is_as_large_as_the_plugin_sees_it) {
  void** table = Table("ncclNetPlugin_v6");
  void* handle = nullptr;
  EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, pointer(), kBytes | std::size_t{1} << 40, 2, &handle), 0);
  const auto registrations = session().CopyState().registrations;
  ASSERT_EQ(registrations.size(), 1U);
  EXPECT_EQ(registrations.begin()->second.bytes, kBytes);
  EXPECT_EQ(Function<DeregMr>(table, 9)(nullptr, handle), 0);
}

TEST_F(PluginTest, a_table_that_is_filled_in_by_its_initialisation_is_wrapped_then) {
  void** table = Table("ncclNetPlugin_v9");
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(Function<Init>(table, 1)(nullptr), 0);
  ASSERT_NE(table[7], nullptr) << "NCCL would call a null pointer";
  void* handle = nullptr;
  EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, pointer(), kBytes, 2, &handle), 0);
  EXPECT_EQ(Registrations(), 1U);
  EXPECT_EQ(Function<DeregMr>(table, 9)(nullptr, handle), 0);
  EXPECT_EQ(Registrations(), 0U);
}

TEST_F(PluginTest, what_fails_changes_nothing) {
  void** table = Table("ncclNetPlugin_v8");
  void* handle = nullptr;
  Switch<int>("stand_in_plugin_result") = 2;
  EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, pointer(), kBytes, 2, &handle), 2);
  EXPECT_EQ(Registrations(), 0U);
  Switch<int>("stand_in_plugin_result") = 0;
  EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, pointer(), kBytes, 2, &handle), 0);
  Switch<int>("stand_in_plugin_result") = 2;
  EXPECT_EQ(Function<DeregMr>(table, 9)(nullptr, handle), 2);
  EXPECT_EQ(Registrations(), 1U);
  EXPECT_TRUE(APauseKeepsIt());
  Switch<int>("stand_in_plugin_result") = 0;
  EXPECT_EQ(Function<DeregMr>(table, 9)(nullptr, handle), 0);
  EXPECT_EQ(Registrations(), 0U);
}

TEST_F(PluginTest, one_handle_for_several_registrations_holds_until_the_last_is_undone) {
  void** table = Table("ncclNetPlugin_v8");
  int cached = 0;
  Switch<void*>("stand_in_plugin_same_handle") = &cached;
  void* handle = nullptr;
  EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, pointer(), kBytes, 2, &handle), 0);
  EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, pointer(), kBytes / 2, 2, &handle), 0);
  EXPECT_EQ(Function<DeregMr>(table, 9)(nullptr, handle), 0);
  EXPECT_TRUE(APauseKeepsIt());
  EXPECT_EQ(Function<DeregMr>(table, 9)(nullptr, handle), 0);
  EXPECT_FALSE(APauseKeepsIt());
}

TEST_F(PluginTest, registering_paused_memory_is_refused_and_host_memory_is_not) {
  void** table = Table("ncclNetPlugin_v8");
  ASSERT_TRUE(session().Pause().ok());
  void* handle = nullptr;
  char host[64];
  EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, pointer(), kBytes, 2, &handle), 5);
  EXPECT_EQ(Function<RegDmaBuf>(table, 8)(nullptr, pointer(), kBytes, 2, 0, 77, &handle), 5);
  EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, host, sizeof host, 1, &handle), 0);
  EXPECT_EQ(Function<DeregMr>(table, 9)(nullptr, handle), 0);
}

TEST_F(PluginTest, the_same_table_is_wrapped_once_and_other_names_are_not) {
  EXPECT_EQ(Table("ncclNetPlugin_v8"), Table("ncclNetPlugin_v8"));
  EXPECT_NE(Table("ncclNetPlugin_v8"), dlsym(plugin_, "ncclNetPlugin_v8"));
  EXPECT_EQ(static_cast<void*>(Table("stand_in_plugin_result")), dlsym(plugin_, "stand_in_plugin_result"));
  int tuner = 0;
  EXPECT_EQ(intercept::WrapPlugin("ncclTunerPlugin_v4", &tuner), &tuner);
  EXPECT_FALSE(APauseKeepsIt());
}

TEST_F(PluginTest, nccl_gets_our_function_for_every_name_that_registers) {
  const auto look_up = Nccl<void*(void*, const char*)>("stand_in_nccl_look_up");
  for (const char* name :
       {"ibv_reg_mr", "ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr", "ibv_dereg_mr", "mlx5dv_reg_dmabuf_mr", "mlx5dv_devx_umem_reg",
        "mlx5dv_devx_umem_reg_ex", "mlx5dv_devx_umem_dereg", "gdr_pin_buffer", "gdr_pin_buffer_v2", "gdr_unpin_buffer"}) {
    void* const own = dlsym(plugin_, name);
    ASSERT_NE(own, nullptr) << name;
    EXPECT_NE(look_up(plugin_, name), own) << name;
  }
  EXPECT_EQ(look_up(plugin_, "ibv_open_device"), dlsym(plugin_, "ibv_open_device"));
  EXPECT_EQ(look_up(plugin_, "gdr_no_such_function"), nullptr);
}

// NCCL does so with its last communicator. Each time it lies somewhere else.
TEST_F(PluginTest, one_that_is_unloaded_and_loaded_again_and_again_is_seen_each_time) {
  const test::TemporaryDirectory directory;
  const auto look_up = Nccl<void*(void*, const char*)>("stand_in_nccl_look_up");
  constexpr std::uintptr_t kPage = 4096;
  std::set<void*> places;
  for (int i = 0; i < 40; ++i) {
    const auto copy = directory.path() / ("libnccl-net-" + std::to_string(i) + ".so");
    std::filesystem::copy_file(AMEM_NET_PLUGIN, copy);
    void* const plugin = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(plugin, nullptr) << dlerror();
    auto** const own = static_cast<void**>(dlsym(plugin, "ncclNetPlugin_v8"));
    auto** const table = static_cast<void**>(look_up(plugin, "ncclNetPlugin_v8"));
    ASSERT_NE(table, own) << i;
    places.insert(own);
    void* handle = nullptr;
    EXPECT_EQ(Function<RegMr>(table, 7)(nullptr, pointer(), kBytes, 2, &handle), 0);
    EXPECT_EQ(Registrations(), 1U);
    EXPECT_EQ(Function<DeregMr>(table, 9)(nullptr, handle), 0);
    ASSERT_EQ(dlclose(plugin), 0);
    auto* const page = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(own) / kPage * kPage);
    ASSERT_EQ(mmap(page, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0), page);
  }
  EXPECT_EQ(places.size(), 40U);
  EXPECT_FALSE(APauseKeepsIt());
  EXPECT_EQ(session().CopyState().kept_whole, "");
}

#ifndef AMEM_SANITIZED  // tests/without_memory.cpp
// What NCCL gets is recorded; what it does not get the card does not hold.
TEST_F(PluginTest, without_memory_a_registration_is_recorded_or_undone) {
  void** const table = Table("ncclNetPlugin_v8");
  int& held = Switch<int>("stand_in_plugin_held");
  const auto reg = Function<RegMr>(table, 7);
  const auto reg_dma_buf = Function<RegDmaBuf>(table, 8);
  const auto each = [&](const auto& call) {
    bool refused = true;
    std::uint64_t spared = 0;
    for (; refused && !HasFailure(); ++spared) {
      SCOPED_TRACE(spared);
      ASSERT_LT(spared, 1000U);
      void* handle = nullptr;
      int result = 0;
      {
        const test::WithoutMemory none(spared, 1);
        result = call(&handle);
        refused = test::WithoutMemory::HasRefused();
      }
      EXPECT_EQ(held, result == 0 ? 1 : 0) << result;
      EXPECT_EQ(Registrations(), result == 0 ? 1U : 0U);
      if (result == 0) {
        EXPECT_EQ(Function<DeregMr>(table, 9)(nullptr, handle), 0);
      }
      EXPECT_EQ(Registrations(), 0U);
      EXPECT_EQ(held, 0);
    }
    EXPECT_GT(spared, 5U) << "next to nothing was refused";
  };
  each([&](void** handle) { return reg(nullptr, pointer(), kBytes, 2, handle); });
  each([&](void** handle) { return reg_dma_buf(nullptr, pointer(), kBytes, 2, 0, 77, handle); });
  EXPECT_EQ(session().CopyState().broken, "");
}
#endif

// The last test, because it holds for the rest of the process.
TEST_F(PluginTest, under_a_plugin_of_an_unknown_version_all_memory_stays_and_pauses_work) {
  EXPECT_FALSE(APauseKeepsIt());
  for (const char* name : {"ncclNetPlugin_v99", "ncclGinPlugin_v99"})
    EXPECT_EQ(static_cast<void*>(Table(name)), dlsym(plugin_, name)) << "NCCL gets the plugin's own";
  const PoolId tag = *session().pools().Open("weights", PoolPolicy::kPreserve);
  ASSERT_TRUE(session().pools().Allocate(tag, kBytes, DeviceOrdinal{0}).ok());
  const auto in_tag = [&] { return session().Inspect([&](const State& state) { return MeasurePools(state).at(tag); }); };
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(session().pools().Pause(tag, {}).ok());
    EXPECT_EQ(in_tag().own_resident, in_tag().own) << "the card may have the pages of a tag, too";
    EXPECT_TRUE(session().pools().Resume(tag, {}).ok());
    EXPECT_TRUE(APauseKeepsIt());
  }
  EXPECT_EQ(WhyKept(AllocationOfMemory()), KeepReason::kUnseen);
  EXPECT_EQ(Registrations(), 0U);
  EXPECT_NE(session().CopyState().kept_whole.find("ncclNetPlugin_v99"), std::string::npos);
  EXPECT_EQ(Count<EverythingKept>(), 1U);
}

}  // namespace
}  // namespace amem
