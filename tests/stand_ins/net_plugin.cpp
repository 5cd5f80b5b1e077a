// A network plugin, as NCCL loads one: tables of functions of several versions. The table of version 9 is filled in when it is
// initialised, as some plugins do. Tables for transfers from kernels (GIN) and one-sided ones (RMA) are as aws-ofi-nccl exports
// them. A handle is the address that was registered.
#include <array>
#include <cstddef>
#include <cstdint>

#define SHOWN extern "C" __attribute__((visibility("default")))

// Of libibverbs, libmlx5 and libgdrapi, their names only.
#define NAME(name) \
  SHOWN int name() { return 0; }
NAME(ibv_reg_mr)
NAME(ibv_reg_mr_iova2)
NAME(ibv_reg_dmabuf_mr)
NAME(ibv_dereg_mr)
NAME(ibv_open_device)
NAME(mlx5dv_reg_dmabuf_mr)
NAME(mlx5dv_devx_umem_reg)
NAME(mlx5dv_devx_umem_reg_ex)
NAME(mlx5dv_devx_umem_dereg)
NAME(gdr_pin_buffer)
NAME(gdr_pin_buffer_v2)
NAME(gdr_unpin_buffer)

SHOWN int stand_in_plugin_result;           // what registering and its undoing answer
SHOWN std::size_t stand_in_plugin_bytes;    // of the last registration
SHOWN std::uint64_t stand_in_plugin_flags;  // of the last symmetric one
SHOWN int stand_in_plugin_held;             // registrations that were not undone
SHOWN void* stand_in_plugin_same_handle;    // not null: the handle of every registration
int stand_in_plugin_result = 0;
std::size_t stand_in_plugin_bytes = 0;
int stand_in_plugin_held = 0;
std::uint64_t stand_in_plugin_flags = 0;
void* stand_in_plugin_same_handle = nullptr;

struct Table {
  const char* name;
  std::array<void*, 19> functions;
};
struct SymmetricTable {
  const char* name;
  std::array<void*, 20> functions;
};

namespace {

int Registered(void* data, std::size_t bytes, void** handle) {
  stand_in_plugin_bytes = bytes;
  if (stand_in_plugin_result == 0) ++stand_in_plugin_held;
  if (stand_in_plugin_result == 0) *handle = stand_in_plugin_same_handle != nullptr ? stand_in_plugin_same_handle : data;
  return stand_in_plugin_result;
}

int Init(void*) { return 0; }
int Nothing() { return 0; }
int RegMr(void*, void* data, std::size_t bytes, int, void** handle) { return Registered(data, bytes, handle); }
int RegMrInt(void*, void* data, int bytes, int, void** handle) {
  return Registered(data, static_cast<std::size_t>(bytes), handle);
}
int RegMrDmaBuf(void*, void* data, std::size_t bytes, int, std::uint64_t, int, void** handle) {
  return Registered(data, bytes, handle);
}
int DeregMr(void*, void*) {
  if (stand_in_plugin_result == 0) --stand_in_plugin_held;
  return stand_in_plugin_result;
}
void* const kNothing = reinterpret_cast<void*>(&Nothing);

constexpr std::size_t kInit = 0, kRegMr = 6;  // behind the name

Table Old(bool dma_buf) {
  Table table{"old", {}};
  table.functions.fill(kNothing);
  table.functions[kInit] = reinterpret_cast<void*>(&Init);
  table.functions[kRegMr] = reinterpret_cast<void*>(&RegMrInt);
  if (dma_buf) table.functions[kRegMr + 1] = reinterpret_cast<void*>(&RegMrDmaBuf);
  table.functions[dma_buf ? kRegMr + 2 : kRegMr + 1] = reinterpret_cast<void*>(&DeregMr);
  return table;
}
Table New() {
  Table table = Old(true);
  table.functions[kRegMr] = reinterpret_cast<void*>(&RegMr);
  return table;
}
int FillIn(void*);

int RegMrSym(void*, void* data, std::size_t bytes, int, std::uint64_t flags, void** handle) {
  stand_in_plugin_flags = flags;
  return Registered(data, bytes, handle);
}
int RegMrSymDmaBuf(void*, void* data, std::size_t bytes, int, std::uint64_t, int, std::uint64_t flags, void** handle) {
  return RegMrSym(nullptr, data, bytes, 0, flags, handle);
}
// With the registration as kernels find it, which is the plugin's handle again.
int RegMrGin(void*, void* data, std::size_t bytes, int, std::uint64_t flags, void** handle, void** device) {
  const int result = RegMrSym(nullptr, data, bytes, 0, flags, handle);
  if (result == 0) *device = *handle;
  return result;
}
int RegMrGinDmaBuf(void*, void* data, std::size_t bytes, int, std::uint64_t, int, std::uint64_t flags, void** handle,
                   void** device) {
  return RegMrGin(nullptr, data, bytes, 0, flags, handle, device);
}

SymmetricTable Symmetric(std::size_t at, bool gin) {
  SymmetricTable table{"symmetric", {}};
  table.functions.fill(kNothing);
  table.functions[5] = table.functions[9] = nullptr;  // createContext and destroyContext, without GDAKI
  table.functions[kInit] = reinterpret_cast<void*>(&Init);
  table.functions[at] = gin ? reinterpret_cast<void*>(&RegMrGin) : reinterpret_cast<void*>(&RegMrSym);
  table.functions[at + 1] = gin ? reinterpret_cast<void*>(&RegMrGinDmaBuf) : reinterpret_cast<void*>(&RegMrSymDmaBuf);
  table.functions[at + 2] = reinterpret_cast<void*>(&DeregMr);
  return table;
}

}  // namespace

// ---- as nccl-rdma-sharp in mode ib: each registration has another handle, and what a transfer was given is kept for the test

SHOWN std::array<void*, 3> stand_in_plugin_seen;  // handles that the last transfer was given
SHOWN int stand_in_plugin_transfers;              // how many were begun
SHOWN void* stand_in_plugin_undone;               // the last handle that was undone
std::array<void*, 3> stand_in_plugin_seen{};
int stand_in_plugin_transfers = 0;
void* stand_in_plugin_undone = nullptr;

namespace {

int g_request;
int Transferred(std::array<void*, 3> seen, void** request) {
  stand_in_plugin_seen = seen;
  ++stand_in_plugin_transfers;
  *request = &g_request;
  return 0;
}
int NextHandle(void** handle) {
  static std::uintptr_t next = 0x1000;
  if (stand_in_plugin_result == 0) *handle = reinterpret_cast<void*>(++next);
  return stand_in_plugin_result;
}
int RegMrIb(void*, void*, std::size_t, int, void** handle) { return NextHandle(handle); }
int RegDmaBufIb(void*, void*, std::size_t, int, std::uint64_t, int, void** handle) { return NextHandle(handle); }
int DeregMrIb(void*, void* handle) {
  if (stand_in_plugin_result == 0) stand_in_plugin_undone = handle;
  return stand_in_plugin_result;
}
int ISend(void*, void*, std::size_t, int, void* handle, void** request) { return Transferred({handle}, request); }
int ISend10(void*, void*, std::size_t, int, void* handle, void*, void** request) { return Transferred({handle}, request); }
int IRecv(void*, int, void**, void*, int*, void** handles, void** request) {
  return Transferred({handles[0], handles[1], handles[2]}, request);
}
int IRecv10(void*, int, void**, void*, int*, void** handles, void**, void** request) {
  return Transferred({handles[0], handles[1], handles[2]}, request);
}
int IFlush(void*, int, void**, int*, void** handles, void** request) { return Transferred({handles[0]}, request); }
int TestIb(void*, int* done, int*) {
  *done = 1;
  return 0;
}

Table RdmaSharp(const char* name, bool profiling) {
  Table table{name, {}};
  table.functions.fill(kNothing);
  constexpr std::size_t kDeviceMr = 16;
  const std::array<void*, 7> from_reg_mr = {reinterpret_cast<void*>(&RegMrIb),
                                            reinterpret_cast<void*>(&RegDmaBufIb),
                                            reinterpret_cast<void*>(&DeregMrIb),
                                            profiling ? reinterpret_cast<void*>(&ISend10) : reinterpret_cast<void*>(&ISend),
                                            profiling ? reinterpret_cast<void*>(&IRecv10) : reinterpret_cast<void*>(&IRecv),
                                            reinterpret_cast<void*>(&IFlush),
                                            reinterpret_cast<void*>(&TestIb)};
  for (std::size_t i = 0; i < from_reg_mr.size(); ++i) table.functions.at(kRegMr + i) = from_reg_mr.at(i);
  table.functions.at(kDeviceMr) = nullptr;
  return table;
}

}  // namespace

SHOWN Table ncclNetPlugin_v7, ncclNetPlugin_v10, ncclNetPlugin_v11, ncclNetPlugin_v12;
Table ncclNetPlugin_v7 = RdmaSharp("IBext_v7", false), ncclNetPlugin_v10 = RdmaSharp("IBext_v10", true),
      ncclNetPlugin_v11 = RdmaSharp("IBext_v11", true), ncclNetPlugin_v12 = RdmaSharp("IBext_v12", true);

SHOWN SymmetricTable ncclGinPlugin_v11, ncclGinPlugin_v12, ncclGinPlugin_v13, ncclGinPlugin_v14, ncclGinPlugin_v99,
    ncclRmaPlugin_v13, ncclRmaPlugin_v14, ncclRmaPlugin_v15;
SymmetricTable ncclGinPlugin_v11 = Symmetric(kRegMr, true), ncclGinPlugin_v12 = Symmetric(kRegMr, true),
               ncclGinPlugin_v13 = Symmetric(kRegMr, true), ncclGinPlugin_v14 = Symmetric(kRegMr + 1, true),
               ncclGinPlugin_v99 = Symmetric(kRegMr + 1, true), ncclRmaPlugin_v13 = Symmetric(kRegMr, true),
               ncclRmaPlugin_v14 = Symmetric(kRegMr, false), ncclRmaPlugin_v15 = Symmetric(kRegMr, false);

SHOWN Table ncclNetPlugin_v5, ncclNetPlugin_v6, ncclNetPlugin_v8, ncclNetPlugin_v9, ncclCollNetPlugin_v8, ncclNetPlugin_v99;
Table ncclNetPlugin_v5 = Old(false), ncclNetPlugin_v6 = Old(true), ncclNetPlugin_v8 = New(),
      ncclNetPlugin_v9 = {"late", {reinterpret_cast<void*>(&FillIn)}}, ncclCollNetPlugin_v8 = New(), ncclNetPlugin_v99 = New();

namespace {

int FillIn(void*) {
  ncclNetPlugin_v9 = New();
  return 0;
}

}  // namespace
