#include "journal/record.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace amem {
namespace {

constexpr std::size_t kChecked = offsetof(RecordHeader, length);  // the checksum covers from here

constexpr auto kCrcOfByte = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = (table[i] >> 1) ^ ((table[i] & 1) != 0 ? 0x82f63b78U : 0U);
  }
  return table;
}();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t WithInstruction(std::span<const std::byte> bytes) {
  std::uint64_t crc = 0xffffffffU;
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    crc = _mm_crc32_u64(crc, word);
  }
  auto tail = static_cast<std::uint32_t>(crc);
  for (; left > 0; --left, ++at) tail = _mm_crc32_u8(tail, static_cast<unsigned char>(*at));
  return ~tail;
}
const bool kHaveInstruction = __builtin_cpu_supports("sse4.2") != 0;
#endif

}  // namespace

std::uint32_t Crc32cPortable(std::span<const std::byte> bytes) {
  std::uint32_t crc = 0xffffffffU;
  for (const std::byte byte : bytes) crc = (crc >> 8) ^ kCrcOfByte[(crc ^ static_cast<std::uint32_t>(byte)) & 0xff];
  return ~crc;
}

std::uint32_t Crc32c(std::span<const std::byte> bytes) {
#if defined(__x86_64__)
  if (kHaveInstruction) return WithInstruction(bytes);
#endif
  return Crc32cPortable(bytes);
}

void WriteRecord(std::byte* at, RecordType type, std::uint64_t seq, std::span<const std::byte> payload) {
  RecordHeader header{.length = static_cast<std::uint32_t>(payload.size()), .type = type, .seq = seq};
  std::memcpy(at, &header, sizeof header);
  if (!payload.empty()) std::memcpy(at + sizeof header, payload.data(), payload.size());
  header.crc = Crc32c({at + kChecked, sizeof header - kChecked + payload.size()});
  std::memcpy(at + offsetof(RecordHeader, crc), &header.crc, sizeof header.crc);
}

std::vector<std::byte> Framed(RecordType type, std::uint64_t seq, std::span<const std::byte> payload) {
  std::vector<std::byte> frame(RecordBytes(payload.size()));
  WriteRecord(frame.data(), type, seq, payload);
  return frame;
}

std::optional<RecordHeader> PeekRecord(std::span<const std::byte> bytes) {
  RecordHeader header;
  if (bytes.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != RecordHeader::kMagic || header.length > bytes.size() - sizeof header) return std::nullopt;
  return header;
}

std::optional<Record> ReadRecord(std::span<const std::byte> bytes) {
  const auto header = PeekRecord(bytes);
  if (!header) return std::nullopt;
  const auto checked = bytes.subspan(kChecked, sizeof *header - kChecked + header->length);
  if (Crc32c(checked) != header->crc) return std::nullopt;
  return Record{header->type, header->seq, bytes.subspan(sizeof *header, header->length)};
}

std::size_t ScanRecords(std::span<const std::byte> bytes, const std::function<void(const Record&)>& found) {
  constexpr std::uint32_t magic = RecordHeader::kMagic;
  const auto* needle = reinterpret_cast<const std::byte*>(&magic);
  auto at = bytes.begin();
  auto unfinished = bytes.end();
  while ((at = std::search(at, bytes.end(), needle, needle + sizeof magic)) != bytes.end()) {
    const auto rest = bytes.subspan(static_cast<std::size_t>(at - bytes.begin()));
    if (const auto record = ReadRecord(rest)) {
      found(*record);
      at += static_cast<std::ptrdiff_t>(sizeof(RecordHeader) + record->payload.size());
      unfinished = bytes.end();
      continue;
    }
    if (!PeekRecord(rest) && unfinished == bytes.end()) unfinished = at;  // its length points behind the end
    ++at;
  }
  return static_cast<std::size_t>(bytes.end() - unfinished);
}

}  // namespace amem
