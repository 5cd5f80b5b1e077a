#include "journal/session_dir.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <system_error>
#include <tuple>

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

File OpenDirectory(const fs::path& path, int flags = 0) {
  return File(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags));
}

std::vector<std::string> NamesIn(const fs::path& directory, std::error_code& failed) {
  std::vector<std::string> names;
  for (fs::directory_iterator it(directory, failed), end; !failed && it != end; it.increment(failed))
    names.push_back(it->path().filename());
  return names;
}

bool Exists(const fs::path& path) {
  struct stat st {};
  return lstat(path.c_str(), &st) == 0;
}

bool IsLink(const fs::path& path) {
  struct stat st {};
  return lstat(path.c_str(), &st) == 0 && S_ISLNK(st.st_mode);
}

// Removes the files of a journal, and the directory if nothing else is in it; follows no link.
void RemoveSession(const fs::path& session) {
  const File dir = OpenDirectory(session, O_NOFOLLOW);
  if (dir.fd() < 0) return;
  GiveMemoryBack(session / "tail");
  for (const char* file : kFiles) unlinkat(dir.fd(), file, 0);
  rmdir(session.c_str());  // fails when something else is in it
}

using Time = std::pair<std::int64_t, std::int64_t>;
Time WrittenAt(const struct stat& st) { return {st.st_mtim.tv_sec, st.st_mtim.tv_nsec}; }

struct Found {
  std::string name;
  Time written;
  Bytes bytes = 0;
  bool ended = false;   // and made on this host
  bool failed = false;  // crashed, broken, or with a pause or resume that failed
};

constexpr std::string_view kFailed = "failed";
constexpr const char* kIncomplete = "incomplete";  // a file that unpacking makes
constexpr const char* kStatus = "status";          // likewise
constexpr std::string_view kPackedLive = "live ";  // in it

std::string HostLine() { return "host " + std::to_string(HostNumber()); }

// Whether a session has ended. On a file system that hosts share, only what this host has made is known to have.
bool HasEnded(const fs::path& directory, bool closed, const std::string& words, bool shared) {
  const bool known = !shared || Exists(directory / "tail");
  if (!closed) return known && LifeOfWriter(directory / "tail", shared) == WriterLife::kEnded;
  return !shared || words.starts_with(HostLine() + "\n");
}

// nullopt: it is not a session of this user.
std::optional<Found> Examine(const fs::path& session, bool shared) {
  const File dir = OpenDirectory(session, O_NOFOLLOW);
  struct stat st {};
  if (dir.fd() < 0 || fstat(dir.fd(), &st) != 0 || st.st_uid != geteuid()) return std::nullopt;
  if (fstatat(dir.fd(), "data.mdb", &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode)) return std::nullopt;
  Found found{.name = session.filename(), .written = WrittenAt(st)};
  for (const char* file : kFiles)
    if (fstatat(dir.fd(), file, &st, AT_SYMLINK_NOFOLLOW) == 0) found.bytes += static_cast<Bytes>(st.st_blocks) * 512;
  const bool closed = Exists(session / "closed");
  const std::string words = ReadSmallFile(session / "closed");
  found.ended = HasEnded(session, closed, words, shared);
  found.failed = !closed || Exists(session / "broken") || words.find(kFailed) != std::string::npos;
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
void RemoveStaleNew(int parent, const fs::path& session, bool shared) {
  struct stat st {};
  if (lstat(session.c_str(), &st) != 0 || !S_ISDIR(st.st_mode) || st.st_uid != geteuid()) return;
  const std::optional<std::int64_t> now = NowOfFileSystem(parent);
  const bool stale = now && *now - st.st_mtim.tv_sec >= kStaleAfterSeconds;
  if (stale && LifeOfWriter(session / "tail", shared) == WriterLife::kEnded) RemoveSession(session);
}

// The journal in `directory`, if there is one, becomes one that `name` had before. None is lost: RemoveOldSessions lets go of
// them like any other that failed.
void PutAside(const fs::path& directory, const fs::path& name) {
  const std::string aside = name.string() + std::string(kBrokenSuffix);
  for (int n = 1; Exists(directory) && n < 10'000; ++n) {
    const std::string free = n == 1 ? aside : aside + "-" + std::to_string(n);
    if (renameat2(AT_FDCWD, directory.c_str(), AT_FDCWD, free.c_str(), RENAME_NOREPLACE) == 0) return;
    if (errno != EEXIST && errno != ENOTEMPTY) {  // the file system cannot do that
      if (!Exists(free)) (void)rename(directory.c_str(), free.c_str());
      if (!Exists(directory)) return;
    }
  }
}

// Of which session a directory is by its name, also one that broke.
std::optional<SessionId> SessionOfAnyName(std::string_view name) {
  return SessionOfName(name.substr(0, std::min(name.size(), name.find(kBrokenSuffix))));
}

Time LastWritten(const fs::path& session) {
  struct stat st {};
  return lstat((session / "data.mdb").c_str(), &st) == 0 ? WrittenAt(st) : Time{};
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
  if (!path_.empty()) RemoveSession(path_);
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

Status MarkClosed(const fs::path& directory, bool failed) {
  AMEM_ASSIGN(const auto file, File::Open(directory / "closed", O_WRONLY | O_CREAT | O_NOFOLLOW));
  // On a full disk the file stays empty: that it is there is what counts.
  (void)file.Write(HostLine() + "\n" + (failed ? std::string(kFailed) + "\n" : ""));
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
  const WriterLife life = LifeOfWriter(directory / "tail", false);
  if (life == WriterLife::kAlive || ReadSmallFile(directory / kStatus).starts_with(kPackedLive)) return SessionStatus::kLive;
  // The session may have closed between the two questions.
  if (Exists(directory / "closed")) return SessionStatus::kClosed;
  if (IsCopy(directory / "tail")) return SessionStatus::kCopied;
  return life == WriterLife::kEnded ? SessionStatus::kCrashed : SessionStatus::kUnknown;
}

std::uint64_t PackedAt(const fs::path& directory) {
  const std::string words = ReadSmallFile(directory / kStatus);
  return words.starts_with(kPackedLive) ? std::strtoull(words.c_str() + kPackedLive.size(), nullptr, 10) : 0;
}

Status MarkPackedLive(const fs::path& directory, std::uint64_t at_ns) {
  AMEM_ASSIGN(const auto file, File::Open(directory / kStatus, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW));
  return file.Write(std::string(kPackedLive) + std::to_string(at_ns) + "\n");
}

Status MarkIncomplete(const fs::path& directory, std::string_view missing) {
  AMEM_ASSIGN(const auto file, File::Open(directory / kIncomplete, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW));
  std::string known = MissingIn(directory);
  return file.Write((known.empty() ? "" : "; ") + std::string(missing));
}

std::string MissingIn(const fs::path& directory) { return ReadSmallFile(directory / kIncomplete); }

void RemoveOldSessions(const fs::path& directory, std::uint32_t keep_sessions, Bytes keep_bytes) {
  const File parent = OpenDirectory(directory);
  if (parent.fd() < 0) return;
  const bool shared = !IsOnLocalFileSystem(parent.fd());
  std::vector<Found> ended;
  Bytes bytes = 0;
  std::error_code failed;
  for (const std::string& name : NamesIn(directory, failed)) {
    if (name.starts_with(kNewPrefix)) RemoveStaleNew(parent.fd(), directory / name, shared);
    if (!SessionOfAnyName(name)) continue;
    auto one = Examine(directory / name, shared);
    if (one && one->ended) {
      MoveToDisk(directory / name / "tail");
      ended.push_back(std::move(*one));
    } else if (one) {
      bytes += one->bytes;
    }
  }
  RemoveForgottenMemory();
  // Failed ones first, and of each the youngest.
  std::ranges::sort(ended, std::greater<>(), [](const Found& one) { return std::tuple(one.failed, one.written); });
  for (std::size_t i = 0; i < ended.size(); ++i) {  // those to keep come first
    bytes += ended[i].bytes;
    if (i >= keep_sessions || bytes > keep_bytes) RemoveSession(directory / ended[i].name);
  }
}

Result<std::vector<fs::path>> ListSessions(const fs::path& directory) {
  if (IsSessionDirectory(directory)) return std::vector{directory};
  std::error_code failed;
  const auto names = NamesIn(directory, failed);
  if (failed) return SystemFailure("list sessions in", directory, failed.value());
  std::vector<std::pair<Time, fs::path>> found;
  for (const std::string& name : names) {
    const fs::path path = directory / name;
    if (SessionOfName(name) && !IsLink(path) && IsSessionDirectory(path)) found.emplace_back(LastWritten(path), path);
  }
  std::ranges::sort(found,
                    [](const auto& a, const auto& b) { return std::tie(b.first, a.second) < std::tie(a.first, b.second); });
  std::vector<fs::path> sessions;
  for (auto& [written, path] : found) sessions.push_back(std::move(path));
  return sessions;
}

}  // namespace amem
