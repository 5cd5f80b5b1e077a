#include "tests/gpu/apis.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <vector>

namespace amem::gpu {

namespace {

#define AMEM_GPU_TEXT_(x) #x
#define AMEM_GPU_TEXT(x) AMEM_GPU_TEXT_(x)

template <class Function>
void Find(void* library, const char* symbol, const std::string& where, bool required, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr && required) throw Failure(Format("%s: no symbol %s", where.c_str(), symbol));
}

std::string DlError() {
  const char* text = dlerror();
  return text != nullptr ? text : "no reason given";
}

}  // namespace

std::string Format(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  va_list again;
  va_copy(again, arguments);
  const int length = vsnprintf(nullptr, 0, format, arguments);
  va_end(arguments);
  std::string text(static_cast<std::size_t>(length < 0 ? 0 : length) + 1, '\0');
  vsnprintf(text.data(), text.size(), format, again);
  va_end(again);
  text.pop_back();
  return text;
}

Cuda::Cuda() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Skip("no GPU driver: dlopen(libcuda.so.1): " + DlError());
#define AMEM_GPU_LOAD(member, function) Find(library, AMEM_GPU_TEXT(function), "libcuda.so.1", false, member);
  AMEM_GPU_CUDA_FUNCTIONS(AMEM_GPU_LOAD)
#undef AMEM_GPU_LOAD
  if (Init == nullptr || DeviceGetCount == nullptr) throw Skip("libcuda.so.1 has no cuInit or cuDeviceGetCount");
  if (const CUresult result = Init(0); result != CUDA_SUCCESS) throw Skip("cuInit: " + Name(result));
  if (const CUresult result = DeviceGetCount(&devices); result != CUDA_SUCCESS) throw Skip("cuDeviceGetCount: " + Name(result));
  if (devices == 0) throw Skip("the driver reports no GPU");
}

const Cuda& Cuda::Get() {
  static const Cuda cuda;
  return cuda;
}

std::string Cuda::Name(CUresult result) const {
  const char* name = nullptr;
  if (GetErrorName != nullptr && GetErrorName(result, &name) == CUDA_SUCCESS && name != nullptr)
    return Format("%s (%d)", name, static_cast<int>(result));
  return Format("CUresult %d", static_cast<int>(result));
}

void Cuda::Check(CUresult result, const std::string& what) const {
  if (result != CUDA_SUCCESS) throw Failure(what + ": " + Name(result));
}

Device Device::Open(int ordinal) {
  const Cuda& cuda = Cuda::Get();
  Device device;
  device.ordinal = ordinal;
  cuda.Check(cuda.DeviceGet(&device.handle, ordinal), Format("cuDeviceGet(%d)", ordinal));
  cuda.Check(cuda.PrimaryCtxRetain(&device.context, device.handle), Format("cuDevicePrimaryCtxRetain(device %d)", ordinal));
  device.MakeCurrent();
  return device;
}

void Device::MakeCurrent() const {
  const Cuda& cuda = Cuda::Get();
  cuda.Check(cuda.CtxSetCurrent(context), Format("cuCtxSetCurrent(device %d)", ordinal));
}

MemoryInfo Device::Memory() const {
  const Cuda& cuda = Cuda::Get();
  MakeCurrent();
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  cuda.Check(cuda.MemGetInfo(&free_bytes, &total_bytes), Format("cuMemGetInfo(device %d)", ordinal));
  return {free_bytes, total_bytes};
}

const Nccl& Nccl::Load(const std::string& path, bool bind_now) {
  static std::unique_ptr<Nccl> loaded;
  if (loaded) {
    if (loaded->path != path) throw Failure("this process has loaded " + loaded->path + ", it cannot load " + path + " too");
    return *loaded;
  }
  auto nccl = std::make_unique<Nccl>();
  nccl->path = path;
  // Lazily, as a linked program loads it.
  nccl->library = dlopen(path.c_str(), (bind_now ? RTLD_NOW : RTLD_LAZY) | RTLD_LOCAL);
  if (nccl->library == nullptr) throw Failure("dlopen(" + path + "): " + DlError());
  const auto find = [&](const char* symbol, auto& function, bool required) {
    Find(nccl->library, symbol, path, required, function);
  };
  find("ncclGetVersion", nccl->GetVersion, true);
  find("ncclGetUniqueId", nccl->GetUniqueId, true);
  find("ncclCommInitRank", nccl->CommInitRank, true);
  find("ncclCommSplit", nccl->CommSplit, false);
  find("ncclCommDestroy", nccl->CommDestroy, true);
  find("ncclCommAbort", nccl->CommAbort, false);
  find("ncclCommGetAsyncError", nccl->CommGetAsyncError, false);
  find("ncclGetErrorString", nccl->GetErrorString, true);
  find("ncclGetLastError", nccl->GetLastError, false);
  find("ncclAllReduce", nccl->AllReduce, true);
  find("ncclAllGather", nccl->AllGather, false);
  find("ncclReduceScatter", nccl->ReduceScatter, false);
  find("ncclBroadcast", nccl->Broadcast, false);
  find("ncclSend", nccl->Send, false);
  find("ncclRecv", nccl->Recv, false);
  find("ncclGroupStart", nccl->GroupStart, false);
  find("ncclGroupEnd", nccl->GroupEnd, false);
  find("ncclMemAlloc", nccl->MemAlloc, false);
  find("ncclMemFree", nccl->MemFree, false);
  find("ncclCommWindowRegister", nccl->CommWindowRegister, false);
  find("ncclCommWindowDeregister", nccl->CommWindowDeregister, false);
  find("ncclCommSuspend", nccl->CommSuspend, false);
  find("ncclCommResume", nccl->CommResume, false);
  nccl->Check(nccl->GetVersion(&nccl->version), "ncclGetVersion");
  loaded = std::move(nccl);
  return *loaded;
}

std::string Nccl::Describe(ncclResult_t result) const {
  std::string text = Format("%s (%d)", GetErrorString(result), result);
  if (GetLastError != nullptr) {
    const char* last = GetLastError(nullptr);
    if (last != nullptr && *last != '\0') text += Format("; last error: %s", last);
  }
  return text;
}

void Nccl::Check(ncclResult_t result, const std::string& what) const {
  if (result != 0) throw Failure(what + ": " + Describe(result));
}

std::string Nccl::VersionText() const {
  return version >= 10000 ? Format("%d.%d.%d", version / 10000, version / 100 % 100, version % 100)
                          : Format("%d.%d.%d", version / 1000, version / 100 % 10, version % 100);
}

std::optional<Amem> Amem::Find(const Nccl& nccl) {
  const auto symbol = [&](const char* name) {
    void* found = dlsym(nccl.library, name);
    return found != nullptr ? found : dlsym(RTLD_DEFAULT, name);
  };
  Amem amem;
  amem.Pause = reinterpret_cast<decltype(amem.Pause)>(symbol("ncclPause"));
  amem.Resume = reinterpret_cast<decltype(amem.Resume)>(symbol("ncclResume"));
  amem.ResumeTags = reinterpret_cast<decltype(amem.ResumeTags)>(symbol("amem_resume"));
  if (amem.Pause == nullptr || amem.Resume == nullptr) return std::nullopt;
  amem.MemStats = reinterpret_cast<decltype(amem.MemStats)>(symbol("ncclMemStats"));
  amem.SetGroupId = reinterpret_cast<decltype(amem.SetGroupId)>(symbol("ncclSetGroupID"));
  amem.GetGroupId = reinterpret_cast<decltype(amem.GetGroupId)>(symbol("ncclGetGroupID"));
  amem.json_ = symbol("amem_json");
  amem.last_error_ = symbol("amem_last_error");
  return amem;
}

std::string Amem::StatsJson() const {
  if (json_ == nullptr) return {};
  const auto call = reinterpret_cast<int (*)(const char*, char*, std::size_t*)>(json_);
  std::size_t length = 0;
  if (const int result = call("stats", nullptr, &length); result != 0)
    throw Failure(Format("amem_json: %d: %s", result, LastError().c_str()));
  // It may grow between the two calls, while NCCL's threads allocate.
  std::string text(length + 4096, '\0');
  length = text.size();
  if (const int result = call("stats", text.data(), &length); result != 0)
    throw Failure(Format("amem_json: %d: %s", result, LastError().c_str()));
  text.resize(std::min(text.size(), length > 0 ? length - 1 : 0));
  return text;
}

std::string Amem::LastError() const {
  if (last_error_ == nullptr) return {};
  const char* text = reinterpret_cast<const char* (*)()>(last_error_)();
  return text != nullptr ? text : "";
}

void Amem::Check(ncclResult_t result, const Nccl& nccl, const std::string& what) const {
  if (result == 0) return;
  const std::string reason = LastError();
  throw Failure(Format("%s: %s (%d): %s", what.c_str(), nccl.GetErrorString(result), result,
                       reason.empty() ? "amem_last_error gives no reason" : reason.c_str()));
}

}  // namespace amem::gpu
