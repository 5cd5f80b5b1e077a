// NCCL's network plugins register memory from their own code, unseen by AMem. But NCCL looks up a plugin's table of functions
// by name and makes every call through it, so it gets a copy of the table with AMem's registering functions.
//
// Up to deregMr, network and collective-network plugins of versions 5 to 12 have one layout; version 5 lacks regMrDmaBuf, and
// before version 8 regMr takes the size as an int. A plugin that also serves transfers from kernels (GIN) and one-sided ones
// (RMA) has tables for these, which NCCL looks up whether it will use them or not; aws-ofi-nccl has them since 1.19. Their
// regMrSym, regMrSymDmaBuf and deregMrSym stand where those functions do; in GIN from version 14 on one place later, behind
// getGinProperties.
//
// Under other tables all memory stays. NCCL may hand a plugin any memory, the program's too, and a newer NCCL at other times
// than those that are known, so nothing is out of reach of a table that AMem cannot read.
#include <spdlog/fmt/fmt.h>

#include <array>
#include <charconv>
#include <optional>
#include <string_view>

#include "ncclpatch/hook/elf_image.h"
#include "ncclpatch/intercept/card_buffers.h"
#include "ncclpatch/intercept/registrations.h"

namespace amem::intercept {
namespace {

constexpr int kInvalidUsage = 5, kFirstWithDmaBuf = 6, kFirstWithLongSize = 8, kFirstWithGinProperties = 14;
constexpr std::size_t kInit = 1, kConnect = 5, kAccept = 6, kRegMr = 7, kMostFunctions = 64, kMostTables = 16;

// Collective networks have the functions of networks, and RMA had those of GIN at first.
enum class Family : std::uint8_t { kNet, kGin, kRma };

struct Kind {
  Family family{};
  int version = 0;

  [[nodiscard]] bool has_dma_buf() const { return version >= kFirstWithDmaBuf; }
  [[nodiscard]] std::size_t reg_mr() const {
    return family == Family::kGin && version >= kFirstWithGinProperties ? kRegMr + 1 : kRegMr;
  }
  [[nodiscard]] std::size_t dereg_mr() const { return has_dma_buf() ? reg_mr() + 2 : reg_mr() + 1; }
  friend bool operator==(const Kind&, const Kind&) = default;
};

struct PluginTable {
  Kind kind;
  std::size_t functions = 0;
  void* const* real = nullptr;
  std::array<void*, kMostFunctions> copy{};

  template <class F>
  [[nodiscard]] F* Real(std::size_t function) const {
    return reinterpret_cast<F*>(real[function]);
  }
};
constinit std::array<PluginTable, kMostTables> g_tables;
constinit std::mutex g_tables_mutex;

using AnyCall = int(void*, void*, void*, void*, void*, void*);  // at most six arguments, all in registers

// A registration by a plugin.
template <class MakeCall>
int Register(const char* call, Extent part, const char* how, void** handle, int descriptor, const MakeCall& make_call) {
  const Registering gate(call, part);
  if (gate.refused()) return kInvalidUsage;
  const int result = make_call();
  if (result == 0 && handle != nullptr) Forever<Registrations>().Add(KeyOf(Registrar::kPlugin, *handle), part, how, descriptor);
  if (descriptor >= 0) Forever<Registrations>().Consumed(descriptor);
  return result;
}

void Refresh(std::size_t table);

template <std::size_t T>
struct Of {
  static const PluginTable& table() { return g_tables[T]; }

  // A plugin may fill in its table when it is initialised.
  static int CallInit(void* a, void* b, void* c, void* d, void* e, void* f) {
    const int result = table().template Real<AnyCall>(kInit)(a, b, c, d, e, f);
    Refresh(T);
    return result;
  }
  // NCCL makes the buffer of a connection next. (A collective network has no accept, but another harmless function there.)
  template <std::size_t function>
  static int Connect(void* a, void* b, void* c, void* d, void* e, void* f) {
    const int result = table().template Real<AnyCall>(function)(a, b, c, d, e, f);
    if (result == 0) CardBuffers::ThreadUsesCard();
    return result;
  }
  static int RegMr(void* comm, void* data, size_t bytes, int type, void** handle) {
    if (table().kind.version < kFirstWithLongSize) bytes = static_cast<size_t>(static_cast<int>(bytes));
    return Register("regMr of a network plugin", PartAt(data, bytes), "network plugin", handle, -1,
                    [&] { return table().template Real<decltype(RegMr)>(kRegMr)(comm, data, bytes, type, handle); });
  }
  static int RegDmaBuf(void* comm, void* data, size_t bytes, int type, std::uint64_t offset, int descriptor, void** handle) {
    return Register("regMrDmaBuf of a network plugin", PartAt(data, bytes), "network plugin, dma-buf", handle, descriptor, [&] {
      return table().template Real<decltype(RegDmaBuf)>(kRegMr + 1)(comm, data, bytes, type, offset, descriptor, handle);
    });
  }
  // `Device...`: of GIN, where kernels find the registration.
  template <class... Device>
  static int RegMrSym(void* comm, void* data, size_t bytes, int type, std::uint64_t flags, void** handle, Device... device) {
    return Register("regMrSym of a network plugin", PartAt(data, bytes), "network plugin, symmetric", handle, -1, [&] {
      return table().template Real<decltype(RegMrSym<Device...>)>(table().kind.reg_mr())(comm, data, bytes, type, flags, handle,
                                                                                         device...);
    });
  }
  template <class... Device>
  static int RegSymDmaBuf(void* comm, void* data, size_t bytes, int type, std::uint64_t offset, int descriptor,
                          std::uint64_t flags, void** handle, Device... device) {
    return Register("regMrSymDmaBuf of a network plugin", PartAt(data, bytes), "network plugin, symmetric, dma-buf", handle,
                    descriptor, [&] {
                      return table().template Real<decltype(RegSymDmaBuf<Device...>)>(table().kind.reg_mr() + 1)(
                          comm, data, bytes, type, offset, descriptor, flags, handle, device...);
                    });
  }
  static int DeregMr(void* comm, void* handle) {
    return Deregister(KeyOf(Registrar::kPlugin, handle),
                      [&] { return table().template Real<int(void*, void*)>(table().kind.dereg_mr())(comm, handle); });
  }
};

struct Wrappers {
  void *init, *connect, *accept, *dereg_mr;
  std::array<std::array<void*, 2>, 3> reg_mr;  // by family: by address, and of a dma-buf
};
template <class F>
void* Entry(F* function) {
  return reinterpret_cast<void*>(function);
}
template <std::size_t... T>
auto AllWrappers(std::index_sequence<T...>) {
  return std::array{Wrappers{Entry(&Of<T>::CallInit),
                             Entry(&Of<T>::template Connect<kConnect>),
                             Entry(&Of<T>::template Connect<kAccept>),
                             Entry(&Of<T>::DeregMr),
                             {{{Entry(&Of<T>::RegMr), Entry(&Of<T>::RegDmaBuf)},
                               {Entry(&Of<T>::template RegMrSym<void**>), Entry(&Of<T>::template RegSymDmaBuf<void**>)},
                               {Entry(&Of<T>::template RegMrSym<>), Entry(&Of<T>::template RegSymDmaBuf<>)}}}}...};
}

// What stands at a place of a table in place of the plugin's function; null: that function.
void* WrapperOf(const Kind& kind, std::size_t function, const Wrappers& wrappers) {
  const auto& [by_address, of_dma_buf] = wrappers.reg_mr.at(static_cast<std::size_t>(kind.family));
  if (function == kInit) return wrappers.init;
  if (function == kind.reg_mr()) return by_address;
  if (function == kind.reg_mr() + 1 && kind.has_dma_buf()) return of_dma_buf;
  if (function == kind.dereg_mr()) return wrappers.dereg_mr;
  if (kind.family != Family::kNet) return nullptr;
  return function == kConnect ? wrappers.connect : function == kAccept ? wrappers.accept : nullptr;
}

void Refresh(std::size_t index) {
  static const auto wrappers = AllWrappers(std::make_index_sequence<kMostTables>());
  PluginTable& table = g_tables[index];
  const std::lock_guard lock(g_tables_mutex);
  for (std::size_t i = 0; i < table.functions; ++i) {
    void* const real = table.real[i];
    void* const ours = real == nullptr ? nullptr : WrapperOf(table.kind, i, wrappers[index]);
    void* const wanted = ours == nullptr ? real : ours;
    if (table.copy[i] != wanted) table.copy[i] = wanted;
  }
}

// Tables of these versions are known.
struct Versions {
  std::string_view prefix;
  Family family;
  int oldest, newest;
};
constexpr std::array kKnown = {
    Versions{"ncclNetPlugin_v", Family::kNet, 5, 12}, Versions{"ncclCollNetPlugin_v", Family::kNet, 5, 12},
    Versions{"ncclGinPlugin_v", Family::kGin, 11, 14}, Versions{"ncclRmaPlugin_v", Family::kGin, 13, 13},
    Versions{"ncclRmaPlugin_v", Family::kRma, 14, 15}};

// A plugin's table that registers no memory; or no table at all.
bool IsHarmless(std::string_view name) {
  for (const std::string_view harmless : {"ncclTunerPlugin_", "ncclProfiler_", "ncclEnvPlugin_"})
    if (name.starts_with(harmless)) return true;
  return name.find("Plugin_v") == name.npos;
}

std::optional<Kind> KindOf(std::string_view name) {
  for (const Versions& known : kKnown) {
    if (!name.starts_with(known.prefix)) continue;
    int version = 0;
    std::from_chars(name.data() + known.prefix.size(), name.data() + name.size(), version);
    if (version >= known.oldest && version <= known.newest) return Kind{known.family, version};
  }
  return std::nullopt;
}

// The place of a table, new or known. kMostTables: none is left.
std::size_t PlaceOf(void* const* real, const Kind& kind, std::size_t functions) {
  const std::lock_guard lock(g_tables_mutex);
  for (std::size_t i = 0; i < kMostTables; ++i) {
    PluginTable& table = g_tables[i];
    if (table.real != nullptr && (table.real != real || table.kind != kind)) continue;
    table.kind = kind;
    table.functions = functions;
    table.real = real;
    return i;
  }
  return kMostTables;
}

}  // namespace

void* WrapPlugin(const char* name, void* table) {
  if (IsHarmless(name)) return table;
  std::size_t bytes = 0;
  if (ElfImage image; ElfImage::Containing(table, &image) && image.Find(name, &bytes) != table) bytes = 0;
  const std::size_t functions = bytes / sizeof(void*);
  const std::optional<Kind> kind = KindOf(name);
  const bool known = kind && functions > kind->dereg_mr() && functions <= kMostFunctions;
  const std::size_t place = known ? PlaceOf(static_cast<void* const*>(table), *kind, functions) : kMostTables;
  if (place == kMostTables) {
    Runtime::Get().KeepEverything(fmt::format("{}, which this version of AMem does not know, may register it", name));
    return table;
  }
  Refresh(place);
  return g_tables[place].copy.data();
}

}  // namespace amem::intercept
