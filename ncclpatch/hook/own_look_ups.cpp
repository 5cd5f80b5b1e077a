#include "ncclpatch/hook/own_look_ups.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "ncclpatch/hook/replacements.h"

namespace amem::hook::own_look_ups {
namespace {

constexpr const char* kLookUp = "cuGetProcAddress_v2";
using GetProcAddress = int(const char* name, void** function, int version, std::uint64_t flags, void* why);
constinit std::atomic<GetProcAddress*> g_get{nullptr};

int Get(const char* name, void** function, int version, std::uint64_t flags, void* why) {
  const replacements::OwnLookUp own;
  const int result = g_get.load()(name, function, version, flags, why);
  if (result == 0 && function != nullptr) *function = replacements::Plain(*function);
  return result;
}

// "cuMemAlloc" of cuMemAlloc_v2.
std::string WithoutVersion(const std::string& name) {
  const auto suffix = name.rfind("_v");
  return suffix != std::string::npos && name.size() == suffix + 3 ? name.substr(0, suffix) : name;
}

}  // namespace

void* Find(void* (*dlsym)(void* handle, const char* name), void* library, const char* name) {
  constexpr int kVersion = 12000;  // whose variants are those that AMem calls
  const replacements::OwnLookUp own;
  const bool look_up = std::strcmp(name, kLookUp) == 0;
  void* const exported = replacements::Plain(dlsym(library, name));
  if (exported != nullptr && !look_up) return exported;
  void* const get = look_up ? exported : replacements::Plain(dlsym(library, kLookUp));
  if (get == nullptr) return nullptr;
  g_get.store(reinterpret_cast<GetProcAddress*>(get));
  if (look_up) return reinterpret_cast<void*>(&Get);
  void* found = nullptr;
  int why = 0;
  return Get(WithoutVersion(name).c_str(), &found, kVersion, 0, &why) == 0 ? found : nullptr;
}

}  // namespace amem::hook::own_look_ups
