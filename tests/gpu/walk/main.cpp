// walk [runtime|dlsym [CHAPTER|apart]]: walks through the driver and prints each answer: all chapters in one process, one of
// them, or each in a process of its own. walk_test.py compares what it prints without AMem and in each scope. On a GPU: walk
// runtime apart > stock; AMEM_SCOPE=all amem run -- walk runtime apart | diff stock -
#include <dlfcn.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "tests/gpu/walk/walk.h"

namespace amem::walk {
namespace {

void* g_library = nullptr;
Way g_way = Way::kRuntime;
std::string g_chapter;
struct Known {
  std::string name;
  std::size_t bytes = 0;
};
std::map<CUdeviceptr, Known> g_known;

}  // namespace

void Driver::Open(Way way) {
  g_way = way;
  g_library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (g_library != nullptr) return;
  std::fprintf(stderr, "walk: %s\n", dlerror());
  std::exit(9);
}

void* Driver::Find(const char* name, const char* exported) {
  return g_way == Way::kDlsym ? dlsym(g_library, exported) : OfVersion(name, CUDA_VERSION);
}

void* Driver::OfVersion(const char* name, int version) {
  static auto* const get = reinterpret_cast<decltype(cuGetProcAddress)*>(dlsym(g_library, "cuGetProcAddress_v2"));
  void* found = nullptr;
  CUdriverProcAddressQueryResult how{};
  return get(name, &found, version, 0, &how) == CUDA_SUCCESS ? found : nullptr;
}

void Chapter(const std::string& name) { g_chapter = name; }

void SayText(const std::string& line) {
  std::printf("%s: %s\n", g_chapter.c_str(), line.c_str());
  std::fflush(stdout);  // so that a crash shows where
}

void Say(const std::string& asked, CUresult result, const std::string& wrote) {
  SayText(asked + " = " + std::to_string(static_cast<int>(result)) +
          (result == CUDA_SUCCESS && !wrote.empty() ? ", " + wrote : ""));
}

void Know(const std::string& name, CUdeviceptr base, std::size_t bytes) { g_known[base] = {name, bytes}; }
void Forget(CUdeviceptr base) { g_known.erase(base); }

std::string Where(CUdeviceptr address) {
  if (address == 0) return "0";
  auto at = g_known.upper_bound(address);
  if (at == g_known.begin()) return "elsewhere";
  --at;
  const CUdeviceptr offset = address - at->first;
  if (offset > at->second.bytes) return "elsewhere";
  return at->second.name + (offset == 0 ? "" : "+" + std::to_string(offset));
}

void SayRange(const std::string& asked, CUdeviceptr at) {
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  const CUresult result = CALL(cuMemGetAddressRange, &base, &bytes, at);
  SAY("range " + asked, result, Where(base) + " " + std::to_string(bytes));
}

namespace {

struct Part {
  const char* name;
  void (*walk)();
};
constexpr Part kParts[] = {
    {"sizes", Sizes},       {"wrong-sizes", WrongSizes}, {"pitched", Pitched}, {"frees", Frees}, {"free-memory", FreeMemory},
    {"handles", Handles},   {"sparse", Sparse},          {"ipc", Ipc},         {"more", More},   {"runtime", ByRuntime},
    {"captures", Captures}, {"contexts", Contexts}};

// Those chapters whose name is `wanted`, or all.
int Run(const char* wanted) {
  Chapter("start");
  SAY("cuInit", CALL(cuInit, 0));
  CUcontext primary = nullptr;
  SAY("cuDevicePrimaryCtxRetain", CALL(cuDevicePrimaryCtxRetain, &primary, 0));
  SAY("cuCtxSetCurrent", CALL(cuCtxSetCurrent, primary));
  for (const Part& part : kParts)
    if (wanted == nullptr || std::strcmp(wanted, part.name) == 0) part.walk();
  return 0;
}

// Each chapter in a process of its own, so that what one leaves behind, or a crash, ends no other.
int RunApart(const char* way) {
  bool good = true;
  for (const Part& part : kParts) {
    const char* const arguments[] = {"amem-walk", way, part.name, nullptr};
    pid_t child = 0;
    int status = 0;
    if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, const_cast<char**>(arguments), environ) != 0) return 9;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    if (status == 0) continue;
    Chapter(part.name);
    SayText("ended with status " + std::to_string(status));
    good = false;
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace amem::walk

int main(int count, char** arguments) {
  using namespace amem::walk;
  const char* const way = count > 1 ? arguments[1] : "runtime";
  const char* const chapter = count > 2 ? arguments[2] : nullptr;
  if (chapter != nullptr && std::strcmp(chapter, "apart") == 0) return RunApart(way);
  if (!StartOther()) return 0;  // this is the other process, and has done its part
  Driver::Open(std::strcmp(way, "dlsym") == 0 ? Way::kDlsym : Way::kRuntime);
  return Run(chapter);
}
