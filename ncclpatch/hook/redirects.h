// Redirects: NCCL functions whose names lead to AMem, so that it sees a program's calls.
//
// A redirected function is a type E with
//   kName      NCCL's name; its alias pncclX is redirected with it
//   Function   its C type; not needed if it follows from With(library, pass, arguments...), which Around calls
// and one of
//   Call(library, real, arguments...)  runs in its place
//   Before(library, arguments...)      runs before the jump to NCCL's function; must not throw. A result other than zero is the
//                                      answer in place of NCCL's
// Each libnccl under AMem has its own entry points, which know that library's function. `library` is its place here, from 0.
//
// The values in a libnccl's symbol table are changed, so the names lead here for dlsym with any handle and for imports that are
// bound later; other objects' imports that were bound before are rewritten. AMem's own look-ups use Real().
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <span>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/hook/replacements.h"

namespace amem::redirects {

inline constexpr std::size_t kLibraries = 4;  // at a time; names of further ones stay their own, which is reported

struct Redirect {
  const char* name;
  std::span<std::atomic<void*>, kLibraries> reals;
  std::span<void* const, kLibraries> entries;
};
using Table = std::span<const Redirect>;

// Runs `Self::With(library, pass, arguments...)` in place of NCCL's function; pass() makes the original call.
using Pass = std::function<int()>;
template <class Self, replacements::Text Name>
struct Around {
  static constexpr const char* kName = Name.data;
  template <class Real, class... A>
  static int Call(std::size_t library, Real real, A... arguments) {
    const auto pass = [&] { return real(arguments...); };
    return Self::With(library, std::ref(pass), arguments...);
  }
};

template <class E, class F = typename decltype(replacements::TypeOf<E>())::type>
struct Entry;
template <class E, class R, class... A>
struct Entry<E, R(A...)> {
  using Real = R (*)(A...) noexcept;  // noexcept, so that the compiler may jump to it
  static inline constinit std::atomic<void*> reals[kLibraries]{};

  template <std::size_t L>
  static R Enter(A... arguments) {
    auto* const real = reinterpret_cast<Real>(reals[L].load(std::memory_order_acquire));
    if constexpr (requires { E::Before(L, arguments...); }) {
      // In a forked child this only sets a thread-local variable.
      if (const R answer = E::Before(L, arguments...); answer != R{}) [[unlikely]]
        return answer;
      return real(arguments...);
    } else {
      if (replacements::inert.load(std::memory_order_relaxed)) return real(arguments...);
      return E::Call(L, real, arguments...);
    }
  }

  static auto& Entries() {
    static void* const entries[kLibraries] = {reinterpret_cast<void*>(&Enter<0>), reinterpret_cast<void*>(&Enter<1>),
                                              reinterpret_cast<void*>(&Enter<2>), reinterpret_cast<void*>(&Enter<3>)};
    return entries;
  }
};

// A family's table, for Install.
template <class... E>
Table MakeTable() {
  static const std::array table = {Redirect{E::kName, Entry<E>::reals, Entry<E>::Entries()}...};
  return table;
}

// A function by which libnccl starts or joins threads, and its replacement, so that these threads are known; only if the
// import means this very function.
struct ThreadCall {
  const char* name;
  void* plain;
  void* replacement;
};
// What is redirected in every libnccl that comes under AMem later. The contents of both must stay valid.
void Install(std::span<const Table> tables, std::span<const ThreadCall> starts);

// Redirects the names of a library that has just come under AMem, unless they are already. The hook calls it, one thread at a
// time. A failure is reported, and the names it concerns stay NCCL's.
Status Set(const hook::Library& library, const ElfImage& image);

// The library at a place; null: none.
const hook::Library* LibraryAt(std::size_t place);
// That library's own function; null: it has none of that name.
void* Real(std::size_t place, const char* name);
// Whether every loaded libnccl under AMem has a function of this name.
bool AllHave(const char* name);

}  // namespace amem::redirects
