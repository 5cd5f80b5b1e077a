// Sessions as directories: how they are named, made, marked, listed and removed. journal.h begins with what is in one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "journal/journal.h"

namespace amem {

std::string DirectoryName(SessionId session);                     // 16 hex digits
std::optional<SessionId> SessionOfName(std::string_view name);    // nullopt: not the name of a session directory
bool IsSessionDirectory(const std::filesystem::path& directory);  // it exists and holds data.mdb

// A session's directory while it is made, under another name, so that no other process sees it without its locked tail. The
// destructor removes it with its contents, unless Publish() gave it its name.
class NewSessionDirectory {
 public:
  // Makes options.directory as well, where it is missing.
  static Result<NewSessionDirectory> Create(const std::filesystem::path& directory, SessionId session);
  NewSessionDirectory(NewSessionDirectory&& other) noexcept;
  NewSessionDirectory& operator=(NewSessionDirectory&&) = delete;
  ~NewSessionDirectory();
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  Result<std::filesystem::path> Publish();

 private:
  NewSessionDirectory(std::filesystem::path path, std::filesystem::path name)
      : path_(std::move(path)), name_(std::move(name)) {}
  std::filesystem::path path_, name_;
};

// `closed` and `broken`.
Status MarkClosed(const std::filesystem::path& directory, SyncMode sync);
void MarkBroken(const std::filesystem::path& directory, std::string_view reason);  // best effort: the disk may be full
std::string BrokenReason(const std::filesystem::path& directory);                  // empty: not marked
SessionStatus StatusOf(const std::filesystem::path& directory);                    // as the files say

// Removes ended sessions under `directory`, oldest first, until at most `keep_sessions` of them with at most `keep_bytes` are
// left. Never touches a session whose writer lives, other directories, other users' directories, or anything through a symbolic
// link. Failures are ignored; several processes may do it at once.
void RemoveOldSessions(const std::filesystem::path& directory, std::uint32_t keep_sessions, Bytes keep_bytes);

}  // namespace amem
