// CRC-32C (Castagnoli), the one with an instruction for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace amem {

// Crc32c("123456789") == 0xe3069283.
std::uint32_t Crc32c(std::span<const std::byte> bytes);
// The same without the instruction; for machines that lack it, and for the test that compares both.
std::uint32_t Crc32cPortable(std::span<const std::byte> bytes);

}  // namespace amem
