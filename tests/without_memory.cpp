#include "tests/without_memory.h"

#include <cstdlib>
#include <new>
#include <utility>

#ifndef AMEM_SANITIZED  // a sanitizer has operators of its own, and libraries use those
namespace {
struct Shortage {
  std::uint64_t spared = 0, left = 0;
  bool refused = false, suspended = false;
};
constinit thread_local Shortage t_shortage;

bool Refuses() {
  if (t_shortage.left == 0 || t_shortage.suspended) return false;
  if (t_shortage.spared > 0) {
    --t_shortage.spared;
    return false;
  }
  --t_shortage.left;
  return t_shortage.refused = true;
}
}  // namespace

void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return Refuses() ? nullptr : std::malloc(bytes); }
void* operator new(std::size_t bytes) {
  void* const memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace amem::test {

WithoutMemory::WithoutMemory(std::uint64_t spared, std::uint64_t most) { t_shortage = {.spared = spared, .left = most}; }
WithoutMemory::~WithoutMemory() { t_shortage.spared = t_shortage.left = 0; }
WithMemory::WithMemory() : before_(std::exchange(t_shortage.suspended, true)) {}
WithMemory::~WithMemory() { t_shortage.suspended = before_; }
bool WithoutMemory::HasRefused() { return t_shortage.refused; }

}  // namespace amem::test
#endif
