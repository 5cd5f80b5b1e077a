// How long whole pauses and resumes of a job's ranks take on the simulator, and what processor time they cost: with little
// memory, so that most of it is the agreement. And the processor time of ranks for which nothing happens.
//
// cycle_bench [RANKS=4] [CYCLES=200]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/scenarios/rank_process.h"

using namespace amem;
using namespace amem::test;

namespace {

using Clock = std::chrono::steady_clock;

// Of all threads of all children of this process, microseconds.
double Processor() {
  double all = 0;
  std::ifstream children("/proc/thread-self/children");
  for (int pid = 0; children >> pid;) {
    std::error_code ended;
    for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task", ended)) {
      std::ifstream said(task.path() / "schedstat");
      double ns = 0;
      if (said >> ns) all += ns / 1000;
    }
  }
  return all;
}

double Median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

void AllOk(RankProcesses& job, Op op) {
  for (const auto& reply : job.All({.op = op, .version = 1})) {
    if (reply && reply->ok()) continue;
    std::fprintf(stderr, "cycle_bench: %s\n", reply ? reply->text.data() : "a rank died");
    std::exit(1);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int ranks = count > 1 ? std::atoi(arguments[1]) : 4, cycles = count > 2 ? std::atoi(arguments[2]) : 200;
  RankProcesses job(ranks);
  AllOk(job, Op::kFill);
  std::vector<double> pauses, resumes, costs;
  for (int i = 0; i < cycles + 5; ++i) {
    const double before = Processor();
    const auto began = Clock::now();
    AllOk(job, Op::kPause);
    const auto paused = Clock::now();
    AllOk(job, Op::kResume);
    const auto resumed = Clock::now();
    if (i < 5) continue;  // connections, pages and buffers are made in the first
    pauses.push_back(std::chrono::duration<double, std::micro>(paused - began).count());
    resumes.push_back(std::chrono::duration<double, std::micro>(resumed - paused).count());
    costs.push_back((Processor() - before) / ranks);
  }
  constexpr auto kWhile = std::chrono::seconds(2);
  const auto idle = [&] {
    const double before = Processor();
    std::this_thread::sleep_for(kWhile);
    return (Processor() - before) / ranks / 2;
  };
  const double running = idle();
  for (int rank = 1; rank < ranks; ++rank) job.Send(rank, {.op = Op::kPause});
  const double waiting = idle();
  job.Send(0, {.op = Op::kPause});
  for (int rank = 0; rank < ranks; ++rank) static_cast<void>(job.Receive(rank));
  const double paused = idle();
  std::printf(
      "%d ranks: pause %.0f us, resume %.0f us; processor time of a rank: %.0f us for both; a second of running %.0f us, of "
      "waiting for one rank to come %.0f us, of being paused %.0f us\n",
      ranks, Median(pauses), Median(resumes), Median(costs), running, waiting, paused);
  return 0;
}
