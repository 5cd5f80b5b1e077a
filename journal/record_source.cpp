#include "journal/record_source.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "journal/record.h"
#include "journal/store.h"

namespace amem {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{16} << 20;
constexpr std::size_t kLargestChunkBytes = std::size_t{256} << 20;  // no record is larger, whatever its header claims

// Finds the whole records in a damaged file, and remembers where they are.
class SalvagedSource final : public RecordSource {
 public:
  static Result<std::unique_ptr<RecordSource>> Collect(File file, const Status& damage) {
    std::unique_ptr<SalvagedSource> source(new SalvagedSource(std::move(file)));
    AMEM_TRY(source->ScanFile());
    if (std::ranges::all_of(source->places_, &Places::empty))
      return Status{Code::kCorrupt, damage.message() + "; and no record of a journal is in it"};
    source->ForgetLetGo();
    source->damage_ = damage.message() + "; whole records were collected from the file";
    return std::unique_ptr<RecordSource>(std::move(source));
  }
  Status Scan(Table table, std::uint64_t from, const Visitor& visit) const override {
    const Places& places = Of(table);
    std::vector<std::byte> frame;
    for (auto it = places.lower_bound(from); it != places.end(); ++it) {
      frame.resize(it->second.bytes);
      AMEM_TRY(file_.ReadAt(it->second.offset, frame).status());
      if (!visit(it->first, frame)) break;
    }
    return {};
  }
  [[nodiscard]] Result<KeyExtent> ExtentOf(Table table) const override {
    const Places& places = Of(table);
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

  using Places = std::map<std::uint64_t, Place>;
  // Of the table in which records of that type are; null: there is no such type.
  Places* PlacesOf(RecordType type) {
    if (type == RecordType::kEvent) return &Of(Table::kEvents);
    if (type == RecordType::kSnapshot) return &Of(Table::kSnapshots);
    return type == RecordType::kMeta ? &Of(Table::kMeta) : nullptr;
  }
  [[nodiscard]] Places& Of(Table table) { return places_[static_cast<std::size_t>(table)]; }
  [[nodiscard]] const Places& Of(Table table) const { return places_[static_cast<std::size_t>(table)]; }
  Status ScanFile() {
    AMEM_ASSIGN(const auto size, file_.Size());
    std::vector<std::byte> chunk(kChunkBytes);
    for (Bytes offset = 0; offset < size;) {
      AMEM_ASSIGN(const auto n, file_.ReadAt(offset, chunk));
      if (n == 0) return {};
      const auto bytes = std::span<const std::byte>(chunk).first(n);
      const std::size_t rest = ScanRecords(bytes, [&](const Record& record) {
        const auto* start = record.payload.data() - sizeof(RecordHeader);
        if (Places* const places = PlacesOf(record.type)) {
          (*places)[record.seq] = {offset + static_cast<Bytes>(start - chunk.data()),
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
    Places& snapshots = Of(Table::kSnapshots);
    while (snapshots.size() > 2) snapshots.erase(snapshots.begin());
    if (snapshots.size() < 2) return;
    Places& events = Of(Table::kEvents);
    events.erase(events.begin(), events.upper_bound(snapshots.begin()->first));
  }

  File file_;
  std::array<Places, kTables> places_;
  std::string damage_;
};

}  // namespace

Result<std::unique_ptr<RecordSource>> OpenSource(const std::filesystem::path& directory, bool live, bool trusted) {
  const auto path = directory / "data.mdb";
  AMEM_ASSIGN(auto file, File::OpenToRead(path));
  const bool locks_are_here = access((directory / kLockFile).c_str(), F_OK) == 0;
  Status damage{
      Code::kCorrupt,
      path.string() + (locks_are_here ? " is locked, and by no process of this user that can be seen from here, so "
                                        "LMDB's locks beside it are not used; read it as its user and where it runs, "
                                        "or copy the directory"
                                      : " is being written, and LMDB's locks are not to be seen from here: they are in "
                                        "memory (/dev/shm); read it where its process runs")};
  if (trusted) damage = live ? Status{} : CheckStructure(file);
  if (damage.ok()) {
    auto store = Store::Open(directory, live);
    if (store) return std::unique_ptr<RecordSource>(*std::move(store));
    damage = store.status();
    if (live || damage.code() != Code::kCorrupt) return damage;
  }
  if (damage.code() != Code::kCorrupt) return damage.Within("open " + path.string());
  return SalvagedSource::Collect(std::move(file), damage).Within("open " + path.string());
}

}  // namespace amem
