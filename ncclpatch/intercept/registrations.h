// Memory whose address a network card or another driver knows: its physical pages must not move, so a pause leaves it in place
// (Registered).
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {

inline Extent PartAt(const void* address, size_t bytes) { return {Address{reinterpret_cast<std::uint64_t>(address)}, bytes}; }

// Who gave a registration's handle; handles of different registrars may be equal.
enum class Registrar : std::uint8_t { kVerbs, kUserMemory, kGdrCopy, kPlugin };
struct RegionKey {
  Registrar registrar;
  std::uint64_t handle;
  friend auto operator<=>(const RegionKey&, const RegionKey&) = default;
};
inline RegionKey KeyOf(Registrar registrar, const void* handle) { return {registrar, reinterpret_cast<std::uint64_t>(handle)}; }

class Registrations {
 public:
  // The driver made a dma-buf of `part`. Whoever has the descriptor may register it, so it pins the part until a registration
  // that AMem sees replaces it (Consumed), or that registration fails. `flags` are those of cuMemGetHandleForAddressRange.
  void Exported(int descriptor, Extent part, unsigned long long flags);
  void Consumed(int descriptor);
  [[nodiscard]] Extent ExportedAs(int descriptor);

  // `key` now pins `part`, which was registered by the dma-buf `descriptor` if that is not -1. A plugin that caches
  // registrations may give one handle several times.
  void Add(RegionKey key, Extent part, const char* how, int descriptor = -1);
  // Before a registration is undone, because another thread may get the same handle afterwards; or if it failed.
  [[nodiscard]] std::vector<Extent> Take(RegionKey key);
  void PutBack(RegionKey key, std::vector<Extent> parts);
  static void Forget(const std::vector<Extent>& parts);

 private:
  struct Export {
    Extent part;
    unsigned long long flags = 0;
    bool pinned = false;
  };
  struct Region {
    std::vector<Extent> parts;
    int uses = 0;
  };
  std::mutex mutex_;
  std::map<int, Export> exported_;
  std::map<RegionKey, Region> regions_;
};

// Held while memory is registered, so that no pause takes it between the card's answer and the record.
class Registering {
 public:
  Registering(const char* call, Extent part);
  [[nodiscard]] bool refused() const { return refused_; }  // the memory is paused

 private:
  decltype(std::declval<Session&>().EnterLaunch()) entered_;
  Session::InTags tags_;
  bool refused_ = false;
};

// Held while a registration is undone: waits for a pause or resume, which relies on what cards hold.
struct Still {
  std::shared_lock<CallGate> nccl;
  Session::InTags tags;
};
Still HoldStill(const std::vector<Extent>& parts);

// Undoes a registration by `make_call`, which returns 0 on success.
template <class MakeCall>
int Deregister(RegionKey key, const MakeCall& make_call) {
  std::vector<Extent> parts = Forever<Registrations>().Take(key);
  const Still still = HoldStill(parts);
  const int result = make_call();
  if (result == 0)
    Registrations::Forget(parts);
  else
    Forever<Registrations>().PutBack(key, std::move(parts));
  return result;
}

// What NCCL gets in place of a table of functions: a network plugin's is wrapped, so that its registrations are seen.
void* WrapPlugin(const char* name, void* table);

}  // namespace amem::intercept
