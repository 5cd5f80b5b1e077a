// A world of processes: the conductor starts them, kills some, and stops some for a while.
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/scenarios/start_session.h"
#include "tests/world/conductor.h"
#include "tests/world/findings.h"
#include "tests/world/launches.h"
#include "tests/world/rank.h"
#include "tests/world/shortages.h"
#include "tests/world/stops.h"
#include "tests/world/world.h"

extern char** environ;

namespace amem::world {
namespace {

using Clock = std::chrono::steady_clock;

struct FoundByChild {};

class Children {
 public:
  Children(const Settings& settings, std::shared_ptr<Page> page, const std::shared_ptr<SimulatorWorld>& memory,
           const char* program)
      : settings_(settings),
        page_(std::move(page)),
        random_(settings.seed * 104'729),
        shortages_(settings, page_, settings.directory / "journal"),
        stops_(settings, page_, memory) {
    for (int rank = 0; rank < settings.ranks; ++rank) pids_.push_back(Start(program, rank));
    if (random_() % 2 == 0) kill_at_ = Clock::now() + settings.life * (random_() % 100) / 100;
  }
  ~Children() {
    for (const pid_t pid : pids_) {
      if (pid > 0 && ::kill(pid, SIGKILL) == 0) ::waitpid(pid, nullptr, 0);
    }
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  // Kills when it is time, and notices who ended.
  void Look() {
    if (Clock::now() >= kill_at_) Kill(random_() % pids_.size());
    shortages_.Advance(pids_);
    stops_.Advance(pids_);
    for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
      int status = 0;
      if (pids_[rank] <= 0 || ::waitpid(pids_[rank], &status, WNOHANG) != pids_[rank]) continue;
      pids_[rank] = 0;
      page_->gone[rank] = true;
      if (page_->dead[rank] || status == 0) continue;
      if (!WIFEXITED(status) || WEXITSTATUS(status) != kFoundExit)
        std::fprintf(stderr, "FOUND, seed %lu (%s): the process of rank %zu ended with status %d\n", settings_.seed,
                     Describe(settings_).c_str(), rank, status);
      throw FoundByChild{};
    }
  }
  void AwaitEnd() {
    while (std::ranges::any_of(pids_, [](pid_t pid) { return pid > 0; })) {
      Look();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  // One has found something, and the others say what they know. Stacks take a while.
  void LetThemSpeak() {
    for (const auto until = Clock::now() + std::chrono::seconds(20); Clock::now() < until && page_->found;) {
      for (pid_t& pid : pids_) {
        if (pid > 0 && ::waitpid(pid, nullptr, WNOHANG) == pid) pid = 0;
      }
      if (std::ranges::all_of(pids_, [](pid_t pid) { return pid <= 0; })) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

 private:
  pid_t Start(const char* program, int rank) {
    std::vector<std::string> words = {
        program, "--rank", std::to_string(rank), "--seed", std::to_string(settings_.seed), "--directory", settings_.directory};
    words.insert(words.end(), {"--late", std::to_string(settings_.late.count())});
    if (!settings_.lose.empty()) words.insert(words.end(), {"--lose", settings_.lose});
    if (settings_.all_between_launches) words.emplace_back("--between-launches");
    if (!settings_.with.empty()) words.insert(words.end(), {"--with", settings_.with});
    if (!settings_.without.empty()) words.insert(words.end(), {"--without", settings_.without});
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_t pid = 0;
    if (::posix_spawn(&pid, program, nullptr, nullptr, arguments.data(), environ) != 0) std::abort();
    return pid;
  }
  void Kill(std::size_t rank) {
    kill_at_ = Clock::time_point::max();
    if (page_->found) return;  // let it speak
    Trace(fmt::format("rank {} is killed", rank));
    page_->dead[rank] = true;  // before anybody can notice
    ::kill(pids_[rank], SIGKILL);
  }

  const Settings settings_;
  const std::shared_ptr<Page> page_;
  std::mt19937_64 random_;
  Shortages shortages_;
  Stops stops_;
  std::vector<pid_t> pids_;
  Clock::time_point kill_at_ = Clock::time_point::max();
};

}  // namespace

bool RunProcesses(Settings settings, const char* program) {
  std::string directory = "/dev/shm/amem-world-XXXXXX";
  if (::mkdtemp(directory.data()) == nullptr) std::abort();
  settings.directory = directory;
  SetWorld(settings, -1);
  bool nothing_found = true;
  {
    const auto page = OpenPage(settings.directory / "page");
    const auto memory = *SimulatorWorld::Open(settings.directory / "world", kMostRanks, kCapacity);
    Children children(settings, page, memory, program);
    try {
      Conductor(settings, page, [&] { children.Look(); }).Run();
      children.AwaitEnd();
    } catch (const FoundByChild&) {
      nothing_found = false;
      children.LetThemSpeak();
    }
  }
  std::error_code ignored;
  if (settings.keep && !nothing_found) {
    for (const char* name : {"page", "world", "sockets"}) std::filesystem::remove_all(settings.directory / name, ignored);
    fmt::print(stderr, "the journals: {}\n", (settings.directory / "journal").string());
    return false;
  }
  std::filesystem::remove_all(settings.directory, ignored);
  return nothing_found;
}

void RunAsProcess(const Settings& settings, int rank) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  constexpr rlimit kFew{4096, 4096};  // the driver raises a lower limit to the hard one
  if (settings.starves) ::setrlimit(RLIMIT_NOFILE, &kFew);
  StartWatchdog();
  SetWorld(settings, rank);
  // The watchdog looks at it until the process has ended.
  static const auto& page = *new std::shared_ptr<Page>(OpenPage(settings.directory / "page"));
  Share(page->found);
  ShareStops(page->stopped_us, rank);
  SimulatorOptions simulated;
  simulated.world = settings.directory / "world";
  simulated.capacity_per_device = kCapacity;
  std::unique_ptr<Launches> launches;
  if (settings.between_launches) launches = std::make_unique<Launches>(settings, page, rank);
  Rank one(settings, page, rank, simulated, [&](Simulator& simulator) {
    test::RankProcessOptions options;
    if (launches != nullptr) options.requests = &launches->requests();
    options.directory = settings.directory;
    options.session = settings.session;
    options.timeout_ms = settings.timeout_ms();
    options.lasting = settings.shortages;
    const SessionId session = SessionOf(rank);
    page->sessions[static_cast<std::size_t>(rank)] = session.value;
    return test::StartOn(simulator, std::move(options), test::RankOf(rank, session));
  });
  if (launches != nullptr) launches->Begin(one);
  one.launches = launches.get();
  one.Run();
}

}  // namespace amem::world
