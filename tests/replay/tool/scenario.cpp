#include "tests/replay/tool/scenario.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "tests/pass_descriptor.h"
#include "tests/scenarios/start_session.h"

namespace amem::test {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 4, kVictim = 2;
constexpr Bytes kMiB = Bytes{1} << 20;
constexpr Bytes kDevice = 256 * kMiB;
constexpr int kLimitSeconds = 60;
constexpr std::string_view kInSlabs = "_in_slabs";

struct Shared {
  pthread_barrier_t barrier;
  char errors[kRanks][512];
};

class Rank {
 public:
  Rank(int rank, Shared& shared, int to_next, int from_previous, fs::path directory)
      : rank_(rank), shared_(shared), to_next_(to_next), from_previous_(from_previous), directory_(std::move(directory)) {}

  Status Play(std::string scenario) {
    if (scenario.ends_with(kInSlabs)) {
      scenario.resize(scenario.size() - kInSlabs.size());
      layout_ = Layout::kSlab;
    }
    timeout_ms_ = scenario == "never_came" || scenario == "broken" ? 600 : scenario == "stuck_in_driver" ? 1500 : 20'000;
    AMEM_TRY(Start());
    AMEM_TRY(Allocate());
    Wait();
    const auto play = scenario == "healthy"                   ? &Rank::Healthy
                      : scenario == "out_of_memory"           ? &Rank::OutOfMemory
                      : scenario == "out_of_memory_in_create" ? &Rank::OutOfMemoryInCreate
                      : scenario == "killed_in_pause"         ? &Rank::KilledInPause
                      : scenario == "killed_while_paused"     ? &Rank::KilledWhilePaused
                      : scenario == "never_came"              ? &Rank::NeverCame
                      : scenario == "stuck_in_driver"         ? &Rank::StuckInDriver
                                                              : &Rank::Broken;
    AMEM_TRY((this->*play)());
    return session_->Close("exit");
  }

 private:
  void Wait() { pthread_barrier_wait(&shared_.barrier); }
  [[nodiscard]] bool victim() const { return rank_ == kVictim; }
  static Status Expect(const Status& status, Code code) {
    if (status.code() == code) return {};
    return {Code::kInvalid, "this should have ended with \"" + std::string(ToText(code)) + "\", and ended with \"" +
                                std::string(ToText(status.code())) + "\": " + status.message()};
  }

  Status Healthy() {
    for (int cycle = 0; cycle < 2; ++cycle) {
      AMEM_TRY(session_->Pause());
      Wait();
      AMEM_TRY(session_->ResumeInTime());
      Wait();
    }
    return {};
  }
  // While the job was paused, somebody else took memory of the device.
  Status OutOfMemory() {
    AMEM_TRY(session_->Pause());
    Wait();
    std::unique_ptr<Simulator> neighbour;
    if (victim()) {
      auto opened = Simulator::Open(World());
      if (!opened) return opened.status();
      neighbour = *std::move(opened);
      AllocationProperties properties;
      properties.location = {LocationType::kDevice, rank_};
      if (auto taken = neighbour->Create(kDevice - 16 * kMiB, properties, 0); !taken) return taken.status();
    }
    Wait();
    AMEM_TRY(Expect(session_->Resume(), Code::kOutOfMemory));
    Wait();
    return {};
  }
  Status OutOfMemoryInCreate() {
    AMEM_TRY(session_->Pause());
    Wait();
    if (victim()) AMEM_TRY(simulator_->FailNext("Create", 3, cuda::kOutOfMemory));
    AMEM_TRY(Expect(session_->Resume(), Code::kOutOfMemory));
    Wait();
    return {};
  }
  Status KilledInPause() {
    if (victim()) {
      simulator_->SetHook([](std::string_view call, std::uint64_t) {
        static int releases = 0;
        if (call == "Release" && ++releases == 6) ::raise(SIGKILL);
        return 0;
      });
    }
    const Status paused = session_->Pause();
    return paused.ok() ? Expect(paused, Code::kPeerLost) : Status{};
  }
  Status KilledWhilePaused() {
    AMEM_TRY(session_->Pause());
    Wait();
    if (victim()) ::raise(SIGKILL);
    ::usleep(300'000);
    static_cast<void>(session_->ResumeInTime());  // without the dead one's memory, or not at all
    return {};
  }
  Status NeverCame() {
    if (!victim()) AMEM_TRY(Expect(session_->Pause(), Code::kTimeout));
    Wait();
    return {};
  }
  Status StuckInDriver() {
    if (victim()) {
      simulator_->SetHook([](std::string_view call, std::uint64_t) {
        static int unmaps = 0;
        if (call == "Unmap" && ++unmaps == 3) ::usleep(4'000'000);
        return 0;
      });
    }
    const Status paused = session_->Pause();
    Wait();
    return paused.ok() ? Expect(paused, Code::kTimeout) : Status{};
  }
  Status Broken() {
    if (victim()) session_->records().Note(SessionBroken{"append event: write to the disk: No space left on device"});
    Wait();
    const Status paused = session_->Pause();
    Wait();
    return paused.ok() ? Expect(paused, Code::kBroken) : Status{};
  }

  [[nodiscard]] SimulatorOptions World() const {
    SimulatorOptions options;
    options.world = directory_ / "world";
    options.devices = kRanks;
    options.capacity_per_device = kDevice;
    return options;
  }

  Status Start() {
    SessionOpened who = RankOf(rank_, SessionId{0x5e55'0000'0000'0000ULL + static_cast<std::uint64_t>(rank_)});
    who.host = "alpha";
    who.boot_id = "a-boot-of-alpha";
    for (int device = 0; device < kRanks; ++device) who.gpu_uuids.push_back("SIM-" + std::to_string(device));
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    who.realtime_ns = static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    who.monotonic_ns = static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
    RankProcessOptions options{.directory = directory_, .simulated = World(), .timeout_ms = timeout_ms_};
    options.session.layout = layout_;
    auto started = StartProcess(std::move(options), who);
    if (!started) return started.status();
    simulator_ = std::move(started->simulator);
    session_ = std::move(started->session);
    return {};
  }

  // As NCCL does it: create, reserve, map, access; two of three are shared with the next rank.
  Status Allocate() {
    for (const Bytes mib : {Bytes{2}, Bytes{2}, Bytes{10}, Bytes{2}, Bytes{10}, Bytes{10}}) {
      AllocationProperties properties;
      properties.handle_types = 1;
      properties.location = {LocationType::kDevice, rank_};
      const CallSite site{{0x46b1c0 + mib * 0x10, 0x4471f2, 0, 0, 0}};
      auto id = session_->nccl().Create(mib * kMiB, properties, 0, site);
      if (!id) return id.status();
      AMEM_TRY(Place(*id, mib * kMiB, site));
      if (mib == 10) continue;
      auto token = session_->sharing().Export(*id);
      if (!token) return token.status();
      if (!SendDescriptor(to_next_, token->get())) return Status{Code::kIo, "send a descriptor"};
      const UniqueFd received = ReceiveDescriptor(from_previous_);
      if (!received) return Status{Code::kIo, "receive a descriptor"};
      auto theirs = session_->sharing().Import(received.get(), site);
      if (!theirs) return theirs.status();
      AMEM_TRY(Place(*theirs, mib * kMiB, site));
    }
    return {};
  }
  Status Place(AllocationId id, Bytes bytes, const CallSite& site) {
    auto address = session_->nccl().Reserve(bytes, 0, {}, 0, site);
    if (!address) return address.status();
    AMEM_TRY(session_->nccl().Map(*address, bytes, 0, id, 0));
    const AccessDescriptor access{{LocationType::kDevice, rank_}, 3};
    AMEM_TRY(session_->nccl().SetAccess(*address, bytes, std::span(&access, 1)));
    auto* words = reinterpret_cast<std::uint64_t*>(address->value);
    for (Bytes i = 0; i < 4096 / sizeof(*words); ++i) words[i] = i * static_cast<std::uint64_t>(rank_ + 1);
    return {};
  }

  const int rank_;
  Shared& shared_;
  const int to_next_, from_previous_;
  const fs::path directory_;
  Layout layout_ = Layout::kDirect;
  std::uint32_t timeout_ms_ = 0;
  std::unique_ptr<Simulator> simulator_;
  std::unique_ptr<Session> session_;
};

}  // namespace

Status PlayScenario(const std::string& name, const fs::path& directory) {
  if (std::ranges::find(kScenarios, name) == kScenarios.end()) return {Code::kInvalid, "there is no scenario \"" + name + "\""};
  fs::create_directories(directory);
  auto* shared =
      static_cast<Shared*>(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (shared == MAP_FAILED) return {Code::kIo, "no shared memory"};
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&shared->barrier, &attributes, kRanks);
  std::array<std::array<int, 2>, kRanks> rings{};
  for (auto& ring : rings) {
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ring.data()) != 0) return {Code::kIo, "no socket pair"};
  }
  std::array<pid_t, kRanks> children{};
  for (int rank = 0; rank < kRanks; ++rank) {
    children[rank] = ::fork();
    if (children[rank] != 0) continue;
    ::alarm(kLimitSeconds);
    const Status played = Rank(rank, *shared, rings[rank][0], rings[(rank + kRanks - 1) % kRanks][1], directory).Play(name);
    std::snprintf(shared->errors[rank], sizeof shared->errors[rank], "%s", played.message().c_str());
    ::_exit(played.ok() ? 0 : 1);
  }
  for (auto& ring : rings) {
    for (const int fd : ring) ::close(fd);
  }
  Status result;
  for (int left = kRanks; left > 0; --left) {
    int status = 0;
    const pid_t ended = ::wait(&status);
    const bool killed_as_told =
        WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && ended == children[kVictim] && name.starts_with("killed");
    if (status == 0 || killed_as_told || !result.ok()) continue;
    const auto rank = std::ranges::find(children, ended) - children.begin();
    result = {Code::kInvalid, "rank " + std::to_string(rank) + " of scenario " + name + ": " + shared->errors[rank]};
    for (const pid_t child : children) {
      if (child != ended) ::kill(child, SIGKILL);
    }
  }
  ::munmap(shared, sizeof(Shared));
  return result;
}

}  // namespace amem::test
