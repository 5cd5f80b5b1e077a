// Events as Cap'n Proto messages: one segment, unpacked, without a segment table. What is where follows from the structs of
// event.h (layout.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "journal/base/clock.h"
#include "statemachine/state.h"

namespace amem {

// What is known about a journal without reading its events; the values of the table "meta": under 1 from when it was opened,
// under larger keys from when its writer found that the wall clock had been set.
struct FileMeta {
  std::uint32_t format = 0;
  std::uint32_t least_reader = 0;
  SessionId session;
  std::int32_t pid = 0;
  std::uint64_t realtime_ns = 0;   // wall clock at that moment
  std::uint64_t monotonic_ns = 0;  // Event::time_ns at that moment; 0: of a build that did not note it
  AMEM_STRUCT(FileMeta, format, least_reader, session, pid, realtime_ns, monotonic_ns);
};

// Encodes one event after the other into memory of its own, which grows with the largest. For one thread at a time.
class Encoder {
 public:
  Encoder();
  // The bytes are valid until the next call. There are none when the event is too large for any message (512 MiB) or memory has
  // run out. An event of less than 16 KiB needs no heap.
  std::span<const std::byte> Encode(const Event& event);
  std::span<const std::byte> Encode(const FileMeta& meta);

 private:
  template <class Fill>
  std::span<const std::byte> Build(const Fill& fill);

  std::vector<std::uint64_t> scratch_;  // zero between calls: what Cap'n Proto asks of a first segment
  std::vector<std::uint64_t> large_;
};

// Any bytes may be given. If they are not a message of the schema, or have a kind, an enumerator or a list that this build does
// not know, the result is kCorrupt, and its message says what is wrong with them.
Result<Event> DecodeEvent(std::span<const std::byte> message);
// The value for the table "meta" of a journal that this build writes.
std::vector<std::byte> MetaRecord(SessionId session, std::int32_t pid, const WallClock& clock, std::uint64_t key = 1);
Result<FileMeta> DecodeMeta(std::span<const std::byte> message);

// A state as the payload of a snapshot's record: the messages of ToSnapshotEvents(state), each behind its length. `change`, if
// it is given, sees each event before it is encoded.
Result<std::vector<std::byte>> EncodeSnapshot(const State& state, const std::function<void(EventBody&)>& change = {});
// Any bytes may be given; kCorrupt names what is wrong with them.
Result<State> DecodeSnapshot(std::span<const std::byte> payload);

}  // namespace amem
