#include "ncclpatch/hook/redirects.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "ncclpatch/hook/libraries.h"

namespace amem::redirects {
namespace {

struct Installed {
  std::span<const Table> tables;
  std::span<const ThreadCall> thread_calls;
};
constinit std::atomic<const Installed*> g_installed{nullptr};
constinit std::array<std::atomic<const hook::Library*>, kLibraries> g_places{};
constinit std::uint64_t g_last_refused = 0;  // hook::Library::number; each is reported once

const Redirect* FindRedirect(std::string_view name) {
  const Installed* installed = g_installed.load(std::memory_order_acquire);
  if (installed == nullptr || !name.starts_with("nccl")) return nullptr;
  for (const Table& table : installed->tables)
    for (const Redirect& redirect : table)
      if (name == redirect.name) return &redirect;
  return nullptr;
}

// A name of a library and its address.
struct Found {
  const Redirect* redirect;
  std::uintptr_t address;
  std::uint32_t index;  // in its symbol table
};

std::vector<Found> NamesOf(const ElfImage& image) {
  std::vector<Found> found;
  image.ForEachExport([&](const char* name, std::uintptr_t address, std::uint32_t index) {
    if (const Redirect* redirect = FindRedirect(name)) found.push_back({redirect, address, index});
  });
  const std::size_t own = found.size();
  image.ForEachExport([&](const char* name, std::uintptr_t address, std::uint32_t index) {
    if (name[0] != 'p') return;
    const Redirect* redirect = FindRedirect(name + 1);
    for (std::size_t i = 0; redirect != nullptr && i < own; ++i)
      if (found[i].redirect == redirect && found[i].address == address) return found.push_back({redirect, address, index});
  });
  return found;
}

// A free place, or one whose library was unloaded.
std::size_t ChoosePlace(const hook::Library& library) {
  const std::vector<hook::Library> loaded = hook::Libraries();
  for (std::size_t place = 0; place < kLibraries; ++place) {
    const hook::Library* taken = g_places[place].load();
    if (taken != nullptr && std::ranges::find(loaded, taken->number, &hook::Library::number) != loaded.end()) continue;
    g_places[place].store(&library, std::memory_order_release);
    return place;
  }
  return kLibraries;
}

// Rewrites other objects' imports that were bound to NCCL's function before. Under the loader's lock, so that no object is
// unloaded meanwhile.
Status RewriteBoundImports(const ElfImage& nccl, const std::vector<Found>& names, std::size_t place) {
  Status first;
  ElfImage::ForEach([&](const ElfImage& other) {
    if (other.base() == nccl.base()) return false;
    other.ForEachImport([&](const char* name, const ElfImage::Slot& slot) {
      if (!nccl.InText(*slot.where)) return;
      const std::string_view asked(name[0] == 'p' ? name + 1 : name);
      for (const Found& found : names) {
        if (found.address != *slot.where || asked != found.redirect->name) continue;
        if (Status status = other.Write(slot, found.redirect->entries[place]); !status && first) first = std::move(status);
        return;
      }
    });
    return false;
  });
  return first;
}

// A library may import one twice: for its own calls, and as a pointer for its C++ library's threads.
Status TakeThreadCalls(const ElfImage& image, std::span<const ThreadCall> starts) {
  Status first;
  image.ForEachImport([&](const char* name, const ElfImage::Slot& slot) {
    for (const ThreadCall& start : starts) {
      if (std::string_view(name) != start.name) continue;
      if (!image.Unbound(slot) && *slot.where != reinterpret_cast<std::uintptr_t>(start.plain)) return;
      if (Status status = image.Write(slot, start.replacement); !status && first) first = std::move(status);
    }
  });
  return first;
}

}  // namespace

void Install(std::span<const Table> tables, std::span<const ThreadCall> starts) {
  g_installed.store(new Installed{tables, starts}, std::memory_order_release);
}

Status Set(const hook::Library& library, const ElfImage& image) {
  const Installed* installed = g_installed.load(std::memory_order_acquire);
  if (installed == nullptr) return Status::Ok();
  for (const auto& place : g_places)
    if (const hook::Library* known = place.load(); known != nullptr && known->number == library.number) return Status::Ok();
  const std::size_t place = ChoosePlace(library);
  if (place == kLibraries) {
    if (std::exchange(g_last_refused, std::max(g_last_refused, library.number)) >= library.number) return Status::Ok();
    return {Code::kUnsupported,
            fmt::format("{}: the names of its functions stay its own, because there are {} NCCLs in this process already; its "
                        "communicators are not seen",
                        library.path, kLibraries)};
  }
  const std::vector<Found> names = NamesOf(image);
  for (const Table& table : installed->tables)
    for (const Redirect& redirect : table) redirect.reals[place].store(nullptr);
  for (const Found& found : names)
    found.redirect->reals[place].store(reinterpret_cast<void*>(found.address), std::memory_order_release);
  AMEM_TRY(TakeThreadCalls(image, installed->thread_calls));
  for (const Found& found : names) AMEM_TRY(image.PointNameTo(found.index, found.redirect->entries[place]));
  return RewriteBoundImports(image, names, place);
}

const hook::Library* LibraryAt(std::size_t place) { return g_places[place].load(std::memory_order_acquire); }

void* Real(std::size_t place, const char* name) {
  if (const Redirect* redirect = FindRedirect(name))
    if (void* real = redirect->reals[place].load(std::memory_order_acquire)) return real;
  const hook::Library* library = LibraryAt(place);
  return library == nullptr ? nullptr : hook::libraries::FindIn(*library, name);
}

bool AllHave(const char* name) {
  return std::ranges::all_of(hook::Libraries(), [&](const auto& one) { return hook::libraries::FindIn(one, name) != nullptr; });
}

}  // namespace amem::redirects
