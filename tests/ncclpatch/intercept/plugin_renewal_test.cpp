// With AMEM_NETWORK=renew: what NCCL holds of a plugin's registration leads to the plugin's handle of today, and nothing is
// under way while that changes. Whole jobs over such a plugin are in tests/scenarios/network_test.cpp.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ncclpatch/intercept/plugin_handles.h"
#include "ncclpatch/nccl/attribution.h"
#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem {
namespace {

using intercept::PluginHandles;

constexpr int kHost = 1, kGpu = 2;  // NCCL_PTR_HOST, NCCL_PTR_CUDA

// The functions of a table, by their places in versions 6 to 12. `oldest`: version 5, which lacks regMrDmaBuf.
struct Net {
  void** table;
  bool profiling, oldest = false;

  template <class F>
  F* At(std::size_t place) const {
    return reinterpret_cast<F*>(table[oldest && place > 7 ? place - 1 : place]);
  }
  int Connect() const { return At<int(int, void*, void**, void**)>(5)(0, nullptr, nullptr, nullptr); }
  int RegMr(void* comm, void* data, int type, void** handle) const {
    return At<int(void*, void*, size_t, int, void**)>(7)(comm, data, 4096, type, handle);
  }
  int DeregMr(void* comm, void* handle) const { return At<int(void*, void*)>(9)(comm, handle); }
  int ISend(void* comm, void* handle, void** request) const {
    if (profiling)
      return At<int(void*, void*, size_t, int, void*, void*, void**)>(10)(comm, nullptr, 1, 0, handle, nullptr, request);
    return At<int(void*, void*, size_t, int, void*, void**)>(10)(comm, nullptr, 1, 0, handle, request);
  }
  int IRecv(void* comm, std::array<void*, 3> handles, void** request) const {
    if (profiling)
      return At<int(void*, int, void**, void*, int*, void**, void**, void**)>(11)(comm, 3, nullptr, nullptr, nullptr,
                                                                                  handles.data(), nullptr, request);
    return At<int(void*, int, void**, void*, int*, void**, void**)>(11)(comm, 3, nullptr, nullptr, nullptr, handles.data(),
                                                                        request);
  }
  int IFlush(void* comm, void* handle, void** request) const {
    return At<int(void*, int, void**, int*, void**, void**)>(12)(comm, 1, nullptr, nullptr, &handle, request);
  }
  int Test(void* request, int* done) const { return At<int(void*, int*, int*)>(13)(request, done, nullptr); }
  int CloseSend(void* comm) const { return At<int(void*)>(14)(comm); }
};

class PluginRenewalTest : public test::Intercepted {
 protected:
  using Seen = std::array<void*, 3>;

  void SetUp() override {
    Intercepted::SetUp();
    handles().Begin();
    nccl::t_state.origin.services = true;
    plugin_ = dlopen(AMEM_NET_PLUGIN, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(plugin_, nullptr) << dlerror();
    Switch<int>("stand_in_plugin_result") = 0;
    ASSERT_EQ(Nccl<int(size_t, CUdeviceptr*)>("stand_in_nccl_small_buffer")(kBytes, &buffer_), 0);
  }
  void TearDown() override {
    EXPECT_TRUE(session().CopyState().regions.empty());
    nccl::t_state.origin.services = false;
    EXPECT_EQ(Nccl<int(CUdeviceptr, size_t)>("stand_in_nccl_free_buffer")(buffer_, kBytes), 0);
    Intercepted::TearDown();
  }
  template <class T>
  T& Switch(const char* name) {
    return *static_cast<T*>(dlsym(plugin_, name));
  }
  Net Table(const char* name, bool profiling) {
    return {static_cast<void**>(Nccl<void*(void*, const char*)>("stand_in_nccl_look_up")(plugin_, name)), profiling};
  }
  // The table of version 5 gets the name and the functions of that of version 7.
  void MakeOldestRenewable() {
    void** const oldest = static_cast<void**>(dlsym(plugin_, "ncclNetPlugin_v5"));
    void** const from = static_cast<void**>(dlsym(plugin_, "ncclNetPlugin_v7"));
    std::copy_n(from + 9, 7, oldest + 8);  // from deregMr to closeRecv
    oldest[0] = const_cast<char*>("IBext_v5");
    oldest[7] = from[7];
  }
  Seen& seen() { return Switch<Seen>("stand_in_plugin_seen"); }
  int& transfers() { return Switch<int>("stand_in_plugin_transfers"); }
  void*& undone() { return Switch<void*>("stand_in_plugin_undone"); }
  static PluginHandles& handles() { return Forever<PluginHandles>(); }
  [[nodiscard]] void* buffer() const { return reinterpret_cast<void*>(buffer_); }
  static std::vector<RegionId> Regions() {
    std::vector<RegionId> all;
    for (const auto& [id, region] : session().CopyState().regions) all.push_back(id);
    return all;
  }
  static std::map<RegionId, intercept::TrafficGate*> Gates() {
    std::map<RegionId, intercept::TrafficGate*> gates;
    handles().FindGates(Regions(), &gates);
    return gates;
  }
  static std::string Drained() {
    for (const auto& [region, gate] : Gates())
      if (std::string busy = intercept::TrafficGate::Shut({gate}, In(std::chrono::milliseconds(0)))[gate]; !busy.empty())
        return busy;
    return {};
  }
  static void Open() {
    for (const auto& [region, gate] : Gates()) gate->Reopen();
  }
  static void Undo() {
    for (const RegionId id : Regions()) EXPECT_TRUE(handles().Deregister(id).ok());
  }
  static void Again() {
    for (const RegionId id : Regions()) EXPECT_TRUE(handles().Register(id).ok());
    Open();
  }

  void* plugin_ = nullptr;
  CUdeviceptr buffer_ = 0;
  int connection_ = 0;
};

TEST_F(PluginRenewalTest, each_call_leads_to_the_plugins_handle_of_today) {
  MakeOldestRenewable();
  for (const char* const name :
       {"ncclNetPlugin_v5", "ncclNetPlugin_v7", "ncclNetPlugin_v10", "ncclNetPlugin_v11", "ncclNetPlugin_v12"}) {
    SCOPED_TRACE(name);
    const int version = std::atoi(std::strrchr(name, 'v') + 1);
    Net net = Table(name, version >= 10);
    net.oldest = version == 5;
    ASSERT_EQ(net.Connect(), 0);
    void *handle = nullptr, *request = nullptr, *host = nullptr;
    ASSERT_EQ(net.RegMr(&connection_, buffer(), kGpu, &handle), 0);
    ASSERT_EQ(net.RegMr(&connection_, &connection_, kHost, &host), 0);
    ASSERT_EQ(Regions().size(), 1U);
    EXPECT_EQ(session().CopyState().regions.begin()->second.card.substr(0, 6), "IBext_");
    void* const first = handles().Real(handle);
    EXPECT_NE(first, handle);
    EXPECT_EQ(handles().Real(host), host) << "host memory stays, and its handle is the plugin's";

    ASSERT_EQ(net.ISend(&connection_, handle, &request), 0);
    EXPECT_EQ(seen()[0], first);
    EXPECT_NE(Drained().find("a transfer is under way on a connection"), std::string::npos) << Drained();
    int done = 0;
    ASSERT_EQ(net.Test(request, &done), 0);
    ASSERT_EQ(Drained(), "");
    Undo();
    EXPECT_EQ(undone(), first);
    const int before = transfers();
    ASSERT_EQ(net.ISend(&connection_, handle, &request), 0);
    EXPECT_EQ(request, nullptr) << "try again later";
    ASSERT_EQ(net.IRecv(&connection_, {handle, host, nullptr}, &request), 0);
    EXPECT_EQ(request, nullptr);
    EXPECT_EQ(transfers(), before);
    Again();

    void* const second = handles().Real(handle);
    EXPECT_NE(second, first);
    ASSERT_EQ(net.ISend(&connection_, handle, &request), 0);
    EXPECT_EQ(seen()[0], second);
    ASSERT_EQ(net.Test(request, &done), 0);
    ASSERT_EQ(net.IRecv(&connection_, {handle, host, nullptr}, &request), 0);
    EXPECT_EQ(seen(), (Seen{second, host, nullptr}));
    ASSERT_EQ(net.Test(request, &done), 0);
    ASSERT_EQ(net.IFlush(&connection_, handle, &request), 0);
    EXPECT_EQ(seen()[0], second);
    ASSERT_EQ(net.Test(request, &done), 0);
    EXPECT_EQ(net.DeregMr(&connection_, handle), 0);
    EXPECT_EQ(undone(), second);
    EXPECT_EQ(net.DeregMr(&connection_, host), 0);
    EXPECT_EQ(undone(), host);
  }
}

TEST_F(PluginRenewalTest, what_is_given_up_while_it_is_undone_is_asked_of_nobody) {
  const Net net = Table("ncclNetPlugin_v11", true);
  ASSERT_EQ(net.Connect(), 0);
  void *one = nullptr, *other = nullptr, *request = nullptr;
  ASSERT_EQ(net.RegMr(&connection_, buffer(), kGpu, &one), 0);
  ASSERT_EQ(net.RegMr(&connection_, buffer(), kGpu, &other), 0);
  // A transfer that never ends, on a connection that is closed.
  int closed = 0;
  ASSERT_EQ(net.ISend(&closed, one, &request), 0);
  EXPECT_NE(Drained(), "");
  EXPECT_EQ(net.CloseSend(&closed), 0);
  ASSERT_EQ(Drained(), "");
  Undo();
  undone() = nullptr;
  EXPECT_EQ(net.DeregMr(&connection_, one), 0);
  EXPECT_EQ(undone(), nullptr);
  EXPECT_EQ(Regions().size(), 1U);
  EXPECT_EQ(net.CloseSend(&connection_), 0);
  Again();
  EXPECT_EQ(handles().Real(other), nullptr) << "its connection is gone";
  EXPECT_EQ(net.DeregMr(&connection_, other), 0);
  EXPECT_EQ(undone(), nullptr);
}

TEST_F(PluginRenewalTest, a_failure_names_the_plugin_and_leaves_the_handle_as_it_was) {
  const Net net = Table("ncclNetPlugin_v11", true);
  ASSERT_EQ(net.Connect(), 0);
  void* handle = nullptr;
  ASSERT_EQ(net.RegMr(&connection_, buffer(), kGpu, &handle), 0);
  void* const real = handles().Real(handle);
  const RegionId region = Regions().front();
  EXPECT_FALSE(handles().Deregister(region).ok()) << "nothing was drained";
  ASSERT_EQ(Drained(), "");
  Switch<int>("stand_in_plugin_result") = 2;
  Status failed = handles().Deregister(region);
  EXPECT_NE(failed.message().find("IBext_v11 did not deregister 4 KiB"), std::string::npos) << failed.message();
  EXPECT_NE(failed.message().find("answered 2"), std::string::npos) << failed.message();
  EXPECT_EQ(handles().Real(handle), real);
  Switch<int>("stand_in_plugin_result") = 0;
  ASSERT_TRUE(handles().Deregister(region).ok());
  Switch<int>("stand_in_plugin_result") = 3;
  failed = handles().Register(region);
  EXPECT_NE(failed.message().find("IBext_v11 did not register 4 KiB"), std::string::npos) << failed.message();
  Switch<int>("stand_in_plugin_result") = 0;
  ASSERT_TRUE(handles().Register(region).ok());
  Open();
  EXPECT_EQ(net.DeregMr(&connection_, handle), 0);
}

TEST_F(PluginRenewalTest, other_plugins_and_other_memory_keep_the_plugins_own_handles) {
  const auto pins = [&](const Net& net, void* data) {
    void* handle = nullptr;
    EXPECT_EQ(net.RegMr(&connection_, data, kGpu, &handle), 0);
    EXPECT_EQ(handles().Real(handle), handle);
    const State state = session().CopyState();
    EXPECT_TRUE(state.regions.empty());
    const std::string why = state.registrations.empty() ? "(not recorded)" : state.registrations.begin()->second.pins;
    EXPECT_EQ(net.DeregMr(&connection_, handle), 0);
    return why;
  };
  EXPECT_EQ(pins(Table("ncclNetPlugin_v6", false), buffer()), "");
  EXPECT_EQ(pins(Table("ncclCollNetPlugin_v8", false), buffer()), "") << "a collective network's";
  const Net net = Table("ncclNetPlugin_v11", true);
  ASSERT_EQ(net.Connect(), 0);
  EXPECT_EQ(pins(net, reinterpret_cast<void*>(memory())), "its memory is the program's");
  nccl::t_state.origin.services = false;
  EXPECT_NE(pins(net, buffer()).find("serves a communicator's connections"), std::string::npos);
}

}  // namespace
}  // namespace amem
