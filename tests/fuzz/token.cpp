// Tokens: any bytes are a token or an error, and a token has one form.
#include "replay/peers/token.h"

#include <cstdlib>
#include <cstring>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace amem;
  const auto token = Decode(std::as_bytes(std::span(data, size)));
  if (!token.ok()) return 0;
  const auto bytes = Encode(*token);
  const auto again = Decode(bytes);
  if (!again.ok() || !(*again == *token)) std::abort();
  return 0;
}
