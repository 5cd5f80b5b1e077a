// Messages of peers: any bytes are a message within its bounds or an error, and what is a message can be said again.
#include <cstdlib>

#include "replay/peers/messages.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace amem;
  const auto message = DecodeMessage(std::as_bytes(std::span(data, size)));
  if (!message.ok()) return 0;
  const auto bytes = EncodeMessage(*message);
  if (!bytes.ok()) return 0;  // more than a message may be
  const auto again = DecodeMessage(*bytes);
  if (!again.ok() || again->body.index() != message->body.index() || again->request != message->request) std::abort();
  return 0;
}
