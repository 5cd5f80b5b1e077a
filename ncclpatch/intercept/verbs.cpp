// What NCCL itself and other libraries register with network cards and for storage, and pin for copies by the processor
// (GDRCopy).
//
// NCCL registers by address (ibv_reg_mr, with the peer-memory module) or by a dma-buf. It closes the dma-buf's descriptor right
// after; the registration holds the pages until it is undone.
#include <spdlog/fmt/fmt.h>

#include <cerrno>

#include "ncclpatch/intercept/cards.h"

namespace amem::intercept {
namespace {

struct MemGetHandleForAddressRange : Instead<MemGetHandleForAddressRange, "cuMemGetHandleForAddressRange"> {
  static CUresult With(const Pass<>& pass, void* handle, CUdeviceptr address, size_t bytes, CUmemRangeHandleType type,
                       unsigned long long flags) {
    const Registering gate(kName, {Address{address}, bytes});
    if (gate.refused()) return CUDA_ERROR_ILLEGAL_STATE;
    const CUresult result = pass();
    if (gate.concerns() && result == CUDA_SUCCESS && handle != nullptr && type == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
      Forever<Registrations>().Exported(*static_cast<int*>(handle), {Address{address}, bytes}, flags);
    return result;
  }
};

// NCCL sets CU_POINTER_ATTRIBUTE_SYNC_MEMOPS on memory that it registers for communication from kernels (DOCA). The driver
// answers; a call about AMem's memory is journaled.
constexpr auto kAttributeSet = [](CUresult result, const void*, CUpointer_attribute attribute, CUdeviceptr address) {
  Session* session = Runtime::Get().started();
  if (session != nullptr && session->nccl().AddressRange(Address{address}).ok())
    session->records().Note(PassedThrough{"cuPointerSetAttribute",
                                          fmt::format("attribute {} of {}", static_cast<int>(attribute), Hex(address)),
                                          static_cast<std::int32_t>(result)});
};

// A library's calls that are a part of a network plugin's registration are recorded as that, and AMem makes some itself while
// all others wait.
template <class Ours>
struct ByAnotherThanPlugin : ByAnother<Ours> {
  template <class R, class... A>
  static R Call(R (*real)(A...), std::type_identity_t<A>... arguments) {
    return OfPlugin::now > 0 ? real(arguments...) : ByAnother<Ours>::Call(real, arguments...);
  }
};
// The function that was found for NCCL or, if it has looked up none, for another library; null: for neither. NCCL looks all
// functions up before it registers anything.
template <class Replaced>
auto RealOf() {
  using Function = typename decltype(replacements::TypeOf<Replaced>())::type;
  for (const auto* reals : {&replacements::Thunk<Replaced>::reals, &replacements::Thunk<ByAnotherThanPlugin<Replaced>>::reals})
    for (const auto& real : *reals)
      if (void* const found = real.load()) return reinterpret_cast<Function*>(found);
  return static_cast<Function*>(nullptr);
}

// AMem only passes the protection domain and region on, so it needs no types of ibverbs.
void* Refused() {
  errno = EBUSY;
  return nullptr;
}

// What NCCL does not get the card must not hold, because no pause would know of it.
void GiveBack(Registrar registrar, void* region);

// `way`: how it is done again, where it can be.
template <class MakeCall>
void* Register(const char* call, Registrar registrar, Extent part, const char* how, const MakeCall& make_call,
               int descriptor = -1, const Cards::Way* way = nullptr) {
  const Registering gate(call, part);
  if (gate.refused()) return Refused();
  void* region = make_call();
  if (region == nullptr || (!gate.concerns() && OfAnother::now != 0)) return region;
  const Status recorded = OrNoMemory([&]() -> Status {
    Registered record;
    if (way != nullptr && OfAnother::now == 0 && Forever<Cards>().on()) {
      std::string pins;
      if (auto* const shadow = Forever<Cards>().Shadow(static_cast<verbs::Region*>(region), part, *way, &record, &pins))
        region = shadow;
      record.pins = pins;
    }
    Forever<Registrations>().Add(KeyOf(registrar, region), part, how, descriptor, std::move(record));
    return {};
  });
  if (recorded.ok()) return region;
  GiveBack(registrar, region);
  return errno = ENOMEM, nullptr;
}
// The same for [offset, offset + bytes) of a dma-buf.
template <class MakeCall>
void* RegisterDmaBuf(const char* call, Registrar registrar, int descriptor, std::uint64_t offset, size_t bytes,
                     const MakeCall& make_call, const Cards::Way* way = nullptr) {
  const Extent whole = Forever<Registrations>().ExportedAs(descriptor).part;
  const Extent part = whole.bytes == 0 ? Extent{} : Extent{whole.address + offset, bytes};
  void* region = Register(call, registrar, part, "dma-buf", make_call, descriptor, way);
  static_cast<void>(OrNoMemory([&] { return Forever<Registrations>().Consumed(descriptor), Status(); }));
  return region;
}

using DeregisterCall = int(void*);
DeregisterCall* RealDeregister();
int Undo(verbs::Region* region) {
  errno = 0;
  const int result = RealDeregister()(region);
  return result >= 0 ? result : errno != 0 ? errno : EIO;  // -1, or the negative error of a driver
}

// By address; the functions differ in what follows the size.
template <Text Name, Registrar registrar, Text How, class... More>
struct RegisterAt : Named<Name> {
  using Function = void*(void*, void*, size_t, More...);
  static void* Call(Function* real, void* domain, void* address, size_t bytes, More... more) {
    const auto make_call = [=] { return real(domain, address, bytes, more...); };
    if constexpr (registrar != Registrar::kVerbs) {
      return Register(Name.data, registrar, PartAt(address, bytes), How.data, make_call);
    } else {
      const Cards::Way way{.domain = static_cast<verbs::Domain*>(domain),
                           .access = Access(more...),
                           .at_its_address = IsAt(reinterpret_cast<std::uint64_t>(address), more...),
                           .again = [=] { return static_cast<verbs::Region*>(make_call()); },
                           .undo = &Undo};
      return Register(Name.data, registrar, PartAt(address, bytes), How.data, make_call, -1, &way);
    }
  }

 private:
  static std::uint32_t Access(std::uint64_t, auto access) { return static_cast<std::uint32_t>(access); }
  static std::uint32_t Access(auto access) { return static_cast<std::uint32_t>(access); }
  static bool IsAt(std::uint64_t address, std::uint64_t io_address, auto) { return io_address == address; }
  static bool IsAt(std::uint64_t, auto) { return true; }
};
using RegMr = RegisterAt<"ibv_reg_mr", Registrar::kVerbs, "ibv_reg_mr", int>;
using RegMrIova2 = RegisterAt<"ibv_reg_mr_iova2", Registrar::kVerbs, "ibv_reg_mr", std::uint64_t, unsigned>;
using RegMrIova = RegisterAt<"ibv_reg_mr_iova", Registrar::kVerbs, "ibv_reg_mr", std::uint64_t, int>;
using UmemReg = RegisterAt<"mlx5dv_devx_umem_reg", Registrar::kUserMemory, "mlx5dv_devx_umem_reg", std::uint32_t>;

// Of a dma-buf.
template <Text Name, class... More>
struct RegisterDescriptor : Named<Name> {
  using Function = void*(void*, std::uint64_t, size_t, std::uint64_t, int, int, More...);
  static void* Call(Function* real, void* domain, std::uint64_t offset, size_t bytes, std::uint64_t io_address, int descriptor,
                    int access, More... more) {
    const auto make_call = [=](int of) { return real(domain, offset, bytes, io_address, of, access, more...); };
    const DmaBufMaker maker = DmaBufMaker::Of(descriptor);
    Cards::Way way{.domain = static_cast<verbs::Domain*>(domain),
                   .access = static_cast<std::uint32_t>(access),
                   .at_its_address = io_address == maker.made.part.address.value + offset,
                   .undo = &Undo};
    if (Forever<Cards>().on())
      way.again = [=]() -> verbs::Region* {
        void* region = nullptr;
        return maker.Again([&](int of) { region = make_call(of); }) ? static_cast<verbs::Region*>(region) : nullptr;
      };
    return RegisterDmaBuf(
        Name.data, Registrar::kVerbs, descriptor, offset, bytes, [&] { return make_call(descriptor); }, &way);
  }
};
using RegDmabufMr = RegisterDescriptor<"ibv_reg_dmabuf_mr">;
using Mlx5RegDmabufMr = RegisterDescriptor<"mlx5dv_reg_dmabuf_mr", int>;

template <Text Name, Registrar registrar>
struct DeregisterHandle : Named<Name> {
  using Function = DeregisterCall;
  static int Call(Function* real, void* handle) {
    return Deregister(KeyOf(registrar, handle), [&] {
      return registrar == Registrar::kVerbs ? Forever<Cards>().Deregister(handle, real) : real(handle);
    });
  }
};
using DeregMr = DeregisterHandle<"ibv_dereg_mr", Registrar::kVerbs>;  // also of what mlx5dv_reg_dmabuf_mr gave
using UmemDereg = DeregisterHandle<"mlx5dv_devx_umem_dereg", Registrar::kUserMemory>;
template <class Replaced>
DeregisterCall* RealOrNone() {
  const auto found = RealOf<Replaced>();
  return found != nullptr ? found : [](void*) { return ENOSYS; };
}
DeregisterCall* RealDeregister() { return RealOrNone<DeregMr>(); }
void GiveBack(Registrar registrar, void* region) {
  if (registrar == Registrar::kVerbs)
    DeregMr::Call(RealDeregister(), region);
  else
    UmemDereg::Call(RealOrNone<UmemDereg>(), region);
}

struct RegMrEx : Instead<RegMrEx, "ibv_reg_mr_ex"> {
  struct Input {  // ibv_mr_init_attr
    size_t bytes;
    int access;
    std::uint64_t mask, iova;
    void* address;
    int descriptor;
    std::uint64_t offset;
    void* hints;
  };
  static constexpr std::uint64_t kAddress = 2, kDmaBuf = 4;  // of the mask
  static void* With(const Pass<void*>& pass, void*, Input* input) {
    if (input != nullptr && (input->mask & kDmaBuf) != 0)
      return RegisterDmaBuf(kName, Registrar::kVerbs, input->descriptor, input->offset, input->bytes, pass);
    if (input == nullptr || (input->mask & kAddress) == 0) return pass();
    return Register(kName, Registrar::kVerbs, PartAt(input->address, input->bytes), "ibv_reg_mr", pass);
  }
};

// Gives a registration other memory. A failure may have undone it, too; then the memory stays, to be sure.
struct ReregMr : Named<"ibv_rereg_mr"> {
  static constexpr int kChangesMemory = 1, kInvalid = -1;
  using Function = int(void*, int, void*, void*, size_t, int);
  static int Call(Function* real, void* region, int flags, void* domain, void* address, size_t bytes, int access) {
    // No NCCL calls this for what it registers. A shadow would not know what it stands for then.
    if (Forever<Cards>().Behind(region) != region) return errno = ENOTSUP, kInvalid;
    const auto pass = [&] { return real(region, flags, domain, address, bytes, access); };
    if ((flags & kChangesMemory) == 0) return pass();
    const RegionKey key = KeyOf(Registrar::kVerbs, region);
    Registrations::Held before;
    {
      const Extent part = PartAt(address, bytes);
      const Registering gate(kName, part);
      if (gate.refused()) return Refused(), kInvalid;
      if (const int result = pass(); result != 0) return result;
      before = Forever<Registrations>().Take(key);
      if (gate.concerns()) Forever<Registrations>().Add(key, part, "ibv_reg_mr");
    }
    const Still still = HoldStill(before.parts);  // no longer inside the gates
    Registrations::Forget(before.parts, before.library);
    return 0;
  }
};

struct UmemRegEx : Instead<UmemRegEx, "mlx5dv_devx_umem_reg_ex"> {
  struct Input {    // mlx5dv_devx_umem_in
    void* address;  // of a dma-buf: the offset
    size_t bytes;
    std::uint32_t access;
    std::uint64_t page_sizes, mask;
    int descriptor;
  };
  static constexpr std::uint64_t kDmaBuf = 1;  // of the mask: `descriptor` is set
  static void* With(const Pass<void*>& pass, void*, Input* input) {
    if (input == nullptr) return pass();
    if ((input->mask & kDmaBuf) != 0)
      return RegisterDmaBuf(kName, Registrar::kUserMemory, input->descriptor, reinterpret_cast<std::uint64_t>(input->address),
                            input->bytes, pass);
    return Register(kName, Registrar::kUserMemory, PartAt(input->address, input->bytes), kName, pass);
  }
};

struct GdrHandle {
  unsigned long value;
};
struct GdrUnpin : Instead<GdrUnpin, "gdr_unpin_buffer"> {
  static int With(const Pass<int>& pass, void*, GdrHandle handle) {
    return Deregister({Registrar::kGdrCopy, handle.value}, pass);
  }
};
// The versions differ in the arguments between size and handle.
template <Text Name, class... Middle>
struct PinForGdr : Named<Name> {
  using Function = int(void*, unsigned long, size_t, Middle..., GdrHandle*);
  static int Call(Function* real, void* gdr, unsigned long address, size_t bytes, Middle... middle, GdrHandle* handle) {
    const Extent part{Address{address}, bytes};
    const Registering gate("gdr_pin_buffer", part);
    if (gate.refused()) return EBUSY;
    const int result = real(gdr, address, bytes, middle..., handle);
    if (result != 0 || handle == nullptr) return result;
    const auto add = [&] {
      return Forever<Registrations>().Add({Registrar::kGdrCopy, handle->value}, part, "gdr_pin_buffer"), Status();
    };
    if (OrNoMemory(add).ok()) return 0;
    if (auto* const unpin = RealOf<GdrUnpin>()) unpin(gdr, *handle);  // it must not be pinned without a record
    return ENOMEM;
  }
};
using GdrPin = PinForGdr<"gdr_pin_buffer", std::uint64_t, std::uint32_t>;
using GdrPin2 = PinForGdr<"gdr_pin_buffer_v2", std::uint32_t>;

// GPUDirect Storage. A registration is known by its address.
struct FileError {  // CUfileError_t
  int file, driver;
};
constexpr FileError kFileInvalid{5022, 0};  // CU_FILE_INVALID_VALUE
struct FileDeregister : Instead<FileDeregister, "cuFileBufDeregister"> {
  static FileError WithoutMemory() { return kFileInvalid; }
  static FileError With(const Pass<FileError>& pass, const void* address) {
    FileError result{};
    Deregister(KeyOf(Registrar::kFile, address), [&] { return (result = pass()).file; });
    return result;
  }
};
struct FileRegister : Instead<FileRegister, "cuFileBufRegister"> {
  static FileError WithoutMemory() { return kFileInvalid; }
  static FileError With(const Pass<FileError>& pass, const void* address, size_t bytes, int) {
    const Extent part = PartAt(address, bytes);
    const Registering gate(kName, part);
    if (gate.refused()) return kFileInvalid;
    const FileError result = pass();
    if (result.file != 0 || !gate.concerns()) return result;
    const auto add = [&] { return Forever<Registrations>().Add(KeyOf(Registrar::kFile, address), part, kName), Status(); };
    if (OrNoMemory(add).ok()) return result;
    if (auto* const deregister = RealOf<FileDeregister>()) deregister(address);
    return kFileInvalid;
  }
};

// With AMEM_NETWORK=renew: the contexts that NCCL opens, and their queue pairs, are counted (Cards). What there is no memory to
// count is NCCL's all the same: its registrations then pin, or its card is never quiet.
template <class Count>
void CountIfThereIsMemory(const Count& count) {
  static_cast<void>(OrNoMemory([&] { return count(), Status(); }));
}
struct OpenDevice : Named<"ibv_open_device"> {
  static verbs::Context* Call(verbs::Context* (*real)(void*), void* device) {
    verbs::Context* const context = real(device);
    CountIfThereIsMemory([&] { Forever<Cards>().Opened(context); });
    return context;
  }
};
struct CloseDevice : Named<"ibv_close_device"> {
  static int Call(int (*real)(verbs::Context*), verbs::Context* context) {
    return Forever<Cards>().Close(context, [&] { return real(context); });
  }
};
struct CreatePair : Named<"ibv_create_qp"> {
  static verbs::Pair* Call(verbs::Pair* (*real)(void*, verbs::PairWanted*), void* domain, verbs::PairWanted* wanted) {
    verbs::Pair* const pair = real(domain, wanted);
    Card* const card = pair == nullptr ? nullptr : Forever<Cards>().CardOf(pair->context);
    if (card != nullptr) CountIfThereIsMemory([&] { card->Add(*pair, *wanted); });
    return pair;
  }
};
// Another thread may get the same number as soon as the card has given it back.
struct DestroyPair : Named<"ibv_destroy_qp"> {
  static int Call(int (*real)(verbs::Pair*), verbs::Pair* pair) {
    Card* const card = pair == nullptr ? nullptr : Forever<Cards>().CardOf(pair->context);
    std::shared_ptr<CountedPair> counted;
    if (card != nullptr) CountIfThereIsMemory([&] { counted = card->Remove(pair->number); });
    const int result = real(pair);
    if (result != 0 && counted != nullptr) CountIfThereIsMemory([&] { card->PutBack(std::move(counted)); });
    return result;
  }
};

using PointerSetAttribute = AMEM_THEN(kAttributeSet, cuPointerSetAttribute);
template <template <class> class As>
std::span<const replacements::Replacement> Table() {
  return replacements::Table<As<MemGetHandleForAddressRange>, As<RegMr>, As<RegMrIova>, As<RegMrIova2>, As<RegMrEx>,
                             As<ReregMr>, As<RegDmabufMr>, As<Mlx5RegDmabufMr>, As<DeregMr>, As<UmemReg>, As<UmemRegEx>,
                             As<UmemDereg>, As<GdrPin>, As<GdrPin2>, As<GdrUnpin>, As<FileRegister>, As<FileDeregister>,
                             As<PointerSetAttribute>>();
}

}  // namespace

std::span<const replacements::Replacement> VerbsReplacements() { return Table<std::type_identity_t>(); }
std::span<const replacements::Replacement> CountedCardReplacements() {
  return replacements::Table<OpenDevice, CloseDevice, CreatePair, DestroyPair>();
}

std::span<const replacements::Replacement> VerbsOfOthers() { return Table<ByAnotherThanPlugin>(); }
}  // namespace amem::intercept
