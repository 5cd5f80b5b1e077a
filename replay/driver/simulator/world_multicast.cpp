// Multicast objects in a simulated world, shared by all its processes.
#include <algorithm>
#include <limits>

#include "replay/driver/driver.h"
#include "replay/driver/simulator/world_table.h"

namespace amem {

std::optional<SimulatorWorld::Key> SimulatorWorld::AddMulticast(std::uint32_t member, std::uint32_t devices, Bytes bytes) {
  const Guard guard(*table_);
  const auto room = std::ranges::find_if(table_->multicasts, [](const auto& one) { return one.id == 0; });
  const auto index = table_->FreeIndex();
  if (room == table_->multicasts.end() || !index) return std::nullopt;
  const std::uint64_t id = table_->next_id++;
  table_->Use(*index, id, kHostMemory, bytes, member);
  *room = {};
  room->devices = devices;
  room->bytes = bytes;
  room->id = id;
  return Key{*index, id};
}

int SimulatorWorld::AddDevice(Key key, std::int32_t device) {
  const Guard guard(*table_);
  WorldMulticast* multicast = table_->FindMulticast(key);
  if (multicast == nullptr) return cuda::kInvalidValue;
  const std::uint64_t bit = std::uint64_t{1} << static_cast<unsigned>(device);
  if ((multicast->added & bit) != 0) return cuda::kInvalidValue;
  if (multicast->IsComplete()) return cuda::kInvalidValue;
  multicast->added |= bit;
  return 0;
}

bool SimulatorWorld::IsComplete(Key key) {
  const Guard guard(*table_);
  const WorldMulticast* multicast = table_->FindMulticast(key);
  return multicast != nullptr && multicast->IsComplete();
}

int SimulatorWorld::Bind(std::uint32_t member, Key key, const Binding& wanted) {
  const Guard guard(*table_);
  WorldMulticast* multicast = table_->FindMulticast(key);
  WorldEntry* memory = table_->Find(wanted.memory);
  if (multicast == nullptr || memory == nullptr) return cuda::kInvalidValue;
  if ((multicast->added >> static_cast<unsigned>(wanted.device) & 1) == 0) return cuda::kInvalidDevice;
  if (!multicast->IsComplete()) return cuda::kNotReady;
  if (wanted.offset > multicast->bytes || wanted.bytes > multicast->bytes - wanted.offset) return cuda::kInvalidValue;
  WorldBinding* room = nullptr;
  for (WorldBinding& one : multicast->bindings) {
    if (one.bytes == 0) {
      room = room == nullptr ? &one : room;
    } else if (one.device == wanted.device && one.offset < wanted.offset + wanted.bytes &&
               wanted.offset < one.offset + one.bytes) {
      return cuda::kInvalidValue;
    }
  }
  if (room == nullptr || memory->references[member] == std::numeric_limits<std::uint16_t>::max()) return cuda::kOutOfMemory;
  ++memory->references[member];
  *room = {wanted, member};
  return 0;
}

int SimulatorWorld::Unbind(std::uint32_t member, Key key, std::int32_t device, Bytes offset, Bytes bytes) {
  const Guard guard(*table_);
  WorldMulticast* multicast = table_->FindMulticast(key);
  if (multicast == nullptr || bytes == 0) return cuda::kInvalidValue;
  for (WorldBinding& one : multicast->bindings) {
    if (one.bytes != bytes || one.offset != offset || one.device != device || one.member != member) continue;
    const Key memory = one.memory;
    one = {};
    table_->DropReferenceOf(member, memory);
    return 0;
  }
  return cuda::kInvalidValue;
}

}  // namespace amem
