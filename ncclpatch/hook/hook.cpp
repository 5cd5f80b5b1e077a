#include "ncclpatch/hook/hook.h"

#include <dlfcn.h>
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "ncclpatch/hook/libc_symbols.h"
#include "ncclpatch/hook/libraries.h"
#include "ncclpatch/hook/own_look_ups.h"
#include "ncclpatch/hook/own_names.h"
#include "ncclpatch/hook/redirects.h"
#include "ncclpatch/hook/replacements.h"

#define AMEM_HIDDEN __attribute__((visibility("hidden")))
extern "C" {
void amem_dlsym_stub();  // route_stub.S
void amem_dlvsym_stub();
AMEM_HIDDEN void* amem_route_dlsym(void* return_address, void* handle, const char* name);
AMEM_HIDDEN void* amem_route_dlvsym(void* return_address, void* handle, const char* name);
AMEM_HIDDEN void* amem_route_exported_dlsym(void* return_address, void* handle, const char* name);
AMEM_HIDDEN void* amem_route_exported_dlvsym(void* return_address, void* handle, const char* name);
}

namespace amem::hook {
namespace {

using Dlsym = void* (*)(void*, const char*);
using Dlvsym = void* (*)(void*, const char*, const char*);

constinit std::atomic<bool> g_enabled{false}, g_reach_late{false};
constinit std::atomic<const replacements::Tables*> g_reach{nullptr};  // other libraries, too, for these names
bool Reaches() { return g_reach.load(std::memory_order_acquire) != nullptr; }
constinit std::atomic<void*> g_driver_library{nullptr};

constinit std::mutex g_patch_mutex;  // guards import tables: one thread at a time unseals, writes and seals a page
constinit std::atomic<Report> g_report{nullptr};

void SendReport(bool failed, const std::string& message) {
  if (const Report report = g_report.load(std::memory_order_acquire)) report(failed, message);
}

// Who else defines a function that this library exports. That is not always libc, because others wrap it too.
struct Definitions {
  const char* name;
  std::atomic<void*> libc{nullptr}, next{nullptr}, first{nullptr};
};
constinit Definitions g_dlsym{"dlsym"}, g_dlvsym{"dlvsym"};

template <class Find>
void* Once(std::atomic<void*>& known, const Find& find) {
  void* found = known.load(std::memory_order_acquire);
  if (found == nullptr) known.store(found = find(), std::memory_order_release);
  return found;
}

void* InLibc(Definitions& of) {
  return Once(of.libc, [&] { return FindInLibc(of.name); });
}

bool IsOwnCode(std::uintptr_t target) {
  ElfImage self;
  return ElfImage::Containing(reinterpret_cast<const void*>(&amem_dlsym_stub), &self) && self.InText(target);
}

// The next definition behind this library: what a caller that found ours would have reached without it.
void* Next(Definitions& of) {
  return Once(of.next, [&] {
    void* const found = RealDlsym(RTLD_NEXT, of.name);
    return found != nullptr ? found : InLibc(of);
  });
}

// The first definition that is not ours: what libnccl, and AMem itself, would have reached without this library. A library
// before ours asks for the next and so reaches the exported function. (RTLD_DEFAULT would find ours, which is bound to itself.)
void* First(Definitions& of) {
  return Once(of.first, [&] {
    void* const found = RealDlsym(dlopen(nullptr, RTLD_LAZY | RTLD_NOLOAD), of.name);
    return found == nullptr || IsOwnCode(reinterpret_cast<std::uintptr_t>(found)) ? Next(of) : found;
  });
}
Dlsym FirstDlsym() { return reinterpret_cast<Dlsym>(First(g_dlsym)); }

bool IsUpper(char c) { return c >= 'A' && c <= 'Z'; }
// Names with cuda, cudnn or cublas belong to other libraries and are far more frequent.
bool IsDriverName(const char* name) { return name[0] == 'c' && name[1] == 'u' && IsUpper(name[2]); }
// A loop of our own, because strncmp may be a sanitizer's that waits for the answer to this very look-up.
bool StartsWith(const char* name, const char* prefix) {
  for (; *prefix != '\0'; ++name, ++prefix)
    if (*name != *prefix) return false;
  return true;
}
// Functions that register memory with a network card: verbs, Mellanox's extension, GDRCopy, NCCL's network plugins.
bool IsNetworkName(const char* name) {
  for (const char* prefix : {"ibv_", "mlx5dv_", "gdr_", "nccl"})
    if (StartsWith(name, prefix)) return true;
  return false;
}

const char* WayOf(const ElfImage& image) {
  if (image.Needs("libamem_nccl.so")) return "patched";
  return IsPreloaded() ? "preload" : "attach";
}

// Lists a libnccl whose look-ups lead here, and redirects its names. With g_patch_mutex held.
bool Take(const ElfImage& image, const char* way) {
  const Library* library = libraries::Register(image, way);
  if (library == nullptr) return false;
  if (const Status status = redirects::Set(*library, image); !status) SendReport(true, status.message());
  return true;
}

bool FromNccl(void* return_address) {
  ElfImage image;
  if (!ElfImage::Containing(return_address, &image)) return false;
  if (libraries::Knows(image)) return true;
  if (!IsNccl(image)) return false;
  const std::lock_guard lock(g_patch_mutex);
  return Take(image, WayOf(image));
}

// ---- what libnccl gets in place of dlsym and dlvsym --------------------------------------------------------------------

void* ReplacedDlsym(void* handle, const char* name) {
  void* real = FirstDlsym()(handle, name);
  if (real == nullptr) return nullptr;
  if (IsDriverName(name)) g_driver_library.store(handle, std::memory_order_release);
  return replacements::BindExported(name, real, nullptr);
}

void* ReplacedDlvsym(void* handle, const char* name, const char* version) {
  void* real = reinterpret_cast<Dlvsym>(First(g_dlvsym))(handle, name, version);
  return real == nullptr ? nullptr : replacements::BindExported(name, real, nullptr);
}

bool Concerns(void* return_address, const char* name) {
  return g_enabled.load(std::memory_order_acquire) && name != nullptr && (IsDriverName(name) || IsNetworkName(name)) &&
         !replacements::inert.load(std::memory_order_relaxed) && FromNccl(return_address);
}

// For any other library: a function of the driver, or one that registers memory, that AMem replaces there. What a caller that
// asks for the next definition would find depends on who it is, so that its answer is left alone; and so is the answer to one
// that asks for any, unless it is in the global scope, where all find the same.
void* OthersDlsym(void* handle, const char* name) {
  return replacements::BindExported(name, FirstDlsym()(handle, name), nullptr, replacements::Caller::kOther);
}
void* OthersDlvsym(void* handle, const char* name, const char* version) {
  void* const real = reinterpret_cast<Dlvsym>(First(g_dlvsym))(handle, name, version);
  return replacements::BindExported(name, real, nullptr, replacements::Caller::kOther);
}
// Not AMem; nor one that has the driver's functions or dlsym itself, the driver or an interposer: it looks up what it passes
// calls on to, AMem's own too.
bool IsOther(const ElfImage& image) { return image.Find("cuMemAlloc_v2") == nullptr && image.Find("dlsym") == nullptr; }
bool ConcernsOther(const void* return_address, void* handle, const char* name) {
  ElfImage caller;
  return g_enabled.load(std::memory_order_acquire) && name != nullptr && (IsDriverName(name) || IsNetworkName(name)) &&
         handle != RTLD_NEXT && !replacements::inert.load(std::memory_order_relaxed) &&
         replacements::Replaces(name, replacements::Caller::kOther) && ElfImage::Containing(return_address, &caller) &&
         IsOther(caller) && (handle != RTLD_DEFAULT || FirstDlsym()(handle, name) != nullptr);
}

// Whether a program looks up a function of NCCL.
bool AsksForNccl(const char* name) {
  return g_enabled.load(std::memory_order_acquire) && name != nullptr &&
         (StartsWith(name, "nccl") || StartsWith(name, "pnccl")) && !replacements::inert.load(std::memory_order_relaxed);
}

// ---- patching ----------------------------------------------------------------------------------------------------------

Status Patch(const ElfImage& image, const char* way) {
  AMEM_TRY(image.Write(image.ImportSlot("dlsym"), reinterpret_cast<const void*>(&amem_dlsym_stub)));
  if (const auto slot = image.ImportSlot("dlvsym"))
    AMEM_TRY(image.Write(slot, reinterpret_cast<const void*>(&amem_dlvsym_stub)));
  Take(image, way);
  SendReport(false, fmt::format("{} is under AMem ({})", image.path(), way));
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
                      "(import torch) and before its first call (init_process_group)",
                      image.path())};
}

Status AttachTo(const ElfImage& image) {
  const ElfImage::Slot slot = image.ImportSlot("dlsym");
  if (!slot) return {Code::kUnsupported, fmt::format("attach to {}: it does not import dlsym", image.path())};
  if (IsOwnCode(*slot.where)) {
    Take(image, WayOf(image));
    return Status::Ok();
  }
  return HasLookedUpTheDriver(image, slot) ? TooLate(image) : Patch(image, WayOf(image));
}

// Copies, because objects are listed under the loader's lock, where neither mprotect nor logging is allowed.
template <class Match>
std::vector<ElfImage> LoadedThat(const Match& match) {
  std::vector<ElfImage> found;
  ElfImage::ForEach([&](const ElfImage& image) {
    if (match(image)) found.push_back(image);
    return false;
  });
  return found;
}

// ---- other libraries -----------------------------------------------------------------------------------------------------

namespace others {

constexpr const char* kDriver = "libcuda.so.1";
struct TooLate {
  std::string library, name;  // which function it may have called before; empty: any
};
struct Known {
  std::set<std::pair<std::uintptr_t, std::string>> patched;  // by where it is, where another may be loaded later, and path
  std::vector<TooLate> too_late;
};
constinit Known* known = nullptr;  // with g_patch_mutex held; never destroyed

// What the loader would find first. Without the loader, which may wait for a thread that waits for the lock.
void* InAnyLibrary(const char* name) {
  void* found = nullptr;
  ElfImage::ForEach([&](const ElfImage& image) { return (found = image.Find(name)) != nullptr; });
  return found;
}

// Its imports of those functions lead to AMem's. What a slot of the PLT led to before its first use, the loader would have
// found. A library that is bound already may have called unseen, unless AMem was there before it.
Status PatchImports(const ElfImage& image, bool late) {
  Status first;
  const replacements::Tables& names = *g_reach.load();
  image.ForEachImport([&](const char* name, const ElfImage::Slot& slot) {
    if (!(IsDriverName(name) || IsNetworkName(name)) || !replacements::Has(names, name)) return;
    const bool unbound = image.Unbound(slot);
    void* const real = unbound ? InAnyLibrary(name) : reinterpret_cast<void*>(*slot.where);
    if (real == nullptr || IsOwnCode(reinterpret_cast<std::uintptr_t>(real))) return;
    if (!unbound && late) known->too_late.push_back({FileName(image), name});
    void* const entry = replacements::BindExported(name, real, nullptr, replacements::Caller::kOther);
    if (Status written = image.Write(slot, entry); !written && first) first = std::move(written);
  });
  return first;
}

Status PatchLookUp(const ElfImage& image, const char* function, void (*stub)()) {
  const ElfImage::Slot slot = image.ImportSlot(function);
  const bool finds_ours = slot && image.Unbound(slot) && IsPreloaded();
  if (!slot || IsOwnCode(*slot.where) || finds_ours) return Status::Ok();
  if (HasLookedUpTheDriver(image, slot)) {
    known->too_late.push_back({FileName(image), ""});
    return {Code::kRefused,
            fmt::format("{} has looked up the driver's functions already, and its calls are not seen: start the process with "
                        "LD_PRELOAD=libamem_nccl.so",
                        image.path())};
  }
  return image.Write(slot, reinterpret_cast<const void*>(stub));
}

Status Patch(const ElfImage& image, bool late) {
  AMEM_TRY(PatchImports(image, late));
  AMEM_TRY(PatchLookUp(image, "dlsym", &amem_dlsym_stub));
  return PatchLookUp(image, "dlvsym", &amem_dlvsym_stub);
}

void PatchAll() {
  const bool late = !IsPreloaded() || (known == nullptr && g_reach_late.load());
  if (known == nullptr) known = new Known;
  const auto is_new = [](const ElfImage& image) {
    return IsOther(image) && !IsNccl(image) && !known->patched.contains({image.base(), image.path()});
  };
  for (const ElfImage& image : LoadedThat(is_new)) {
    known->patched.emplace(image.base(), image.path());
    // From a tag on, in the default scope, what is not seen is told where it matters (PastAmem).
    if (const Status status = Patch(image, late); !status) SendReport(!g_reach_late.load(), status.message());
  }
}

}  // namespace others

bool HasEntryPoints(const ElfImage& image) {
  if (image.Find("ncclGetVersion") == nullptr) return false;
  return image.Find("ncclCommInitRankConfig") != nullptr || image.Find("ncclCommInitRank") != nullptr;
}

Presence PresenceOf(const ElfImage& image) {
  Presence found{image.path(), libraries::VersionOf(image), "", ""};
  const ElfImage::Slot slot = image.ImportSlot("dlsym");
  if (!IsNccl(image))
    found.why = "NCCL is linked into this library, whose driver calls AMem cannot tell from NCCL's";
  else if (!slot)
    found.why = "it does not import dlsym";
  else if (IsOwnCode(*slot.where))
    found.way = WayOf(image);
  else if (HasLookedUpTheDriver(image, slot))
    found.why =
        "it looked up the driver's functions before AMem was there: start with LD_PRELOAD=libamem_nccl.so, or attach "
        "right after it is loaded (import torch) and before its first call (init_process_group)";
  else
    found.why = "its import table could not be written";
  return found;
}

constinit std::atomic<std::uint64_t> g_patched_at{0};  // LoadCount
constinit std::atomic<std::uint64_t> g_patches{0};

void PatchLoaded() {
  for (const ElfImage& image : LoadedThat(&IsNccl))
    if (const Status status = AttachTo(image); status.code() == Code::kIo) SendReport(true, status.message());
  if (Reaches()) others::PatchAll();
  g_patches.fetch_add(1);
}

// What the program has just loaded, before anything in it is called by name. Not where a dlsym comes from patching itself, or
// beside it.
void PatchOthersIfIdle() {
  const std::uint64_t loaded = LoadCount();
  if (g_patched_at.load() == loaded) return;
  const std::unique_lock lock(g_patch_mutex, std::try_to_lock);
  if (!lock) return;
  g_patched_at.store(loaded);
  PatchLoaded();
}

// What answers in place of dlsym; null: nothing here.
void* RouteDlsym(void* return_address, void* handle, const char* name) {
  if (Reaches() && !replacements::inert.load(std::memory_order_relaxed)) PatchOthersIfIdle();
  if (Concerns(return_address, name)) return reinterpret_cast<void*>(&ReplacedDlsym);
  if (ConcernsOther(return_address, handle, name)) return reinterpret_cast<void*>(&OthersDlsym);
  if (!AsksForNccl(name)) return nullptr;
  if (AnswersName(return_address, handle, name)) return reinterpret_cast<void*>(&AnswerName);
  PatchIfLoaded();
  return nullptr;
}

// What answers a look-up that is nobody's here. An import that was redirected, of libnccl or of a library that was reached, may
// have led to another interposer's before; who found the exported function would have found the next.
void* Otherwise(Definitions& of, void* return_address, bool exported) {
  if (exported) return Next(of);
  return Reaches() || FromNccl(return_address) ? First(of) : InLibc(of);
}
void* ForDlsym(void* return_address, void* handle, const char* name, bool exported) {
  void* const answers = RouteDlsym(return_address, handle, name);
  return answers != nullptr ? answers : Otherwise(g_dlsym, return_address, exported);
}
void* ForDlvsym(void* return_address, void* handle, const char* name, bool exported) {
  if (Concerns(return_address, name)) return reinterpret_cast<void*>(&ReplacedDlvsym);
  if (ConcernsOther(return_address, handle, name)) return reinterpret_cast<void*>(&OthersDlvsym);
  return Otherwise(g_dlvsym, return_address, exported);
}

Status AttachToAll() {
  const std::lock_guard lock(g_patch_mutex);
  const std::vector<ElfImage> libraries = LoadedThat(&IsNccl);
  if (libraries.empty())
    return {Code::kNotFound,
            "attach: no NCCL is loaded in this process; load it first (import torch, or load libnccl.so.2), then call "
            "amem_attach() (Python: amem.attach())"};
  // One that cannot be attached to does not keep the others from it.
  Status first;
  for (const ElfImage& image : libraries)
    if (Status status = AttachTo(image); !status && first) first = std::move(status);
  Enable();
  return first;
}

}  // namespace

void SetReport(Report report) { g_report.store(report, std::memory_order_release); }
void Enable() { g_enabled.store(true, std::memory_order_release); }

bool IsPreloaded() {
  const char* preloaded = std::getenv("LD_PRELOAD");
  return preloaded != nullptr && std::strstr(preloaded, "libamem_nccl") != nullptr;
}

bool IsNccl(const ElfImage& image) {
  if (StartsWith(image.soname(), "libnccl.so")) return true;
  if (!HasEntryPoints(image)) return false;
  std::size_t own = 0, other = 0;
  image.ForEachExport([&](const char* name, std::uintptr_t, std::uint32_t) {
    ++(StartsWith(name, "nccl") || StartsWith(name, "pnccl") ? own : other);
  });
  return own > other;  // stock builds define nothing else
}

void PatchAtLoad() {
  const std::lock_guard lock(g_patch_mutex);
  PatchLoaded();
}

std::uint64_t ImportCount() { return LoadCount() + UnloadCount() + g_patches.load(); }

void PatchIfLoaded() {
  if (const std::uint64_t loaded = LoadCount(); g_patched_at.exchange(loaded) != loaded) PatchAtLoad();
}

Status Attach() {
  Status status = AttachToAll();
  const std::vector<Library> all = Libraries();
  // Without the lock over the import tables: this asks the loader, which may wait for a thread that waits for the lock.
  if (std::any_of(all.begin(), all.end(), [](const Library& one) { return std::strcmp(one.way, "attach") == 0; }))
    ShowServedNames();
  return status;
}

std::vector<Presence> Survey() {
  const auto has_nccl = [](const ElfImage& image) { return StartsWith(image.soname(), "libnccl.so") || HasEntryPoints(image); };
  std::vector<Presence> found;
  for (const ElfImage& image : LoadedThat(has_nccl)) found.push_back(PresenceOf(image));
  return found;
}

void ReachOthers(const replacements::Tables& names, bool late) {
  const replacements::Tables* none = nullptr;
  if (g_reach.compare_exchange_strong(none, &names)) g_reach_late.store(late);
}

bool InterceptsOthers() {
  static const bool first =
      IsOwnCode(reinterpret_cast<std::uintptr_t>(RealDlsym(dlopen(nullptr, RTLD_LAZY | RTLD_NOLOAD), "dlsym")));
  return (first || (Reaches() && !g_reach_late.load())) && g_enabled.load(std::memory_order_acquire);
}

std::vector<std::string> PastAmem(std::span<const char* const> names) {
  std::vector<std::string> found;
  ElfImage::ForEach([&](const ElfImage& image) {
    if (!image.Needs(others::kDriver) || libraries::Knows(image)) return false;
    const auto past = [&](const char* name) {
      const ElfImage::Slot slot = image.ImportSlot(name);
      return slot && !IsOwnCode(*slot.where);
    };
    if (std::ranges::any_of(names, past)) found.emplace_back(FileName(image));
    return false;
  });
  const std::lock_guard lock(g_patch_mutex);
  if (others::known == nullptr) return found;
  for (const others::TooLate& one : others::known->too_late)
    if ((one.name.empty() || std::ranges::find(names, one.name) != names.end()) &&
        std::ranges::find(found, one.library) == found.end())
      found.push_back(one.library);
  return found;
}

void BeforeFork() {
  g_patch_mutex.lock();
  libraries::Lock();
}
void AfterFork() {
  libraries::Unlock();
  g_patch_mutex.unlock();
}

void* RealDlsym(void* handle, const char* name) { return reinterpret_cast<Dlsym>(InLibc(g_dlsym))(handle, name); }
void* NextDlsym(void* handle, const char* name) { return reinterpret_cast<Dlsym>(Next(g_dlsym))(handle, name); }
void* FindLibcDlsym() { return InLibc(g_dlsym); }

void* DriverSymbol(const char* name) {
  // Never closed, because its threads and handles outlive us.
  void* library = Once(g_driver_library, [] { return dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); });
  return library == nullptr ? nullptr : own_look_ups::Find(FirstDlsym(), library, name);
}

}  // namespace amem::hook

void* amem_route_dlsym(void* return_address, void* handle, const char* name) {
  return amem::hook::ForDlsym(return_address, handle, name, false);
}
void* amem_route_dlvsym(void* return_address, void* handle, const char* name) {
  return amem::hook::ForDlvsym(return_address, handle, name, false);
}
void* amem_route_exported_dlsym(void* return_address, void* handle, const char* name) {
  return amem::hook::ForDlsym(return_address, handle, name, true);
}
void* amem_route_exported_dlvsym(void* return_address, void* handle, const char* name) {
  return amem::hook::ForDlvsym(return_address, handle, name, true);
}
