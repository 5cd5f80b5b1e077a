// The page that a rank and the tool share: 4096 bytes, the file `control` in the session's directory, mode 0600.
//
// Each word has one writer. What belongs together is written first and announced last: by the rank with `phase`, by the tool
// with `asked`. Numbers of requests go up within a page. Both sides take what they read for no more than a claim.
//
//   The step that all agree on. A rank stores `steps` and then loads `asked`; the tool stores `asked` in all pages and then
//   loads all `steps`, everything sequentially consistent. So a rank that has stored s and did not see the request is seen with
//   s at least, and sees the request at s + 1: no rank passes the largest number that the tool has read by more than one.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "journal/base/file.h"
#include "journal/doorbell.h"
#include "statemachine/types.h"

namespace amem::control {

inline constexpr const char* kPageName = "control";
inline constexpr std::size_t kPageBytes = 4096;

enum class Phase : std::uint32_t {
  kRunning,  // nothing is asked, or the rank is on its way to the step that was agreed on
  kHeld,     // in a safe point, until a step is agreed on
  kArrived,  // in the safe point that was agreed on, or in its own resume; waits for all others
  kPausing,
  kPaused,  // stays inside the safe point until a resume is asked for
  kResuming,
  kFailed,  // the pause failed, and the rank runs on as before
};
std::string_view ToText(Phase phase);

enum class Ask : std::uint32_t { kNothing, kPause, kResume };

// How far a request may be carried out. A rank waits at each, until all have got there.
enum class Stage : std::uint32_t {
  kCome,  // no more than coming: the request can be withdrawn, and is void when the tool dies
  kTags,  // the program's tags
  kNccl,  // NCCL's memory, together with all others; from here on the request stands without the tool
};

// Whether the program's own pause holds.
enum class OwnPause : std::uint32_t { kNo, kPaused, kResuming };

struct Page {
  static constexpr std::uint64_t kMagic = 0x4c5254434d454d41;  // "AMEMCTRL" in the file
  static constexpr std::uint32_t kVersion = 1;

  // Never changes.
  std::uint64_t magic = kMagic;
  std::uint32_t version = kVersion;
  std::int32_t pid = 0;
  std::uint64_t start_ticks = 0;  // field 22 of /proc/PID/stat
  std::uint64_t session = 0;
  std::uint64_t pid_namespace = 0;  // inode of /proc/self/ns/pid; the pid means something only there
  std::int64_t rank = -1;           // -1: no launcher gave it one

  // Written by the rank.
  alignas(64) std::atomic<std::uint64_t> steps{0};  // safe points that it came to
  std::atomic<std::uint64_t> last_step_ns{0};       // CLOCK_MONOTONIC_COARSE of the last one
  std::atomic<std::uint32_t> own_pause{0};          // OwnPause
  alignas(64) std::atomic<std::uint32_t> phase{0};  // Phase
  std::atomic<std::uint32_t> stage_done{0};         // Stage: of request `about`
  std::atomic<std::uint64_t> about{0};              // the request that phase, stage_done, at, code and message are about
  std::atomic<std::uint64_t> at{0}, at_ns{0};       // the step at which it waits, and since when (CLOCK_MONOTONIC)
  std::atomic<std::uint32_t> code{0};               // Code: why `about` failed on this rank
  std::atomic<std::uint64_t> freed_bytes{0};        // by this request
  std::atomic<std::uint64_t> held_bytes{0};         // resident when it last came, paused or resumed
  char message[1536] = {};                          // with a NUL

  // Written by the tool that holds the lock.
  alignas(64) std::atomic<std::uint64_t> asked{0};  // number of the request; 0: nothing is asked
  alignas(64) SharedDoorbell bell;                  // rung after each change
  std::atomic<std::uint64_t> last_request{0};       // numbers up to this one were given out
  std::atomic<std::uint32_t> kind{0};               // Ask
  std::atomic<std::uint32_t> all_tags{0};
  std::atomic<std::uint64_t> target{0};  // the step; 0: not agreed on yet
  std::atomic<std::uint32_t> stage{0};   // Stage
  std::atomic<std::int32_t> by_pid{0};
  std::atomic<std::uint64_t> void_after_ns{0};  // CLOCK_MONOTONIC: at kCome no rank waits longer for a tool that is stopped
  std::atomic<std::uint64_t> note{0};           // number of the note below; 0: none was left
  std::atomic<std::uint64_t> note_from_ns{0}, note_to_ns{0}, note_bytes{0};
  char note_gpus[768] = {};  // with a NUL
  // The session directory of the rank that is told first to pause NCCL's memory, with a NUL: whether that one was told is
  // decided for all. Written before `asked`; empty: by a tool that did not know this word, or the path is too long.
  char told_first[768] = {};
};
static_assert(sizeof(Page) <= kPageBytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

// A page that is mapped. Unmapped with the object, which moves.
class MappedPage {
 public:
  MappedPage() = default;
  // The rank's: makes the file with its block, so that a full disk is an error here and never a signal later. A file of that
  // name is replaced.
  static Result<MappedPage> Create(const std::filesystem::path& directory, SessionId session, std::int64_t rank);
  // The tool's. kNotFound: there is none. kRefused: it is another user's, another version's, or no page.
  static Result<MappedPage> Open(const std::filesystem::path& directory);
  MappedPage(MappedPage&& other) noexcept;
  MappedPage& operator=(MappedPage&& other) noexcept;
  ~MappedPage();

  [[nodiscard]] Page& page() const { return *page_; }
  Page* operator->() const { return page_; }
  [[nodiscard]] int fd() const { return file_.fd(); }
  // Whether another open file description has the lock: a tool that lives.
  [[nodiscard]] bool LockedByAnother() const;
  Status Lock() const;  // kRefused: another has it

 private:
  MappedPage(File file, Page* page) : file_(std::move(file)), page_(page) {}
  File file_;
  Page* page_ = nullptr;
};

// Bounded texts in a page.
void PutText(char* into, std::size_t size, std::string_view text);
std::string GetText(const char* from, std::size_t size);

}  // namespace amem::control
