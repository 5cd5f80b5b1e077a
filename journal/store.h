// One journal's LMDB environment: three tables of records by sequence number.
//
// LMDB forbids opening an environment twice in one process (closing one would drop the locks of the other), so all stores of
// one journal in this process share its environment. A forked child opens its own, and leaves alone what it inherited.
#pragma once

#include <array>
#include <mutex>

#include "journal/record_source.h"

struct MDB_txn;

namespace amem {

inline constexpr const char* kLockFile = "lock.mdb";
// Whether LMDB may open that file of a session's directory: it writes to it, so it must be this user's, and if it is a link,
// one to this user's memory (shared_memory.h).
bool HasOwnLocks(const std::filesystem::path& directory);

class Store final : public RecordSource {
 public:
  using TableIds = std::array<unsigned, kTables>;

  // One transaction.
  class Writing {
   public:
    Writing(MDB_txn* txn, const TableIds& tables) : txn_(txn), tables_(tables) {}
    // Keys of a table must grow.
    Status Append(Table table, std::uint64_t key, std::span<const std::byte> value) const;
    // Removes up to `limit` entries with key < `below`; the number removed.
    [[nodiscard]] Result<std::uint64_t> RemoveBelow(Table table, std::uint64_t below, std::uint64_t limit) const;

   private:
    MDB_txn* txn_;
    const TableIds& tables_;
  };

  // Makes data.mdb and lock.mdb in `directory`, which exists and has none. `locks`: where lock.mdb is, if it is a link; empty:
  // there is none, and no other process reads by LMDB while this one writes.
  static Result<std::unique_ptr<Store>> Create(const std::filesystem::path& directory, Bytes map_bytes,
                                               const std::filesystem::path& locks = kLockFile);
  // Opens for reading only. `live`: a process may be writing to it, so LMDB's locks are taken, for which lock.mdb must be
  // writable; a copy needs none. Otherwise no file is touched.
  static Result<std::unique_ptr<Store>> Open(const std::filesystem::path& directory, bool live);
  // Whether this process has the store in that directory open, with locks.
  static bool IsOpenHere(const std::filesystem::path& directory);
  ~Store() override;

  Status Append(Table table, std::uint64_t key, std::span<const std::byte> value);  // in a transaction of its own
  // Runs `body` in a transaction, and commits it when that returns ok. Only by one thread at a time.
  Status Write(const std::function<Status(const Writing&)>& body);
  Status Scan(Table table, std::uint64_t from, const Visitor& visit) const override;
  [[nodiscard]] Result<KeyExtent> ExtentOf(Table table) const override;
  // Makes what was committed survive the operating system.
  Status Sync();
  // Tells the store the new name of its directory, for messages. To be called before other threads use the store.
  void MovedTo(const std::filesystem::path& directory);
  // Of a writer. kIo: data.mdb has no name any more, was cut short or cannot be reached, and LMDB must not touch its map.
  [[nodiscard]] Status CheckFiles() const;
  // Frees what dead readers of this journal held.
  void ForgetDeadReaders() const;

 private:
  struct Environment;
  struct Registry;
  explicit Store(std::shared_ptr<Environment> environment);
  Status Read(const std::function<Status(MDB_txn*)>& body) const;
  [[nodiscard]] Status CheckBeforeUse() const;  // CheckFiles, and whether all pages can be read
  std::shared_ptr<Environment> environment_;
  // LMDB maps the file, and each page that is read stays in the memory of this process, so that reading a journal of gigabytes
  // would take gigabytes. After a long scan its pages are unmapped; they stay in the cache of the operating system, and whoever
  // else looks at them in this process has them mapped again.
  struct Touched {
    std::uintptr_t begin = ~std::uintptr_t{0}, end = 0;
    std::size_t bytes = 0;
    void Add(std::span<const std::byte> frame);
    void LetGo();
  };
  mutable std::mutex touched_mutex_;
  mutable Touched touched_;
};

}  // namespace amem
