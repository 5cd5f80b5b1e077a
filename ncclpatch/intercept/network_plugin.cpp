// NCCL's network plugins register memory from their own code, unseen by AMem. But NCCL looks up a plugin's table of functions
// by name and makes every call through it, so it gets a copy of the table with AMem's registering functions.
//
// Up to deregMr, network and collective-network plugins of versions 5 to 12 have one layout; version 5 lacks regMrDmaBuf, and
// before version 8 regMr takes the size as an int. A plugin that also serves transfers from kernels (GIN) and one-sided ones
// (RMA) has tables for these, which NCCL looks up whether it will use them or not; aws-ofi-nccl has them since 1.19. Their
// regMrSym, regMrSymDmaBuf and deregMrSym stand where those functions do; in GIN from version 14 on one place later, behind
// getGinProperties.
//
// With AMEM_NETWORK=renew registrations of networks that are known to need no more are undone in a pause (plugin_handles.h).
// Then what begins, ends and closes transfers is AMem's, too: it stands behind deregMr, and from version 10 on has a handle for
// profilers.
//
// Under other tables all memory stays. NCCL may hand a plugin any memory, the program's too, and a newer NCCL at other times
// than those that are known, so nothing is out of reach of a table that AMem cannot read.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string_view>

#include "ncclpatch/hook/elf_image.h"
#include "ncclpatch/intercept/card_buffers.h"
#include "ncclpatch/intercept/plugin_handles.h"

namespace amem::intercept {
namespace {

constexpr int kSystemError = 2, kInternalError = 3, kInvalidUsage = 5;  // ncclResult_t
constexpr int kGpuMemory = 2;                                           // NCCL_PTR_CUDA
constexpr int kFirstWithDmaBuf = 6, kFirstWithDevices = 7, kFirstWithLongSize = 8, kFirstWithProfiling = 10,
              kFirstWithGinProperties = 14;
constexpr std::size_t kInit = 1, kConnect = 5, kAccept = 6, kRegMr = 7, kMostFunctions = 64, kMostTables = 16;

// Up to deregMr collective networks have the functions of networks, and RMA had those of GIN at first.
enum class Family : std::uint8_t { kNet, kCollNet, kGin, kRma };

struct Kind {
  Family family{};
  int version = 0;

  [[nodiscard]] bool has_dma_buf() const { return version >= kFirstWithDmaBuf; }
  [[nodiscard]] std::size_t reg_mr() const {
    return family == Family::kGin && version >= kFirstWithGinProperties ? kRegMr + 1 : kRegMr;
  }
  [[nodiscard]] std::size_t dereg_mr() const { return has_dma_buf() ? reg_mr() + 2 : reg_mr() + 1; }
  // Of networks:
  [[nodiscard]] std::size_t isend() const { return dereg_mr() + 1; }
  [[nodiscard]] std::size_t irecv() const { return dereg_mr() + 2; }
  [[nodiscard]] std::size_t iflush() const { return dereg_mr() + 3; }
  [[nodiscard]] std::size_t test() const { return dereg_mr() + 4; }
  [[nodiscard]] std::size_t close_send() const { return dereg_mr() + 5; }
  [[nodiscard]] std::size_t close_receive() const { return dereg_mr() + 6; }
  [[nodiscard]] std::size_t get_device_mr() const { return dereg_mr() + 8; }
  friend bool operator==(const Kind&, const Kind&) = default;
};

struct PluginTable {
  Kind kind;
  std::size_t functions = 0;
  void* const* real = nullptr;
  std::array<char, 32> symbol{};  // whose value is `real`; all that are known fit
  std::array<void*, kMostFunctions> copy{};
  std::atomic<bool> renews{false};  // its registrations are PluginHandles'
  PluginGate gate;

  [[nodiscard]] const char* name() const { return static_cast<const char*>(real[0]); }

  // The plugin's own function, whose parameters have the types of these arguments.
  template <class... Arguments>
  int Call(std::size_t function, Arguments... arguments) const {
    return reinterpret_cast<int (*)(Arguments...)>(real[function])(arguments...);
  }
};
// Never destroyed, because NCCL's threads use it up to the end.
PluginTable& TableAt(std::size_t place) {
  static auto& tables = *new std::array<PluginTable, kMostTables>;
  return tables[place];
}
constinit std::mutex g_tables_mutex;

// This thread has connected to another rank, as that does which registers the buffers of connections.
thread_local bool t_has_connected = false;

// Makes a plugin's call that registers or undoes that. What the plugin does then is not recorded as another library's.
template <class MakeCall>
int InPlugin(const PluginTable& table, const MakeCall& make_call) {
  const OfPlugin inside(table.renews.load());
  return make_call();
}
int UndoByPlugin(PluginTable& table, void* comm, void* handle) {
  const auto make_call = [&](void* real) {
    return InPlugin(table, [&] { return table.Call(table.kind.dereg_mr(), comm, real); });
  };
  return table.renews.load() ? Forever<PluginHandles>().GiveUp(handle, make_call) : make_call(handle);
}

// A registration by a plugin, on `comm`. `wrap(handle, record)`: as PluginHandles::Wrap.
constexpr auto kAsItIs = [](void*, Registered*) -> void* { return nullptr; };
template <class MakeCall, class Wrap = decltype(kAsItIs)>
int Register(PluginTable& table, void* comm, const char* call, Extent part, const char* how, void** handle, int descriptor,
             const MakeCall& make_call, const Wrap& wrap = kAsItIs) {
  const Registering gate(call, part);
  if (gate.refused()) return kInvalidUsage;
  int result = make_call();
  if (result == 0 && handle != nullptr) {
    const Status recorded = OrNoMemory([&]() -> Status {
      Registered record;
      if (void* const ours = wrap(*handle, &record)) *handle = ours;
      Forever<Registrations>().Add(KeyOf(Registrar::kPlugin, *handle), part, how, descriptor, std::move(record));
      return {};
    });
    if (!recorded.ok()) {  // what NCCL does not get the card must not hold, because no pause would know of it
      static_cast<void>(OrNoMemory([&] { return UndoByPlugin(table, comm, *handle), Status(); }));
      *handle = nullptr;
      result = kSystemError;
    }
  }
  if (descriptor >= 0) static_cast<void>(OrNoMemory([&] { return Forever<Registrations>().Consumed(descriptor), Status(); }));
  return result;
}

void** RequestAmong(void** request) { return request; }
void** RequestAmong(void* /*for a profiler*/, void** request) { return request; }
void** RequestAmong(void** /*for profilers*/, void** request) { return request; }

void Refresh(PluginTable& table);

// What NCCL calls in place of a plugin's functions, with the table in which it found them (Entry).
struct Plugin {
  // A plugin may fill in its table when it is initialised.
  static int CallInit(PluginTable& table, void* a, void* b, void* c, void* d, void* e, void* f) {
    const int result = table.Call(kInit, a, b, c, d, e, f);
    Refresh(table);
    return result;
  }
  // NCCL makes the buffer of a connection next. (A collective network has no accept, but another harmless function there.)
  template <std::size_t function>
  static int Connect(PluginTable& table, void* a, void* b, void* c, void* d, void* e, void* f) {
    const int result = table.Call(function, a, b, c, d, e, f);
    if (result == 0) CardBuffers::ThreadUsesCard();
    if (result == 0) t_has_connected = true;
    return result;
  }

  template <class Again>
  static void* Wrap(PluginTable& table, void* comm, void* data, size_t bytes, int type, void* real, const Again& again,
                    Registered* record) {
    if (!table.renews.load() || type != kGpuMemory) return nullptr;
    if (!t_has_connected) return record->pins = "it was not registered by a thread that has connected", nullptr;
    const auto undo = [comm, &table](void* handle) {
      return InPlugin(table, [&] { return table.Call(table.kind.dereg_mr(), comm, handle); });
    };
    return Forever<PluginHandles>().Wrap(real, PartAt(data, bytes), {table.name(), &table.gate, comm, undo, again}, record);
  }
  static int RegMr(PluginTable& table, void* comm, void* data, size_t bytes, int type, void** handle) {
    if (table.kind.version < kFirstWithLongSize) bytes = static_cast<size_t>(static_cast<int>(bytes));
    const auto make_call = [=, &table](void** made) {
      return InPlugin(table, [&] { return table.Call(kRegMr, comm, data, bytes, type, made); });
    };
    return Register(
        table, comm, "regMr of a network plugin", PartAt(data, bytes), "network plugin", handle, -1,
        [&] { return make_call(handle); },
        [&](void* real, Registered* record) { return Wrap(table, comm, data, bytes, type, real, make_call, record); });
  }
  static int RegDmaBuf(PluginTable& table, void* comm, void* data, size_t bytes, int type, std::uint64_t offset, int descriptor,
                       void** handle) {
    const auto make_call = [=, &table](int of, void** made) {
      return InPlugin(table, [&] { return table.Call(kRegMr + 1, comm, data, bytes, type, offset, of, made); });
    };
    return Register(
        table, comm, "regMrDmaBuf of a network plugin", PartAt(data, bytes), "network plugin, dma-buf", handle, descriptor,
        [&] { return make_call(descriptor, handle); },
        [&](void* real, Registered* record) {
          const auto again = [=, remade = DmaBufMaker::Of(descriptor)](void** made) {
            int result = kInternalError;
            if (!remade.Again([&](int of) { result = make_call(of, made); })) return kSystemError;
            return result;
          };
          return Wrap(table, comm, data, bytes, type, real, again, record);
        });
  }
  // `Device...`: of GIN, where kernels find the registration.
  template <class... Device>
  static int RegMrSym(PluginTable& table, void* comm, void* data, size_t bytes, int type, std::uint64_t flags, void** handle,
                      Device... device) {
    return Register(table, comm, "regMrSym of a network plugin", PartAt(data, bytes), "network plugin, symmetric", handle, -1,
                    [&] { return table.Call(table.kind.reg_mr(), comm, data, bytes, type, flags, handle, device...); });
  }
  template <class... Device>
  static int RegSymDmaBuf(PluginTable& table, void* comm, void* data, size_t bytes, int type, std::uint64_t offset,
                          int descriptor, std::uint64_t flags, void** handle, Device... device) {
    return Register(table, comm, "regMrSymDmaBuf of a network plugin", PartAt(data, bytes),
                    "network plugin, symmetric, dma-buf", handle, descriptor, [&] {
                      return table.Call(table.kind.reg_mr() + 1, comm, data, bytes, type, offset, descriptor, flags, handle,
                                        device...);
                    });
  }
  static int DeregMr(PluginTable& table, void* comm, void* handle) {
    return Deregister(KeyOf(Registrar::kPlugin, handle), [&] { return UndoByPlugin(table, comm, handle); });
  }

  // ---- transfers, where registrations are renewed. `rest`: a handle for profilers, if there is one, and the request.
  template <class... Rest>
  static int ISend(PluginTable& table, void* comm, void* data, size_t bytes, int tag, void* handle, Rest... rest) {
    return table.gate.Begin(comm, RequestAmong(rest...), [&] {
      return table.Call(table.kind.isend(), comm, data, bytes, tag, Forever<PluginHandles>().Real(handle), rest...);
    });
  }
  template <class... Rest>
  static int IRecv(PluginTable& table, void* comm, int count, void** data, void* sizes, int* tags, void** handles,
                   Rest... rest) {
    return table.gate.Begin(comm, RequestAmong(rest...), [&] {
      return WithReal(count, handles, [&](void** real) {
        return table.Call(table.kind.irecv(), comm, count, data, sizes, tags, real, rest...);
      });
    });
  }
  // NCCL takes no request for done already. It flushes what has arrived for a kernel that runs, so not while the gate is shut;
  // then it waits, unless its communicator ends.
  static int IFlush(PluginTable& table, void* comm, int count, void** data, int* sizes, void** handles, void** request) {
    for (bool made = false;;) {
      const int result = table.gate.Begin(comm, request, [&] {
        made = true;
        return WithReal(count, handles,
                        [&](void** real) { return table.Call(table.kind.iflush(), comm, count, data, sizes, real, request); });
      });
      if (made) return result;
      if (!table.gate.AwaitReopening()) return kInternalError;
    }
  }
  static int Test(PluginTable& table, void* request, int* done, int* sizes) {
    const int result = table.Call(table.kind.test(), request, done, sizes);
    if (result == 0 && *done != 0) table.gate.Ended(request);
    return result;
  }
  template <bool sends>
  static int Close(PluginTable& table, void* comm) {
    table.gate.Closed(comm);
    Forever<PluginHandles>().Closed(comm);
    const std::size_t function = sends ? table.kind.close_send() : table.kind.close_receive();
    return table.Call(function, comm);
  }
  template <class MakeCall>
  static int WithReal(int count, void** handles, const MakeCall& make_call) {
    std::array<void*, 32> real;  // NCCL receives eight at once
    if (handles == nullptr || count < 0 || static_cast<std::size_t>(count) > real.size()) return make_call(handles);
    std::transform(handles, handles + count, real.begin(), [](void* one) { return Forever<PluginHandles>().Real(one); });
    return make_call(real.data());
  }
};

struct Wrappers {
  void *init, *connect, *accept, *dereg_mr;
  std::array<std::array<void*, 2>, 4> reg_mr;  // by family: by address, and of a dma-buf
  std::array<void*, 2> isend, irecv;           // without and with a handle for profilers
  void *iflush, *test, *close_send, *close_receive;
};
// NCCL's call does not say by which table it came, so each table has entries of its own.
template <auto kFunction>
struct Entry;
template <class... Arguments, int (*kFunction)(PluginTable&, Arguments...)>
struct Entry<kFunction> {
  template <std::size_t table>
  static int Call(Arguments... arguments) noexcept {
    try {
      return kFunction(TableAt(table), arguments...);
    } catch (const std::exception&) {  // NCCL's C code must not see it
      return kSystemError;
    }
  }
};
template <std::size_t table, auto kFunction>
void* EntryOf() {
  return reinterpret_cast<void*>(&Entry<kFunction>::template Call<table>);
}
template <std::size_t... T>
auto AllWrappers(std::index_sequence<T...>) {
  return std::array{Wrappers{EntryOf<T, &Plugin::CallInit>(),
                             EntryOf<T, &Plugin::Connect<kConnect>>(),
                             EntryOf<T, &Plugin::Connect<kAccept>>(),
                             EntryOf<T, &Plugin::DeregMr>(),
                             {{{EntryOf<T, &Plugin::RegMr>(), EntryOf<T, &Plugin::RegDmaBuf>()},
                               {EntryOf<T, &Plugin::RegMr>(), EntryOf<T, &Plugin::RegDmaBuf>()},
                               {EntryOf<T, &Plugin::RegMrSym<void**>>(), EntryOf<T, &Plugin::RegSymDmaBuf<void**>>()},
                               {EntryOf<T, &Plugin::RegMrSym<>>(), EntryOf<T, &Plugin::RegSymDmaBuf<>>()}}},
                             {EntryOf<T, &Plugin::ISend<void**>>(), EntryOf<T, &Plugin::ISend<void*, void**>>()},
                             {EntryOf<T, &Plugin::IRecv<void**>>(), EntryOf<T, &Plugin::IRecv<void**, void**>>()},
                             EntryOf<T, &Plugin::IFlush>(),
                             EntryOf<T, &Plugin::Test>(),
                             EntryOf<T, &Plugin::Close<true>>(),
                             EntryOf<T, &Plugin::Close<false>>()}...};
}

// The networks whose registrations can be done again, by the name in their table. Where a plugin shows kernels its
// registrations, they keep what they have seen.
bool CanRenew(const PluginTable& table) {
  constexpr int kOldest = 5, kNewest = 12;
  if (!Forever<PluginHandles>().on() || table.kind.family != Family::kNet || table.name() == nullptr) return false;
  const bool shows_kernels = table.kind.version >= kFirstWithDevices && table.functions > table.kind.get_device_mr() &&
                             table.real[table.kind.get_device_mr()] != nullptr;
  return std::string_view(table.name()).starts_with("IBext_v") && table.kind.version >= kOldest &&
         table.kind.version <= kNewest && table.functions > table.kind.close_receive() && !shows_kernels;
}

void* TransferOf(const Kind& kind, std::size_t function, const Wrappers& wrappers) {
  const std::size_t profiling = kind.version >= kFirstWithProfiling ? 1 : 0;
  if (function == kind.isend()) return wrappers.isend[profiling];
  if (function == kind.irecv()) return wrappers.irecv[profiling];
  if (function == kind.iflush()) return wrappers.iflush;
  if (function == kind.test()) return wrappers.test;
  if (function == kind.close_send()) return wrappers.close_send;
  return function == kind.close_receive() ? wrappers.close_receive : nullptr;
}

// What stands at a place of a table in place of the plugin's function; null: that function.
void* WrapperOf(const Kind& kind, bool renews, std::size_t function, const Wrappers& wrappers) {
  const auto family = static_cast<std::size_t>(kind.family);
  if (family >= wrappers.reg_mr.size()) return nullptr;
  const auto& [by_address, of_dma_buf] = wrappers.reg_mr[family];
  if (function == kInit) return wrappers.init;
  if (function == kind.reg_mr()) return by_address;
  if (function == kind.reg_mr() + 1 && kind.has_dma_buf()) return of_dma_buf;
  if (function == kind.dereg_mr()) return wrappers.dereg_mr;
  if (kind.family != Family::kNet && kind.family != Family::kCollNet) return nullptr;
  if (function == kConnect || function == kAccept) return function == kConnect ? wrappers.connect : wrappers.accept;
  return renews ? TransferOf(kind, function, wrappers) : nullptr;
}

void Refresh(PluginTable& table) {
  static const auto all = AllWrappers(std::make_index_sequence<kMostTables>());
  const auto place = static_cast<std::size_t>(&table - &TableAt(0));
  if (place >= all.size()) return;
  const Wrappers& wrappers = all[place];
  const std::lock_guard lock(g_tables_mutex);
  const bool renews = CanRenew(table);
  for (std::size_t i = 0; i < table.functions; ++i) {
    void* const real = table.real[i];
    void* const ours = real == nullptr ? nullptr : WrapperOf(table.kind, renews, i, wrappers);
    void* const wanted = ours == nullptr ? real : ours;
    if (table.copy[i] != wanted) table.copy[i] = wanted;
  }
  table.renews.store(renews);
}

// Tables of these versions are known.
struct Versions {
  std::string_view prefix;
  Family family;
  int oldest, newest;
};
constexpr std::array kKnown = {
    Versions{"ncclNetPlugin_v", Family::kNet, 5, 12}, Versions{"ncclCollNetPlugin_v", Family::kCollNet, 5, 12},
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
//
// NCCL unloads its plugins with its last communicator, and may find them at another address the next time. Nobody calls through
// the table of an object that is not loaded any more.
std::size_t PlaceOf(void* const* real, const char* symbol, const Kind& kind, std::size_t functions) {
  const auto is_known = [&](const PluginTable& table) { return table.real == real && table.kind == kind; };
  const auto is_free = [](const PluginTable& table) { return table.real == nullptr; };
  const auto is_unloaded = [](const PluginTable& table) {
    ElfImage image;  // another one may be there now
    std::size_t bytes = 0;
    return !ElfImage::Containing(table.real, &image) || image.Find(table.symbol.data(), &bytes) != table.real;
  };
  const std::lock_guard lock(g_tables_mutex);
  const auto first = [](const auto& is) {
    std::size_t place = 0;
    while (place < kMostTables && !is(TableAt(place))) ++place;
    return place;
  };
  std::size_t place = first(is_known);
  if (place == kMostTables) place = first(is_free);
  if (place == kMostTables) place = first(is_unloaded);
  if (place == kMostTables) return place;
  PluginTable& table = TableAt(place);
  std::snprintf(table.symbol.data(), table.symbol.size(), "%s", symbol);
  if (!is_known(table)) Forever<PluginHandles>().Unloaded(&table.gate);
  table.kind = kind;
  table.functions = functions;
  table.real = real;
  return place;
}

}  // namespace

void* WrapPlugin(const char* name, void* table) {
  if (IsHarmless(name)) return table;
  std::size_t bytes = 0;
  if (ElfImage image; ElfImage::Containing(table, &image) && image.Find(name, &bytes) != table) bytes = 0;
  const std::size_t functions = bytes / sizeof(void*);
  const std::optional<Kind> kind = KindOf(name);
  const bool known = kind && functions > kind->dereg_mr() && functions <= kMostFunctions;
  if (!known) {
    Runtime::Get().LeaveAllInPlace(fmt::format("{}, which this version of AMem does not know, may register it", name));
    return table;
  }
  const std::size_t place = PlaceOf(static_cast<void* const*>(table), name, *kind, functions);
  if (place == kMostTables) {
    Runtime::Get().LeaveAllInPlace(
        fmt::format("{} may register it, and more tables of network plugins are loaded at once than the {} that AMem can see",
                    name, kMostTables));
    return table;
  }
  Refresh(TableAt(place));
  return TableAt(place).copy.data();
}

}  // namespace amem::intercept
