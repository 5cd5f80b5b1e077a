#include "tests/ncclpatch/nccl/without_memory.h"

#include <cstdlib>
#include <new>

#ifndef AMEM_SANITIZED  // a sanitizer has operators of its own, and libraries use those
static constinit thread_local bool t_has_none = false;

void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return t_has_none ? nullptr : std::malloc(bytes); }
void* operator new(std::size_t bytes) {
  void* const memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace amem::nccl {

WithoutMemory::WithoutMemory() { t_has_none = true; }
WithoutMemory::~WithoutMemory() { t_has_none = false; }

}  // namespace amem::nccl
#endif
