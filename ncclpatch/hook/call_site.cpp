#include <unwind.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "ncclpatch/hook/hook.h"

namespace amem {
namespace {

constexpr std::size_t kMostOwnFrames = 8;  // between libnccl's code and the unwinder
// The CUDA runtime inside libnccl may be between here and ncclMemAlloc.
constexpr std::size_t kMostLibraryFrames = 16;

struct Walk {
  CallSite site;
  std::size_t most;  // of the library
  std::size_t found = 0, own = 0;
  bool for_application = false, for_window = false;
};

_Unwind_Reason_Code Visit(_Unwind_Context* context, void* argument) {
  auto& walk = *static_cast<Walk*>(argument);
  const auto address = static_cast<std::uintptr_t>(_Unwind_GetIP(context));
  const hook::Library* library = hook::LibraryAt(address);
  if (library == nullptr) return walk.found > 0 || ++walk.own > kMostOwnFrames ? _URC_END_OF_STACK : _URC_NO_REASON;
  if (walk.found < walk.site.frames.size()) walk.site.frames[walk.found] = address - library->base;
  ++walk.found;
  walk.for_application = walk.for_application || (address >= library->mem_alloc_begin && address < library->mem_alloc_end);
  walk.for_window = walk.for_window || (address >= library->window_begin && address < library->window_end);
  return walk.found >= walk.most || walk.for_application || walk.for_window ? _URC_END_OF_STACK : _URC_NO_REASON;
}

struct Search {
  ElfImage own, found;
  std::size_t frames = 0;
};

_Unwind_Reason_Code VisitCaller(_Unwind_Context* context, void* argument) {
  constexpr std::size_t kMostFrames = 64;
  auto& search = *static_cast<Search*>(argument);
  const auto address = static_cast<std::uintptr_t>(_Unwind_GetIP(context));
  if (++search.frames > kMostFrames) return _URC_END_OF_STACK;
  ElfImage image;
  if (search.own.Contains(address) || !ElfImage::Containing(reinterpret_cast<const void*>(address), &image))
    return _URC_NO_REASON;
  search.found = image;
  const std::string_view soname = image.soname();
  const bool passes_on = std::ranges::any_of(std::array{"libcudart.so", "libcuda.so", "libffi.so"},
                                             [&](const char* name) { return soname.starts_with(name); });
  return passes_on ? _URC_NO_REASON : _URC_END_OF_STACK;
}

}  // namespace

std::string FileName(const ElfImage& image) {
  const std::string_view path = image.path();
  return path.empty() ? "the program" : std::string(path.substr(path.rfind('/') + 1));
}

bool CallingImage(ElfImage* found) {
  Search search;
  static_cast<void>(ElfImage::Containing(reinterpret_cast<const void*>(&VisitCaller), &search.own));
  _Unwind_Backtrace(&VisitCaller, &search);
  *found = search.found;
  return search.found.text_end() != 0;
}

std::string CallingLibrary() {
  ElfImage image;
  static_cast<void>(CallingImage(&image));
  return FileName(image);
}

CallSite CaptureCallSite(bool* for_application, bool* for_window) noexcept {
  Walk walk{{}, for_application == nullptr ? CallSite{}.frames.size() : kMostLibraryFrames};
  _Unwind_Backtrace(&Visit, &walk);
  if (for_application != nullptr) *for_application = walk.for_application;
  if (for_window != nullptr) *for_window = walk.for_window;
  return walk.site;
}

}  // namespace amem
