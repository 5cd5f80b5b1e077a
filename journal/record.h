// The frame around everything that is stored, in the tail and in LMDB alike: what it is, how long, and a checksum over both.
// The drain moves frames from one to the other without opening them, and a frame can be found in a damaged file without help.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace amem {

// CRC-32C (Castagnoli), the one with an instruction for it. Crc32c("123456789") == 0xe3069283.
std::uint32_t Crc32c(std::span<const std::byte> bytes);
// The same without the instruction; for machines that lack it, and for the test that compares both.
std::uint32_t Crc32cPortable(std::span<const std::byte> bytes);

enum class RecordType : std::uint32_t { kEvent = 1, kSnapshot = 2, kMeta = 3 };

struct RecordHeader {
  static constexpr std::uint32_t kMagic = 0x724a4d41;  // "AMJr" in the file
  std::uint32_t magic = kMagic;
  std::uint32_t crc = 0;     // CRC-32C of everything after this field, to the end of the payload
  std::uint32_t length = 0;  // of the payload, bytes
  RecordType type{};
  std::uint64_t seq = 0;  // of the event; of the last event a snapshot covers; 1 for meta data
};
static_assert(sizeof(RecordHeader) == 24 && std::is_trivially_copyable_v<RecordHeader>);

inline constexpr std::size_t kRecordAlignment = 8;
constexpr std::size_t RecordBytes(std::size_t payload) {  // with header and padding
  return (sizeof(RecordHeader) + payload + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
}

// A frame whose checksum was right.
struct Record {
  RecordType type{};
  std::uint64_t seq = 0;
  std::span<const std::byte> payload;
};

// Writes header and payload at `at`, which has room for RecordBytes(payload.size()).
void WriteRecord(std::byte* at, RecordType type, std::uint64_t seq, std::span<const std::byte> payload);
std::vector<std::byte> Framed(RecordType type, std::uint64_t seq, std::span<const std::byte> payload);
// The header at the start of `bytes`, if magic and length are plausible; the checksum is not looked at.
std::optional<RecordHeader> PeekRecord(std::span<const std::byte> bytes);
// nullopt: too short, no magic or a wrong checksum.
std::optional<Record> ReadRecord(std::span<const std::byte> bytes);
// Calls `found` with every whole record in `bytes`, wherever it starts; records do not overlap. Returns how many bytes may
// belong to a record that goes on behind the end (0: none).
std::size_t ScanRecords(std::span<const std::byte> bytes, const std::function<void(const Record&)>& found);

}  // namespace amem
