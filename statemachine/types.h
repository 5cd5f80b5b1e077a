// The vocabulary of AMem: ids, properties and results, as plain values.
//
// Everything here is a value type without ownership, usable from any thread. Nothing depends on CUDA, files or clocks; numeric
// constants that the driver also uses (location types, access flags, result codes) have the driver's values, so that they can
// be recorded and replayed unchanged.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "statemachine/fields.h"

namespace amem {

using Bytes = std::uint64_t;

// A number that cannot be mixed up with another kind of number. Zero is "none" for every id below.
template <class Tag, class Rep = std::uint64_t>
struct Id {
  Rep value{};
  constexpr Id() = default;
  constexpr explicit Id(Rep v) : value(v) {}
  constexpr explicit operator bool() const { return value != Rep{}; }
  friend constexpr auto operator<=>(const Id&, const Id&) = default;
};

using SequenceNumber = Id<struct SequenceTag>;             // position in one session's journal; the first event has 1
using SessionId = Id<struct SessionTag>;                   // random, unique on all hosts for practical purposes
using AllocationId = Id<struct AllocationTag>;             // stable over resumes; what NCCL holds in place of a driver handle
using CommunicatorId = Id<struct CommunicatorTag>;         // counts the communicators of this process from 1
using PoolId = Id<struct PoolTag, std::uint32_t>;          // counts the pools of a session from 1; zero: NCCL's memory
using RegionId = Id<struct RegionTag>;                     // counts the renewable registrations of a session from 1; zero: none
using DriverHandle = Id<struct DriverHandleTag>;           // what the driver calls it today; changes with every resume
using Address = Id<struct AddressTag>;                     // a device virtual address
using DeviceOrdinal = Id<struct DeviceTag, std::int32_t>;  // CUDA device ordinal of this process; zero is device 0

constexpr Address operator+(Address a, Bytes n) { return Address{a.value + n}; }

// What a map has under a key; null: nothing.
template <class Map>
auto* FindIn(Map& map, const typename Map::key_type& key) {
  const auto it = map.find(key);
  return it == map.end() ? nullptr : &it->second;
}

// The entry of a map by address that contains `address`, end() if none. The map's values have `bytes`, or are that.
template <class Map>
auto Containing(Map& map, Address address) {
  auto it = map.upper_bound(address);
  if (it == map.begin()) return map.end();
  --it;
  const Bytes before = address.value - it->first.value;
  if constexpr (requires { it->second.bytes; }) {
    return before < it->second.bytes ? it : map.end();
  } else {
    return before < it->second ? it : map.end();
  }
}

// The entries of such a map that lie in [address, address + bytes), if only partly.
template <class Iterator>
struct Touched {
  Iterator first, last;
  [[nodiscard]] Iterator begin() const { return first; }
  [[nodiscard]] Iterator end() const { return last; }
  [[nodiscard]] bool empty() const { return first == last; }
  [[nodiscard]] Address where() const { return first->first; }
};
template <class Map>
auto Touching(Map& map, Address address, Bytes bytes) {
  const Address end = address + bytes;
  auto first = Containing(map, address);
  if (first == map.end()) first = map.lower_bound(address);
  return Touched<decltype(first)>{first, end < address ? map.end() : map.lower_bound(end)};
}

// Told beside an enum that counts from zero: what it is called, its last enumerator, beyond which a reader rejects a value as a
// newer build's, and a name for each, if people see them.
template <class Enum>
struct Enumerators {
  Enum last;
  const char* called;
  const std::string_view* names = nullptr;
};
#define AMEM_NAMES(Enum, last, called, ...)                                                                    \
  inline constexpr std::string_view kNamesOf##Enum[] = {__VA_ARGS__};                                          \
  constexpr Enumerators<Enum> EnumeratorsOf(Enum) {                                                            \
    static_assert(std::size(kNamesOf##Enum) == static_cast<std::size_t>(Enum::last) + 1, "one name for each"); \
    return {Enum::last, called, kNamesOf##Enum};                                                               \
  }                                                                                                            \
  static_assert(true)
template <class Enum>
requires(EnumeratorsOf(Enum{}).names != nullptr) std::string_view ToText(Enum value) {
  constexpr auto known = EnumeratorsOf(Enum{});
  return value <= known.last ? known.names[static_cast<std::size_t>(value)] : "unknown";
}

enum class LocationType : std::uint32_t {  // values of CUmemLocationType
  kInvalid = 0,
  kDevice = 1,
  kHost = 2,
  kHostNuma = 3,
  kHostNumaCurrent = 4,
};

struct Location {
  LocationType type = LocationType::kInvalid;
  std::int32_t id = 0;  // device ordinal or NUMA node
  AMEM_STRUCT(Location, type, id);
  friend auto operator<=>(const Location&, const Location&) = default;
};

// CUmemAllocationProp, whole: a redo uses these and derives nothing.
struct AllocationProperties {
  std::uint32_t type = 1;          // CUmemAllocationType; 1 = pinned
  std::uint32_t handle_types = 0;  // CUmemAllocationHandleType bits: 1 = posix fd, 8 = fabric
  Location location;
  std::uint8_t compression = 0;
  std::uint8_t gpu_direct_rdma = 0;
  std::uint16_t usage = 0;
  std::uint32_t reserved = 0;
  AMEM_STRUCT(AllocationProperties, type, handle_types, location, compression, gpu_direct_rdma, usage, reserved);
  friend auto operator<=>(const AllocationProperties&, const AllocationProperties&) = default;
};

// Whose memory an allocation is, and so whether a pause takes it: NCCL's own it takes; the program's (ncclMemAlloc) it leaves,
// because kernels and libraries of the program may use it at any time, unless the program asked for it to be released. Of a
// pool: a chunk is kUser, and memory that a library made whole under a tag kUserReleased.
// kMulticastReleased: a multicast object that a pause releases and a resume makes anew; any other multicast object stays.
enum class MemoryTag : std::uint8_t { kNccl = 0, kUser, kUserReleased, kMulticastReleased };
AMEM_NAMES(MemoryTag, kMulticastReleased, "memory tag", "nccl", "user", "user-released", "multicast-released");

// What a pause of a pool does with the contents: saves them to host memory, or forgets them.
enum class PoolPolicy : std::uint8_t { kPreserve = 0, kDiscard };
AMEM_NAMES(PoolPolicy, kDiscard, "pool policy", "preserve", "discard");

// How another library of the process shares device memory with other processes past AMem. kUnseen: it may do so by calls that
// AMem does not see. kLeft: private memory that AMEM_SCOPE=all does not take; the function that made it stands for the library.
enum class OutsideKind : std::uint8_t {
  kIpcExport = 0,
  kIpcImport,
  kHandleExport,
  kHandleImport,
  kMulticast,
  kPoolExport,
  kPoolImport,
  kUnseen,
  kLeft
};
AMEM_NAMES(OutsideKind, kLeft, "kind of sharing", "cudaIpc export", "cudaIpc import", "cuMem handle export",
           "cuMem handle import", "multicast object", "memory pool export", "memory pool import", "calls past AMem",
           "left to the driver");

struct AccessDescriptor {
  Location location;
  std::uint32_t flags = 0;  // CUmemAccess_flags: 0 none, 1 read, 3 read and write
  AMEM_STRUCT(AccessDescriptor, location, flags);
  friend auto operator<=>(const AccessDescriptor&, const AccessDescriptor&) = default;
};

// Whether rights by location give what is wanted; and a change of one, which takes it away if its flags are 0.
bool Allows(const std::vector<AccessDescriptor>& access, const AccessDescriptor& wanted);
void MergeAccess(std::vector<AccessDescriptor>& access, const AccessDescriptor& change);

// Return addresses inside libnccl, innermost first, as offsets from its load address; 0 = no frame.
struct CallSite {
  std::array<std::uint64_t, 5> frames{};
  friend auto operator<=>(const CallSite&, const CallSite&) = default;
};

// Somebody else's allocation, as named by its owner.
struct RemoteAllocation {
  SessionId owner;
  AllocationId allocation;  // the owner's id
  AMEM_STRUCT(RemoteAllocation, owner, As{"owner_allocation", allocation});
  friend auto operator<=>(const RemoteAllocation&, const RemoteAllocation&) = default;
};

// What went wrong, in the classes a caller can act on.
enum class Code : std::uint8_t {
  kOk = 0,
  kInvalid,        // the request itself is wrong (order, range, argument)
  kNotFound,       // names something that does not exist
  kOutOfMemory,    // device or host memory
  kDriver,         // the driver refused; Status::driver_result has its CUresult
  kIo,             // file, socket or LMDB
  kCorrupt,        // bytes that cannot be what they claim
  kTimeout,        // a deadline passed
  kPeerLost,       // the other process died or closed
  kRefused,        // not allowed now (paused, other user, wrong secret)
  kUnsupported,    // understood, and not done by this build or device
  kBroken,         // an earlier failure is latched; see its message
  kNoDescriptors,  // the process or the host has reached its limit of open files (EMFILE, ENFILE)
};
AMEM_NAMES(Code, kNoDescriptors, "error class", "ok", "invalid", "not found", "out of memory", "driver error", "I/O error",
           "corrupt", "timed out", "peer lost", "refused", "not supported", "broken", "no descriptors left");

// The result of everything that can fail. The message says what was tried, on what, what came back, and what to do.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message, int driver_result = 0)
      : code_(code), driver_result_(driver_result), message_(std::move(message)) {}
  static Status Ok() { return {}; }

  [[nodiscard]] bool ok() const { return code_ == Code::kOk; }
  explicit operator bool() const { return ok(); }
  [[nodiscard]] Code code() const { return code_; }
  [[nodiscard]] int driver_result() const { return driver_result_; }  // CUresult of the call that failed, 0 if none was made
  [[nodiscard]] const std::string& message() const { return message_; }
  // The same failure with what was being done put before it: "resume: create allocation 7: out of memory ...".
  [[nodiscard]] Status Within(std::string_view doing) const {
    return ok() ? *this : Status{code_, std::string(doing) + ": " + message_, driver_result_}.ReportedBy(reported_by_);
  }
  // The session that answered with this failure, or whose loss it is; zero: it happened here.
  [[nodiscard]] SessionId reported_by() const { return reported_by_; }
  [[nodiscard]] Status ReportedBy(SessionId session) const {
    Status told = *this;
    if (!told.ok()) told.reported_by_ = session;
    return told;
  }
  friend bool operator==(const Status&, const Status&) = default;

 private:
  Code code_ = Code::kOk;
  int driver_result_ = 0;
  SessionId reported_by_;
  std::string message_;
};

// A value, or the reason there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : data_(std::in_place_index<0>, std::move(value)) {}           // NOLINT(google-explicit-constructor)
  Result(Status failure) : data_(std::in_place_index<1>, std::move(failure)) {}  // NOLINT(google-explicit-constructor)
  [[nodiscard]] bool ok() const { return data_.index() == 0; }
  explicit operator bool() const { return ok(); }
  T& operator*() & { return std::get<0>(data_); }
  const T& operator*() const& { return std::get<0>(data_); }
  T&& operator*() && { return std::get<0>(std::move(data_)); }
  T* operator->() { return &std::get<0>(data_); }
  const T* operator->() const { return &std::get<0>(data_); }
  [[nodiscard]] Status status() const { return ok() ? Status{} : std::get<1>(data_); }
  [[nodiscard]] Result Within(std::string_view doing) && { return ok() ? std::move(*this) : Result(status().Within(doing)); }

 private:
  std::variant<T, Status> data_;
};

// Evaluates `expr` (a Status) and returns it from the enclosing function when it is a failure.
#define AMEM_TRY(expr)                                                                          \
  do {                                                                                          \
    if (::amem::Status amem_try_status = (expr); !amem_try_status.ok()) return amem_try_status; \
  } while (false)

// AMEM_ASSIGN(auto handle, driver.Create(...)): the value of a Result, whose failure the enclosing function returns.
#define AMEM_ASSIGN(declaration, ...) AMEM_ASSIGN_FROM(AMEM_JOINED(amem_result_, __LINE__), declaration, __VA_ARGS__)
#define AMEM_ASSIGN_FROM(result, declaration, ...) \
  auto result = (__VA_ARGS__);                     \
  if (!result.ok()) return result.status();        \
  declaration = *std::move(result)
#define AMEM_JOINED(a, b) AMEM_JOINED_NOW(a, b)
#define AMEM_JOINED_NOW(a, b) a##b

std::string Hex(std::uint64_t value);  // "0x1f", the way addresses and ids are printed everywhere
template <class Tag>
std::string Hex(Id<Tag> id) {
  return Hex(id.value);
}

}  // namespace amem
