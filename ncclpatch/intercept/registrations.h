// Memory whose address a network card, another driver or another library knows: its physical pages must not move, so a pause
// leaves it in place (Registered).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "journal/base/no_memory.h"
#include "ncclpatch/intercept/intercept.h"

namespace amem::intercept {

inline Extent PartAt(const void* address, size_t bytes) { return {Address{reinterpret_cast<std::uint64_t>(address)}, bytes}; }

// Who gave a registration's handle; handles of different registrars may be equal.
enum class Registrar : std::uint8_t { kVerbs, kUserMemory, kGdrCopy, kPlugin, kFile };
struct RegionKey {
  Registrar registrar;
  std::uint64_t handle;
  friend auto operator<=>(const RegionKey&, const RegionKey&) = default;
};
inline RegionKey KeyOf(Registrar registrar, const void* handle) { return {registrar, reinterpret_cast<std::uint64_t>(handle)}; }

// This thread is in a call of a network plugin's whose registrations are recorded as the plugin's.
struct OfPlugin : NoCopies {
  static inline thread_local int now = 0;
  explicit OfPlugin(bool recorded) : recorded_(recorded) { now += recorded_ ? 1 : 0; }
  ~OfPlugin() { now -= recorded_ ? 1 : 0; }

 private:
  const bool recorded_;
};

class Registrations {
 public:
  // The number of a renewable registration.
  static RegionId NewRegion();

  // The driver made a dma-buf of `part`. Whoever has the descriptor may register it, so it pins the part until a registration
  // that AMem sees replaces it (Consumed), or that registration fails. NCCL closes it then; another library may keep it, and
  // its dma-buf pins until the descriptor is closed as well (DropClosed). So does one that NCCL closes unused, because it had
  // registered that very range before. `flags` are those of cuMemGetHandleForAddressRange.
  void Exported(int descriptor, Extent part, unsigned long long flags);
  void Consumed(int descriptor);
  void DropClosed();
  struct Exporting {
    Extent part;
    unsigned long long flags = 0;
  };
  [[nodiscard]] Exporting ExportedAs(int descriptor);  // no bytes: it is not known

  // `key` now pins `part`, which was registered by the dma-buf `descriptor` if that is not -1; or a pause can undo it, if
  // `record` names a region. A plugin that caches registrations may give one handle several times.
  void Add(RegionKey key, Extent part, const char* how, int descriptor = -1, Registered record = {});
  struct Held {
    std::vector<Extent> parts;
    std::string library;  // that registered them; empty: NCCL
    RegionId region;      // Registered::region, of the one part
  };
  // Before a registration is undone, because another thread may get the same handle afterwards; or if it failed.
  [[nodiscard]] Held Take(RegionKey key);
  void PutBack(RegionKey key, Held held);
  static void Forget(const std::vector<Extent>& parts, const std::string& library = {}, RegionId region = {});
  // Records it. False: the memory is not AMem's.
  static bool Note(Extent part, const std::string& how, const std::string& library, Registered record = {});

 private:
  struct Export {
    Extent part;
    unsigned long long flags = 0;
    std::string library;
    dev_t device = 0;  // which file the descriptor is of
    ino_t file = 0;
    bool pinned = false, consumed = false;
  };
  struct Region {
    Held held;
    int uses = 0;
  };
  std::mutex mutex_;
  std::map<int, Export> exported_;
  [[nodiscard]] bool HaveRenewable(const Extent& part);  // the caller holds mutex_
  std::vector<Export> closed_;                           // for DropClosed
  std::map<RegionKey, Region> regions_;
};

// How NCCL made a dma-buf, so that it can be made again.
struct DmaBufMaker {
  Registrations::Exporting made;
  std::optional<DeviceOrdinal> device;

  static DmaBufMaker Of(int descriptor);
  // Calls `use` with the descriptor of a new one, and closes that. False, with errno: the driver gives none.
  [[nodiscard]] bool Again(const std::function<void(int descriptor)>& use) const;
};

// The library in whose call this thread is; empty: NCCL.
std::string OtherLibrary();

// Held while memory is registered, so that no pause takes it between the card's answer and the record. Another library's call
// on memory that is not AMem's waits for nothing.
class Registering {
 public:
  Registering(const char* call, Extent part);
  [[nodiscard]] bool refused() const { return refused_; }    // the memory is paused
  [[nodiscard]] bool concerns() const { return concerns_; }  // it may be AMem's

 private:
  std::shared_lock<CallGate> entered_;
  InTags tags_;
  bool refused_ = false, concerns_ = false;
};

// Held while another library's call does something with the driver's own handle, after which nobody says who has the pages. No
// pause takes them meanwhile.
class HandingOut {
 public:
  explicit HandingOut(CUmemGenericAllocationHandle handle);
  // If the call worked, that memory of AMem's stays from now on. Gives `result`.
  CUresult Done(CUresult result, std::uint32_t handle_type = CU_MEM_HANDLE_TYPE_NONE) const;

 private:
  AllocationId allocation_;  // zero: it is not AMem's
  std::shared_lock<CallGate> nccl_;
  InTags tag_;
};

// Held while a registration is undone: waits for a pause or resume, which relies on what cards hold. Without memory for the
// gates of tags only for those of NCCL's memory, because the card must not keep what its owner gives back.
struct Still {
  std::shared_lock<CallGate> nccl;
  InTags tags;
};
Still HoldStill(const std::vector<Extent>& parts);

// Undoes a registration by `make_call`, which returns 0 on success.
template <class MakeCall>
int Deregister(RegionKey key, const MakeCall& make_call) {
  Registrations::Held held = Forever<Registrations>().Take(key);
  const Still still = HoldStill(held.parts);
  const int result = make_call();
  // Where there is no memory for it, the memory stays pinned.
  static_cast<void>(OrNoMemory([&] {
    if (result == 0)
      Registrations::Forget(held.parts, held.library, held.region);
    else
      Forever<Registrations>().PutBack(key, std::move(held));
    return Status();
  }));
  return result;
}

// What NCCL gets in place of a table of functions: a network plugin's is wrapped, so that its registrations are seen.
void* WrapPlugin(const char* name, void* table);

}  // namespace amem::intercept
