// Memory that AMem does not make: what is recorded of it, so that reports can say how much a pause leaves in place, and what
// the ledger knows of an address or a handle that another library uses.
//
// No method is called with a lock; each takes the ledger's for itself and calls nothing else.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "journal/base/no_copies.h"
#include "replay/ledger/ledger.h"
#include "replay/session/call_admission.h"
#include "statemachine/event.h"
#include "statemachine/types.h"

namespace amem {

struct TagPart {  // memory that a tag handed out
  Address address;
  Bytes bytes = 0;
  DeviceOrdinal device;
  bool opened = false;  // by an IPC handle of another process
};

class Records : NoCopies {
 public:
  // Both must outlive it.
  Records(Ledger& ledger, const CallAdmission& calls) : ledger_(ledger), calls_(calls) {}

  // ---- memory that stays the driver's
  // Records a call that the driver has answered (host memory, driver pools, multicast, passed through). New memory at a known
  // address means that the old memory was freed unseen.
  void Note(EventBody event);
  // Records facts for the journal only. False: the ledger stayed locked for that long, and nothing was recorded.
  bool TryNote(std::span<const EventBody> facts, std::chrono::milliseconds patience);
  // Records that memory will be freed, before the driver frees it, because another thread may get the same address right after.
  // Returns the event that takes this back if the driver refuses; nullopt: the memory is not known, and nothing was recorded.
  // LegacyFreed: only for cuMemAlloc memory of the driver's.
  std::optional<HostAllocated> NoteFree(HostFreed freed);
  std::optional<AsyncAllocated> NoteFree(AsyncFreed freed);
  std::optional<LegacyAllocated> NoteFree(LegacyFreed freed);

  // ---- what other libraries hold of AMem's memory, NCCL's or a tag's
  // Records a registration. False: none of that memory is AMem's, and nothing was recorded. Throws std::bad_alloc where the
  // system gives no memory for the record: then the registration must be undone.
  bool NoteRegistration(const Registered& registered);
  // Why a pause could not undo a registration of that memory, so that it must be recorded without a region; empty: it could.
  std::string WhyPins(const Extent& part);
  // Records that a library shared the pages there, or bound them, in a way whose end is never seen: they stay from now on.
  void NoteHandedOut(AllocationId allocation, std::uint32_t handle_type, const std::string& library);
  void NoteHandedOut(Address address, std::uint32_t handle_type, const std::string& library);

  // ---- what is there
  [[nodiscard]] bool Manages(const Extent& part);  // whether AMem has mapped memory somewhere in it
  // The whole mapping that contains the address; no bytes: it is not AMem's.
  [[nodiscard]] Extent MappingAt(Address address);
  [[nodiscard]] AllocationId AllocationOf(DriverHandle handle);  // zero: it is not AMem's. Searches all
  Result<TagPart> PartOfTag(Address address);                    // the part that contains the address; kNotFound
  // How much of [address, address + bytes) is mapped memory of handles that another library made or imported under a tag.
  Bytes HandlesOfTags(Address address, Bytes bytes);
  // Of this session's journal; empty: there is none, or it is not known now. Waits for a moment only.
  [[nodiscard]] std::filesystem::path JournalDirectory();

 private:
  Ledger& ledger_;
  const CallAdmission& calls_;
};

}  // namespace amem
