// What happens to the process: it forks, and its driver fails.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "tests/world/action.h"
#include "tests/world/findings.h"

namespace amem::world {

// The child does what may be done in the child of a process with threads: it ends, at once or after a while, or runs a program.
void Fork(Worker& worker) {
  const auto how = worker.Pick(3);
  const pid_t child = ::fork();
  if (child == 0) {
    if (how == 0) ::execl("/bin/true", "true", nullptr);
    if (how == 1) ::usleep(20'000);
    ::_exit(0);
  }
  const bool may_fail =
      worker.rank.settings.shortages;  // neither the child nor the program that it runs may have what it needs
  if (child < 0 && may_fail) return;
  if (child < 0) Found("fork failed");
  int status = 0;
  if (::waitpid(child, &status, 0) != child || (status != 0 && !may_fail))
    Found(fmt::format("a forked child ended with status {}", status));
}

void FailACall(Worker& worker) {
  if (!worker.rank.settings.faults) return;
  static constexpr std::array kCalls = {"Create",         "Reserve",     "Map",    "SetAccess",   "Export",  "Import",
                                        "AllocatePinned", "FindNonZero", "Gather", "CopyToHost",  "Scatter", "CopyToDevice",
                                        "ClearAll",       "Memory",      "Clear",  "Synchronize", "MomentOf"};
  const char* const call = kCalls.at(worker.Pick(kCalls.size()));
  const std::uint64_t nth = 1 + worker.Pick(3);
  const int result = worker.Pick(2) == 0 ? cuda::kOutOfMemory : cuda::kOperatingSystem;
  Trace(fmt::format("{} {} will fail", call, nth));
  static_cast<void>(worker.rank.simulator->FailNext(call, nth, result));
}

// What --lose asks for.
void Lose(Worker& worker) {
  Rank& rank = worker.rank;
  if (rank.settings.lose == "range") static_cast<void>(rank.session->nccl().Reserve(kPage, 0, {}, 0, {}));
  if (rank.settings.lose == "thread") {
    const Within within("a call that is lost", std::chrono::milliseconds(50));
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
  const Place* const place = worker.Any([](const Place& p) { return p.kind == Kind::kNccl && p.memory->value != 0; });
  if (rank.settings.lose != "byte" || place == nullptr) return;
  worker.stream->Await();
  const auto entered = rank.session->calls().EnterLaunch("a kernel");
  if (!entered.owns_lock()) return;  // there is nothing to write to
  const std::byte wrong{0x77};
  static_cast<void>(rank.simulator->KernelWrites(rank.device, place->address, std::span(&wrong, 1)));
}

void Rest(Worker& worker) { std::this_thread::sleep_for(std::chrono::milliseconds(worker.Pick(5))); }

}  // namespace amem::world
