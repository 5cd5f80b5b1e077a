// Where a reader gets the records of a journal from: LMDB (store.h), or a damaged file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "journal/base/file.h"

namespace amem {

enum class Table : std::size_t { kMeta = 0, kEvents = 1, kSnapshots = 2 };
inline constexpr std::size_t kTables = 3;

// What a table holds; its keys are not contiguous.
struct KeyExtent {
  std::uint64_t records = 0;
  std::optional<std::uint64_t> first, last;  // keys
};

// Each call sees the table as it is then.
class RecordSource {
 public:
  using Visitor = std::function<bool(std::uint64_t key, std::span<const std::byte> frame)>;
  virtual ~RecordSource() = default;
  // Calls `visit` for the entries with key >= `from` in order, until it returns false. The bytes are valid until then.
  virtual Status Scan(Table table, std::uint64_t from, const Visitor& visit) const = 0;
  [[nodiscard]] virtual Result<KeyExtent> ExtentOf(Table table) const = 0;
  // In words, when the file itself is damaged and this is what could be collected from it; else empty.
  [[nodiscard]] virtual std::string Damage() const { return {}; }
};

// Whether LMDB can walk a data.mdb without leaving the file. LMDB trusts what it wrote: a damaged page number, offset or length
// makes it read outside the map, or ends the process with an assertion. A reader of a dead journal therefore checks the pages
// first, and does not use LMDB when they are not sound. kCorrupt says which page is wrong and how. Values are not looked at:
// each has its own checksum. The file must not change meanwhile. Knows the format of LMDB 0.9 (data version 1) on 64-bit
// little-endian machines.
Status CheckStructure(const File& data);

// The records in `directory`/data.mdb. `live`: its writer works on it, and is `trusted` to have LMDB's locks in order, or LMDB
// is not used. Where it is not, and where LMDB cannot walk the file of an ended session, whole records are collected from the
// file by their own lengths and checksums.
Result<std::unique_ptr<RecordSource>> OpenSource(const std::filesystem::path& directory, bool live, bool trusted);

}  // namespace amem
