// A job of fake processes, their driver and their machine for tests of a freeze, in memory that a forked tool shares with its
// test: the tool can be killed before and after every call that it makes, and another goes on where it stopped.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "journal/codec.h"
#include "replay/freeze/operation.h"

namespace amem::test {

inline constexpr int kFakeRanks = 3;
inline constexpr Bytes kOnGpu = Bytes{6} << 30, kLeftByPause = Bytes{1} << 30, kGpuTotal = Bytes{80} << 30;

enum class FakeCall : int { kPause, kLock, kCheckpoint, kRestore, kUnlock, kResume, kNote, kTell, kCount };

struct FakeRank {
  std::atomic<int> state{0};  // CheckpointState
  std::atomic<std::uint64_t> start{0};
  std::atomic<int> gpu{0};
  std::atomic<bool> shares{false};   // GPU memory, although it is paused
  std::atomic<bool> touched{false};  // a call was made about it after it had ended
};

struct FakeShared {
  std::array<FakeRank, kFakeRanks> ranks;
  std::atomic<bool> paused{false};
  std::atomic<int> calls{0}, die_at{0};  // two for each call: before it and after it
  std::array<std::atomic<int>, static_cast<std::size_t>(FakeCall::kCount)> fail_at{}, made{};
  std::atomic<int> fail_with{0};
  std::atomic<Bytes> host_room{Bytes{500} << 30}, taken_by_others{0};
  std::atomic<int> notes{0};
  std::atomic<int> asked{0};  // to come to a pause
};

class FrozenWorld final : public control::AskedJob, public Checkpointer, public FreezeHost {
 public:
  FrozenWorld() {
    void* memory = mmap(nullptr, sizeof(FakeShared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared = new (memory) FakeShared;
    for (int rank = 0; rank < kFakeRanks; ++rank) {
      shared->ranks[At(rank)].start = 1000 + static_cast<std::uint64_t>(rank);
      shared->ranks[At(rank)].gpu = rank;
    }
    std::string name = (std::filesystem::temp_directory_path() / "amem-freeze-XXXXXX").string();
    directory = mkdtemp(name.data());
    for (int rank = 0; rank < kFakeRanks; ++rank) std::filesystem::create_directory(directory / std::to_string(rank));
  }
  ~FrozenWorld() override {
    munmap(shared, sizeof(FakeShared));
    std::filesystem::remove_all(directory);
  }
  FrozenWorld(const FrozenWorld&) = delete;
  FrozenWorld& operator=(const FrozenWorld&) = delete;

  static constexpr pid_t kFirstPid = 4'000'000;  // above any real one
  FakeShared* shared = nullptr;
  std::filesystem::path directory;
  bool unknown_to_the_driver = false;
  bool driver_starts = true;     // in the tool
  bool ranks_elsewhere = false;  // a communicator has more ranks than there are here
  bool is_grown = false;         // that communicator, so that it has no name
  MemoryTag user_memory = MemoryTag::kNccl;
  PoolId tag;         // of the memory
  bool kept = false;  // by whom does not matter
  bool parked = false;
  LocationType location = LocationType::kDevice;
  bool imported = false, multicast = false, registered = false, renewable = false, handed_out = false;
  std::string handed_to;  // a library
  std::string driver = "580.159.04";
  decltype(State::outside) outside;        // what other libraries of rank 1 share
  decltype(State::outside) outside_later;  // the same, once it is paused

  // What a tool does, in this process.
  Status Do(Status (FreezeOperation::*what)(), FreezeOptions options = {}) {
    FreezeOperation operation(*this, *this, *this, std::move(options));
    const Status done = (operation.*what)();
    report = operation.report();
    return done;
  }
  // In a process of its own, which dies at the nth of the moments before and after its calls. False: it came to its end.
  bool DiesIn(Status (FreezeOperation::*what)(), int nth, const FreezeOptions& options = {}) {
    shared->calls = 0;
    shared->die_at = nth;
    const pid_t child = fork();
    if (child == 0) {
      static_cast<void>(Do(what, options));
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    shared->die_at = 0;
    return WEXITSTATUS(status) == kDied;
  }
  FreezeReport report;

  [[nodiscard]] bool AllAre(CheckpointState state, bool paused) const {
    for (const FakeRank& rank : shared->ranks) {
      if (rank.state != static_cast<int>(state)) return false;
    }
    return shared->paused == paused;
  }
  // The nth call of that name from now on answers `result`.
  void Fail(FakeCall call, int nth, int result) {
    shared->fail_at[static_cast<std::size_t>(call)] = shared->made[static_cast<std::size_t>(call)] + nth;
    shared->fail_with = result;
  }
  void End(int rank) { shared->ranks[At(rank)].start = 0; }

  // ---- AskedJob
  std::vector<control::RankView> Ranks() override {
    std::vector<control::RankView> looks;
    for (int rank = 0; rank < kFakeRanks; ++rank) {
      const std::uint64_t start = shared->ranks[At(rank)].start;
      if (start != 1000 + static_cast<std::uint64_t>(rank)) continue;  // has ended, whoever has its number now
      looks.push_back({.process = {.session = SessionId{static_cast<std::uint64_t>(rank) + 1},
                                   .pid = kFirstPid + rank,
                                   .start_ticks = start,
                                   .name = "rank " + std::to_string(rank),
                                   .directory = directory / std::to_string(rank)},
                       .is = {.phase = shared->paused ? control::Phase::kPaused : control::Phase::kRunning,
                              .parked = parked && shared->paused}});
    }
    return looks;
  }
  Status Pause(const control::AskOptions& asked, const control::Progress&) override {
    ++shared->asked;
    if (does_not_come) return {Code::kTimeout, "rank 1 did not come"};
    EXPECT_TRUE(asked.all_tags);
    std::optional<Status> allowed = asked.may_pause ? std::nullopt : std::optional<Status>(Status());
    for (; !allowed; allowed = asked.may_pause())  // the ranks have come, and wait, and leave the processor to the checks
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    AMEM_TRY(*allowed);
    if (when_pausing) when_pausing();
    return Call(FakeCall::kPause, [&]() -> Status {
      shared->paused = true;
      return {};
    });
  }
  Status Resume(std::chrono::milliseconds, const control::Progress&) override {
    return Call(FakeCall::kResume, [&]() -> Status {
      for (const FakeRank& rank : shared->ranks) {
        if (rank.start != 0 && rank.state != 0) return {Code::kTimeout, "a rank does not answer"};
      }
      shared->paused = false;
      return {};
    });
  }
  Status LeaveNote(SessionId session, EventBody note) override {
    const bool back = std::holds_alternative<::amem::Frozen>(note);
    return Call(back ? FakeCall::kNote : FakeCall::kTell, [&]() -> Status {
      if (back) return ++shared->notes, Status();
      Encoder encoder;
      const auto bytes = encoder.Encode(Event{{}, 0, 0, std::move(note)});
      std::ofstream(NoteOf(session))
          .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
      return {};
    });
  }
  // As the journal of that rank has it.
  [[nodiscard]] std::optional<FreezeStep> Told(SessionId session) const {
    std::ifstream file(NoteOf(session));
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    if (bytes.empty()) return std::nullopt;
    return std::get<FreezeStep>(DecodeEvent(std::as_bytes(std::span(bytes)))->body);
  }
  Result<State> MemoryOf(const RankProcess& process) override {
    State state;
    state.freeze = Told(process.session);
    Allocation one{.bytes = kOnGpu, .properties = {.location = {LocationType::kDevice, 0}}};
    one.tag = user_memory;
    one.pool = tag;
    one.kept_with_all = kept;
    one.properties.location.type = location;
    one.guest_references = 1;
    one.resident = !shared->paused || user_memory == MemoryTag::kUser;
    one.multicast = multicast;
    one.pinned = registered ? 1 : 0;
    one.renewable = renewable ? 1 : 0;
    one.handed_out = handed_out;
    one.handed_to = handed_to;
    const bool shares = shared->ranks[At(process.pid - kFirstPid)].shares;
    if (imported || shares) one.importers[{SessionId{77}, AllocationId{1}}] = 1;
    if (shares) one.resident = true;
    state.allocations.emplace(AllocationId{1}, one);
    if (shares) state.allocations.emplace(AllocationId{2}, one);
    if (process.pid == kFirstPid + 1) state.outside = shared->paused ? outside_later : outside;
    Communicator communicator;
    communicator.hash = is_grown ? 0 : 7;
    communicator.rank = process.pid - kFirstPid;
    communicator.ranks = ranks_elsewhere ? 2 * kFakeRanks : kFakeRanks;
    communicator.ready = true;
    state.communicators.emplace(CommunicatorId{1}, communicator);
    return state;
  }

  std::string DriverVersion() override { return driver; }

  // ---- Checkpointer
  [[nodiscard]] std::string Version() const override { return "CUDA 13.0"; }
  [[nodiscard]] bool TakesPairs() const override { return true; }
  Result<std::vector<std::string>> Gpus() override {
    if (!driver_starts) return Status{Code::kDriver, "CUDA_ERROR_NO_DEVICE", 100};
    return std::vector<std::string>{"GPU-0", "GPU-1", "GPU-2"};
  }
  Result<CheckpointState> StateOf(pid_t pid) override {
    if (unknown_to_the_driver) return Status{Code::kDriver, "CUDA_ERROR_INVALID_VALUE", 1};
    return static_cast<CheckpointState>(shared->ranks[At(pid - kFirstPid)].state.load());
  }
  Status Lock(pid_t pid, std::chrono::milliseconds) override { return Change(FakeCall::kLock, pid, 0, 1); }
  Status Checkpoint(pid_t pid) override { return Change(FakeCall::kCheckpoint, pid, 1, 2); }
  Status Restore(pid_t pid, std::span<const GpuPair> pairs) override {
    FakeRank& rank = shared->ranks[At(pid - kFirstPid)];
    if (!shared->paused || rank.shares) {  // as the driver does with a process that shares memory
      rank.state = static_cast<int>(CheckpointState::kFailed);
      return {Code::kDriver, "CUDA_ERROR_NOT_SUPPORTED", 801};
    }
    const auto pair = std::ranges::find(pairs, "GPU-" + std::to_string(rank.gpu), &GpuPair::from);
    return Change(FakeCall::kRestore, pid, 2, 1, pair == pairs.end() ? rank.gpu.load() : std::stoi(pair->to.substr(4)));
  }
  Status Unlock(pid_t pid) override { return Change(FakeCall::kUnlock, pid, 1, 0); }

  // ---- FreezeHost
  std::vector<GpuInUse> GpusInUse() override {
    for (int waited = 0; looks_when_asked && shared->asked == 0 && waited < 5000; ++waited) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (shared->asked > 0) saw_asked = true;
    std::vector<GpuInUse> gpus;
    if (hides_gpus) return gpus;
    for (int rank = 0; rank < kFakeRanks; ++rank) {
      const bool there = shared->ranks[At(rank)].state != 2 && shared->ranks[At(rank)].start != 0;
      const Bytes held = !there ? 0 : shared->paused ? kLeftByPause : kOnGpu;
      GpuInUse gpu{.uuid = "GPU-" + std::to_string(rank), .memory = {}, .holders = {}};
      gpu.memory = {.free = kGpuTotal - held - shared->taken_by_others, .total = kGpuTotal};
      if (held > 0) gpu.holders.push_back({kFirstPid + rank, held, "python3"});
      if (shared->taken_by_others > 0) gpu.holders.push_back({99, shared->taken_by_others, "vllm"});
      if (two_others) gpu.holders.push_back({98, 1, "sglang"});
      gpus.push_back(std::move(gpu));
    }
    return gpus;
  }
  std::optional<HostRoom> RoomFor(pid_t) override { return HostRoom{shared->host_room, "MemAvailable"}; }
  ProcessLife LifeOf(const RankProcess& process) override {
    using Is = ProcessLife::Is;
    if (process.pid == unseen) return {Is::kUnknown, "too many open files"};
    return {shared->ranks[At(process.pid - kFirstPid)].start == process.start_ticks ? Is::kAlive : Is::kEnded, {}};
  }
  Result<std::set<pid_t>> Siblings(pid_t pid) override {
    if (siblings_unseen) return Status{Code::kNoDescriptors, "too many open files"};
    return siblings.empty() ? std::set<pid_t>{pid} : siblings;
  }
  std::set<pid_t> siblings;
  bool siblings_unseen = false;
  pid_t unseen = 0;  // whether that process lives
  std::function<void()> when_pausing;
  bool two_others = false;             // use each GPU
  bool hides_gpus = false;             // NVML, as in a container
  bool does_not_come = false;          // a rank, to the pause
  bool looks_when_asked = false;       // the GPUs are looked at when the ranks have been asked, or after 5 s
  std::atomic<bool> saw_asked{false};  // they were

 private:
  [[nodiscard]] std::filesystem::path NoteOf(SessionId session) const {
    return directory / std::to_string(session.value - 1) / "note";
  }
  static constexpr int kDied = 77;
  static std::size_t At(int rank) { return static_cast<std::size_t>(rank); }

  void MayDie() {
    if (++shared->calls == shared->die_at) _exit(kDied);
  }
  Status Call(FakeCall call, const std::function<Status()>& make) {
    MayDie();
    const auto number = static_cast<std::size_t>(call);
    if (++shared->made[number] == shared->fail_at[number]) {
      return {Code::kDriver, "the driver said " + std::to_string(shared->fail_with), shared->fail_with};
    }
    const Status done = make();
    MayDie();
    return done;
  }
  Status Change(FakeCall call, pid_t pid, int from, int to, int gpu = -1) {
    FakeRank& rank = shared->ranks[At(pid - kFirstPid)];
    if (rank.start == 0) rank.touched = true;
    return Call(call, [&]() -> Status {
      if (rank.state != from) return {Code::kDriver, "CUDA_ERROR_ILLEGAL_STATE", 401};
      if (gpu >= 0) rank.gpu = gpu;  // before the state, by which a tool that looks after another's death tells it
      rank.state = to;
      return {};
    });
  }
};

}  // namespace amem::test
