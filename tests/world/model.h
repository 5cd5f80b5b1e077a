// The model: what each piece of device memory should hold, and where it can be reached. It knows nothing of AMem.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>

#include "replay/driver/simulator/world.h"
#include "replay/session/pools/pools.h"
#include "statemachine/types.h"
#include "tests/world/streams.h"

namespace amem::world {

// Contents follow from a value: every page of them differs from the others. 0: anything.
void Fill(std::span<std::byte> contents, std::uint64_t value);
// Where the first page begins that is wrong; nullopt: all is right.
std::optional<Bytes> FirstWrong(std::span<const std::byte> contents, std::uint64_t value);
std::string DescribePage(std::span<const std::byte> page);

// Memory of the program under a tag. All kernels on it run on its stream.
struct Tag {
  PoolId id;
  bool preserves = true;
  Stream* stream = nullptr;
  // Shared while a kernel is submitted; exclusive while a pause or resume is asked for, as the program's contract is.
  std::shared_mutex use;
  bool usable = true;                     // with `use`
  bool behind = false;                    // with `use`: its last pause was not waited for
  std::atomic<std::uint64_t> losses = 0;  // how often contents were discarded
};

// One thread's, which alone changes it; kernels have copies of what they need.
struct Memory {
  Bytes bytes = 0;
  DeviceOrdinal device;
  std::uint64_t value = 0;  // of its contents
  bool fixed = false;       // others may look at it, so it is not written to any more
  std::int32_t owner = -1;  // the rank that it is imported from
  Tag* tag = nullptr;
  std::uint64_t losses = 0;  // of the tag, when it was written
  bool freed = false;        // nothing may touch it, though it is still mapped somewhere
};

// How one thread reaches memory, and gives it back.
enum class Kind : std::uint8_t { kNccl, kUser, kLegacy, kTag, kWindow, kImport, kLegacyImport };
const char* ToText(Kind kind);

struct Place {
  Kind kind{};
  Address address;  // of the memory
  std::shared_ptr<Memory> memory;
  AllocationId allocation;
  Address base;    // of the mapping, which the memory may be a part of
  Bytes span = 0;  // of the mapping
  int offer = -1;  // the place in the page's table, of what is offered, or was opened
  // What a network card has registered: the physical memory must stay the same as long as it is.
  std::optional<SimulatorWorld::Key> card;
};

}  // namespace amem::world
