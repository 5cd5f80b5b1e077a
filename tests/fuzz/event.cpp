// The event codec: any bytes are an event or an error, and an event comes back as it was.
#include <cstdlib>

#include "journal/codec.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace amem;
  const auto event = DecodeEvent(std::as_bytes(std::span(data, size)));
  if (!event.ok()) return 0;
  static Encoder encoder;
  const auto bytes = encoder.Encode(*event);
  if (bytes.empty()) return 0;  // too large for a message
  const auto again = DecodeEvent(bytes);
  if (!again.ok() || !(*again == *event)) std::abort();
  return 0;
}
