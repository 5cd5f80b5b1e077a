// NCCL's network plugins register memory from their own code, unseen by AMem. But NCCL looks up a plugin's table of functions
// by name and makes every call through it, so it gets a copy of the table with AMem's registering functions.
//
// Up to deregMr, network and collective-network plugins of versions 5 to 12 have one layout; version 5 lacks regMrDmaBuf, and
// before version 8 regMr takes the size as an int. Under other versions all memory stays.
#include <spdlog/fmt/fmt.h>

#include <array>
#include <charconv>
#include <string_view>

#include "ncclpatch/hook/elf_image.h"
#include "ncclpatch/intercept/registrations.h"

namespace amem::intercept {
namespace {

constexpr int kInvalidUsage = 5, kOldest = 5, kFirstWithDmaBuf = 6, kFirstWithLongSize = 8, kNewest = 12;
constexpr std::size_t kInit = 1, kRegMr = 7, kMostFunctions = 64, kMostTables = 16;

struct PluginTable {
  int version = 0;
  std::size_t functions = 0;
  void* const* real = nullptr;
  std::array<void*, kMostFunctions> copy{};

  [[nodiscard]] bool has_dma_buf() const { return version >= kFirstWithDmaBuf; }
  [[nodiscard]] std::size_t dereg_mr() const { return has_dma_buf() ? kRegMr + 2 : kRegMr + 1; }
  template <class F>
  [[nodiscard]] F* Real(std::size_t function) const {
    return reinterpret_cast<F*>(real[function]);
  }
};
constinit std::array<PluginTable, kMostTables> g_tables;
constinit std::mutex g_tables_mutex;

using Init = int(void*, void*, void*, void*, void*);  // at most five arguments, all in registers
using PluginRegMr = int(void* comm, void* data, size_t bytes, int type, void** handle);
using PluginRegDmaBuf = int(void* comm, void* data, size_t bytes, int type, std::uint64_t offset, int descriptor,
                            void** handle);
using PluginDeregMr = int(void* comm, void* handle);

void Refresh(std::size_t table);

template <std::size_t T>
struct Of {
  // A plugin may fill in its table when it is initialised.
  static int CallInit(void* a, void* b, void* c, void* d, void* e) {
    const int result = g_tables[T].Real<Init>(kInit)(a, b, c, d, e);
    Refresh(T);
    return result;
  }
  static int RegMr(void* comm, void* data, size_t bytes, int type, void** handle) {
    if (g_tables[T].version < kFirstWithLongSize) bytes = static_cast<size_t>(static_cast<int>(bytes));
    const Registering gate("regMr of a network plugin", PartAt(data, bytes));
    if (gate.refused()) return kInvalidUsage;
    const int result = g_tables[T].Real<PluginRegMr>(kRegMr)(comm, data, bytes, type, handle);
    if (result == 0 && handle != nullptr)
      Forever<Registrations>().Add(KeyOf(Registrar::kPlugin, *handle), PartAt(data, bytes), "network plugin");
    return result;
  }
  static int RegDmaBuf(void* comm, void* data, size_t bytes, int type, std::uint64_t offset, int descriptor, void** handle) {
    const Registering gate("regMrDmaBuf of a network plugin", PartAt(data, bytes));
    if (gate.refused()) return kInvalidUsage;
    const int result = g_tables[T].Real<PluginRegDmaBuf>(kRegMr + 1)(comm, data, bytes, type, offset, descriptor, handle);
    if (result == 0 && handle != nullptr)
      Forever<Registrations>().Add(KeyOf(Registrar::kPlugin, *handle), PartAt(data, bytes), "network plugin, dma-buf");
    Forever<Registrations>().Consumed(descriptor);
    return result;
  }
  static int DeregMr(void* comm, void* handle) {
    return Deregister(KeyOf(Registrar::kPlugin, handle),
                      [&] { return g_tables[T].Real<PluginDeregMr>(g_tables[T].dereg_mr())(comm, handle); });
  }
};

struct Wrappers {
  void *init, *reg_mr, *reg_dma_buf, *dereg_mr;
};
template <std::size_t... T>
constexpr auto AllWrappers(std::index_sequence<T...>) {
  return std::array{Wrappers{reinterpret_cast<void*>(&Of<T>::CallInit), reinterpret_cast<void*>(&Of<T>::RegMr),
                             reinterpret_cast<void*>(&Of<T>::RegDmaBuf), reinterpret_cast<void*>(&Of<T>::DeregMr)}...};
}

void Refresh(std::size_t index) {
  static const auto wrappers = AllWrappers(std::make_index_sequence<kMostTables>());
  PluginTable& table = g_tables[index];
  const std::lock_guard lock(g_tables_mutex);
  for (std::size_t i = 0; i < table.functions; ++i) {
    void* wanted = table.real[i];
    if (wanted != nullptr && i == kInit) wanted = wrappers[index].init;
    if (wanted != nullptr && i == kRegMr) wanted = wrappers[index].reg_mr;
    if (wanted != nullptr && i == kRegMr + 1 && table.has_dma_buf()) wanted = wrappers[index].reg_dma_buf;
    if (wanted != nullptr && i == table.dereg_mr()) wanted = wrappers[index].dereg_mr;
    if (table.copy[i] != wanted) table.copy[i] = wanted;
  }
}

// The version after "ncclNetPlugin_v" or "ncclCollNetPlugin_v"; 0: another plugin that may register memory; -1: one that does
// not.
int VersionOf(std::string_view name) {
  for (const std::string_view harmless : {"ncclTunerPlugin_", "ncclProfiler_", "ncclEnvPlugin_"})
    if (name.starts_with(harmless)) return -1;
  if (name.find("Plugin_v") == name.npos) return -1;
  for (const std::string_view prefix : {"ncclNetPlugin_v", "ncclCollNetPlugin_v"}) {
    if (!name.starts_with(prefix)) continue;
    int version = 0;
    std::from_chars(name.data() + prefix.size(), name.data() + name.size(), version);
    return version;
  }
  return 0;
}

// The place of a table, new or known. kMostTables: none is left.
std::size_t PlaceOf(void* const* real, int version, std::size_t functions) {
  const std::lock_guard lock(g_tables_mutex);
  for (std::size_t i = 0; i < kMostTables; ++i) {
    PluginTable& table = g_tables[i];
    if (table.real != nullptr && (table.real != real || table.version != version)) continue;
    table.version = version;
    table.functions = functions;
    table.real = real;
    return i;
  }
  return kMostTables;
}

}  // namespace

void* WrapPlugin(const char* name, void* table) {
  const int version = VersionOf(name);
  if (version < 0) return table;
  std::size_t bytes = 0;
  if (ElfImage image; ElfImage::Containing(table, &image) && image.Find(name, &bytes) != table) bytes = 0;
  const std::size_t functions = bytes / sizeof(void*);
  const bool known = version >= kOldest && version <= kNewest && functions > kRegMr + 2 && functions <= kMostFunctions;
  const std::size_t place = known ? PlaceOf(static_cast<void* const*>(table), version, functions) : kMostTables;
  if (place == kMostTables) {
    Runtime::Get().KeepEverything(fmt::format("{}, which this version of AMem does not know, may register it", name));
    return table;
  }
  Refresh(place);
  return g_tables[place].copy.data();
}

}  // namespace amem::intercept
