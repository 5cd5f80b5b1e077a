// The values inside events as parts of messages. Templates, so that no header needs Cap'n Proto's: `to` is a builder, and
// `from` a reader, of the struct in journal.capnp that has the value's name.
#pragma once

#include <cstring>
#include <string>

#include "statemachine/event.h"

namespace amem::codec {

inline void PutText(auto to, const std::string& from) { std::memcpy(to.begin(), from.data(), from.size()); }
inline std::string GetText(auto from) { return {from.begin(), from.size()}; }

// An empty text is left out, because that is its default.
#define AMEM_PUT_TEXT(builder, Name, value)                                                            \
  do {                                                                                                 \
    if (!(value).empty()) PutText((builder).init##Name(static_cast<unsigned>((value).size())), value); \
  } while (false)

// Ends the decoding of a message; Parse() in codec.cpp returns it as the reason.
[[noreturn]] inline void Reject(std::string message) { throw Status{Code::kCorrupt, std::move(message)}; }

template <class Enum>
Enum GetEnum(std::uint8_t value, Enum last, const char* name) {
  if (value > static_cast<std::uint8_t>(last))
    Reject("it has " + std::string(name) + " " + std::to_string(value) + ", and this build knows none above " +
           std::to_string(static_cast<unsigned>(last)));
  return static_cast<Enum>(value);
}
inline CycleKind GetCycleKind(std::uint8_t v) { return GetEnum(v, CycleKind::kResume, "cycle kind"); }
inline PhaseKind GetPhaseKind(std::uint8_t v) { return GetEnum(v, PhaseKind::kResumeOpen, "phase kind"); }
inline StepKind GetStepKind(std::uint8_t v) { return GetEnum(v, StepKind::kBeginRestore, "step kind"); }
inline Code GetCode(std::uint8_t v) { return GetEnum(v, Code::kBroken, "error class"); }

template <class Enum>
std::uint8_t Number(Enum value) {
  static_assert(sizeof(Enum) == 1);
  return static_cast<std::uint8_t>(value);
}

inline void PutSite(auto to, const CallSite& from) {
  static_assert(std::tuple_size_v<decltype(from.frames)> == 5, "journal.capnp has five frames");
  const auto& [frames] = from;
  to.setFrame0(frames[0]);
  to.setFrame1(frames[1]);
  to.setFrame2(frames[2]);
  to.setFrame3(frames[3]);
  to.setFrame4(frames[4]);
}
inline CallSite GetSite(auto from) {
  return {{from.getFrame0(), from.getFrame1(), from.getFrame2(), from.getFrame3(), from.getFrame4()}};
}
// Nothing is written for a call site that is all zero.
#define AMEM_PUT_SITE(builder, value)                                \
  do {                                                               \
    if ((value) != CallSite{}) PutSite((builder).initSite(), value); \
  } while (false)

inline void PutProperties(auto to, const AllocationProperties& from) {
  const auto& [type, handle_types, location, compression, gpu_direct_rdma, usage, reserved] = from;
  to.setType(type);
  to.setHandleTypes(handle_types);
  to.setLocationType(static_cast<std::uint32_t>(location.type));
  to.setLocationId(location.id);
  to.setCompression(compression);
  to.setGpuDirectRdma(gpu_direct_rdma);
  to.setUsage(usage);
  to.setReserved(reserved);
}
inline AllocationProperties GetProperties(auto from) {
  return {from.getType(),
          from.getHandleTypes(),
          Location{static_cast<LocationType>(from.getLocationType()), from.getLocationId()},
          from.getCompression(),
          from.getGpuDirectRdma(),
          from.getUsage(),
          from.getReserved()};
}
inline void PutAccess(auto to, const AccessDescriptor& from) {
  const auto& [location, flags] = from;
  const auto& [type, id] = location;
  to.setLocationType(static_cast<std::uint32_t>(type));
  to.setLocationId(id);
  to.setFlags(flags);
}
inline AccessDescriptor GetAccess(auto from) {
  return {Location{static_cast<LocationType>(from.getLocationType()), from.getLocationId()}, from.getFlags()};
}
inline void PutStep(auto to, const Step& from) {
  const auto& [kind, allocation, address, bytes, device] = from;
  to.setKind(Number(kind));
  to.setAllocation(allocation.value);
  to.setAddress(address.value);
  to.setBytes(bytes);
  to.setDevice(device.value);
}
inline Step GetStep(auto from) {
  return {GetStepKind(from.getKind()), AllocationId{from.getAllocation()}, Address{from.getAddress()}, from.getBytes(),
          DeviceOrdinal{from.getDevice()}};
}

}  // namespace amem::codec
