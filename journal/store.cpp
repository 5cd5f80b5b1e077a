#include "journal/store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <lmdb.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/file.h"
#include "journal/base/fork_guard.h"
#include "journal/readable_pages.h"
#include "journal/shared_memory.h"
#include "statemachine/check.h"

namespace amem {
namespace {

constexpr const char* kTableNames[kTables] = {"meta", "events", "snapshots"};
constexpr Bytes kLockFileBytes = 16384;  // LMDB uses the size that it finds: room for about 250 readers

// LMDB reports EIO for a write that was cut short, as a disk that is nearly full does.
int Exactly(int error, const std::filesystem::path& path) {
  constexpr Bytes kNearly = Bytes{1} << 20;
  if (error != EIO) return error;
  struct statvfs disk {};
  if (statvfs(path.c_str(), &disk) == 0 && Bytes{disk.f_bavail} * disk.f_frsize < kNearly) return ENOSPC;
  struct stat file {};
  rlimit limit{};
  const bool limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  if (limited && stat(path.c_str(), &file) == 0 && static_cast<Bytes>(file.st_size) + kNearly > limit.rlim_cur) return EFBIG;
  return error;
}

Status Failure(std::string_view doing, const std::filesystem::path& directory, int rc) {
  const auto path = directory / "data.mdb";
  if (rc > 0) return SystemFailure(doing, path, Exactly(rc, path));
  const char* advice = "";
  if (rc == MDB_MAP_FULL) advice = "; the journal reached the limit of its size (JournalOptions::map_bytes)";
  if (rc == MDB_VERSION_MISMATCH || rc == MDB_INVALID) advice = "; it is not a journal, or its first pages are damaged";
  const bool corrupt = rc == MDB_CORRUPTED || rc == MDB_PAGE_NOTFOUND || rc == MDB_INVALID || rc == MDB_VERSION_MISMATCH ||
                       rc == MDB_NOTFOUND || rc == MDB_BAD_VALSIZE || rc == MDB_INCOMPATIBLE;
  return {corrupt ? Code::kCorrupt : Code::kIo,
          fmt::format("{} {}: {} (LMDB {}){}", doing, path.string(), mdb_strerror(rc), rc, advice)};
}

Status TableFailure(std::string_view doing, Table table, int rc) {
  const std::string what = fmt::format("{} table {}", doing, kTableNames[static_cast<std::size_t>(table)]);
  if (rc > 0) return {Code::kIo, what + ": " + SystemFailure("", "", rc).message()};
  if (rc == MDB_MAP_FULL)
    return {Code::kIo, what + ": the file reached the limit of its size (MDB_MAP_FULL); raise JournalOptions::map_bytes"};
  return {Code::kCorrupt, fmt::format("{}: {} (LMDB {})", what, mdb_strerror(rc), rc)};
}

MDB_val ValueOf(std::span<const std::byte> bytes) { return {bytes.size(), const_cast<std::byte*>(bytes.data())}; }
MDB_val KeyOf(std::uint64_t& key) { return {sizeof key, &key}; }

class Cursor {
 public:
  int Open(MDB_txn* txn, unsigned table) {
    MDB_cursor* made = nullptr;
    const int rc = mdb_cursor_open(txn, table, &made);
    cursor_.reset(made);
    return rc;
  }
  // Positions like mdb_cursor_get. A key that is no sequence number is corruption.
  int Get(std::uint64_t& key, MDB_val& value, MDB_cursor_op op) {
    MDB_val k = KeyOf(key);
    const int rc = mdb_cursor_get(cursor_.get(), &k, &value, op);
    if (rc != 0) return rc;
    if (k.mv_size != sizeof key) return MDB_CORRUPTED;
    std::memcpy(&key, k.mv_data, sizeof key);
    return 0;
  }
  int Remove() { return mdb_cursor_del(cursor_.get(), 0); }

 private:
  std::unique_ptr<MDB_cursor, decltype(&mdb_cursor_close)> cursor_{nullptr, &mdb_cursor_close};
};

using FileKey = std::pair<dev_t, ino_t>;  // which file, by whatever name

Result<FileKey> Identify(const std::filesystem::path& directory) {
  struct stat st {};
  const auto path = directory / "data.mdb";
  if (::stat(path.c_str(), &st) != 0) return SystemFailure("open", path, errno);
  return FileKey{st.st_dev, st.st_ino};
}

int OpenTables(MDB_env* env, Store::TableIds& tables, bool create) {
  MDB_txn* txn = nullptr;
  int rc = mdb_txn_begin(env, nullptr, create ? 0 : MDB_RDONLY, &txn);
  if (rc != 0) return rc;
  const unsigned flags = MDB_INTEGERKEY | (create ? MDB_CREATE : 0U);
  for (std::size_t i = 0; i < kTables && rc == 0; ++i) rc = mdb_dbi_open(txn, kTableNames[i], flags, &tables[i]);
  if (rc == 0) return mdb_txn_commit(txn);
  mdb_txn_abort(txn);
  return rc;
}

int OpenEnvironment(MDB_env** env, const std::filesystem::path& directory, Bytes map_bytes, unsigned flags) {
  int rc = mdb_env_create(env);
  if (rc != 0) return rc;
  if (map_bytes != 0) rc = mdb_env_set_mapsize(*env, map_bytes);
  if (rc == 0) rc = mdb_env_set_maxdbs(*env, kTables);
  if (rc == 0) rc = mdb_env_open(*env, directory.c_str(), flags, 0600);
  if (rc == 0) return 0;
  mdb_env_close(*env);
  *env = nullptr;
  return rc;
}

// LMDB maps a lock file that has holes: on a full disk, touching a hole would raise a signal.
Status ReserveLockFile(const std::filesystem::path& directory, const std::filesystem::path& locks) {
  if (locks.empty()) return {};
  const auto path = directory / locks;
  AMEM_ASSIGN(const auto file, File::Open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW));
  if (const int error = posix_fallocate(file.fd(), 0, kLockFileBytes); error != 0)
    return SystemFailure("make room in", path, error);
  if (locks.is_absolute() && symlink(locks.c_str(), (directory / kLockFile).c_str()) != 0)
    return SystemFailure("make a link in", directory, errno);
  return {};
}

}  // namespace

struct Store::Environment {
  MDB_env* env = nullptr;
  TableIds tables{};
  std::filesystem::path directory;
  FileKey file;
  bool has_locks = true;
  File lock;  // of a writer: data.mdb, locked, so that without a tail it is known to live as well
  // of a writer: what data.mdb had when it was last written to, as it never gets shorter; until when its pages are not checked
  std::atomic<Bytes> bytes{0};
  std::atomic<std::uint64_t> check_again_ns{0};
};

// LMDB allows a process one environment for each file, so this list belongs to the process. It is never destroyed, because
// stores may outlive static objects.
struct Store::Registry {
  ForkGuard guard;
  std::mutex mutex;
  std::map<FileKey, std::shared_ptr<Environment>> environments;

  static Registry& The();
  std::unique_ptr<Store> Enter(std::shared_ptr<Environment> made, const std::filesystem::path& directory, const FileKey& file) {
    made->directory = directory;
    made->file = file;
    environments[file] = made;
    return std::unique_ptr<Store>(new Store(std::move(made)));
  }
};

Store::Registry& Store::Registry::The() {
  static std::atomic<Registry*> current{nullptr};
  Registry* seen = current.load(std::memory_order_acquire);
  while (seen == nullptr || seen->guard.InChild()) {  // a child starts with an empty list and leaves its parent's alone
    auto* fresh = new Registry;
    if (current.compare_exchange_strong(seen, fresh)) return *fresh;
    delete fresh;
  }
  return *seen;
}

Store::Store(std::shared_ptr<Environment> environment) : environment_(std::move(environment)) {}

Result<std::unique_ptr<Store>> Store::Create(const std::filesystem::path& directory, Bytes map_bytes,
                                             const std::filesystem::path& locks) {
  AMEM_TRY(ReserveLockFile(directory, locks));
  Registry& registry = Registry::The();
  const std::lock_guard lock(registry.mutex);
  auto made = std::make_shared<Environment>();
  made->has_locks = !locks.empty();
  const unsigned flags = MDB_NOTLS | MDB_NOSYNC | (made->has_locks ? 0U : MDB_NOLOCK);
  if (const int rc = OpenEnvironment(&made->env, directory, map_bytes, flags); rc != 0) return Failure("create", directory, rc);
  const int rc = OpenTables(made->env, made->tables, true);
  const auto file = Identify(directory);
  if (rc != 0 || !file) {
    mdb_env_close(made->env);
    return rc != 0 ? Failure("create tables in", directory, rc) : file.status();
  }
  auto data = File::OpenToRead(directory / "data.mdb");
  const auto size = data ? data->Size() : Result<Bytes>(data.status());
  if (!size) {
    mdb_env_close(made->env);
    return size.status();
  }
  made->lock = *std::move(data);
  made->bytes = *size;
  (void)flock(made->lock.fd(), LOCK_EX | LOCK_NB);
  return registry.Enter(std::move(made), directory, *file);
}

Status Store::CheckFiles() const {
  if (environment_->lock.fd() < 0) return {};  // of a reader
  AMEM_TRY(CheckWhole(environment_->lock, environment_->bytes));
  // By its name, because closing another descriptor of it would end LMDB's locks. A lock file that is not there harms nobody.
  struct stat locks {};
  const bool has_locks = environment_->has_locks && stat((environment_->directory / kLockFile).c_str(), &locks) == 0;
  if (!has_locks || static_cast<Bytes>(locks.st_size) >= kLockFileBytes) return {};
  return {Code::kIo, std::string(kLockFile) + " was cut short"};
}

// Costs about 20 us for each megabyte of the file that is in memory, and a read where it is not: so it takes at most a tenth
// of the time.
Status Store::CheckBeforeUse() const {
  constexpr std::uint64_t kOftenNs = 20'000'000, kShare = 10;
  if (environment_->lock.fd() < 0) return {};
  const auto lost = [&](const Status& why) { return why.Within("the files of journal " + environment_->directory.string()); };
  if (const Status whole = CheckFiles(); !whole.ok()) return lost(whole);
  const std::uint64_t began = MonotonicNs();
  if (began < environment_->check_again_ns) return {};
  AMEM_TRY(lost(CheckReadable(environment_->lock, environment_->bytes)));
  const std::uint64_t ended = MonotonicNs();
  environment_->check_again_ns = ended + std::max(kOftenNs, (ended - began) * kShare);
  return {};
}

bool HasOwnLocks(const std::filesystem::path& directory) {
  const auto locks = directory / kLockFile;
  struct stat st {};
  std::error_code failed;
  if (lstat(locks.c_str(), &st) != 0) return false;
  if (S_ISLNK(st.st_mode) && !IsOwnSharedMemory(std::filesystem::read_symlink(locks, failed))) return false;
  return stat(locks.c_str(), &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid();
}

Result<std::unique_ptr<Store>> Store::Open(const std::filesystem::path& directory, bool live) {
  Registry& registry = Registry::The();
  const std::lock_guard lock(registry.mutex);
  AMEM_ASSIGN(const auto file, Identify(directory));
  if (auto* const open = FindIn(registry.environments, file)) return std::unique_ptr<Store>(new Store(*open));
  auto made = std::make_shared<Environment>();
  if (live && (!HasOwnLocks(directory) || access((directory / kLockFile).c_str(), W_OK) != 0)) {
    // A reader that LMDB does not know of would see pages change while it reads them.
    return Status{Code::kRefused,
                  "open " + (directory / "data.mdb").string() +
                      ": it is being written, and to read it then lock.mdb beside it must be writable; copy the "
                      "directory and read the copy, or wait until the session has ended"};
  }
  const unsigned flags = MDB_NOTLS | MDB_RDONLY | (live ? 0U : MDB_NOLOCK);
  if (const int rc = OpenEnvironment(&made->env, directory, 0, flags); rc != 0) return Failure("open", directory, rc);
  if (const int rc = OpenTables(made->env, made->tables, false); rc != 0) {
    mdb_env_close(made->env);
    return Failure("open the tables of", directory, rc);
  }
  return registry.Enter(std::move(made), directory, file);
}

bool Store::IsOpenHere(const std::filesystem::path& directory) {
  Registry& registry = Registry::The();
  const std::lock_guard lock(registry.mutex);
  const auto file = Identify(directory);
  const auto* const open = file ? FindIn(registry.environments, *file) : nullptr;
  return open != nullptr && (*open)->has_locks;
}

Store::~Store() {
  Registry& registry = Registry::The();
  const std::lock_guard lock(registry.mutex);
  const auto it = registry.environments.find(environment_->file);
  // A forked child has another list, and leaves LMDB's memory as it is: closing would release the locks of the parent's
  // readers, which are in shared memory.
  if (it == registry.environments.end() || it->second != environment_) return;
  environment_.reset();
  if (it->second.use_count() > 1) return;  // that of another store, which can only change under the lock
  mdb_env_close(it->second->env);
  registry.environments.erase(it);
}

Status Store::Append(Table table, std::uint64_t key, std::span<const std::byte> value) {
  return Write([&](const Writing& writing) { return writing.Append(table, key, value); });
}

Status Store::Write(const std::function<Status(const Writing&)>& body) {
  AMEM_TRY(CheckBeforeUse());
  MDB_txn* txn = nullptr;
  if (const int rc = mdb_txn_begin(environment_->env, nullptr, 0, &txn); rc != 0)
    return Failure("begin to write", environment_->directory, rc);
  if (Status status = body(Writing(txn, environment_->tables)); !status) {
    mdb_txn_abort(txn);
    return status.Within("write " + (environment_->directory / "data.mdb").string());
  }
  if (const int rc = mdb_txn_commit(txn); rc != 0) return Failure("commit to", environment_->directory, rc);
  if (const auto size = environment_->lock.Size()) environment_->bytes = *size;
  return {};
}

Status Store::Read(const std::function<Status(MDB_txn*)>& body) const {
  AMEM_TRY(CheckBeforeUse());
  MDB_txn* txn = nullptr;
  int rc = mdb_txn_begin(environment_->env, nullptr, MDB_RDONLY, &txn);
  if (rc == MDB_READERS_FULL) {  // some may be of processes that died
    ForgetDeadReaders();
    rc = mdb_txn_begin(environment_->env, nullptr, MDB_RDONLY, &txn);
  }
  if (rc != 0) return Failure("begin to read", environment_->directory, rc);
  Status status = body(txn);
  mdb_txn_abort(txn);
  return status.Within("read " + (environment_->directory / "data.mdb").string());
}

Status Store::Sync() {
  AMEM_TRY(CheckBeforeUse());
  const int rc = mdb_env_sync(environment_->env, 1);
  return rc == 0 ? Status{} : Failure("sync", environment_->directory, rc);
}

void Store::MovedTo(const std::filesystem::path& directory) { environment_->directory = directory; }

void Store::ForgetDeadReaders() const {
  int dead = 0;
  mdb_reader_check(environment_->env, &dead);
}

void Store::Touched::Add(std::span<const std::byte> frame) {
  const auto at = reinterpret_cast<std::uintptr_t>(frame.data());
  begin = std::min(begin, at);
  end = std::max(end, at + frame.size());
  bytes += frame.size();
}

// All between the first and the last page of any scan: LMDB's inner pages lie between those of the records, and the kernel
// maps some neighbours of each page that is touched.
void Store::Touched::LetGo() {
  constexpr std::size_t kWorthIt = std::size_t{256} << 10;
  if (bytes < kWorthIt) return;
  bytes = 0;
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t from = begin / page * page;
  (void)madvise(reinterpret_cast<void*>(from), end - from, MADV_DONTNEED);  // a failure costs memory and nothing else
}

Status Store::Scan(Table table, std::uint64_t from, const Visitor& visit) const {
  const std::lock_guard lock(touched_mutex_);
  Status done = Read([&](MDB_txn* txn) -> Status {
    Cursor cursor;
    int rc = cursor.Open(txn, environment_->tables[static_cast<std::size_t>(table)]);
    std::uint64_t key = from;
    MDB_val value{};
    for (MDB_cursor_op op = MDB_SET_RANGE; rc == 0; op = MDB_NEXT) {
      rc = cursor.Get(key, value, op);
      if (rc != 0) break;
      const std::span frame(static_cast<const std::byte*>(value.mv_data), value.mv_size);
      touched_.Add(frame);
      if (!visit(key, frame)) return {};
    }
    return rc == MDB_NOTFOUND ? Status{} : TableFailure("scan", table, rc);
  });
  touched_.LetGo();
  return done;
}

Result<KeyExtent> Store::ExtentOf(Table table) const {
  KeyExtent extent;
  AMEM_TRY(Read([&](MDB_txn* txn) -> Status {
    MDB_stat stat{};
    Cursor cursor;
    const unsigned id = environment_->tables[static_cast<std::size_t>(table)];
    std::uint64_t first = 0, last = 0;
    MDB_val value{};
    int rc = mdb_stat(txn, id, &stat);
    if (rc == 0) rc = cursor.Open(txn, id);
    if (rc == 0) rc = cursor.Get(first, value, MDB_FIRST);
    if (rc == 0) rc = cursor.Get(last, value, MDB_LAST);
    if (rc == 0) extent = {stat.ms_entries, first, last};
    return rc == 0 || rc == MDB_NOTFOUND ? Status{} : TableFailure("read", table, rc);
  }));
  return extent;
}

Status Store::Writing::Append(Table table, std::uint64_t key, std::span<const std::byte> value) const {
  AMEM_CHECK(!value.empty(), key);
  MDB_val k = KeyOf(key);
  MDB_val v = ValueOf(value);
  const int rc = mdb_put(txn_, tables_[static_cast<std::size_t>(table)], &k, &v, MDB_APPEND);
  return rc == 0 ? Status{} : TableFailure("append to", table, rc);
}

Result<std::uint64_t> Store::Writing::RemoveBelow(Table table, std::uint64_t below, std::uint64_t limit) const {
  Cursor cursor;
  int rc = cursor.Open(txn_, tables_[static_cast<std::size_t>(table)]);
  std::uint64_t removed = 0;
  for (; rc == 0 && removed < limit; ++removed) {
    std::uint64_t key = 0;
    MDB_val value{};
    rc = cursor.Get(key, value, MDB_FIRST);
    if (rc != 0 || key >= below) break;
    rc = cursor.Remove();
  }
  if (rc != 0 && rc != MDB_NOTFOUND) return TableFailure("remove from", table, rc);
  return removed;
}

}  // namespace amem
