// The stubs in place of dlsym and dlvsym, of one processor: what they ask, and that the function that answers sees the caller's
// arguments and return address. stub_test.py builds it for this processor, and for aarch64 where there are a cross compiler and
// an emulator.
#include <stdio.h>
#include <string.h>

typedef void* Stub(void* handle, const char* name, const char* version);
Stub amem_dlsym_stub, amem_dlvsym_stub, amem_exported_dlsym_stub, amem_exported_dlvsym_stub;

static void* const kHandle = (void*)0x1234;
static void* const kAnswer = (void*)0x5678;
static int asked, wrong;
static void* caller;

static void Expect(int right, const char* what) {
  if (right) return;
  fprintf(stderr, "wrong: %s\n", what);
  ++wrong;
}

static __attribute__((noinline)) void* Answer(void* handle, const char* name, const char* version) {
  Expect(handle == kHandle && strcmp(name, "cuInit") == 0 && strcmp(version, "V_1") == 0, "arguments of the one that answers");
  Expect(__builtin_return_address(0) == caller, "return address of the one that answers");
  return kAnswer;
}

static void* Route(int which, void* return_address, void* handle, const char* name) {
  volatile char used[256];  // a function may use any register and the stack
  memset((void*)used, which, sizeof used);
  Expect(handle == kHandle && strcmp(name, "cuInit") == 0, "arguments of the one that is asked");
  asked = asked * 10 + which;
  caller = return_address;
  return (void*)Answer;
}

void* amem_route_dlsym(void* r, void* h, const char* n) { return Route(1, r, h, n); }
void* amem_route_dlvsym(void* r, void* h, const char* n) { return Route(2, r, h, n); }
void* amem_route_exported_dlsym(void* r, void* h, const char* n) { return Route(3, r, h, n); }
void* amem_route_exported_dlvsym(void* r, void* h, const char* n) { return Route(4, r, h, n); }

int main(void) {
  Stub* const stubs[] = {amem_dlsym_stub, amem_dlvsym_stub, amem_exported_dlsym_stub, amem_exported_dlvsym_stub};
  for (int i = 0; i < 4; ++i) Expect(stubs[i](kHandle, "cuInit", "V_1") == kAnswer, "what comes back");
  Expect(asked == 1234, "who was asked");
  return wrong != 0;
}
