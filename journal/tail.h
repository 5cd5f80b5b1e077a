// The tail: where records wait until they are in LMDB. When the writer dies, its records stay where they are, and a reader
// finds them.
//
// The file `tail` is one page of header and a ring. A journal on a disk has the ring in memory that outlives the process
// (shared_memory.h), and in its file only a header that says so, and the lock. Where there is no such memory, what is appended
// is written to the file by calls, which cost a microsecond, return errors, and wait for the file system.
//
//  Positions count bytes since the beginning and never wrap; position p lies at
// p % capacity. Records do not wrap either: when the rest of the ring is too short for one, it is skipped.
//
//     drained          published     begun
//   ----|===record===record|--torn-----|----    begun > published in a dead process: killed inside an append
//
// The appender moves `begun`, writes, and moves `published`; the drain moves `drained` after LMDB has committed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "journal/base/file.h"
#include "journal/record.h"
#include "statemachine/types.h"

namespace amem {

inline constexpr Bytes kTailHeaderBytes = 4096;
inline constexpr Bytes kLeastTailBytes = 16384;  // with the header

struct TailHeader {
  static constexpr std::uint64_t kMagic = 0x4c4941544d454d41;  // "AMEMTAIL" in the file
  std::uint64_t magic = kMagic;
  std::uint32_t format = 1;
  std::int32_t pid = 0;
  std::uint64_t capacity = 0;  // of the ring
  std::uint64_t session = 0;
  std::uint64_t pid_namespace = 0;  // inode of /proc/self/ns/pid; a pid means something only there
  std::uint64_t process_start = 0;  // field 22 of /proc/PID/stat; tells a reused pid
  std::uint64_t boot = 0;           // a number made of the boot id
  std::uint32_t host = 0;           // HostNumber()
  std::uint32_t crc = 0;            // of all before
  alignas(64) std::atomic<std::uint64_t> begun{0};
  std::atomic<std::uint64_t> published{0};
  alignas(64) std::atomic<std::uint64_t> drained{0};
  alignas(64) std::atomic<std::uint32_t> broken{0};  // 1: reason is complete
  char reason[508] = {};
  std::uint64_t inode = 0;            // of the file `tail`, and so another one in a copy; 0: not known
  std::uint32_t in_memory = 0;        // 1: the positions and the ring are in MemoryOf(this file)
  char journal[1024] = {};            // in memory: the journal's directory, by its last name
  std::uint64_t mount_namespace = 0;  // in which that name means something; 0: not known
};
static_assert(sizeof(TailHeader) <= kTailHeaderBytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

// A stretch of the ring, in two parts where it goes over the end.
struct RingStretch {
  std::span<const std::byte> parts[2];
};

// The writer's side. Append by one thread at a time, Drainable and Drained by one other.
class Tail {
 public:
  enum class Ring { kInMemory, kInFile };  // the first where it can be had
  // Makes the file with all its blocks, so that a full disk is an error here, and locks it: the lock goes with the process.
  // `bytes` includes the header.
  static Result<Tail> Create(const std::filesystem::path& path, Bytes bytes, SessionId session, Ring ring = Ring::kInMemory);

  // False: there is no room now, or the file cannot be written, as Failure() says.
  bool Append(RecordType type, std::uint64_t seq, std::span<const std::byte> payload);
  [[nodiscard]] const Status& Failure() const { return failure_; }
  // There may never be room for a larger payload.
  [[nodiscard]] std::size_t LargestPayload() const { return capacity_ / 4; }
  [[nodiscard]] std::uint64_t Published() const { return header().published.load(std::memory_order_acquire); }
  [[nodiscard]] std::uint64_t DrainedUpTo() const { return header().drained.load(std::memory_order_acquire); }
  [[nodiscard]] Bytes Used() const;
  [[nodiscard]] Bytes Capacity() const { return capacity_; }

  // What is published and not yet drained.
  [[nodiscard]] RingStretch Drainable(std::uint64_t up_to) const;
  void Drained(std::uint64_t up_to);

  // Other processes can read the reason even when no file can be written any more.
  void MarkBroken(std::string_view reason);

  // Where LMDB can have its locks, which it maps: beside the ring in memory, or in the journal's directory (a relative path).
  // Empty: nowhere.
  [[nodiscard]] std::filesystem::path PlaceOfLocks() const;
  // kIo: its file or its memory has no name any more, was cut short or cannot be reached.
  [[nodiscard]] Status CheckFiles() const;
  // The journal's directory has got its name.
  void MovedTo(const std::filesystem::path& directory);

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(std::byte* at) const;
  };
  using Map = std::unique_ptr<std::byte[], Unmap>;
  Tail(File file, File memory, Map map, Bytes capacity, std::filesystem::path in_memory, bool by_calls)
      : file_(std::move(file)),
        memory_(std::move(memory)),
        map_(std::move(map)),
        capacity_(capacity),
        in_memory_(std::move(in_memory)),
        by_calls_(by_calls) {}
  Status Prepare(const std::filesystem::path& path, Bytes in_file, Bytes bytes, SessionId session, std::uint64_t inode);
  static Result<Map> MapRing(const std::filesystem::path& path, int fd, Bytes bytes);
  [[nodiscard]] TailHeader& header() const { return *reinterpret_cast<TailHeader*>(map_.get()); }
  [[nodiscard]] std::byte* ring() const { return map_.get() + kTailHeaderBytes; }
  Status WriteByCalls(std::uint64_t at, std::uint64_t skip, std::size_t bytes);

  File file_;    // holds the lock
  File memory_;  // locked as well; none: the ring is in the file
  Map map_;      // of the memory or of the file; by calls: the process's own copy of the file
  std::uint64_t capacity_;
  std::uint64_t free_until_ = 0;     // the appender's copy of drained + capacity; refreshed when it does not suffice
  std::filesystem::path in_memory_;  // the name of memory_
  bool by_calls_;
  Status failure_;  // of a call
};

// Of a writer that has ended: writes what it left in memory to the file, and gives the memory back, if both are this user's.
// Several processes may do it at once. A writer that closes, or whose journal is removed, needs only the second.
void MoveToDisk(const std::filesystem::path& path);
void GiveMemoryBack(const std::filesystem::path& path);
// Gives back this user's memory of tails whose writers have ended and whose journals were removed: at once where the directory
// of all journals is gone, and otherwise after an hour, because a journal may have been moved. Where the journal was written in
// another mount namespace, as of a container that shares /dev/shm, its directory cannot be seen from here: after a day.
void RemoveForgottenMemory();

// Splits a stretch into records. `visit` gets the bytes of a frame, header included, and the position in the stretch where it
// ends; it ends the walk by returning false. WalkRing returns false when it meets bytes that are not a record.
bool WalkRing(const RingStretch& stretch,
              const std::function<bool(std::span<const std::byte> frame, std::uint64_t end)>& visit);

// What of a tail cannot be read, and why.
struct TailDamage {
  enum class Kind : std::uint8_t {
    kNone,
    kWithin,       // whole records follow
    kAtEnd,        // none do, and there may have been more
    kUnreachable,  // all is in memory that is gone, or of another container
  };
  Kind kind = Kind::kNone;
  Bytes bytes = 0;  // that are not readable as records
  std::string words;
};

// What a reader finds in a tail, also while its owner writes to it.
struct TailContents {
  std::vector<std::byte> copy;
  std::vector<Record> records;  // in order, whole; they point into `copy`
  TailDamage damage;
  bool torn = false;          // an append was under way
  std::string broken_reason;  // set when the writer said that it is broken
  Bytes file_bytes = 0;
};
// Any bytes may be in the file. A file that is not there is no failure.
Result<TailContents> ReadTail(const std::filesystem::path& path);

// What can be told from here of the process that made a tail.
enum class WriterLife : std::uint8_t {
  kAlive,
  kEnded,    // also when there is no tail
  kUnknown,  // it is one of another host or pid namespace, perhaps, or the tail is damaged, or cannot be read now
};
// `shared`: the file system may be one of several hosts, where a lock that is free proves nothing about a writer elsewhere.
WriterLife LifeOfWriter(const std::filesystem::path& path, bool shared);
inline bool WriterIsAlive(const std::filesystem::path& path) { return LifeOfWriter(path, false) == WriterLife::kAlive; }
inline bool WriterMayLive(const std::filesystem::path& path) { return LifeOfWriter(path, false) != WriterLife::kEnded; }
// Whether this file is a copy of the one that the writer made. False where that cannot be told.
bool IsCopy(const std::filesystem::path& path);
// The writer's process while it can be seen from here: of this boot, of this pid namespace, and not known to have ended. Else
// 0.
std::int32_t ProcessOfWriter(const std::filesystem::path& path);
// Whether the locks in this tail's directory are those of a living writer that this process may trust: one of the same user
// that has this very file open. Anybody who can read a directory can lock a file in it. Of this process's own writers
// Store::IsOpenHere knows.
bool WriterIsTrusted(const std::filesystem::path& path);

// A number of this host, the same after a reboot, and never 0.
std::uint32_t HostNumber();

}  // namespace amem
