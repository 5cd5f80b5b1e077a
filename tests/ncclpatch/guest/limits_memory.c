/* Preloaded: another guest that lives from dlsym, as those that limit each container's part of a GPU. Whoever looks up the
 * driver's cuGetProcAddress_v2 gets one that hands out a cuMemCreate of its own, or with LIMIT_ALLOC a cuMemAlloc, which makes
 * LIMIT_MIB in all and no more. Whoever looks up `limits_memory` gets that function, although nobody exports it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef void* (*Dlsym)(void*, const char*);
typedef int (*Create)(void*, size_t, const void*, unsigned long long);
typedef int (*Alloc)(unsigned long long*, size_t);
typedef int (*GetProcAddress)(const char*, void**, int, unsigned long long, void*);

static Create g_create;
static Alloc g_alloc;
static GetProcAddress g_get;

static int IsTooMuch(size_t bytes) {
  static size_t made;
  return (made += bytes) > strtoull(getenv("LIMIT_MIB"), NULL, 10) << 20;
}

static int LimitedCreate(void* handle, size_t bytes, const void* properties, unsigned long long flags) {
  return IsTooMuch(bytes) ? 2 /* CUDA_ERROR_OUT_OF_MEMORY */ : g_create(handle, bytes, properties, flags);
}

static int LimitedAlloc(unsigned long long* memory, size_t bytes) { return IsTooMuch(bytes) ? 2 : g_alloc(memory, bytes); }

static int LimitedGet(const char* name, void** function, int version, unsigned long long flags, void* status) {
  const int result = g_get(name, function, version, flags, status);
  const int of_alloc = getenv("LIMIT_ALLOC") != NULL;
  if (result != 0 || strcmp(name, of_alloc ? "cuMemAlloc" : "cuMemCreate") != 0) return result;
  if (of_alloc) {
    g_alloc = (Alloc)*function;
    *function = (void*)&LimitedAlloc;
    return result;
  }
  g_create = (Create)*function;
  *function = (void*)&LimitedCreate;
  return result;
}

static const char* LimitsMemory(void) { return "limited"; }

static Dlsym Next(void) {
  static Dlsym next;
#if defined(__x86_64__)
  if (next == NULL) next = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
#else
  if (next == NULL) next = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
#endif
  return next;
}

void* dlsym(void* handle, const char* name) {
  if (strcmp(name, "limits_memory") == 0) return (void*)&LimitsMemory;
  void* found = Next()(handle, name);
  if (found == NULL || strcmp(name, "cuGetProcAddress_v2") != 0) return found;
  g_get = (GetProcAddress)found;
  return (void*)&LimitedGet;
}
