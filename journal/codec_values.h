// How fields and values become parts of messages, in both directions. Templates, so that no header needs Cap'n Proto's: a
// message is a builder, which is written, or a reader, which is read, of the struct in journal.capnp that has the value's name.
#pragma once

#include <concepts>
#include <cstring>
#include <string>

#include "statemachine/event.h"

namespace amem::codec {

template <class T, class Kind>
concept Of = std::same_as<std::remove_const_t<T>, Kind>;

// Ends the decoding of a message; Parse() in codec.cpp returns it as the reason.
[[noreturn]] inline void Reject(std::string message) { throw Status{Code::kCorrupt, std::move(message)}; }

// ---- values that are a number in a message -------------------------------------------------------------------------------

template <class T>
auto Number(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (requires { value.value; }) {  // an id
    return value.value;
  } else {
    return value;
  }
}

template <class Enum>
void TakeEnum(std::uint8_t from, Enum& to, Enum last, const char* name) {
  if (from > static_cast<std::uint8_t>(last))
    Reject("it has " + std::string(name) + " " + std::to_string(from) + ", and this build knows none above " +
           std::to_string(static_cast<unsigned>(last)));
  to = static_cast<Enum>(from);
}
inline void Take(std::uint8_t from, CycleKind& to) { TakeEnum(from, to, CycleKind::kResume, "cycle kind"); }
inline void Take(std::uint8_t from, PhaseKind& to) { TakeEnum(from, to, PhaseKind::kResumeOpen, "phase kind"); }
inline void Take(std::uint8_t from, StepKind& to) { TakeEnum(from, to, StepKind::kUnbind, "step kind"); }
inline void Take(std::uint8_t from, MemoryTag& to) { TakeEnum(from, to, MemoryTag::kMulticastReleased, "memory tag"); }
inline void Take(std::uint8_t from, PoolPolicy& to) { TakeEnum(from, to, PoolPolicy::kDiscard, "pool policy"); }
inline void Take(std::uint8_t from, Code& to) { TakeEnum(from, to, Code::kNoDescriptors, "error class"); }
template <class T>
void Take(auto from, T& to) {
  to = static_cast<T>(from);
}

// ---- fields --------------------------------------------------------------------------------------------------------------

// An empty text and a call site that is all zero are left out, because those are the defaults.
template <class T>
bool IsDefault(const T& value) {
  if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, CallSite>) return value == T{};
  return false;
}

// Writes or reads one field: a list or text, whose size the message must know, a struct, or a number. (clang 14 does not let a
// structured binding into a requires-expression, hence the reference.)
#define AMEM_FIELD(Name)                                                                          \
  {                                                                                               \
    auto& field = Name##_;                                                                        \
    if constexpr (requires { typename decltype(message)::Reads; }) {                              \
      if constexpr (requires { Carry(message.get##Name(), field); }) {                            \
        Carry(message.get##Name(), field);                                                        \
      } else {                                                                                    \
        Take(message.get##Name(), field);                                                         \
      }                                                                                           \
    } else if constexpr (requires { field.size(); }) {                                            \
      if (!IsDefault(field)) Put(message.init##Name(static_cast<unsigned>(field.size())), field); \
    } else if constexpr (requires { Carry(message.init##Name(), field); }) {                      \
      if (!IsDefault(field)) Carry(message.init##Name(), field);                                  \
    } else {                                                                                      \
      message.set##Name(Number(field));                                                           \
    }                                                                                             \
  }

// The preprocessor does not recurse: each scan by AMEM_EXPAND expands a list by one more name, and it scans often enough
// for 80.
#define AMEM_PARENTHESES ()
#define AMEM_EXPAND(...) AMEM_EXPAND_4(AMEM_EXPAND_4(AMEM_EXPAND_4(AMEM_EXPAND_4(__VA_ARGS__))))
#define AMEM_EXPAND_4(...) AMEM_EXPAND_1(AMEM_EXPAND_1(AMEM_EXPAND_1(AMEM_EXPAND_1(__VA_ARGS__))))
#define AMEM_EXPAND_1(...) __VA_ARGS__

// A_, B_, C_ of A, B, C.
#define AMEM_NAMES(Name, ...) Name##_ __VA_OPT__(, AMEM_NAMES_AGAIN AMEM_PARENTHESES(__VA_ARGS__))
#define AMEM_NAMES_AGAIN() AMEM_NAMES
#define AMEM_FIELDS(Name, ...) AMEM_FIELD(Name) __VA_OPT__(AMEM_FIELDS_AGAIN AMEM_PARENTHESES(__VA_ARGS__))
#define AMEM_FIELDS_AGAIN() AMEM_FIELDS

// Writes or reads a struct whose fields have these names in the schema, in the struct's order. It is taken apart with a
// structured binding: a field that is added to the struct and forgotten here does not compile.
#define AMEM_CARRY(Kind, ...)                             \
  inline void Carry(auto message, Of<Kind> auto& value) { \
    auto& [AMEM_EXPAND(AMEM_NAMES(__VA_ARGS__))] = value; \
    AMEM_EXPAND(AMEM_FIELDS(__VA_ARGS__))                 \
  }

// ---- structs -------------------------------------------------------------------------------------------------------------

inline void Carry(auto message, Of<CallSite> auto& value) {
  auto& [frames] = value;
  auto& [Frame0_, Frame1_, Frame2_, Frame3_, Frame4_] = frames;
  AMEM_EXPAND(AMEM_FIELDS(Frame0, Frame1, Frame2, Frame3, Frame4))
}
inline void Carry(auto message, Of<Location> auto& value) {  // its two fields are part of the message around it
  auto& [LocationType_, LocationId_] = value;
  AMEM_EXPAND(AMEM_FIELDS(LocationType, LocationId))
}
inline void Carry(auto message, Of<AllocationProperties> auto& value) {
  auto& [Type_, HandleTypes_, location, Compression_, GpuDirectRdma_, Usage_, Reserved_] = value;
  Carry(message, location);
  AMEM_EXPAND(AMEM_FIELDS(Type, HandleTypes, Compression, GpuDirectRdma, Usage, Reserved))
}
inline void Carry(auto message, Of<AccessDescriptor> auto& value) {
  auto& [location, Flags_] = value;
  Carry(message, location);
  AMEM_FIELD(Flags)
}
AMEM_CARRY(RemoteAllocation, Owner, Allocation)
AMEM_CARRY(Step, Kind, Allocation, Address, Bytes, Device, Offset)
AMEM_CARRY(ByteRange, Offset, Bytes)

// ---- texts and lists -----------------------------------------------------------------------------------------------------

inline void Put(auto to, const std::string& from) { std::memcpy(to.begin(), from.data(), from.size()); }
inline void Take(auto from, std::string& to) { to.assign(from.begin(), from.size()); }

AMEM_CARRY(CycleMember, Session, Rank, Pid, Host)

template <class T>
void Put(auto to, const std::vector<T>& from) {
  for (unsigned i = 0; i < to.size(); ++i) {
    if constexpr (std::is_same_v<T, std::string>) {
      Put(to.init(i, static_cast<unsigned>(from[i].size())), from[i]);
    } else if constexpr (requires { to.set(i, Number(from[i])); }) {
      to.set(i, Number(from[i]));
    } else {
      Carry(to[i], from[i]);
    }
  }
}
template <class T>
void Take(auto from, std::vector<T>& to) {
  for (const auto element : from) {
    if constexpr (requires { Carry(element, to.emplace_back()); }) {
      Carry(element, to.emplace_back());
    } else {
      Take(element, to.emplace_back());
    }
  }
}

}  // namespace amem::codec
