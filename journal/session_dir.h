// Sessions as directories: how they are named, made, marked, listed and removed. journal.h begins with what is in one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "journal/journal.h"

namespace amem {

std::string DirectoryName(SessionId session);                     // 16 hex digits
std::optional<SessionId> SessionOfName(std::string_view name);    // nullopt: not the name of a session directory
bool IsSessionDirectory(const std::filesystem::path& directory);  // it exists and holds data.mdb

// A session's directory while it is made, under another name, so that no other process sees it without its locked tail. The
// destructor removes it with its contents, unless Publish() gave it its name.
class NewSessionDirectory {
 public:
  // Makes `directory` as well, where it is missing. kRefused: the session has one already, which is not `replaced`.
  static Result<NewSessionDirectory> Create(const std::filesystem::path& directory, SessionId session, bool replaced = false);
  NewSessionDirectory(NewSessionDirectory&& other) noexcept;
  NewSessionDirectory& operator=(NewSessionDirectory&&) = delete;
  ~NewSessionDirectory();
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] const std::filesystem::path& name() const { return name_; }  // that it gets
  // What had the name until now gets `.broken` behind it, with a number where there is one already.
  Result<std::filesystem::path> Publish();

 private:
  NewSessionDirectory(std::filesystem::path path, std::filesystem::path name)
      : path_(std::move(path)), name_(std::move(name)) {}
  std::filesystem::path path_, name_;
};

// `closed` and `broken`. The first says what is needed to clean up: which host made the journal, and whether a pause or resume
// `failed` in it.
Status MarkClosed(const std::filesystem::path& directory, bool failed = false);
void MarkBroken(const std::filesystem::path& directory, std::string_view reason);  // best effort: the disk may be full
std::string BrokenReason(const std::filesystem::path& directory);                  // empty: not marked
SessionStatus StatusOf(const std::filesystem::path& directory);                    // as the files say
// Of a journal that came out of a pack and whose process lived when it was packed: then, on the clock of its events. 0:
// another.
std::uint64_t PackedAt(const std::filesystem::path& directory);
Status MarkPackedLive(const std::filesystem::path& directory, std::uint64_t at_ns);

// Of a journal that came out of a pack which was read in part, or was packed in part: what is missing, in words, each time
// added to what was known; empty: nothing is known to be. Whoever reads the journal is told (ReadReport::incomplete).
Status MarkIncomplete(const std::filesystem::path& directory, std::string_view missing);
std::string MissingIn(const std::filesystem::path& directory);

// Removes ended sessions under `directory` until at most `keep_sessions` of them are left, and at most `keep_bytes` together
// with the living. Those that closed in order without a failed pause or resume go first, then the failed ones (crashed, broken,
// or with a failure), of each the oldest first. Never touches a session whose writer lives or may live, what another host has
// made on a file system that hosts share, other directories, other users' directories, or anything through a symbolic link.
// Failures are ignored; several processes may do it at once.
void RemoveOldSessions(const std::filesystem::path& directory, std::uint32_t keep_sessions, Bytes keep_bytes);

}  // namespace amem
