// A network plugin, as NCCL loads one: tables of functions of several versions. The table of version 9 is filled in when it is
// initialised, as some plugins do. A handle is the address
// that was registered.
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

SHOWN int stand_in_plugin_result;         // what registering and its undoing answer
SHOWN std::size_t stand_in_plugin_bytes;  // of the last registration
SHOWN void* stand_in_plugin_same_handle;  // not null: the handle of every registration
int stand_in_plugin_result = 0;
std::size_t stand_in_plugin_bytes = 0;
void* stand_in_plugin_same_handle = nullptr;

struct Table {
  const char* name;
  std::array<void*, 19> functions;
};

namespace {

int Registered(void* data, std::size_t bytes, void** handle) {
  stand_in_plugin_bytes = bytes;
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
int DeregMr(void*, void*) { return stand_in_plugin_result; }
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

}  // namespace

SHOWN Table ncclNetPlugin_v5, ncclNetPlugin_v6, ncclNetPlugin_v8, ncclNetPlugin_v9, ncclCollNetPlugin_v8, ncclNetPlugin_v99;
Table ncclNetPlugin_v5 = Old(false), ncclNetPlugin_v6 = Old(true), ncclNetPlugin_v8 = New(),
      ncclNetPlugin_v9 = {"late", {reinterpret_cast<void*>(&FillIn)}}, ncclCollNetPlugin_v8 = New(), ncclNetPlugin_v99 = New();

namespace {

int FillIn(void*) {
  ncclNetPlugin_v9 = New();
  return 0;
}

}  // namespace
