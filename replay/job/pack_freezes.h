// The journals of freezes that a pack takes along, `freeze-ID.journal` beside the sessions' directories: what was begun on a
// job from outside, and how far it came. Their inside is replay/freeze's; here they are bounded texts with a name.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "statemachine/types.h"

namespace amem {

struct FreezeText {
  std::string name, content;  // "freeze-0123456789abcdef.journal"
};

// Those that name one of these sessions. What cannot be read, or is longer than any journal of a freeze, goes to `damage`.
std::vector<FreezeText> FreezesOf(std::span<const std::filesystem::path> sessions, std::vector<std::string>& damage);

// A block of a pack: the name, a line end, the content.
std::string ToBlock(const FreezeText& freeze);
// Writes what a block holds into `directory`, mode 0600, in place of no file that is there. kCorrupt: it is no such block.
Status WriteFreeze(std::span<const std::byte> block, const std::filesystem::path& directory);

}  // namespace amem
