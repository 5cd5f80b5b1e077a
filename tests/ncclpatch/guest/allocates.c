/* Allocates pieces of 4 MiB, as a CUDA runtime would, until it gets no more or has 64. Prints how many it has. */
#include <dlfcn.h>
#include <stdio.h>

typedef int (*GetProcAddress)(const char*, void**, int, unsigned long long, void*);

static GetProcAddress g_get;

static void* Find(const char* name) {
  void* found = NULL;
  int how = 0;
  return g_get(name, &found, 12000, 0, &how) == 0 ? found : NULL;
}

int main(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL;
  if (library == NULL) return 9;
  g_get = (GetProcAddress)dlsym(library, "cuGetProcAddress_v2");
  if (((int (*)(unsigned))Find("cuInit"))(0) != 0) return 8;
  if (((int (*)(void**, int))Find("cuDevicePrimaryCtxRetain"))(&context, 0) != 0) return 7;
  if (((int (*)(void*))Find("cuCtxSetCurrent"))(context) != 0) return 6;
  int (*alloc)(unsigned long long*, size_t) = (int (*)(unsigned long long*, size_t))Find("cuMemAlloc");
  int pieces = 0;
  for (unsigned long long memory = 0; pieces < 64 && alloc(&memory, (size_t)4 << 20) == 0;) ++pieces;
  printf("%d\n", pieces);
  return 0;
}
