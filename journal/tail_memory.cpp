#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sstream>

#include "journal/base/process_sight.h"
#include "journal/shared_memory.h"
#include "journal/tail_header.h"

namespace amem {

constexpr Bytes kCrcBytes = offsetof(TailHeader, crc);
constexpr const char* kNewSuffix = ".new-";

void UnmapHeader::operator()(const TailHeader* header) const { munmap(const_cast<TailHeader*>(header), kTailHeaderBytes); }

SharedHeader MapHeader(const File& file) {
  void* at = mmap(nullptr, kTailHeaderBytes, PROT_READ, MAP_SHARED, file.fd(), 0);
  return SharedHeader(at == MAP_FAILED ? nullptr : static_cast<const TailHeader*>(at));
}

std::uint32_t HeaderCrc(const TailHeader& header) { return Crc32c({reinterpret_cast<const std::byte*>(&header), kCrcBytes}); }

bool IsSound(const TailHeader& header) { return header.magic == TailHeader::kMagic && header.crc == HeaderCrc(header); }

SharedHeader SoundHeader(const Result<File>& file) {
  const auto size = file ? file->Size() : Result<Bytes>(file.status());
  SharedHeader header = size && *size >= sizeof(TailHeader) ? MapHeader(*file) : nullptr;
  return header && IsSound(*header) ? std::move(header) : nullptr;
}

Status WriteAt(const File& file, Bytes offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = pwrite(file.fd(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return {Code::kIo, "write: " + ErrnoText(n < 0 ? errno : ENOSPC)};
    offset += static_cast<Bytes>(n);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
  return {};
}

std::int32_t LockHolder(const struct stat& st) {
  constexpr std::size_t kLocksMost = std::size_t{4} << 20;
  std::istringstream locks(ReadSmallFile("/proc/locks", kLocksMost));
  for (std::string line; std::getline(locks, line);) {
    // "7: FLOCK  ADVISORY  WRITE 4711 fd:01:1234567 0 EOF"
    std::istringstream words(line);
    std::string number, kind, advisory, mode, pid, file;
    words >> number >> kind >> advisory >> mode >> pid >> file;
    const std::size_t colon = file.rfind(':');
    if (kind != "FLOCK" || mode != "WRITE" || colon == std::string::npos) continue;
    if (std::strtoull(file.c_str() + colon + 1, nullptr, 10) == st.st_ino) return std::atoi(pid.c_str());
  }
  return 0;
}

File MemoryOfTail(const File& file, const TailHeader& tail) {
  struct stat st {
  }, of_memory{};
  if (fstat(file.fd(), &st) != 0 || st.st_ino != tail.inode) return {};  // of a copy
  const auto path = MemoryOf(SessionId{tail.session}, st);
  for (const bool here : {true, false}) {
    const std::string root = here ? "" : "/proc/" + std::to_string(LockHolder(st)) + "/root";
    auto memory = File::OpenToRead(root + path.string());
    if (!memory || fstat(memory->fd(), &of_memory) != 0 || of_memory.st_uid != st.st_uid) continue;
    const SharedHeader header = SoundHeader(memory);
    if (header && header->inode == tail.inode && header->pid == tail.pid && header->process_start == tail.process_start)
      return *std::move(memory);
  }
  return {};
}

static void RemoveMemory(const File& file, const TailHeader& tail) {
  struct stat st {};
  if (fstat(file.fd(), &st) != 0 || st.st_ino != tail.inode || st.st_uid != geteuid()) return;
  const auto path = MemoryOf(SessionId{tail.session}, st);
  unlink(path.c_str());
  unlink((path.string() + kLocksBeside).c_str());
}

void MoveToDisk(const std::filesystem::path& path) {
  const auto file = File::OpenToRead(path);
  const SharedHeader header = SoundHeader(file);
  struct stat st {};
  if (!header || header->in_memory == 0 || fstat(file->fd(), &st) != 0 || st.st_uid != geteuid()) return;
  const File memory = MemoryOfTail(*file, *header);
  const auto bytes = memory.fd() >= 0 ? memory.Size() : Result<Bytes>(Bytes{0});
  if (!bytes || *bytes <= kTailHeaderBytes) return;
  std::vector<std::byte> copy(*bytes);
  if (!memory.ReadAt(0, copy).ok()) return;
  const std::filesystem::path fresh = path.string() + kNewSuffix + std::to_string(getpid());
  const auto made = File::Open(fresh, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW);
  if (!made || fstat(made->fd(), &st) != 0) return;
  const std::uint64_t inode = st.st_ino;
  std::memcpy(copy.data() + offsetof(TailHeader, inode), &inode, sizeof inode);
  const auto pages = std::span<const std::byte>(copy);
  Status written;
  for (Bytes at = 0; at < pages.size() && written.ok(); at += kTailHeaderBytes) {  // most of the ring was never used
    const auto page = pages.subspan(at, std::min(kTailHeaderBytes, pages.size() - at));
    const bool last = at + page.size() == pages.size();
    if (last || std::ranges::any_of(page, [](std::byte b) { return b != std::byte{0}; })) written = WriteAt(*made, at, page);
  }
  if (written.ok() && rename(fresh.c_str(), path.c_str()) == 0) return RemoveMemory(*file, *header);
  unlink(fresh.c_str());
}

void GiveMemoryBack(const std::filesystem::path& path) {
  const auto file = File::OpenToRead(path);
  if (const SharedHeader header = SoundHeader(file); header && header->in_memory != 0) RemoveMemory(*file, *header);
}

void RemoveForgottenMemory() {
  constexpr std::int64_t kMayBeMoved = 60 * 60, kOfOthers = 24 * kMayBeMoved;  // seconds
  struct stat st {};
  st.st_uid = geteuid();
  const auto place = MemoryOf(SessionId{1}, st).parent_path();
  std::error_code failed;
  for (std::filesystem::directory_iterator it(place, failed), end; !failed && it != end; it.increment(failed)) {
    const auto memory = File::OpenToRead(it->path());
    const SharedHeader header = SoundHeader(memory);
    if (!header || fstat(memory->fd(), &st) != 0 || flock(memory->fd(), LOCK_SH | LOCK_NB) != 0) continue;
    const std::filesystem::path journal(std::string(header->journal, strnlen(header->journal, sizeof header->journal)));
    const std::int64_t age = time(nullptr) - st.st_ctim.tv_sec;
    const auto is_near = [&] {  // under its name, or put aside
      std::error_code ended;
      for (std::filesystem::directory_iterator near(journal.parent_path(), ended), last; !ended && near != last;
           near.increment(ended)) {
        const bool same = near->path().native().starts_with(journal.native());
        if (same && lstat((near->path() / "tail").c_str(), &st) == 0 && st.st_ino == header->inode) return true;
      }
      return false;
    };
    const bool seen_here = header->mount_namespace != 0 && header->mount_namespace == MountNamespace();  // 0: not known
    const bool place_is_gone =
        seen_here && !journal.empty() && lstat(journal.parent_path().c_str(), &st) != 0 && errno == ENOENT;
    if (!place_is_gone && (age < (seen_here ? kMayBeMoved : kOfOthers) || is_near())) continue;
    unlink(it->path().c_str());
    unlink((it->path().string() + kLocksBeside).c_str());
  }
}

}  // namespace amem
