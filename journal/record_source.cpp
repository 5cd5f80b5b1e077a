#include "journal/record_source.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "journal/base/file.h"
#include "journal/lmdb_check.h"
#include "journal/record.h"

namespace amem {
namespace {

// LMDB maps the file, and each page that is read stays in the memory of this process, so that reading a journal of gigabytes
// would take gigabytes. After a long scan its pages are unmapped; they stay in the cache of the operating system, and whoever
// else looks at them in this process has them mapped again.
class TouchedPages {
 public:
  void Add(std::span<const std::byte> frame) {
    const auto begin = reinterpret_cast<std::uintptr_t>(frame.data());
    begin_ = std::min(begin_, begin);
    end_ = std::max(end_, begin + frame.size());
    bytes_ += frame.size();
  }
  // All between the first and the last page of any scan: LMDB's inner pages lie between those of the records, and the kernel
  // maps some neighbours of each page that is touched.
  void LetGo() {
    if (bytes_ < kWorthIt) return;
    bytes_ = 0;
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t from = begin_ / page * page;
    // A failure costs memory and nothing else.
    (void)madvise(reinterpret_cast<void*>(from), end_ - from, MADV_DONTNEED);
  }

 private:
  static constexpr std::size_t kWorthIt = std::size_t{256} << 10;
  std::uintptr_t begin_ = ~std::uintptr_t{0}, end_ = 0;
  std::size_t bytes_ = 0;
};

class StoreSource final : public RecordSource {
 public:
  explicit StoreSource(std::unique_ptr<Store> store) : store_(std::move(store)) {}
  Status Scan(Table table, std::uint64_t from, const Visitor& visit) const override {
    const std::lock_guard lock(touched_mutex_);
    const Status done = store_->Read([&](const Store::Reading& reading) {
      return reading.Scan(table, from, [&](std::uint64_t key, std::span<const std::byte> frame) {
        touched_.Add(frame);
        return visit(key, frame);
      });
    });
    touched_.LetGo();
    return done;
  }
  [[nodiscard]] Result<KeyExtent> ExtentOf(Table table) const override {
    Result<KeyExtent> extent = KeyExtent{};
    AMEM_TRY(store_->Read([&](const Store::Reading& reading) {
      extent = reading.ExtentOf(table);
      return extent.status();
    }));
    return extent;
  }

 private:
  std::unique_ptr<Store> store_;
  mutable std::mutex touched_mutex_;
  mutable TouchedPages touched_;
};

constexpr std::size_t kChunkBytes = std::size_t{16} << 20;
constexpr std::size_t kLargestChunkBytes = std::size_t{256} << 20;  // no record is larger, whatever its header claims

// Finds the whole records in a damaged file, and remembers where they are.
class SalvagedSource final : public RecordSource {
 public:
  static Result<std::unique_ptr<RecordSource>> Collect(File file, const Status& damage) {
    std::unique_ptr<SalvagedSource> source(new SalvagedSource(std::move(file)));
    AMEM_TRY(source->ScanFile());
    const auto& tables = source->places_;
    const bool nothing = std::all_of(tables.begin(), tables.end(), [](const auto& table) { return table.empty(); });
    if (nothing) return Status{Code::kCorrupt, damage.message() + "; and no record of a journal is in it"};
    source->ForgetLetGo();
    source->damage_ = damage.message() + "; whole records were collected from the file";
    return std::unique_ptr<RecordSource>(std::move(source));
  }
  Status Scan(Table table, std::uint64_t from, const Visitor& visit) const override {
    const auto& places = places_[static_cast<std::size_t>(table)];
    std::vector<std::byte> frame;
    for (auto it = places.lower_bound(from); it != places.end(); ++it) {
      frame.resize(it->second.bytes);
      AMEM_TRY(file_.ReadAt(it->second.offset, frame).status());
      if (!visit(it->first, frame)) break;
    }
    return {};
  }
  [[nodiscard]] Result<KeyExtent> ExtentOf(Table table) const override {
    const auto& places = places_[static_cast<std::size_t>(table)];
    if (places.empty()) return KeyExtent{};
    return KeyExtent{places.size(), places.begin()->first, places.rbegin()->first};
  }
  [[nodiscard]] std::string Damage() const override { return damage_; }

 private:
  struct Place {
    Bytes offset = 0;
    std::size_t bytes = 0;
  };
  explicit SalvagedSource(File file) : file_(std::move(file)) {}

  static std::optional<Table> TableOf(RecordType type) {
    switch (type) {
      case RecordType::kEvent:
        return Table::kEvents;
      case RecordType::kSnapshot:
        return Table::kSnapshots;
      case RecordType::kMeta:
        return Table::kMeta;
    }
    return std::nullopt;
  }
  Status ScanFile() {
    AMEM_ASSIGN(const auto size, file_.Size());
    std::vector<std::byte> chunk(kChunkBytes);
    for (Bytes offset = 0; offset < size;) {
      AMEM_ASSIGN(const auto n, file_.ReadAt(offset, chunk));
      if (n == 0) return {};
      const auto bytes = std::span<const std::byte>(chunk).first(n);
      const std::size_t rest = ScanRecords(bytes, [&](const Record& record) {
        const auto* start = record.payload.data() - sizeof(RecordHeader);
        if (const auto table = TableOf(record.type)) {
          places_[static_cast<std::size_t>(*table)][record.seq] = {offset + static_cast<Bytes>(start - chunk.data()),
                                                                   sizeof(RecordHeader) + record.payload.size()};
        }
      });
      // A record that goes on after the chunk is read again from its start, in a larger chunk if it fills this one.
      if (offset + n >= size) return {};
      if (rest < n) {
        offset += n - rest;
      } else if (chunk.size() < kLargestChunkBytes) {
        chunk.resize(chunk.size() * 2);
      } else {
        offset += n;
      }
    }
    return {};
  }
  // Pages that LMDB has freed still hold some of the events and snapshots that were removed.
  void ForgetLetGo() {
    auto& snapshots = places_[static_cast<std::size_t>(Table::kSnapshots)];
    while (snapshots.size() > 2) snapshots.erase(snapshots.begin());
    if (snapshots.size() < 2) return;
    auto& events = places_[static_cast<std::size_t>(Table::kEvents)];
    events.erase(events.begin(), events.upper_bound(snapshots.begin()->first));
  }

  File file_;
  std::array<std::map<std::uint64_t, Place>, kTables> places_;
  std::string damage_;
};

}  // namespace

Result<std::unique_ptr<RecordSource>> OpenSource(const std::filesystem::path& directory, bool live, bool trusted) {
  const auto path = directory / "data.mdb";
  AMEM_ASSIGN(auto file, File::OpenToRead(path));
  Status damage{Code::kCorrupt, path.string() +
                                    " is locked, and by no process of this user that can be seen from here, so LMDB's locks "
                                    "beside it are not used; read it as its user and where it runs, or copy the directory"};
  if (trusted) damage = live ? Status{} : CheckStructure(file);
  if (damage.ok()) {
    auto store = Store::Open(directory, live);
    if (store) return std::unique_ptr<RecordSource>(new StoreSource(std::move(*store)));
    damage = store.status();
    if (live || damage.code() != Code::kCorrupt) return damage;
  }
  if (damage.code() != Code::kCorrupt) return damage.Within("open " + path.string());
  return SalvagedSource::Collect(std::move(file), damage).Within("open " + path.string());
}

}  // namespace amem
