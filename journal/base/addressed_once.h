// Where a thread_local object is, asked once. In a shared library the question is a call, and compilers make it again at each
// use of the object rather than hold an address in a register: a dozen times in a function that every launch passes.
#pragma once

namespace amem {

template <class T>
[[gnu::always_inline]] inline T& AddressedOnce(T& of_this_thread) noexcept {
  T* at = &of_this_thread;
  __asm__("" : "+r"(at));
  return *at;
}

}  // namespace amem
