// Ranks in processes of their own, for tests that kill them: each has a session on the simulator with a real journal and real
// sockets, and does what the test tells it over a socket pair. The test's process stays single-threaded, and holds the model.
//
// Every rank has a device to itself and four allocations: "ring" is exported to the next rank and mapped by both, "left" is
// exported to the next rank and freed by its owner, "own" is mapped, and "bare" is only a handle. What is in them follows
// from rank and version alone. With multicast, rank 0 makes an object for all, as NCCL does for NVLS; every rank adds its
// device, binds two allocations of its own at different offsets, one by handle and one by address, and maps the object. With a
// tag, every rank has a pool "weights" with two parts in one chunk. In scope shared all four are another library's than NCCL,
// under its tag, which pauses and resumes mean then, and the next rank has opened a part of cudaMalloc's by cudaIpc. In scope
// all "ring" and "left" are NCCL's, and all else is the program's, whose handles nobody can export; pauses and resumes are of
// both.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "journal/base/unique_fd.h"
#include "ncclpatch/runtime/options.h"
#include "replay/driver/simulator/world.h"
#include "replay/peers/token.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem::test {

inline constexpr Bytes kPage = 4096, kRing = 3 * kPage, kLeft = 3 * kPage, kOwn = 4 * kPage, kBare = 2 * kPage;
inline constexpr Bytes kBound = 2 * kPage, kBoundAt = kPage, kObject = kBound + kBoundAt;  // bound by handle, by address
inline constexpr Bytes kSlab = 16 * kPage;                                                 // all of a rank's fit into one
inline constexpr Bytes kFirstPart = 2 * kPage, kSecondPart = 3 * kPage;
inline constexpr Bytes kSharedChunk = 8 * kPage;
inline constexpr Bytes kChunk = 32 * kPage;  // what a pool takes here: half as much as the device has, as little is left
#ifdef AMEM_SANITIZED
inline constexpr int kSlower = 5;
#else
inline constexpr int kSlower = 1;
#endif
// Of a call's deadline; and for what comes in a moment, but later where the machine is busy.
inline constexpr int kPatienceMs = 12'000 * kSlower;

enum class Op : std::uint32_t {
  kBuild,
  kImport,
  kBind,
  kFill,
  kCheck,
  kArm,
  kPause,
  kResume,
  kPauseTag,  // of the pool; concerns this rank only
  kResumeTag,
  kFree,
  kHog,
  kFork,
  kClose
};
// What happens at the nth driver call (or append to the journal) of one rank, counted from arming.
enum class Fault : std::uint32_t {
  kNone,
  kKillAtCall,
  kKillAtAppend,
  kFailCall,
  kFailAllCalls,
  kFailAppend,
  kStallAtCall,
  kStopAtAppend
};

struct Command {
  Op op{};
  Fault fault{};
  std::uint64_t nth = 0;
  std::uint32_t stall_ms = 0;
  std::uint64_t version = 0;
  std::array<std::array<std::byte, kTokenBytes>, 3> tokens{};
};
struct Reply {
  Code code{};
  int driver_result = 0;
  Lifecycle lifecycle{};
  Lifecycle tag{};                       // of the pool
  std::uint64_t calls = 0, appends = 0;  // since arming
  std::uint64_t took_ms = 0;
  bool fired = false;             // the fault has happened,
  bool fired_voted = false;       // when this rank had cast all its votes for the pause
  std::uint32_t reached = 0;      // kCheck: how many devices a store to the multicast object reaches
  Bytes heap = 0, pinned = 0;     // kCheck: what the process holds of host memory,
  std::uint32_t descriptors = 0;  // and of descriptors
  std::array<std::array<std::byte, kTokenBytes>, 3> tokens{};
  std::array<char, 700> text{};  // of a failure, or of the first thing that kCheck found wrong
  [[nodiscard]] bool ok() const { return code == Code::kOk; }
};

// What a rank's process does before it starts its session, in the job's directory: it enters a container. It may go on as a
// child of the process that was started. False: it cannot.
using RankProcessesIn = std::function<bool(const std::filesystem::path& directory)>;

class RankProcesses {
 public:
  // Starts the ranks, which build their allocations and share them.
  explicit RankProcesses(int ranks, Layout layout = Layout::kDirect, std::uint32_t timeout_ms = kPatienceMs,
                         bool multicast = false, bool tag = false, LibraryScope scope = LibraryScope::kNccl,
                         const RankProcessesIn& enter = {});
  ~RankProcesses();  // kills the processes that are left
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  [[nodiscard]] Layout layout() const { return layout_; }
  [[nodiscard]] bool multicast() const { return multicast_; }
  [[nodiscard]] LibraryScope scope() const { return scope_; }
  [[nodiscard]] int ranks() const { return static_cast<int>(children_.size()); }
  [[nodiscard]] bool alive(int rank) const { return children_[static_cast<std::size_t>(rank)].alive; }
  [[nodiscard]] pid_t pid(int rank) const { return children_[static_cast<std::size_t>(rank)].pid; }
  // One rank; empty: it has died.
  std::optional<Reply> Do(int rank, const Command& command);
  // All living ranks at once; empty for a rank that died meanwhile.
  std::vector<std::optional<Reply>> All(const Command& command);
  // Do in two parts, so that the test can act in between.
  void Send(int rank, const Command& command);
  std::optional<Reply> Receive(int rank);
  void Kill(int rank);
  void Signal(int rank, int signal);
  // Exit status of a rank that ended.
  int Wait(int rank);

  [[nodiscard]] Bytes InUse(int device) const { return world_->InUse(device); }
  [[nodiscard]] const std::filesystem::path& directory() const { return directory_; }
  static SessionId SessionOf(int rank) { return SessionId{static_cast<std::uint64_t>(rank) + 0x100}; }

 private:
  struct Child {
    pid_t pid = 0;
    UniqueFd socket;
    bool alive = false;
    int status = 0;
  };
  std::optional<Reply> Receive(Child& child);

  const Layout layout_;
  const bool multicast_;
  const LibraryScope scope_;
  std::filesystem::path directory_;
  std::shared_ptr<SimulatorWorld> world_;
  std::vector<Child> children_;
};

}  // namespace amem::test
