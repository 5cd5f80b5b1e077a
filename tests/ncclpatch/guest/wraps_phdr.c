/* Preloaded: a wrapper of dl_iterate_phdr, as profilers and sanitizers have one. It asks for libc's when it is first called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stddef.h>

typedef int (*Iterate)(int (*)(struct dl_phdr_info*, size_t, void*), void*);

int dl_iterate_phdr(int (*visit)(struct dl_phdr_info*, size_t, void*), void* context) {
  static Iterate real;
  if (real == NULL) real = (Iterate)dlsym(RTLD_NEXT, "dl_iterate_phdr");
  return real(visit, context);
}
