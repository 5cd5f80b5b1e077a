// Network plugins: what one registers with its card stays where it is during a pause, and NCCL does not notice that it is seen.
#include <cstring>
#include <string>

#include "ncclpatch/intercept/registrations.h"
#include "tests/ncclpatch/intercept/intercepted.h"

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
  [[nodiscard]] std::uint32_t Registrations() const { return AllocationOfMemory().registrations; }
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

// The last test, because it holds for the rest of the process.
TEST_F(PluginTest, under_a_plugin_of_an_unknown_version_all_memory_stays_and_pauses_work) {
  EXPECT_FALSE(APauseKeepsIt());
  EXPECT_EQ(static_cast<void*>(Table("ncclNetPlugin_v99")), dlsym(plugin_, "ncclNetPlugin_v99"))
      << "NCCL gets the plugin's own";
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
