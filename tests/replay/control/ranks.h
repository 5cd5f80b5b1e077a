// Ranks in processes of their own that make safe points, with nothing behind them but numbers in shared memory: for tests of
// how a request is agreed on, carried out and given up. The test's process stays single-threaded.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "replay/control/job_control.h"
#include "replay/control/rank_control.h"
#include "replay/peers/unix/unix_peers.h"

namespace amem::control::test {

inline constexpr std::chrono::milliseconds kLong{20'000};
inline bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline constexpr std::size_t kMostRanks = 8;
inline constexpr const char* kNoLaunches = "it launches nothing";
inline constexpr std::uint32_t kStopsBetween = ~0U;  // launches_by: no thread is inside

// What a rank does, and what the test reads; both sides may write at any time.
struct RankWords {
  std::atomic<std::uint64_t> steps{0};      // safe points that it has left
  std::atomic<std::uint64_t> paused_at{0};  // the step of its last pause of NCCL's memory
  std::atomic<std::uint64_t> pauses{0}, resumes{0}, tag_pauses{0}, tag_resumes{0};
  std::atomic<std::uint64_t> own_pauses{0}, own_resumes{0};
  std::atomic<bool> away{false};       // makes no safe points meanwhile
  std::atomic<bool> own_pause{false};  // its program is to pause, as long as this holds
  std::atomic<bool> makes_no_safepoints{false};
  std::atomic<std::uint32_t> launches_by{0};   // a thread of it that is inside a launch of NCCL's; 0: it launches nothing
  std::atomic<bool> forks{false};              // a child that lives on when it ends, as workers that load data do
  std::atomic<bool> safepoints_inside{false};  // of its own pause, too
  std::atomic<std::uint32_t> fails{0};         // Fails, of the next call
  std::atomic<std::uint64_t> seen{0}, reached{0}, ended{0}, failed{0};  // events
};
enum Fails : std::uint32_t { kNothingFails, kPauseTagsFails, kPauseNcclFails, kResumeTagsFails, kResumeNcclFails };

// A session that shares no memory.
struct Alone : PeerDelegate {
  Result<SharedAllocation> OnImport(const PeerIdentity&, AllocationId, const Token&) override { return Nothing(); }
  Result<SharedAllocation> OnReimport(const PeerIdentity&, const ShareRequest&) override { return Nothing(); }
  bool OnReferenceDropped(const PeerIdentity&, AllocationId, AllocationId) override { return true; }
  bool OnPeerConnected(const PeerIdentity&) override { return true; }
  bool OnPeerLost(const PeerIdentity&, const std::string&) override { return true; }
  Result<std::vector<SessionId>> Neighbours(const std::string&, Deadline) override { return std::vector<SessionId>(); }
  static Status Nothing() { return {Code::kNotFound, "there is nothing"}; }
};
inline SessionId NewSession() {
  static std::uint64_t last = static_cast<std::uint64_t>(::getpid()) << 24U;
  return SessionId{++last};
}

struct Shared {
  std::array<RankWords, kMostRanks> ranks;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> collective{0};   // calls of PauseNccl and ResumeNccl, of all ranks
  std::atomic<std::uint64_t> failed_call{0};  // the last of them that failed; 0: none
};

class Ranks {
 public:
  // `lockstep`: each step waits for that of all others, as an all-reduce does. `most_us`: a step takes so long at most.
  explicit Ranks(int count, bool lockstep = false, std::uint32_t most_us = 300);
  ~Ranks();  // ends the processes
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  RankWords& operator[](int rank) { return shared_->ranks[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] int count() const { return static_cast<int>(pids_.size()); }
  [[nodiscard]] pid_t pid(int rank) const { return pids_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] const std::vector<RankPlace>& places() const { return places_; }
  [[nodiscard]] std::filesystem::path sockets() const { return root_ / "sockets"; }
  [[nodiscard]] Result<JobControl> Open() const { return JobControl::Open(places_, sockets()); }
  void Kill(int rank);
  // True: it became so within some seconds.
  static bool Becomes(const std::function<bool()>& condition);
  bool AllGoOn();       // each makes some more steps
  bool AllArePaused();  // none makes a step, and each has paused as often as the others

 private:
  void BeRank(int rank, bool lockstep, std::uint32_t most_us);

  std::filesystem::path root_;
  Shared* shared_ = nullptr;
  std::vector<RankPlace> places_;
  std::vector<pid_t> pids_;
};

}  // namespace amem::control::test
