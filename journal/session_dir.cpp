#include "journal/session_dir.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "journal/base/directory.h"
#include "journal/base/file.h"
#include "journal/tail.h"
#include "statemachine/check.h"

namespace amem {
namespace {

namespace fs = std::filesystem;

// data.mdb is removed last: without it, a directory is not a session's any more.
constexpr const char* kFiles[] = {"tail", "lock.mdb", "closed", "broken", "data.mdb"};
constexpr const char* kNewPrefix = ".new-";
constexpr std::string_view kBrokenSuffix = ".broken";
constexpr std::int64_t kStaleAfterSeconds = 3600;

struct CloseDirectory {
  void operator()(DIR* dir) const { closedir(dir); }
};
using Directory = std::unique_ptr<DIR, CloseDirectory>;

Directory OpenDirectory(const fs::path& path) { return Directory(opendir(path.c_str())); }

std::vector<std::string> NamesIn(DIR* dir) {
  std::vector<std::string> names;
  rewinddir(dir);
  while (const dirent* entry = readdir(dir)) names.emplace_back(entry->d_name);
  return names;
}

bool Exists(const fs::path& path) {
  struct stat st {};
  return lstat(path.c_str(), &st) == 0;
}

// Removes the files of a journal, and the directory if nothing else is in it. Works from `parent`, so that no link is followed.
void RemoveSession(int parent, const std::string& name) {
  const File dir(openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (dir.fd() < 0) return;
  for (const char* file : kFiles) unlinkat(dir.fd(), file, 0);
  unlinkat(parent, name.c_str(), AT_REMOVEDIR);  // fails when something else is in it
}

struct Found {
  std::string name;
  timespec written{};
  Bytes bytes = 0;
  bool ended = false;   // and made on this host
  bool failed = false;  // crashed, broken, or with a pause or resume that failed
};

bool Before(const timespec& a, const timespec& b) { return a.tv_sec != b.tv_sec ? a.tv_sec < b.tv_sec : a.tv_nsec < b.tv_nsec; }

constexpr std::string_view kFailed = "failed";
constexpr std::string_view kPackedLive = "live ";  // in the file `status`, which unpacking makes

std::string HostLine() { return "host " + std::to_string(HostNumber()); }

// Whether a session has ended. On a file system that hosts share, only what this host has made is known to have.
bool HasEnded(const fs::path& directory, bool closed, const std::string& words, bool shared) {
  if (!closed) return Exists(directory / "tail") ? LifeOfWriter(directory / "tail", shared) == WriterLife::kEnded : !shared;
  return !shared || words.starts_with(HostLine() + "\n");
}

// nullopt: it is not a session of this user.
std::optional<Found> Examine(int parent, const fs::path& directory, const std::string& name, bool shared) {
  const File dir(openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat st {};
  if (dir.fd() < 0 || fstat(dir.fd(), &st) != 0 || st.st_uid != geteuid()) return std::nullopt;
  if (fstatat(dir.fd(), "data.mdb", &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode)) return std::nullopt;
  Found found{.name = name, .written = st.st_mtim};
  for (const char* file : kFiles) {
    if (fstatat(dir.fd(), file, &st, AT_SYMLINK_NOFOLLOW) == 0) found.bytes += static_cast<Bytes>(st.st_blocks) * 512;
  }
  const bool closed = Exists(directory / name / "closed");
  const std::string words = ReadSmallFile(directory / name / "closed");
  found.ended = HasEnded(directory / name, closed, words, shared);
  found.failed = !closed || Exists(directory / name / "broken") || words.find(kFailed) != std::string::npos;
  return found;
}

// What time it is for the file system, whose host may have another clock than this one. Nothing: it does not say.
std::optional<std::int64_t> NowOfFileSystem(int directory) {
  const timespec times[2] = {{.tv_sec = 0, .tv_nsec = UTIME_OMIT}, {.tv_sec = 0, .tv_nsec = UTIME_NOW}};
  struct stat st {};
  if (futimens(directory, times) != 0 || fstat(directory, &st) != 0) return std::nullopt;
  return st.st_mtim.tv_sec;
}

// Removes what a process left that was killed while it made its directory.
void RemoveStaleNew(int parent, const fs::path& directory, const std::string& name, bool shared) {
  struct stat st {};
  if (fstatat(parent, name.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISDIR(st.st_mode) || st.st_uid != geteuid()) return;
  const std::optional<std::int64_t> now = NowOfFileSystem(parent);
  if (!now || *now - st.st_mtim.tv_sec < kStaleAfterSeconds ||
      LifeOfWriter(directory / name / "tail", shared) != WriterLife::kEnded)
    return;
  RemoveSession(parent, name);
}

// The journal in `directory`, if there is one, becomes the one that `name` had before it broke. Only the last such is kept.
void PutAside(const fs::path& directory, const fs::path& name) {
  const fs::path aside = name.string() + std::string(kBrokenSuffix);
  if (!Exists(directory)) return;
  if (const auto parent = OpenDirectory(name.parent_path())) RemoveSession(dirfd(parent.get()), aside.filename());
  (void)rename(directory.c_str(), aside.c_str());
}

timespec LastWritten(const fs::path& session) {
  struct stat st {};
  return lstat((session / "data.mdb").c_str(), &st) == 0 ? st.st_mtim : timespec{};
}

}  // namespace

std::string DirectoryName(SessionId session) {
  const std::string digits = Hex(session.value).substr(2);
  return std::string(16 - digits.size(), '0') + digits;
}

std::optional<SessionId> SessionOfName(std::string_view name) {
  SessionId session;
  (void)std::from_chars(name.data(), name.data() + name.size(), session.value, 16);
  return DirectoryName(session) == name ? std::optional(session) : std::nullopt;
}

bool IsSessionDirectory(const fs::path& directory) {
  struct stat st {};
  if (stat(directory.c_str(), &st) != 0 || !S_ISDIR(st.st_mode)) return false;
  return lstat((directory / "data.mdb").c_str(), &st) == 0 && S_ISREG(st.st_mode);
}

Result<NewSessionDirectory> NewSessionDirectory::Create(const fs::path& directory, SessionId session, bool replaced) {
  if (directory.empty()) return Status{Code::kInvalid, "open a journal: no directory is given (AMEM_JOURNAL_DIR)"};
  if (!session) return Status{Code::kInvalid, "open a journal in " + directory.string() + ": zero is not a session"};
  if (const auto own = OpenOwnDirectory("use as journal directory", directory); !own) return own.status();
  fs::path name = directory / DirectoryName(session);
  if (!replaced && Exists(name)) {
    return Status{Code::kRefused,
                  "open journal " + name.string() + ": it exists already; a session is written once, by one process"};
  }
  const fs::path path = directory / (kNewPrefix + DirectoryName(session) + "-" + std::to_string(getpid()));
  if (mkdir(path.c_str(), 0700) != 0) return SystemFailure("make directory", path, errno);
  return NewSessionDirectory(path, std::move(name));
}

NewSessionDirectory::NewSessionDirectory(NewSessionDirectory&& other) noexcept
    : path_(std::exchange(other.path_, {})), name_(std::move(other.name_)) {}

NewSessionDirectory::~NewSessionDirectory() {
  if (path_.empty()) return;
  if (const auto parent = OpenDirectory(path_.parent_path())) RemoveSession(dirfd(parent.get()), path_.filename());
}

Result<fs::path> NewSessionDirectory::Publish() {
  AMEM_CHECK(!path_.empty(), name_.native());  // it has one name only, and gets it once
  // A directory is renamed over an empty one only. The two change names at once, where the file system can do that.
  if (Exists(name_) && renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, name_.c_str(), RENAME_EXCHANGE) == 0) {
    PutAside(path_, name_);
  } else {
    PutAside(name_, name_);
    if (rename(path_.c_str(), name_.c_str()) != 0) return SystemFailure("name " + path_.string(), name_, errno);
  }
  path_.clear();
  return name_;
}

Status MarkClosed(const fs::path& directory, SyncMode sync, bool failed) {
  const auto path = directory / "closed";
  AMEM_ASSIGN(const auto file, File::Open(path, O_WRONLY | O_CREAT | O_NOFOLLOW));
  // On a full disk the file stays empty: that it is there is what counts.
  (void)file.Write(HostLine() + "\n" + (failed ? std::string(kFailed) + "\n" : ""));
  if (sync != SyncMode::kFull) return {};
  if (fsync(file.fd()) != 0) return SystemFailure("sync", path, errno);
  const auto dir = OpenDirectory(directory);
  if (!dir || fsync(dirfd(dir.get())) != 0) return SystemFailure("sync", directory, errno);
  return {};
}

void MarkBroken(const fs::path& directory, std::string_view reason) {
  const auto file = File::Open(directory / "broken", O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
  if (file) (void)file->Write(reason);
}

std::string BrokenReason(const fs::path& directory) {
  if (!Exists(directory / "broken")) return {};
  std::string reason = ReadSmallFile(directory / "broken");
  return reason.empty() ? "the reason could not be written, as on a full disk" : reason;
}

SessionStatus StatusOf(const fs::path& directory) {
  if (Exists(directory / "broken")) return SessionStatus::kBroken;
  if (Exists(directory / "closed")) return SessionStatus::kClosed;
  if (WriterIsAlive(directory / "tail") || ReadSmallFile(directory / "status").starts_with(kPackedLive))
    return SessionStatus::kLive;
  // The session may have closed between the two questions.
  if (Exists(directory / "closed")) return SessionStatus::kClosed;
  return IsCopy(directory / "tail") ? SessionStatus::kCopied : SessionStatus::kCrashed;
}

std::uint64_t PackedAt(const fs::path& directory) {
  const std::string words = ReadSmallFile(directory / "status");
  return words.starts_with(kPackedLive) ? std::strtoull(words.c_str() + kPackedLive.size(), nullptr, 10) : 0;
}

void RemoveOldSessions(const fs::path& directory, std::uint32_t keep_sessions, Bytes keep_bytes) {
  const auto dir = OpenDirectory(directory);
  if (!dir) return;
  const int parent = dirfd(dir.get());
  const bool shared = !IsOnLocalFileSystem(parent);
  std::vector<Found> ended;
  Bytes bytes = 0;
  for (const std::string& name : NamesIn(dir.get())) {
    if (name.starts_with(kNewPrefix)) RemoveStaleNew(parent, directory, name, shared);
    const bool broken = name.ends_with(kBrokenSuffix);
    if (!SessionOfName(broken ? name.substr(0, name.size() - kBrokenSuffix.size()) : name)) continue;
    auto one = Examine(parent, directory, name, shared);
    if (one && one->ended) {
      ended.push_back(std::move(*one));
    } else if (one) {
      bytes += one->bytes;
    }
  }
  std::sort(ended.begin(), ended.end(),
            [](const Found& a, const Found& b) { return a.failed != b.failed ? a.failed : Before(b.written, a.written); });
  for (std::size_t i = 0; i < ended.size(); ++i) {  // those to keep come first
    bytes += ended[i].bytes;
    if (i >= keep_sessions || bytes > keep_bytes) RemoveSession(parent, ended[i].name);
  }
}

std::string_view ToText(SessionStatus status) { return NameIn(status, "live", "closed", "crashed", "broken", "copied"); }

Result<std::vector<fs::path>> ListSessions(const fs::path& directory) {
  if (IsSessionDirectory(directory)) return std::vector{directory};
  const auto dir = OpenDirectory(directory);
  if (!dir) return SystemFailure("list sessions in", directory, errno);
  std::vector<std::pair<timespec, fs::path>> found;
  for (const std::string& name : NamesIn(dir.get())) {
    const fs::path path = directory / name;
    if (SessionOfName(name) && IsSessionDirectory(path)) found.emplace_back(LastWritten(path), path);
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return Before(b.first, a.first) || (!Before(a.first, b.first) && a.second < b.second);
  });
  std::vector<fs::path> sessions;
  for (auto& [written, path] : found) sessions.push_back(std::move(path));
  return sessions;
}

}  // namespace amem
