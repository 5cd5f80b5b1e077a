// Journals: one directory a session, written by one process, readable by any process at any time.
//
//   DIR/<session id in 16 hex digits>/   mode 0700
//     data.mdb, lock.mdb                 LMDB: events by sequence number, snapshots, meta data
//     tail                               appended events that are not in LMDB yet, or where in memory they are (tail.h); they
//                                        survive the writer's death
//     closed | broken                    present once the session ended in order, or its journal stopped telling the truth
//   DIR/<session id>.broken[-N]/         the journals of that session before they broke and were begun anew
//
// A session directory without `closed` whose writer is dead is one that crashed.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "journal/base/clock.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

inline constexpr std::uint32_t kJournalFormat = 1;       // what this build writes
inline constexpr std::uint32_t kJournalLeastReader = 1;  // the oldest reader that understands it

struct JournalOptions {
  std::filesystem::path directory;  // holds the sessions' directories; made with mode 0700 if missing
  Bytes tail_bytes = Bytes{8} << 20;
  bool tail_in_memory = true;        // where /dev/shm can be had; else what is appended is written to its file by calls
  Bytes map_bytes = Bytes{4} << 30;  // upper bound of one session's LMDB file; sparse
  // A snapshot is due after so many events or bytes; old events go once a snapshot covers them.
  std::uint64_t snapshot_every = 250'000;
  Bytes snapshot_bytes = Bytes{16} << 20;
  // AMEM_JOURNAL_KEEP: when a session opens, ended ones beyond this number, and beyond these bytes together with those of the
  // living, are removed; failed sessions after all others, oldest first.
  std::uint32_t keep_sessions = 128;
  Bytes keep_bytes = Bytes{2} << 30;
  // What time it is; the thread that drains the tail asks, to note when the wall clock was set.
  std::function<WallClock()> clock = WallClock::Now;
  // Of a lasting writer: told in a sentence when it has no journal, and when it has one again. Must not throw.
  std::function<void(const std::string&)> report = {};
};

// Appends events. One writer a session; Append may be called from any thread, but the caller serialises it with Apply, so that
// the order in the journal is the order of the state.
class JournalWriter {
 public:
  virtual ~JournalWriter() = default;
  // Makes the session's directory and starts the thread that drains the tail into LMDB.
  static Result<std::unique_ptr<JournalWriter>> Open(const JournalOptions& options, SessionId session);
  // A writer that outlasts its journal. Where none can be opened, or it breaks, Append fails until Renew has opened one.
  static std::unique_ptr<JournalWriter> OpenLasting(const JournalOptions& options, SessionId session);

  // When this returns ok the event survives SIGKILL of this process. Does not wait for a commit, unless the tail is full, and
  // for a file system that stands still no longer than two seconds, once. After a failure every further call fails with the
  // same reason, and the directory is marked `broken`. In a forked child: kRefused, nothing is touched.
  virtual Status Append(const Event& event) = 0;
  // Waits until everything appended is in LMDB.
  virtual Status Flush() = 0;
  // Stores ToSnapshotEvents(state) as a snapshot and lets events before the previous snapshot go. Call when SnapshotDue().
  [[nodiscard]] virtual bool SnapshotDue() const = 0;
  virtual Status Snapshot(const State& state) = 0;
  // The same without waiting: a copy of the state is encoded and stored by the thread.
  virtual void SnapshotSoon(const State& state) { (void)Snapshot(state); }
  // A question, to be asked without the lock that serialises the calls: whether the files of now can be written until then.
  // kIo: they are lost, and appends fail from now on. kTimeout: their file system stands still. Empty: there is no journal.
  using Question = std::function<Status(std::chrono::steady_clock::time_point until)>;
  [[nodiscard]] virtual Question AskFiles() const { return {}; }
  // Flushes and marks the directory `closed`. The destructor without Close leaves it as a crash would.
  virtual Status Close() = 0;
  // After Append has failed: goes on in a fresh directory, if this is a lasting writer and there can be one now. It begins with
  // a snapshot of `state`, and the next event to append is the one after that. The directory of before, if there is one,
  // becomes DIR/<session id>.broken, or .broken-2 and so on. Where the file system does not answer at once (kTimeout), the
  // directory is made meanwhile, and a later call has it.
  virtual Status Renew(const State&) { return {Code::kUnsupported, "this journal is not renewed"}; }
  [[nodiscard]] virtual std::filesystem::path Directory() const = 0;
};

// kCopied: a copy of a journal that was not closed, made by cp, rsync or tar. Whether its process lives, or lived when it was
// copied, cannot be told from it. kUnknown: nor can it of this one, which was not closed: its process is one of another host or
// pid namespace, or the tail cannot be read now.
enum class SessionStatus : std::uint8_t { kLive, kClosed, kCrashed, kBroken, kCopied, kUnknown };
AMEM_NAMES(SessionStatus, kUnknown, "status", "live", "closed", "crashed", "broken", "copied", "unknown");

struct JournalInfo {
  std::filesystem::path directory;
  SessionStatus status{};
  std::string broken_reason;
  SessionId session;
  std::int32_t pid = 0;
  std::uint32_t format = 0;
  SequenceNumber first, last;
  std::uint64_t events = 0;
  Bytes file_bytes = 0;
  std::vector<SequenceNumber> snapshots;
  WallClock set_clock = {};  // when its writer found last that the wall clock had been set since the session opened, if ever
};

// What reading had to leave out. A torn tail (the writer died inside an append) is not corruption.
struct ReadReport {
  bool torn_tail = false;
  std::uint64_t corrupt_records = 0;
  std::string corruption;  // first one, in words: which sequence number, how many bytes dropped, what to do
  std::string incomplete;  // what the pack lacked that this journal was unpacked from, in words; empty: nothing, or no pack
  [[nodiscard]] bool whole() const { return corrupt_records == 0 && incomplete.empty(); }
};

inline constexpr SequenceNumber kToTheEnd{~std::uint64_t{0}};  // given as the last event to read

// Reads a journal, live or dead, also a read-only copy. A call sees what had been appended when it began, except for events
// that the writer removes meanwhile: a snapshot covers them, so nothing is lost.
class JournalReader {
 public:
  virtual ~JournalReader() = default;
  static Result<std::unique_ptr<JournalReader>> Open(const std::filesystem::path& session_directory);
  virtual Result<JournalInfo> Info() = 0;
  // Calls `visit` for events with first <= seq <= last, in order, until it returns false. Damaged records are left out and
  // reported; a failure means that nothing (more) could be read.
  virtual Result<ReadReport> Read(SequenceNumber first, SequenceNumber last,
                                  const std::function<bool(const Event&)>& visit) = 0;
  // The state after `at` (nullopt: after the last event): the nearest snapshot before it, and the events from there.
  virtual Result<State> StateAt(std::optional<SequenceNumber> at, ReadReport* report = nullptr) = 0;
};

// The session directories under `directory` (or `directory` itself, if it is one), newest first. A link to one is left out: who
// filled the directory may have put it there.
Result<std::vector<std::filesystem::path>> ListSessions(const std::filesystem::path& directory);

}  // namespace amem
