#include "journal/snapshot.h"

#include <cstring>

#include "journal/codec.h"
#include "statemachine/apply.h"

namespace amem {

Result<std::vector<std::byte>> EncodeSnapshot(const State& state) {
  const auto bodies = ToSnapshotEvents(state);
  if (!bodies) return bodies.status();
  std::vector<std::byte> payload;
  Encoder encoder;
  for (const EventBody& body : *bodies) {
    const auto message = encoder.Encode(Event{{}, 0, 0, body});
    if (message.empty()) return Status{Code::kInvalid, "snapshot: an event of it is too large to be stored"};
    const std::uint64_t length = message.size();
    const auto* bytes = reinterpret_cast<const std::byte*>(&length);
    payload.insert(payload.end(), bytes, bytes + sizeof length);
    payload.insert(payload.end(), message.begin(), message.end());
  }
  return payload;
}

Result<State> DecodeSnapshot(std::span<const std::byte> payload) {
  State state;
  while (!payload.empty()) {
    std::uint64_t length = 0;
    if (payload.size() < sizeof length) return Status{Code::kCorrupt, "the snapshot ends inside a length"};
    std::memcpy(&length, payload.data(), sizeof length);
    payload = payload.subspan(sizeof length);
    if (length > payload.size()) return Status{Code::kCorrupt, "the snapshot ends inside an event"};
    const auto event = DecodeEvent(payload.first(length));
    if (!event) return event.status().Within("an event of the snapshot");
    if (const Status applied = Apply(state, *event); !applied) {
      return Status{Code::kCorrupt, "the snapshot does not fold: " + applied.message()};
    }
    payload = payload.subspan(length);
  }
  return state;
}

}  // namespace amem
