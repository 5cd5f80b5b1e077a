// Start and settings of the stand-in, its entry points by name, errors in words.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "replay/driver/result_names.h"
#include "tests/stand_ins/checkpoint/world_checkpoint.h"
#include "tests/stand_ins/cuda/stand_in.h"

namespace amem::stand_in {
namespace {

constexpr int kDriverVersion = 13000;

std::atomic<StandIn*> started{nullptr};
std::atomic<int> started_by{0};
std::mutex start_mutex;

bool Complain(const std::string& what) {
  std::fprintf(stderr, "stand-in libcuda: %s\n", what.c_str());
  return false;
}

bool ReadNumber(const char* variable, std::uint64_t least, std::uint64_t& number) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return true;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, number);
  if (error == std::errc{} && stop == end && number >= least) return true;
  return Complain(std::string(variable) + "='" + text + "' is no number, or is below " + std::to_string(least));
}

bool ReadVisible(std::vector<std::int32_t>& visible) {
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) return true;
  std::string_view rest(text);
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    std::int32_t device = 0;
    const auto [stop, error] = std::from_chars(one.data(), one.data() + one.size(), device);
    if (error != std::errc{} || stop != one.data() + one.size()) {
      return Complain(std::string("CUDA_VISIBLE_DEVICES='") + text + "' is no list of numbers");
    }
    visible.push_back(device);
  }
  return true;
}

std::optional<SimulatorOptions> ReadSettings() {
  std::uint64_t devices = 4, capacity_mib = 16384;
  SimulatorOptions options;
  if (!ReadNumber("AMEM_SIM_DEVICES", 0, devices) || !ReadNumber("AMEM_SIM_CAPACITY_MIB", 1, capacity_mib) ||
      !ReadVisible(options.visible)) {
    return std::nullopt;
  }
  if (const char* world = std::getenv("AMEM_SIM_WORLD")) options.world = world;
  options.fabric = std::getenv("AMEM_SIM_FABRIC") != nullptr;
  options.devices = static_cast<std::int32_t>(devices);
  options.capacity_per_device = capacity_mib << 20;
  return options;
}

bool ForkAndWait() {
  const pid_t child = ::fork();
  if (child == 0) ::execl("/bin/true", "true", nullptr);
  int status = -1;
  return child > 0 && ::waitpid(child, &status, 0) == child && status == 0;
}

// STAND_IN_FAULT=fork
bool ForkAsLibcudaDoes() {
  const char* fault = std::getenv("STAND_IN_FAULT");
  if (fault == nullptr || std::string_view(fault) != "fork") return true;
  bool beside = false;
  std::thread([&] { beside = ForkAndWait(); }).join();
  return (ForkAndWait() && beside) || Complain("a child that cuInit forked did not end with 0");
}

}  // namespace

StandIn* Get() { return started_by.load() == getpid() ? started.load() : nullptr; }

CUresult Start() {
  const std::lock_guard lock(start_mutex);
  if (started.load() != nullptr) return Get() != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
  const auto options = ReadSettings();
  if (!options) return CUDA_ERROR_INVALID_VALUE;
  if (options->devices == 0) return CUDA_ERROR_NO_DEVICE;
  if (!ForkAsLibcudaDoes()) return CUDA_ERROR_UNKNOWN;
  auto simulator = Simulator::Open(*options);
  if (!simulator.ok()) {
    Complain(simulator.status().message());
    return CUDA_ERROR_NO_DEVICE;
  }
  auto stand_in = std::make_unique<StandIn>();
  stand_in->simulator = *std::move(simulator);
  stand_in->devices = *stand_in->simulator->DeviceCount();
  for (int device = 0; device < stand_in->devices; ++device) {
    stand_in->primary.push_back(std::make_unique<CUctx_st>(CUctx_st{.device = device, .primary = true}));
  }
  started_by = getpid();
  started = stand_in.release();
  if (const char* fault = std::getenv("STAND_IN_AT"); fault != nullptr && !PlanFault(fault)) {
    Complain(std::string("STAND_IN_AT='") + fault + "' is not CALL,NTH,ACTION");
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult Result(const Status& status) {
  if (status.ok()) return CUDA_SUCCESS;
  return status.driver_result() != 0 ? static_cast<CUresult>(status.driver_result()) : CUDA_ERROR_UNKNOWN;
}

}  // namespace amem::stand_in

CUDA_CALL CUresult cuInit(unsigned int flags) { return flags == 0 ? amem::stand_in::Start() : CUDA_ERROR_INVALID_VALUE; }

CUDA_CALL CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::uint64_t told = amem::stand_in::kDriverVersion;
  if (!amem::stand_in::ReadNumber("STAND_IN_VERSION", 1, told)) return CUDA_ERROR_INVALID_VALUE;
  *version = static_cast<int>(told);
  return CUDA_SUCCESS;
}

CUDA_CALL CUresult cuGetErrorName(CUresult result, const char** text) {
  const amem::CudaError* const known = amem::FindCudaError(static_cast<int>(result));
  *text = known == nullptr ? nullptr : known->name;
  return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUDA_CALL CUresult cuGetErrorString(CUresult result, const char** text) {
  const amem::CudaError* const known = amem::FindCudaError(static_cast<int>(result));
  *text = known == nullptr ? nullptr : known->description;
  return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// ---- entry points by name --------------------------------------------------------------------------------------------------

namespace {

void* FindOwn(const std::string& symbol) {
  static void* const self = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&stand_in_cuda_at), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  if (self == nullptr || !symbol.starts_with("cu")) return nullptr;
  for (const char* variant : {"_v4", "_v3", "_v2", ""}) {  // the newest is what a plain name means
    if (void* found = dlsym(self, (symbol + variant).c_str())) return found;
  }
  return nullptr;
}

CUresult FindEntry(const char* symbol, void** pointer, int version, const void* caller) {
  if (symbol == nullptr || pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *pointer = amem::stand_in::NoteLookUp(symbol, version, caller, FindOwn(symbol));
  return *pointer == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

}  // namespace

#undef cuGetProcAddress
CUDA_CALL CUresult cuGetProcAddress(const char* symbol, void** pointer, int version, cuuint64_t flags);
CUDA_CALL CUresult cuGetProcAddress(const char* symbol, void** pointer, int version, cuuint64_t) {
  return FindEntry(symbol, pointer, version, __builtin_return_address(0));
}

CUDA_CALL CUresult cuGetProcAddress_v2(const char* symbol, void** pointer, int version, cuuint64_t,
                                       CUdriverProcAddressQueryResult* status) {
  const CUresult result = FindEntry(symbol, pointer, version, __builtin_return_address(0));
  if (status != nullptr) *status = result == CUDA_SUCCESS ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return result;
}

// ---- for tests -------------------------------------------------------------------------------------------------------------

CUDA_CALL int stand_in_cuda_fail_next(const char* call, std::uint64_t nth, int result) {
  amem::stand_in::Start();
  amem::stand_in::StandIn* const stand_in = amem::stand_in::Get();
  return stand_in != nullptr && stand_in->simulator->FailNext(call, nth, result).ok() ? 0 : 1;
}

CUDA_CALL std::uint64_t stand_in_cuda_calls(const char* call) {
  amem::stand_in::StandIn* const stand_in = amem::stand_in::Get();
  return stand_in == nullptr ? 0 : stand_in->simulator->Calls(call);
}

CUDA_CALL std::uint64_t stand_in_cuda_bytes_in_use(int device) {
  amem::stand_in::StandIn* const stand_in = amem::stand_in::Get();
  return stand_in == nullptr ? 0 : stand_in->simulator->BytesInUse(amem::DeviceOrdinal{device});
}

CUDA_CALL std::uint64_t stand_in_cuda_contexts(int device) {
  amem::stand_in::StandIn* const stand_in = amem::stand_in::Get();
  if (stand_in == nullptr || device < 0 || device >= stand_in->devices) return 0;
  const std::lock_guard lock(stand_in->mutex);
  return stand_in->primary[static_cast<std::size_t>(device)]->made;
}

CUDA_CALL std::uint64_t stand_in_cuda_pinned(void* context) {
  amem::stand_in::StandIn* const stand_in = amem::stand_in::Get();
  if (stand_in == nullptr) return 0;
  const std::lock_guard lock(stand_in->mutex);
  std::uint64_t bytes = 0;
  for (const auto& [pointer, block] : stand_in->host)
    if (block.context == context) bytes += block.bytes;
  return bytes;
}

CUDA_CALL void stand_in_cuda_set_busy(void* context, int busy) {
  amem::stand_in::StandIn* const stand_in = amem::stand_in::Get();
  if (stand_in == nullptr) return;
  const std::lock_guard lock(stand_in->mutex);
  stand_in->busy[static_cast<CUcontext>(context)] = busy;
  amem::checkpoint::SetBusy(*stand_in->simulator->world(), stand_in->simulator->member(), busy != 0);
}
