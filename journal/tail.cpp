#include "journal/tail.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "journal/base/process_sight.h"
#include "journal/readable_pages.h"
#include "journal/shared_memory.h"
#include "journal/store.h"
#include "journal/tail_header.h"
#include "statemachine/fnv1a.h"

namespace amem {
namespace {

constexpr std::uint32_t kSkipMagic = 0x70694b53;  // "SKip": go on at the start of the ring

// FNV-1a's own offset basis has one digit more. This one was mistyped once, and is in the headers of the tails on disk: a
// reader with the right one would take every living writer's journal for one of another boot.
constexpr std::uint64_t kBootOffsetBasis = 1469598103934665603ULL;

// Nothing: it cannot be read now.
std::optional<std::uint64_t> BootNumber() {
  Fnv1a number(kBootOffsetBasis);
  const std::string boot = ReadSmallFile("/proc/sys/kernel/random/boot_id");
  if (boot.empty()) return std::nullopt;
  number.Add(std::as_bytes(std::span(boot)));
  return number.value();
}

ProcessIdentity WriterIn(const TailHeader& header) { return {header.pid, header.process_start, header.pid_namespace}; }

void Introduce(TailHeader& header, std::uint64_t capacity, SessionId session, std::uint64_t inode) {
  header.inode = inode;
  const ProcessIdentity self = OwnProcess();
  header.pid = self.pid;
  header.capacity = capacity;
  header.session = session.value;
  header.pid_namespace = self.pid_namespace;
  header.process_start = self.start_ticks;
  header.boot = BootNumber().value_or(0);
  header.host = HostNumber();
  header.mount_namespace = MountNamespace();
  header.crc = HeaderCrc(header);
}

// Exceeding the limit of file sizes would end the process with a signal instead of failing a call.
Status CheckFileLimit(const std::filesystem::path& path, Bytes bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < bytes)
    return SystemFailure("make room for " + std::to_string(bytes) + " bytes in", path, EFBIG);
  return {};
}

struct Positions {
  std::uint64_t begun = 0, published = 0, drained = 0;
};

Positions PositionsIn(const TailHeader& header) {
  Positions p;  // drained first, then published, then begun: each is at most the next, also while they move
  // Once more if `drained` moved: this thread may be held up for so long that the writer goes around the ring.
  for (int tries = 0; tries < 1000; ++tries) {
    p.drained = header.drained.load(std::memory_order_acquire);
    p.published = header.published.load(std::memory_order_acquire);
    p.begun = header.begun.load(std::memory_order_acquire);
    if (header.drained.load(std::memory_order_acquire) == p.drained) break;
  }
  return p;
}

bool Plausible(const TailHeader& header, const Positions& p, Bytes ring_bytes) {
  const std::uint64_t used = p.published - p.drained;
  return IsSound(header) && header.capacity == ring_bytes && p.drained <= p.published && used <= ring_bytes &&
         p.begun >= p.published && (p.drained | p.published) % kRecordAlignment == 0;
}

using Damage = TailDamage::Kind;

// Finds records after a damaged place by trying every position where a record may start.
void CollectPart(std::span<const std::byte> part, TailContents& out) {
  std::size_t at = 0;
  while (at < part.size()) {
    const auto rest = part.subspan(at);
    if (rest.size() >= sizeof kSkipMagic && std::memcmp(rest.data(), &kSkipMagic, sizeof kSkipMagic) == 0) {
      if (out.damage.kind != Damage::kAtEnd) return;
    } else if (const auto record = ReadRecord(rest)) {
      // A record with a smaller number is left from an earlier round through the ring.
      if (out.records.empty() || record->seq > out.records.back().seq) {
        out.records.push_back(*record);
        if (out.damage.kind == Damage::kAtEnd) out.damage.kind = Damage::kWithin;
      }
      at += RecordBytes(record->payload.size());
      continue;
    }
    out.damage.kind = Damage::kAtEnd;
    out.damage.bytes += std::min(kRecordAlignment, rest.size());
    at += kRecordAlignment;
  }
}

// No writer left such a header, so whole records are searched for in the whole ring.
void Salvage(std::span<const std::byte> ring, TailContents& out) {
  ScanRecords(ring, [&](const Record& record) { out.records.push_back(record); });
  std::sort(out.records.begin(), out.records.end(), [](const Record& a, const Record& b) { return a.seq < b.seq; });
  const auto same = [](const Record& a, const Record& b) { return a.seq == b.seq; };
  out.records.erase(std::unique(out.records.begin(), out.records.end(), same), out.records.end());
  out.damage.kind = Damage::kAtEnd;
  out.damage.bytes = ring.size();
}

Status CopyRing(const File& file, std::uint64_t capacity, const Positions& p, TailContents& out) {
  const std::uint64_t start = p.drained % capacity;
  const std::uint64_t used = p.published - p.drained;
  const std::uint64_t first = std::min(used, capacity - start);
  out.copy.resize(used);
  const auto into = std::span(out.copy);
  AMEM_TRY(file.ReadAt(kTailHeaderBytes + start, into.first(first)).status());
  return file.ReadAt(kTailHeaderBytes, into.subspan(first)).status();
}

Status ReadPresent(const File& file, Bytes file_bytes, TailContents& out) {
  out.file_bytes = file_bytes;
  const Bytes ring_bytes = file_bytes > kTailHeaderBytes ? file_bytes - kTailHeaderBytes : 0;
  if (ring_bytes == 0) {
    out.damage = {Damage::kAtEnd, 0,
                  "the tail has " + std::to_string(file_bytes) + " bytes, less than its header: it was cut off"};
    return {};
  }
  const auto header = MapHeader(file);
  if (!header) return SystemFailure("map", "tail", errno);
  const Positions before = PositionsIn(*header);
  if (!Plausible(*header, before, ring_bytes)) {
    out.damage.words = "the header of the tail is damaged, or the tail was cut off; whole records in it are used";
    out.copy.resize(ring_bytes);
    AMEM_ASSIGN(const auto n, file.ReadAt(kTailHeaderBytes, out.copy));
    out.copy.resize(n);
    Salvage(out.copy, out);
    return {};
  }
  if (header->broken.load(std::memory_order_acquire) != 0)
    out.broken_reason.assign(header->reason, strnlen(header->reason, sizeof header->reason));
  AMEM_TRY(CopyRing(file, ring_bytes, before, out));
#ifndef AMEM_THREAD_SANITIZED  // the thread sanitizer does not know fences
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
  // Records that were drained during the copy may be overwritten in it; they are in LMDB.
  const std::uint64_t drained = std::clamp(PositionsIn(*header).drained, before.drained, before.published);
  out.torn = before.begun != before.published;
  const std::uint64_t gone = drained - before.drained;
  const std::uint64_t first = std::min(before.published - before.drained, ring_bytes - before.drained % ring_bytes);
  const auto copy = std::span<const std::byte>(out.copy);
  if (gone < first) CollectPart(copy.subspan(gone, first - gone), out);
  CollectPart(copy.subspan(std::max(first, gone)), out);
  if (out.damage.bytes != 0) out.damage.words = std::to_string(out.damage.bytes) + " bytes of the tail are no records";
  return {};
}

// Whether process `pid`, of this user, has the file open that `st` is of.
bool HasOpen(std::int32_t pid, const struct stat& st) {
  const std::string directory = "/proc/" + std::to_string(pid) + "/fd";
  struct stat process {};
  if (stat(directory.c_str(), &process) != 0 || process.st_uid != geteuid()) return false;
  std::error_code failed;
  for (std::filesystem::directory_iterator it(directory, failed), end; !failed && it != end; it.increment(failed)) {
    struct stat open {};
    if (stat(it->path().c_str(), &open) == 0 && open.st_dev == st.st_dev && open.st_ino == st.st_ino) return true;
  }
  return false;
}

}  // namespace

void Tail::Unmap::operator()(std::byte* at) const { munmap(at, bytes); }

Result<Tail::Map> Tail::MapRing(const std::filesystem::path& path, int fd, Bytes bytes) {
  const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (at == MAP_FAILED) return SystemFailure("map", path, errno);
  return Map(static_cast<std::byte*>(at), Unmap{bytes});
}

Result<Tail> Tail::Create(const std::filesystem::path& path, Bytes bytes, SessionId session, Ring ring) {
  bytes = std::max(bytes, kLeastTailBytes) / kTailHeaderBytes * kTailHeaderBytes;
  AMEM_TRY(CheckFileLimit(path, bytes));
  AMEM_ASSIGN(auto file, File::Open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW));
  // On file systems without locks, the pid alone tells whether the writer lives.
  if (flock(file.fd(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return SystemFailure("lock", path, errno);
  struct stat st {};
  if (fstat(file.fd(), &st) != 0) return SystemFailure("look at", path, errno);
  const bool mapped = IsInMemory(file.fd()) && ring == Ring::kInMemory;
  const auto in_memory = MemoryOf(session, st);
  auto memory = mapped || ring == Ring::kInFile ? Result<SharedMemory>(SharedMemory{}) : MakeSharedMemory(in_memory, bytes);
  const bool has_memory = memory.ok() && memory->bytes != 0;
  const Bytes in_file = has_memory ? kLeastTailBytes : bytes;
  if (has_memory) bytes = memory->bytes;
  Tail made(std::move(file), has_memory ? std::move(memory->file) : File(), nullptr, bytes - kTailHeaderBytes,
            has_memory ? in_memory : std::filesystem::path(), !mapped && !has_memory);
  Status status = made.Prepare(path, in_file, bytes, session, st.st_ino);
  if (!status.ok() && has_memory) unlink(in_memory.c_str());
  if (!status.ok()) return status;
  return made;
}

Status Tail::Prepare(const std::filesystem::path& path, Bytes in_file, Bytes bytes, SessionId session, std::uint64_t inode) {
  if (const int error = posix_fallocate(file_.fd(), 0, static_cast<off_t>(in_file)); error != 0)
    return SystemFailure("make room for " + std::to_string(in_file) + " bytes in", path, error);
  const bool in_memory = memory_.fd() >= 0;
  if (in_memory) (void)flock(memory_.fd(), LOCK_EX | LOCK_NB);
  AMEM_ASSIGN(map_, MapRing(path, by_calls_ ? -1 : in_memory ? memory_.fd() : file_.fd(), bytes));
  Introduce(*new (map_.get()) TailHeader, bytes - kTailHeaderBytes, session, inode);
  if (!by_calls_ && !in_memory) return {};
  const auto on_disk = std::make_unique<TailHeader>();
  Introduce(*on_disk, in_file - kTailHeaderBytes, session, inode);
  on_disk->in_memory = in_memory ? 1 : 0;
  return WriteAt(file_, 0, std::as_bytes(std::span(on_disk.get(), 1))).Within("write " + path.string());
}

std::filesystem::path Tail::PlaceOfLocks() const {
  if (WritesInPlace(file_.fd())) return kLockFile;
  return in_memory_.empty() ? in_memory_ : std::filesystem::path(in_memory_.string() + kLocksBeside);
}

Status Tail::CheckFiles() const {
  const Bytes ring = kTailHeaderBytes + capacity_;
  AMEM_TRY(CheckWhole(file_, memory_.fd() >= 0 ? kLeastTailBytes : ring));
  return memory_.fd() >= 0 ? CheckWhole(memory_, ring) : Status{};
}

void Tail::MovedTo(const std::filesystem::path& directory) {
  if (!in_memory_.empty()) directory.native().copy(header().journal, sizeof header().journal - 1);
}

Bytes Tail::Used() const {
  const std::uint64_t drained = DrainedUpTo();  // read first, because it never passes the published position
  return Published() - drained;
}

bool Tail::Append(RecordType type, std::uint64_t seq, std::span<const std::byte> payload) {
  const std::size_t bytes = RecordBytes(payload.size());
  const std::uint64_t at = header().published.load(std::memory_order_relaxed);
  std::uint64_t offset = at % capacity_;
  const std::uint64_t skip = capacity_ - offset < bytes ? capacity_ - offset : 0;
  if (at + skip + bytes > free_until_) {
    free_until_ = DrainedUpTo() + capacity_;
    if (at + skip + bytes > free_until_) return false;
  }
  header().begun.store(at + skip + bytes, std::memory_order_release);
  if (skip != 0) {
    std::memcpy(ring() + offset, &kSkipMagic, sizeof kSkipMagic);
    offset = 0;
  }
  WriteRecord(ring() + offset, type, seq, payload);
  if (by_calls_) {
    failure_ = WriteByCalls(at, skip, bytes);
    if (!failure_.ok()) return false;
  }
  header().published.store(at + skip + bytes, std::memory_order_release);
  return true;
}

// The record, and then the positions from which readers know of it. If the process is killed in between, it was not appended.
Status Tail::WriteByCalls(std::uint64_t at, std::uint64_t skip, std::size_t bytes) {
  AMEM_TRY(CheckFileLimit("the tail of the journal", kTailHeaderBytes + capacity_));
  const auto write = [&](std::uint64_t offset, std::size_t length) {
    return WriteAt(file_, kTailHeaderBytes + offset, std::span<const std::byte>(ring() + offset, length));
  };
  if (skip != 0) AMEM_TRY(write(at % capacity_, sizeof kSkipMagic));
  AMEM_TRY(write((at + skip) % capacity_, bytes));
  const std::uint64_t positions[] = {at + skip + bytes, at + skip + bytes};
  static_assert(offsetof(TailHeader, published) == offsetof(TailHeader, begun) + sizeof positions[0]);
  return WriteAt(file_, offsetof(TailHeader, begun), std::as_bytes(std::span(positions)));
}

void Tail::Drained(std::uint64_t up_to) {
  // Before the appender uses the room. If it fails, readers find records that are in LMDB as well.
  if (by_calls_) (void)WriteAt(file_, offsetof(TailHeader, drained), std::as_bytes(std::span(&up_to, 1)));
  header().drained.store(up_to, std::memory_order_release);
}

RingStretch Tail::Drainable(std::uint64_t up_to) const {
  const std::uint64_t from = DrainedUpTo();
  const std::uint64_t start = from % capacity_;
  const std::uint64_t first = std::min(up_to - from, capacity_ - start);
  return {{{ring() + start, first}, {ring(), up_to - from - first}}};
}

void Tail::MarkBroken(std::string_view reason) {
  TailHeader& h = header();
  const std::size_t n = std::min(reason.size(), sizeof h.reason - 1);
  std::memcpy(h.reason, reason.data(), n);
  h.reason[n] = '\0';
  h.broken.store(1, std::memory_order_release);
  if (!by_calls_) return;
  (void)WriteAt(file_, offsetof(TailHeader, reason), std::as_bytes(std::span(h.reason, n + 1)));
  const std::uint32_t broken = 1;
  (void)WriteAt(file_, offsetof(TailHeader, broken), std::as_bytes(std::span(&broken, 1)));
}

bool WalkRing(const RingStretch& stretch, const std::function<bool(std::span<const std::byte>, std::uint64_t)>& visit) {
  std::uint64_t before = 0;  // bytes of the stretch before this part
  for (const auto part : stretch.parts) {
    for (std::size_t at = 0; at < part.size();) {
      const auto rest = part.subspan(at);
      if (rest.size() >= sizeof kSkipMagic && std::memcmp(rest.data(), &kSkipMagic, sizeof kSkipMagic) == 0) break;
      const auto header = PeekRecord(rest);
      if (!header) return false;
      at += RecordBytes(header->length);
      if (!visit(rest.first(sizeof *header + header->length), before + at)) return true;
    }
    before += part.size();
  }
  return true;
}

Result<TailContents> ReadTail(const std::filesystem::path& path) {
  // A tail that another process has moved to its file, and of which the memory is gone, is opened again.
  for (bool again = true;; again = false) {
    TailContents out;
    const auto file = File::OpenToRead(path);
    if (!file) {
      if (file.status().code() == Code::kNotFound) return out;
      return file.status();
    }
    const SharedHeader header = SoundHeader(file);
    const bool elsewhere = header && header->in_memory != 0;
    const File memory = elsewhere ? MemoryOfTail(*file, *header) : File();
    const File& place = elsewhere ? memory : *file;
    if (elsewhere && memory.fd() < 0) {
      if (again) continue;
      out.damage.kind = Damage::kUnreachable;
      return out;
    }
    AMEM_ASSIGN(const auto bytes, place.Size());
    AMEM_TRY(ReadPresent(place, bytes, out).Within("read " + path.string()));
    return out;
  }
}

std::uint32_t HostNumber() {
  Fnv1a number;
  utsname names{};
  if (uname(&names) == 0) number.Add(std::as_bytes(std::span(names.nodename, strnlen(names.nodename, sizeof names.nodename))));
  const std::string machine = ReadSmallFile("/etc/machine-id");
  number.Add(std::as_bytes(std::span(machine)));
  const auto folded = static_cast<std::uint32_t>(number.value() ^ number.value() >> 32);
  return folded != 0 ? folded : 1;
}

WriterLife LifeOfWriter(const std::filesystem::path& path, bool shared) {
  const auto file = File::OpenToRead(path);
  if (!file && file.status().code() == Code::kNotFound) {  // the writer locks data.mdb as well, until its object goes
    if (access((path.parent_path() / "closed").c_str(), F_OK) == 0) return WriterLife::kEnded;
    const auto data = File::OpenToRead(path.parent_path() / "data.mdb");
    const bool locked = data && flock(data->fd(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    return locked ? WriterLife::kAlive : WriterLife::kEnded;
  }
  if (!file) return WriterLife::kUnknown;
  const bool free = flock(file->fd(), LOCK_SH | LOCK_NB) == 0;
  if (free && !shared) return WriterLife::kEnded;
  const bool locked = !free && errno == EWOULDBLOCK;
  // A child that the writer forked keeps the lock, and anybody can lock a file that is open to reading, so the writer's process
  // must exist as well. Where it cannot be seen the lock tells; of a file system without locks nothing does.
  const SharedHeader header = SoundHeader(file);
  const auto boot = BootNumber();
  if (!header || !boot || header->boot == 0) return WriterLife::kUnknown;
  const bool made_here = header->host == HostNumber();
  if (header->boot != *boot) return made_here || (!shared && !locked) ? WriterLife::kEnded : WriterLife::kUnknown;
  if (free) return made_here ? WriterLife::kEnded : WriterLife::kUnknown;
  const ProcessLife life = LifeOf(WriterIn(*header));
  if (life.HasEnded()) return WriterLife::kEnded;
  return life.IsAlive() || locked ? WriterLife::kAlive : WriterLife::kUnknown;
}

bool IsCopy(const std::filesystem::path& path) {
  const auto file = File::OpenToRead(path);
  const SharedHeader header = SoundHeader(file);
  struct stat st {};
  if (!header || fstat(file->fd(), &st) != 0) return false;
  return header->inode != 0 && header->inode != st.st_ino;
}

std::int32_t ProcessOfWriter(const std::filesystem::path& path) {
  const SharedHeader header = SoundHeader(File::OpenToRead(path));
  const bool here = header && header->boot == BootNumber() && header->pid_namespace == PidNamespace();
  return here && header->process_start != 0 && !LifeOf(WriterIn(*header)).HasEnded() ? header->pid : 0;
}

bool WriterIsTrusted(const std::filesystem::path& path) {
  const auto file = File::OpenToRead(path);
  struct stat st {};
  if (!file || fstat(file->fd(), &st) != 0 || st.st_uid != geteuid()) return false;
  const SharedHeader header = SoundHeader(file);
  if (!header) return false;
  // Its pid is another one in another pid namespace; the kernel tells the one that is seen from here.
  const std::int32_t pid = header->pid_namespace == PidNamespace() ? header->pid : LockHolder(st);
  return pid > 0 && pid != getpid() && HasOpen(pid, st);
}

}  // namespace amem
