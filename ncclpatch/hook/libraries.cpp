#include "ncclpatch/hook/libraries.h"

#include <link.h>
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <vector>

namespace amem::hook {
namespace {

constinit std::array<std::atomic<const Library*>, 16> g_libraries{};
// Replaced entries are not freed, because another thread may be reading them.
constinit std::vector<const Library*>* g_replaced = nullptr;
constinit std::atomic<std::uint64_t> g_count{0};
constinit std::mutex g_library_mutex;

bool Is(const Library& library, const ElfImage& image) {
  return library.base == image.base() && library.text_end == image.text_end() && library.path == image.path();
}

bool IsLoaded(const Library& library) {
  return ElfImage::ForEach([&](const ElfImage& image) { return Is(library, image); });
}

void ForgetUnloaded() {
  for (auto& entry : g_libraries) {
    const Library* library = entry.load();
    if (library == nullptr || IsLoaded(*library)) continue;
    if (g_replaced == nullptr) g_replaced = new std::vector<const Library*>();
    g_replaced->push_back(library);
    entry.store(nullptr, std::memory_order_release);
  }
}

const Library* Find(const ElfImage& image) {
  for (const auto& entry : g_libraries)
    if (const Library* library = entry.load(std::memory_order_acquire); library != nullptr && Is(*library, image))
      return library;
  return nullptr;
}

}  // namespace

bool libraries::Knows(const ElfImage& image) { return Find(image) != nullptr; }

const Library* libraries::Register(const ElfImage& image, const char* way) {
  const std::lock_guard lock(g_library_mutex);
  if (const Library* known = Find(image)) return known;
  ForgetUnloaded();
  for (auto& entry : g_libraries) {
    if (entry.load() != nullptr) continue;
    auto* library = new Library{++g_count, image.base(), image.text_begin(), image.text_end(), image.path(), way};
    std::size_t bytes = 0;
    library->mem_alloc_begin = reinterpret_cast<std::uintptr_t>(image.Find("ncclMemAlloc", &bytes));
    library->mem_alloc_end = library->mem_alloc_begin + bytes;
    bytes = 0;
    library->window_begin = reinterpret_cast<std::uintptr_t>(image.Find("ncclCommWindowRegister", &bytes));
    library->window_end = library->window_begin + bytes;
    entry.store(library, std::memory_order_release);
    return library;
  }
  return nullptr;
}

void libraries::Lock() { g_library_mutex.lock(); }
void libraries::Unlock() { g_library_mutex.unlock(); }

std::vector<Library> Libraries() {
  const std::lock_guard lock(g_library_mutex);
  ForgetUnloaded();
  std::vector<Library> all;
  for (const auto& entry : g_libraries)
    if (const Library* library = entry.load()) all.push_back(*library);
  std::sort(all.begin(), all.end(), [](const Library& a, const Library& b) { return a.number < b.number; });
  return all;
}

const Library* LibraryAt(std::uintptr_t address) {
  for (const auto& entry : g_libraries) {
    const Library* library = entry.load(std::memory_order_acquire);
    if (library != nullptr && address >= library->text_begin && address < library->text_end) return library;
  }
  return nullptr;
}

void* libraries::FindIn(const Library& library, const char* name) {
  ElfImage image;
  return ElfImage::Containing(reinterpret_cast<const void*>(library.text_begin), &image) ? image.Find(name) : nullptr;
}

std::string libraries::VersionOf(const ElfImage& image) {
  int code = 0;
  using GetVersion = int (*)(int*);
  const auto get_version = reinterpret_cast<GetVersion>(image.Find("ncclGetVersion"));
  if (get_version == nullptr || get_version(&code) != 0 || code == 0) return {};
  const int scale = code >= 10'000 ? 10'000 : 1'000;  // 2.9.0 changed 2908-style numbers to 20908-style
  return fmt::format("{}.{}.{}", code / scale, code % scale / 100, code % 100);
}

LibraryAttached Describe(const Library& library) {
  LibraryAttached event{library.path, "", library.way, "", library.base};
  ElfImage image;
  if (!ElfImage::Containing(reinterpret_cast<const void*>(library.text_begin), &image)) return event;
  event.build_id = image.BuildId();
  event.nccl_version = libraries::VersionOf(image);
  return event;
}

// What the loader says with the first object, which counts all.
static dl_phdr_info LoaderCounts() {
  dl_phdr_info counts{};
  const auto first = [](dl_phdr_info* info, std::size_t, void* found) {
    *static_cast<dl_phdr_info*>(found) = *info;
    return 1;
  };
  dl_iterate_phdr(first, &counts);
  return counts;
}

std::uint64_t LoadCount() { return LoaderCounts().dlpi_adds; }
std::uint64_t UnloadCount() { return LoaderCounts().dlpi_subs; }

}  // namespace amem::hook
