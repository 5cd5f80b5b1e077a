#include "statemachine/amounts.h"

namespace amem {
namespace {

constexpr Bytes kWholeMiB = Bytes{1} << 20;

}  // namespace

std::string RoundedBytes(Bytes bytes) {
  if (bytes < kWholeMiB || bytes % kWholeMiB == 0) return FormatBytes(bytes);
  const Bytes tenth = bytes % kWholeMiB * 10 / kWholeMiB;
  std::string text = FormatBytes(bytes - bytes % kWholeMiB);
  if (tenth != 0) text.insert(text.size() - 4, "." + std::to_string(tenth));
  return text;
}

std::string RoundedUpBytes(Bytes bytes) {
  if (bytes < kWholeMiB) return FormatBytes(bytes);
  const Bytes fraction = bytes % kWholeMiB;
  const Bytes tenths = (fraction * 10 + kWholeMiB - 1) / kWholeMiB;
  return RoundedBytes(bytes - fraction + (tenths * kWholeMiB + 9) / 10);
}

}  // namespace amem
