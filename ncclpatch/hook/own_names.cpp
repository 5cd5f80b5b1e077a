#include "ncclpatch/hook/own_names.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/hook/libc_symbols.h"
#include "ncclpatch/hook/libraries.h"
#include "ncclpatch/hook/redirects.h"

extern "C" void amem_dlsym_stub();  // route_stub.S

namespace amem::hook {
namespace {

struct OwnName {
  const char* name;
  void* function;
  bool served;
};
constinit std::atomic<const std::vector<OwnName>*> g_own_names{nullptr};
constinit std::atomic<void*> g_program{nullptr};  // dlopen(nullptr)'s handle

bool Self(ElfImage* self) { return ElfImage::Containing(reinterpret_cast<const void*>(&amem_dlsym_stub), self); }

const OwnName* FindOwn(const char* name) {
  const auto* all = g_own_names.load(std::memory_order_acquire);
  if (all == nullptr) return nullptr;
  for (const OwnName& own : *all)
    if (SameName(own.name, name)) return &own;
  return nullptr;
}

bool IsGlobal(void* handle) { return handle == RTLD_DEFAULT || handle == g_program.load(std::memory_order_acquire); }

// Whether dlopen's handle belongs to a libnccl under AMem without a function of this name.
bool IsLibraryWithout(void* handle, const char* name) {
  link_map* map = nullptr;
  ElfImage image;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && ElfImage::Containing(map->l_ld, &image) && libraries::Knows(image) &&
         image.Find(name) == nullptr;
}

void* InTreeOf(const void* caller, const char* name, const void* own) {
  ElfImage image;
  if (!ElfImage::Containing(caller, &image)) return nullptr;
  const std::string path = image.path();
  void* const handle = dlopen(path.empty() ? nullptr : path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* const found = RealDlsym(handle, name);
  dlclose(handle);
  return found == own ? nullptr : found;
}

void* InOnlyLibrary(const char* name) {
  std::vector<void*> found;
  for (const Library& library : Libraries())
    if (void* function = libraries::FindIn(library, name)) found.push_back(function);
  return found.size() == 1 ? found.front() : nullptr;
}

void Promote() {
  ElfImage self;
  if (!Self(&self) || self.path()[0] == '\0') return;
  dlopen(self.path(), RTLD_LAZY | RTLD_NOLOAD | RTLD_GLOBAL);  // stays loaded
}

// An import of dlsym that is bound to a function other than libc's is somebody else's interposition, and stays.
void RouteLookUps() {
  ElfImage self;
  if (!Self(&self)) return;
  void* const libc = FindLibcDlsym();
  const bool plain = RealDlsym(g_program.load(std::memory_order_acquire), "dlsym") == libc;  // RTLD_DEFAULT would find ours
  ElfImage::ForEach([&](const ElfImage& image) {
    if (image.base() == self.base() || std::strncmp(image.soname(), "libc.so", 7) == 0 ||
        std::strncmp(image.soname(), "ld-linux", 8) == 0)
      return false;
    if (IsNccl(image)) return false;  // its look-ups say whether it is under AMem
    image.ForEachImport([&](const char* name, const ElfImage::Slot& slot) {
      if (!SameName(name, "dlsym")) return;
      if (*slot.where != reinterpret_cast<std::uintptr_t>(libc) && !(plain && image.Unbound(slot))) return;
      (void)image.Write(slot, reinterpret_cast<const void*>(&amem_dlsym_stub));  // if this fails, the caller gets libc's answer
    });
    return false;
  });
}

}  // namespace

void HideNames(std::span<const char* const> names) {
  ElfImage self;
  if (!Self(&self)) return;
  // A name whose page cannot be written stays visible, and answers with an error that says so.
  self.ForEachExport([&](const char* name, std::uintptr_t, std::uint32_t index) {
    for (const char* hidden : names)
      if (SameName(hidden, name)) (void)self.PointNameTo(index, nullptr);
  });
}

void AnswerNames(std::span<const char* const> served, std::span<const char* const> doorbells) {
  ElfImage self;
  if (!Self(&self)) return;
  auto* all = new std::vector<OwnName>();  // leaked, because NCCL's threads may call after main has returned
  for (const auto& [names, are_served] : {std::pair(served, true), std::pair(doorbells, false)})
    for (const char* name : names)
      if (void* function = self.Find(name)) all->push_back({name, function, are_served});
  g_program.store(dlopen(nullptr, RTLD_LAZY | RTLD_NOLOAD), std::memory_order_release);
  g_own_names.store(all, std::memory_order_release);
}

bool AnswersName(const void* caller, void* handle, const char* name) {
  const OwnName* own = FindOwn(name);
  if (own == nullptr) return false;
  if (handle != RTLD_NEXT) return true;
  // Only the program itself precedes a preloaded library.
  ElfImage image;
  return ElfImage::Containing(caller, &image) && image.path()[0] == '\0';
}

void* AnswerName(void* handle, const char* name) {
  const void* const caller = __builtin_return_address(0);
  const OwnName& own = *FindOwn(name);
  PatchIfLoaded();
  if (IsGlobal(handle) || handle == RTLD_NEXT)
    return own.served && !Libraries().empty() ? own.function : WithoutUs(name, own.function, caller);
  if (own.served && IsLibraryWithout(handle, name)) return own.function;
  return NextDlsym(handle, name);
}

void* WithoutUs(const char* name, const void* own, const void* caller) {
  if (void* next = RealDlsym(RTLD_NEXT, name); next != nullptr && next != own) return next;
  if (void* found = InTreeOf(caller, name, own)) return found;
  return InOnlyLibrary(name);
}

void ShowServedNames() {
  const auto* all = g_own_names.load(std::memory_order_acquire);
  if (all == nullptr) return;
  const bool needed =
      std::any_of(all->begin(), all->end(), [](const OwnName& own) { return own.served && !redirects::AllHave(own.name); });
  if (!needed) return;
  Promote();
  RouteLookUps();
}

}  // namespace amem::hook
