#include "ncclpatch/hook/hook.h"

#include <dlfcn.h>
#include <pthread.h>
#include <spdlog/fmt/fmt.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "ncclpatch/hook/replacements.h"

extern "C" {
void amem_dlsym_stub();  // route_stub.S
void amem_dlvsym_stub();
__attribute__((visibility("hidden"))) void* amem_route_dlsym(void* return_address, void* handle, const char* name);
__attribute__((visibility("hidden"))) void* amem_route_dlvsym(void* return_address, void* handle, const char* name);
}

namespace amem::hook {
namespace {

using Dlsym = void* (*)(void*, const char*);
using Dlvsym = void* (*)(void*, const char*, const char*);

constinit std::atomic<bool> g_enabled{false};
constinit std::atomic<void*> g_real_dlsym{nullptr}, g_real_dlvsym{nullptr}, g_driver_library{nullptr};

// Only appended to; readers see the first `g_library_count` entries.
constexpr std::size_t kMostLibraries = 16;
constinit std::array<Library, kMostLibraries> g_libraries{};
constinit std::atomic<std::size_t> g_library_count{0};
constinit std::mutex g_library_mutex;
constinit std::atomic<Report> g_report{nullptr};

void Tell(bool failed, const std::string& message) {
  if (const Report report = g_report.load(std::memory_order_acquire)) report(failed, message);
}

// Looks in libc's own symbol tables, because asking dlsym for the symbol would lead here again.
void* FindInLibc(const char* name, std::atomic<void*>& known) {
  if (void* found = known.load(std::memory_order_acquire)) return found;
  void* found = nullptr;
  for (const char* soname : {"libc.so.6", "libdl.so.2"}) {  // before glibc 2.34 dlsym was in libdl
    ElfImage::ForEach([&](const ElfImage& image) {
      if (std::strcmp(image.soname(), soname) != 0) return false;
      found = image.Find(name);
      return found != nullptr;
    });
    if (found != nullptr) break;
  }
  known.store(found, std::memory_order_release);
  return found;
}
Dlsym LibcDlsym() { return reinterpret_cast<Dlsym>(FindInLibc("dlsym", g_real_dlsym)); }
Dlvsym LibcDlvsym() { return reinterpret_cast<Dlvsym>(FindInLibc("dlvsym", g_real_dlvsym)); }

bool IsUpper(char c) { return c >= 'A' && c <= 'Z'; }
// Names that begin with cuda, cudnn or cublas belong to other libraries and are far more frequent.
bool IsDriverName(const char* name) { return name[0] == 'c' && name[1] == 'u' && IsUpper(name[2]); }
bool IsVerbsName(const char* name) { return std::strncmp(name, "ibv_", 4) == 0; }

const Library* Register(const ElfImage& image, const char* way) {
  if (const Library* known = LibraryAt(image.text_begin())) return known;
  const std::lock_guard lock(g_library_mutex);
  const std::size_t count = g_library_count.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < count; ++i)
    if (g_libraries[i].base == image.base()) return &g_libraries[i];
  if (count == kMostLibraries) return nullptr;
  std::size_t bytes = 0;
  const auto for_application = reinterpret_cast<std::uintptr_t>(image.Find("ncclMemAlloc", &bytes));
  g_libraries[count] = {image.base(), image.text_begin(), image.text_end(),       image.path(),
                        way,          for_application,    for_application + bytes};
  g_library_count.store(count + 1, std::memory_order_release);
  return &g_libraries[count];
}

const char* WayOf(const ElfImage& image) {
  if (image.Needs("libamem_nccl.so")) return "patched";
  const char* preloaded = std::getenv("LD_PRELOAD");
  return preloaded != nullptr && std::strstr(preloaded, "libamem_nccl") != nullptr ? "preload" : "attach";
}

bool FromNccl(void* return_address) {
  if (LibraryAt(reinterpret_cast<std::uintptr_t>(return_address)) != nullptr) return true;
  ElfImage image;
  if (!ElfImage::Containing(return_address, &image) || !IsNccl(image)) return false;
  return Register(image, WayOf(image)) != nullptr;
}

// ---- what libnccl gets in place of dlsym and dlvsym --------------------------------------------------------------------

void* ReplacedDlsym(void* handle, const char* name) {
  void* real = LibcDlsym()(handle, name);
  if (real == nullptr) return nullptr;
  if (IsDriverName(name)) g_driver_library.store(handle, std::memory_order_release);
  return replacements::BindExported(name, real, nullptr);
}

void* ReplacedDlvsym(void* handle, const char* name, const char* version) {
  void* real = LibcDlvsym()(handle, name, version);
  return real == nullptr ? nullptr : replacements::BindExported(name, real, nullptr);
}

bool Concerns(void* return_address, const char* name) {
  return g_enabled.load(std::memory_order_acquire) && name != nullptr && (IsDriverName(name) || IsVerbsName(name)) &&
         !replacements::inert.load(std::memory_order_relaxed) && FromNccl(return_address);
}

// ---- patching ----------------------------------------------------------------------------------------------------------

bool LeadsHere(std::uintptr_t target) {
  ElfImage self;
  return ElfImage::Containing(reinterpret_cast<const void*>(&amem_dlsym_stub), &self) && self.InText(target);
}

Status Patch(const ElfImage& image, const char* way) {
  AMEM_TRY(image.Write(image.ImportSlot("dlsym"), reinterpret_cast<const void*>(&amem_dlsym_stub)));
  if (const auto slot = image.ImportSlot("dlvsym"))
    AMEM_TRY(image.Write(slot, reinterpret_cast<const void*>(&amem_dlvsym_stub)));
  Register(image, way);
  Tell(false, fmt::format("{} is under AMem ({})", image.path(), way));
  return Status::Ok();
}

bool HasLookedUpTheDriver(const ElfImage& image, const ElfImage::Slot& dlsym_slot) {
  if (image.Unbound(dlsym_slot)) return false;
  return ElfImage::ForEach(
      [&](const ElfImage& other) { return std::strncmp(other.soname(), "libcuda.so", 10) == 0 && image.HoldsCodeOf(other); });
}

Status TooLate(const ElfImage& image) {
  return {Code::kRefused,
          fmt::format("attach to {}: too late, it has looked up the driver's functions already. Start the process with "
                      "LD_PRELOAD=libamem_nccl.so, use a copy made by amem-patch, or attach right after libnccl is loaded "
                      "(import torch) and before its first call",
                      image.path())};
}

Status AttachTo(const ElfImage& image) {
  const ElfImage::Slot slot = image.ImportSlot("dlsym");
  if (!slot) return {Code::kUnsupported, fmt::format("attach to {}: it does not import dlsym", image.path())};
  if (LeadsHere(*slot.where)) {
    Register(image, WayOf(image));
    return Status::Ok();
  }
  return HasLookedUpTheDriver(image, slot) ? TooLate(image) : Patch(image, WayOf(image));
}

// A copy, because the loader's lock is held while objects are listed, and neither mprotect nor logging may happen under it.
std::vector<ElfImage> LoadedNccls() {
  std::vector<ElfImage> found;
  ElfImage::ForEach([&](const ElfImage& image) {
    if (IsNccl(image)) found.push_back(image);
    return false;
  });
  return found;
}

}  // namespace

void SetReport(Report report) { g_report.store(report, std::memory_order_release); }
void Enable() { g_enabled.store(true, std::memory_order_release); }

bool IsNccl(const ElfImage& image) {
  if (std::strncmp(image.soname(), "libnccl.so", 10) == 0) return true;
  if (image.Find("ncclGetVersion") == nullptr) return false;
  return image.Find("ncclCommInitRankConfig") != nullptr || image.Find("ncclCommInitRank") != nullptr;
}

void PatchAtLoad() {
  for (const ElfImage& image : LoadedNccls()) {
    const ElfImage::Slot slot = image.ImportSlot("dlsym");
    if (!slot || LeadsHere(*slot.where) || HasLookedUpTheDriver(image, slot)) continue;
    if (const Status status = Patch(image, WayOf(image)); !status) Tell(true, status.message());
  }
}

Status Attach() {
  const std::vector<ElfImage> libraries = LoadedNccls();
  if (libraries.empty())
    return {Code::kNotFound,
            "attach: no NCCL is loaded in this process; load it first (import torch, or load libnccl.so.2), then attach"};
  for (const ElfImage& image : libraries) AMEM_TRY(AttachTo(image));
  Enable();
  return Status::Ok();
}

std::vector<Library> Libraries() {
  const std::size_t count = g_library_count.load(std::memory_order_acquire);
  return {g_libraries.begin(), g_libraries.begin() + static_cast<std::ptrdiff_t>(count)};
}

const Library* LibraryAt(std::uintptr_t address) {
  const std::size_t count = g_library_count.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < count; ++i)
    if (address >= g_libraries[i].text_begin && address < g_libraries[i].text_end) return &g_libraries[i];
  return nullptr;
}

LibraryAttached Describe(const Library& library) {
  LibraryAttached event{library.path, "", library.way, "", library.base};
  ElfImage image;
  if (!ElfImage::Containing(reinterpret_cast<const void*>(library.text_begin), &image)) return event;
  event.build_id = image.BuildId();
  int code = 0;
  using GetVersion = int (*)(int*);
  const auto get_version = reinterpret_cast<GetVersion>(image.Find("ncclGetVersion"));
  if (get_version == nullptr || get_version(&code) != 0 || code == 0) return event;
  const int scale = code >= 10'000 ? 10'000 : 1'000;  // 2.9.0 changed 2908-style numbers to 20908-style
  event.nccl_version = fmt::format("{}.{}.{}", code / scale, code % scale / 100, code % 100);
  return event;
}

void* RealDlsym(void* handle, const char* name) { return LibcDlsym()(handle, name); }
void* DriverLibrary() { return g_driver_library.load(std::memory_order_acquire); }
void* DriverSymbol(const char* name) {
  void* library = DriverLibrary();
  return library == nullptr ? nullptr : RealDlsym(library, name);
}

}  // namespace amem::hook

void* amem_route_dlsym(void* return_address, void* /*handle*/, const char* name) {
  using namespace amem::hook;
  return Concerns(return_address, name) ? reinterpret_cast<void*>(&ReplacedDlsym) : reinterpret_cast<void*>(LibcDlsym());
}

void* amem_route_dlvsym(void* return_address, void* /*handle*/, const char* name) {
  using namespace amem::hook;
  return Concerns(return_address, name) ? reinterpret_cast<void*>(&ReplacedDlvsym) : reinterpret_cast<void*>(LibcDlvsym());
}
