// One journal's LMDB environment: three tables of records by sequence number.
//
// LMDB forbids opening an environment twice in one process (closing one would drop the locks of the other), so all stores of
// one journal in this process share its environment. A forked child opens its own, and leaves alone what it inherited.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "journal/journal.h"
#include "statemachine/types.h"

struct MDB_txn;

namespace amem {

enum class Table : std::size_t { kMeta = 0, kEvents = 1, kSnapshots = 2 };
inline constexpr std::size_t kTables = 3;

// What a table holds; its keys are not contiguous.
struct KeyExtent {
  std::uint64_t records = 0;
  std::optional<std::uint64_t> first, last;  // keys
};

class Store {
 public:
  using TableIds = std::array<unsigned, kTables>;

  // One transaction; the bytes that it hands out are valid until it ends.
  class Reading {
   public:
    Reading(MDB_txn* txn, const TableIds& tables) : txn_(txn), tables_(tables) {}
    // Calls `visit` for the entries with key >= `from` in order, until it returns false.
    Status Scan(Table table, std::uint64_t from,
                const std::function<bool(std::uint64_t key, std::span<const std::byte> value)>& visit) const;
    [[nodiscard]] Result<KeyExtent> ExtentOf(Table table) const;

   protected:
    MDB_txn* txn_;
    const TableIds& tables_;
  };
  class Writing : public Reading {
   public:
    using Reading::Reading;
    // Keys of a table must grow.
    Status Append(Table table, std::uint64_t key, std::span<const std::byte> value) const;
    // Removes up to `limit` entries with key < `below`; the number removed.
    [[nodiscard]] Result<std::uint64_t> RemoveBelow(Table table, std::uint64_t below, std::uint64_t limit) const;
  };

  // Makes data.mdb and lock.mdb in `directory`, which exists and has none.
  static Result<std::unique_ptr<Store>> Create(const std::filesystem::path& directory, Bytes map_bytes, SyncMode sync);
  // Opens for reading only. `live`: a process may be writing to it, so LMDB's locks are taken, for which lock.mdb must be
  // writable; a copy needs none. Otherwise no file is touched.
  static Result<std::unique_ptr<Store>> Open(const std::filesystem::path& directory, bool live);
  // Whether this process has the store in that directory open.
  static bool IsOpenHere(const std::filesystem::path& directory);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Runs `body` in a transaction, and commits it when that returns ok. Only by one thread at a time.
  Status Write(const std::function<Status(const Writing&)>& body);
  Status Read(const std::function<Status(const Reading&)>& body) const;
  // Makes what was committed survive the operating system.
  Status Sync();
  // Tells the store the new name of its directory, for messages. To be called before other threads use the store.
  void MovedTo(const std::filesystem::path& directory);
  // Frees what dead readers of this journal held.
  void ForgetDeadReaders();

 private:
  struct Environment;
  struct Registry;
  explicit Store(std::shared_ptr<Environment> environment);
  std::shared_ptr<Environment> environment_;
};

}  // namespace amem
