// What NCCL itself registers with network cards, and pins for copies by the processor (GDRCopy).
//
// NCCL registers by address (ibv_reg_mr, with the peer-memory module) or by a dma-buf of an address range. It closes the
// dma-buf's descriptor right after; the registration holds the pages until it is undone.
#include <spdlog/fmt/fmt.h>

#include <cerrno>

#include "ncclpatch/intercept/registrations.h"

namespace amem::intercept {
namespace {

struct MemGetHandleForAddressRange : Named<"cuMemGetHandleForAddressRange"> {
  using Function = CUresult(void*, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long);
  static CUresult Call(Function* real, void* handle, CUdeviceptr address, size_t bytes, CUmemRangeHandleType type,
                       unsigned long long flags) {
    Session* session = Runtime::Get().session();
    const Registering gate(kName, {Address{address}, bytes});
    if (gate.refused()) return CUDA_ERROR_ILLEGAL_STATE;
    const CUresult result = real(handle, address, bytes, type, flags);
    if (session != nullptr && result == CUDA_SUCCESS && handle != nullptr && type == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
      Registrations::Get().Exported(*static_cast<int*>(handle), {Address{address}, bytes});
    return result;
  }
};

// NCCL sets CU_POINTER_ATTRIBUTE_SYNC_MEMOPS on memory that it registers for communication from kernels (DOCA). The driver
// answers; that it was asked about memory of AMem's is journaled.
struct PointerSetAttribute : Named<"cuPointerSetAttribute"> {
  using Function = CUresult(const void*, CUpointer_attribute, CUdeviceptr);
  static CUresult Call(Function* real, const void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    const CUresult result = real(value, attribute, address);
    Session* session = Runtime::Get().started();
    if (session != nullptr && session->AddressRange(Address{address}).ok())
      session->Note(PassedThrough{kName, fmt::format("attribute {} of {}", static_cast<int>(attribute), Hex(address)),
                                  static_cast<std::int32_t>(result)});
    return result;
  }
};

// AMem only passes the protection domain and the region on, so ibverbs' own types are not needed.
void* Refused() {
  errno = EBUSY;
  return nullptr;
}

template <class MakeCall>
void* Register(const char* call, Registrar registrar, Part part, const char* how, const MakeCall& make_call) {
  const Registering gate(call, part);
  if (gate.refused()) return Refused();
  void* region = make_call();
  if (region != nullptr) Registrations::Get().Add(KeyOf(registrar, region), part, how);
  return region;
}
// The same for [offset, offset + bytes) of a dma-buf.
template <class MakeCall>
void* RegisterDmaBuf(const char* call, Registrar registrar, int descriptor, std::uint64_t offset, size_t bytes,
                     const MakeCall& make_call) {
  const Part whole = Registrations::Get().ExportedAs(descriptor);
  const Part part = whole.bytes == 0 ? Part{} : Part{whole.address + offset, bytes};
  void* region = Register(call, registrar, part, "dma-buf", make_call);
  Registrations::Get().Consumed(descriptor);
  return region;
}

struct RegMr : Named<"ibv_reg_mr"> {
  using Function = void*(void*, void*, size_t, int);
  static void* Call(Function* real, void* domain, void* address, size_t bytes, int access) {
    return Register(kName, Registrar::kVerbs, PartAt(address, bytes), kName,
                    [&] { return real(domain, address, bytes, access); });
  }
};

struct RegMrIova2 : Named<"ibv_reg_mr_iova2"> {
  using Function = void*(void*, void*, size_t, std::uint64_t, unsigned int);
  static void* Call(Function* real, void* domain, void* address, size_t bytes, std::uint64_t iova, unsigned int access) {
    return Register(kName, Registrar::kVerbs, PartAt(address, bytes), "ibv_reg_mr",
                    [&] { return real(domain, address, bytes, iova, access); });
  }
};

struct RegDmabufMr : Named<"ibv_reg_dmabuf_mr"> {
  using Function = void*(void*, std::uint64_t, size_t, std::uint64_t, int, int);
  static void* Call(Function* real, void* domain, std::uint64_t offset, size_t bytes, std::uint64_t iova, int descriptor,
                    int access) {
    return RegisterDmaBuf(kName, Registrar::kVerbs, descriptor, offset, bytes,
                          [&] { return real(domain, offset, bytes, iova, descriptor, access); });
  }
};

struct Mlx5RegDmabufMr : Named<"mlx5dv_reg_dmabuf_mr"> {  // its region is undone by ibv_dereg_mr
  using Function = void*(void*, std::uint64_t, size_t, std::uint64_t, int, int, int);
  static void* Call(Function* real, void* domain, std::uint64_t offset, size_t bytes, std::uint64_t iova, int descriptor,
                    int access, int more_access) {
    return RegisterDmaBuf(kName, Registrar::kVerbs, descriptor, offset, bytes,
                          [&] { return real(domain, offset, bytes, iova, descriptor, access, more_access); });
  }
};

struct DeregMr : Named<"ibv_dereg_mr"> {
  using Function = int(void*);
  static int Call(Function* real, void* region) {
    return Deregister(KeyOf(Registrar::kVerbs, region), [&] { return real(region); });
  }
};

struct UmemReg : Named<"mlx5dv_devx_umem_reg"> {
  using Function = void*(void*, void*, size_t, std::uint32_t);
  static void* Call(Function* real, void* context, void* address, size_t bytes, std::uint32_t access) {
    return Register(kName, Registrar::kUserMemory, PartAt(address, bytes), kName,
                    [&] { return real(context, address, bytes, access); });
  }
};

struct UmemRegEx : Named<"mlx5dv_devx_umem_reg_ex"> {
  struct Input {    // mlx5dv_devx_umem_in
    void* address;  // of a dma-buf: the offset in it
    size_t bytes;
    std::uint32_t access;
    std::uint64_t page_sizes, mask;
    int descriptor;
  };
  static constexpr std::uint64_t kDmaBuf = 1;  // in the mask: `descriptor` is set
  using Function = void*(void*, Input*);
  static void* Call(Function* real, void* context, Input* input) {
    const auto make_call = [&] { return real(context, input); };
    if (input == nullptr) return make_call();
    if ((input->mask & kDmaBuf) != 0)
      return RegisterDmaBuf(kName, Registrar::kUserMemory, input->descriptor, reinterpret_cast<std::uint64_t>(input->address),
                            input->bytes, make_call);
    return Register(kName, Registrar::kUserMemory, PartAt(input->address, input->bytes), kName, make_call);
  }
};

struct UmemDereg : Named<"mlx5dv_devx_umem_dereg"> {
  using Function = int(void*);
  static int Call(Function* real, void* memory) {
    return Deregister(KeyOf(Registrar::kUserMemory, memory), [&] { return real(memory); });
  }
};

struct GdrHandle {
  unsigned long value;
};
// The two versions differ in the arguments between the size and the handle.
template <class... Middle>
int PinForGdr(int (*real)(void*, unsigned long, size_t, Middle..., GdrHandle*), void* gdr, unsigned long address, size_t bytes,
              Middle... middle, GdrHandle* handle) {
  const Part part{Address{address}, bytes};
  const Registering gate("gdr_pin_buffer", part);
  if (gate.refused()) return EBUSY;
  const int result = real(gdr, address, bytes, middle..., handle);
  if (result == 0 && handle != nullptr) Registrations::Get().Add({Registrar::kGdrCopy, handle->value}, part, "gdr_pin_buffer");
  return result;
}

struct GdrPin : Named<"gdr_pin_buffer"> {
  using Function = int(void*, unsigned long, size_t, std::uint64_t, std::uint32_t, GdrHandle*);
  static int Call(Function* real, void* gdr, unsigned long address, size_t bytes, std::uint64_t token, std::uint32_t space,
                  GdrHandle* handle) {
    return PinForGdr<std::uint64_t, std::uint32_t>(real, gdr, address, bytes, token, space, handle);
  }
};

struct GdrPin2 : Named<"gdr_pin_buffer_v2"> {
  using Function = int(void*, unsigned long, size_t, std::uint32_t, GdrHandle*);
  static int Call(Function* real, void* gdr, unsigned long address, size_t bytes, std::uint32_t flags, GdrHandle* handle) {
    return PinForGdr<std::uint32_t>(real, gdr, address, bytes, flags, handle);
  }
};

struct GdrUnpin : Named<"gdr_unpin_buffer"> {
  using Function = int(void*, GdrHandle);
  static int Call(Function* real, void* gdr, GdrHandle handle) {
    return Deregister({Registrar::kGdrCopy, handle.value}, [&] { return real(gdr, handle); });
  }
};

}  // namespace

std::span<const replacements::Replacement> VerbsReplacements() {
  return replacements::Table<MemGetHandleForAddressRange, PointerSetAttribute, RegMr, RegMrIova2, RegDmabufMr, Mlx5RegDmabufMr,
                             DeregMr, UmemReg, UmemRegEx, UmemDereg, GdrPin, GdrPin2, GdrUnpin>();
}
}  // namespace amem::intercept
