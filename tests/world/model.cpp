#include "tests/world/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "tests/world/settings.h"

namespace amem::world {
namespace {

using Words = std::array<std::uint64_t, kPage / sizeof(std::uint64_t)>;

const Words& Common() {
  static const Words words = [] {
    Words made{};
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = (i + 1) * 0x9e3779b97f4a7c15U;
    return made;
  }();
  return words;
}

std::uint64_t FirstWord(std::uint64_t value, Bytes offset) { return value * 0xd1b54a32d192ed03U + offset + 1; }

}  // namespace

void Fill(std::span<std::byte> contents, std::uint64_t value) {
  for (Bytes at = 0; at < contents.size(); at += kPage) {
    const Bytes bytes = std::min(kPage, contents.size() - at);
    const std::uint64_t first = FirstWord(value, at);
    std::memcpy(contents.data() + at, Common().data(), bytes);
    std::memcpy(contents.data() + at, &first, std::min(bytes, sizeof(first)));
  }
}

std::optional<Bytes> FirstWrong(std::span<const std::byte> contents, std::uint64_t value) {
  for (Bytes at = 0; at < contents.size(); at += kPage) {
    const Bytes bytes = std::min(kPage, contents.size() - at), head = std::min(bytes, sizeof(std::uint64_t));
    const std::uint64_t first = FirstWord(value, at);
    if (std::memcmp(contents.data() + at, &first, head) != 0) return at;
    if (std::memcmp(contents.data() + at + head, reinterpret_cast<const std::byte*>(Common().data()) + head, bytes - head) != 0)
      return at;
  }
  return std::nullopt;
}

std::string DescribePage(std::span<const std::byte> page) {
  if (std::ranges::all_of(page, [](std::byte b) { return b == std::byte{0}; })) return "zeros";
  std::uint64_t first = 0;
  std::memcpy(&first, page.data(), std::min(page.size(), sizeof(first)));
  return fmt::format("what begins with {:#x}", first);
}

const char* ToText(Kind kind) {
  switch (kind) {
    case Kind::kNccl:
      return "memory of NCCL";
    case Kind::kUser:
      return "memory of ncclMemAlloc";
    case Kind::kLegacy:
      return "memory of cuMemAlloc";
    case Kind::kTag:
      return "memory of a tag";
    case Kind::kWindow:
      return "a window";
    case Kind::kImport:
      return "an import";
    case Kind::kLegacyImport:
      return "an opened IPC handle";
  }
  return "?";
}

}  // namespace amem::world
