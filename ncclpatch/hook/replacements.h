// Replacements: functions of the driver and of ibverbs that AMem replaces for NCCL, and the real ones behind them.
//
// A replaced function is a type E with
//   kName      the name NCCL asks cuGetProcAddress for
//   kExported  the name libcuda exports it under (they differ by a version suffix)
//   Call(real, arguments...)  runs in its place
//   Function   its C type; not needed if it follows from Call, or from With(pass, arguments...), which Call uses
//   WithoutMemory()  what the caller gets where there is no memory for bookkeeping; needed where zero is a success and it is
//            neither CUresult nor int
//   kSince, kBefore  the CUDA versions, kSince <= version < kBefore, in which kName means this function
// One name can stand for several real functions (default streams, versions with one signature). Each real function has an entry
// point of its own, a variant.
//
// Any thread may call Bind; entry points stay valid for the life of the process.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <span>
#include <type_traits>

namespace amem::replacements {

inline constexpr std::size_t kVariants = 4;
inline constexpr int kFirst = 3020,
                     kNoBound = std::numeric_limits<int>::max();  // 3.2 is the first version with 64-bit device pointers

// Who looks a function up: libnccl, or another library of the process.
enum class Caller : std::uint8_t { kNccl, kOther };

struct Replacement {
  const char* name;
  const char* exported;
  int since, before;  // CUDA versions with this signature: since <= version < before
  std::span<std::atomic<void*>, kVariants> reals;
  std::span<void* const, kVariants> entries;
};

// Set in a forked child, where the driver does not work and AMem's state is the parent's: every call passes through.
inline constinit std::atomic<bool> inert{false};

// A function's name as a template argument.
template <std::size_t N>
struct Text {
  char data[N];
  constexpr Text(const char (&text)[N]) { std::copy_n(text, N, data); }  // NOLINT(google-explicit-constructor)
};

template <Text Name, Text Exported = Name, int since = kFirst, int before = kNoBound>
struct Named {
  static constexpr const char *kName = Name.data, *kExported = Exported.data;
  static constexpr int kSince = since, kBefore = before;
};

template <class R, class... A>
std::type_identity<R(A...)> TypeBehind(R (*call)(R (*)(A...), A...));
template <class R, class... A>
std::type_identity<R(A...)> TypeBehind(R (*with)(const std::function<R()>&, A...));
template <class R, class First, class... A>  // a session; of redirects, a library
std::type_identity<R(A...)> TypeBehind(R (*with)(First, const std::function<R()>&, A...));
template <class E>
auto TypeOf() {
  if constexpr (requires { typename E::Function; })
    return std::type_identity<typename E::Function>();
  else if constexpr (requires { &E::With; })
    return decltype(TypeBehind(&E::With))();
  else
    return decltype(TypeBehind(&E::Call))();
}

// What a caller gets where the system gives no memory for the bookkeeping of its call: a failure, of E's own (WithoutMemory)
// where zero or null is none.
template <class E, class R>
R FailureWithoutMemory() {
  if constexpr (requires { E::WithoutMemory(); }) {
    return E::WithoutMemory();
  } else if constexpr (std::is_same_v<R, CUresult>) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } else if constexpr (std::is_same_v<R, int>) {  // of ibverbs and GDRCopy
    return errno = ENOMEM;
  } else {
    static_assert(std::is_pointer_v<R> || std::is_void_v<R>, "zero may be a success");
    errno = ENOMEM;
    return R();
  }
}

template <class E, class F = typename decltype(TypeOf<E>())::type>
struct Thunk;
template <class E, class R, class... A>
struct Thunk<E, R(A...)> {
  static inline constinit std::atomic<void*> reals[kVariants]{};

  template <std::size_t V>
  static R Enter(A... arguments) noexcept {
    auto* real = reinterpret_cast<R (*)(A...)>(reals[V].load(std::memory_order_acquire));
    if (inert.load(std::memory_order_relaxed)) return real(arguments...);
    try {
      return E::Call(real, arguments...);
    } catch (const std::exception&) {  // NCCL's C code must not see it
      return FailureWithoutMemory<E, R>();
    }
  }

  static auto& Entries() {
    static void* const entries[kVariants] = {reinterpret_cast<void*>(&Enter<0>), reinterpret_cast<void*>(&Enter<1>),
                                             reinterpret_cast<void*>(&Enter<2>), reinterpret_cast<void*>(&Enter<3>)};
    return entries;
  }
};

// A family's table, for Install.
template <class... E>
std::span<const Replacement> Table() {
  static const std::array table = {
      Replacement{E::kName, E::kExported, E::kSince, E::kBefore, Thunk<E>::reals, Thunk<E>::Entries()}...};
  return table;
}

// While it lives, what this thread looks up is for AMem itself, whose own calls must never come back to it: nothing is
// replaced, whoever answers and whatever library that answer passes through.
struct OwnLookUp {
  static inline thread_local int now = 0;
  OwnLookUp() { ++now; }
  ~OwnLookUp() { --now; }
  OwnLookUp(const OwnLookUp&) = delete;
  OwnLookUp& operator=(const OwnLookUp&) = delete;
};
// The function behind an entry point of AMem's, which a library had found earlier; any other function itself.
void* Plain(void* function);

// The function to hand out in place of `real`, which the driver gave for `name` at `cuda_version`; `real` itself if AMem does
// not replace it for that caller. *replaced (may be null) says which.
void* Bind(const char* name, int cuda_version, void* real, bool* replaced, Caller caller = Caller::kNccl);
// The same for the exported name, which dlsym or dlvsym was asked for.
void* BindExported(const char* exported, void* real, bool* replaced, Caller caller = Caller::kNccl);
// Whether BindExported knows that name.
bool Replaces(const char* exported, Caller caller);

// What Bind looks in for that caller: one table for each file of ncclpatch/intercept/. Before this call nothing is replaced.
// `tables` must stay valid.
using Tables = std::span<const std::span<const Replacement>>;
bool Has(const Tables& tables, const char* exported);
void Install(const Tables& tables, Caller caller = Caller::kNccl);

// What NCCL gets in place of `real` for a plugin's table of functions.
using WrapPlugin = void* (*)(const char* name, void* real);
void Install(WrapPlugin wrap);

}  // namespace amem::replacements
