// Redirects: NCCL's own functions whose names lead to AMem, so that a program's calls of them are seen.
//
// A redirected function is a type E with
//   kName      NCCL's name; the alias with a p in front (pncclX) is redirected with it, as it is the same function
//   Function   its C type
// and one of
//   Call(library, real, arguments...)  what happens instead
//   Before(library, arguments...)      what happens before NCCL's function is jumped to; must not throw. What it returns, if
//                                      not zero, is the answer in place of NCCL's
// Each libnccl under AMem gets entry points of its own, which know that library's function. `library` is its place here, from
// 0.
//
// For a libnccl under AMem the names lead here for dlsym, whatever the handle, and for imports that are bound from then on,
// because the values in its symbol table are changed; imports of other objects that were bound before are rewritten. AMem's own
// look-ups of NCCL's functions use Real().
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <span>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/hook/replacements.h"

namespace amem::redirects {

inline constexpr std::size_t kLibraries = 4;  // at a time; the names of one more stay its own, which is reported

struct Redirect {
  const char* name;
  std::span<std::atomic<void*>, kLibraries> reals;
  std::span<void* const, kLibraries> entries;
};
using Table = std::span<const Redirect>;

template <class E, class F = typename E::Function>
struct Entry;
template <class E, class R, class... A>
struct Entry<E, R(A...)> {
  using Real = R (*)(A...) noexcept;  // noexcept, so that the compiler may jump to it
  static inline constinit std::atomic<void*> reals[kLibraries]{};

  template <std::size_t L>
  static R Enter(A... arguments) {
    auto* const real = reinterpret_cast<Real>(reals[L].load(std::memory_order_acquire));
    if constexpr (requires { E::Before(L, arguments...); }) {
      // In a forked child this sets a variable of the thread, and no more.
      if (const R answer = E::Before(L, arguments...); answer != R{}) [[unlikely]]
        return answer;
      return real(arguments...);
    } else {
      if (replacements::inert.load(std::memory_order_relaxed)) return real(arguments...);
      return E::Call(L, real, arguments...);
    }
  }

  static void* const* Entries() {
    static void* const entries[kLibraries] = {reinterpret_cast<void*>(&Enter<0>), reinterpret_cast<void*>(&Enter<1>),
                                              reinterpret_cast<void*>(&Enter<2>), reinterpret_cast<void*>(&Enter<3>)};
    return entries;
  }
};

// The table of a family of functions, for Install.
template <class... E>
Table MakeTable() {
  static const std::array table = {Redirect{E::kName, std::span<std::atomic<void*>, kLibraries>(Entry<E>::reals),
                                            std::span<void* const, kLibraries>(Entry<E>::Entries(), kLibraries)}...};
  return table;
}

// What is redirected in every libnccl that comes under AMem from now on. `tables`, and what they view, must stay valid.
void Install(std::span<const Table> tables);

// A function with which libnccl starts threads, and what its import of it is pointed to, so that these threads are known: only
// where the import means this very function.
struct ThreadStart {
  const char* name;
  void* plain;
  void* replacement;
};
void InstallThreadStarts(std::span<const ThreadStart> starts);  // what they view must stay valid

// Redirects the names of a library that has just come under AMem; nothing if they are already. Called by the hook, one thread
// at a time. A failure is reported, and the names that it concerns stay NCCL's own.
Status Set(const hook::Library& library, const ElfImage& image);

// The library at a place; null if there is none.
const hook::Library* LibraryAt(std::size_t place);
// NCCL's own function of that library: null if it has none of that name.
void* Real(std::size_t place, const char* name);
// Whether every loaded libnccl that is under AMem has a function of this name.
bool AllHave(const char* name);

}  // namespace amem::redirects
