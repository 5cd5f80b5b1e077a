// A libibverbs.so.1 that registers anything with no card at all: whether a caller's registration is seen needs no more.
#include <cstddef>
#include <cstdlib>

#define VERBS extern "C" __attribute__((visibility("default")))

VERBS void* ibv_reg_mr(void* domain, void* address, std::size_t bytes, int access);
VERBS int ibv_dereg_mr(void* region);

void* ibv_reg_mr(void*, void* address, std::size_t bytes, int) {
  return address == nullptr || bytes == 0 ? nullptr : std::malloc(1);
}
int ibv_dereg_mr(void* region) {
  std::free(region);
  return 0;
}
