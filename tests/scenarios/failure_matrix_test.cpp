// The matrix of failures: jobs of real processes on the stand-ins fail in every way of failure_table.cpp, and `amem-replay why`
// must name cause, ranks and remedy in every look. By day every sixth failure meets one kind of clean-up, at night
// (AMEM_NIGHTLY=1) each meets every kind.
//
//   AMEM_FAILURE_ONLY=TEXT    only failures with that in their names, and what was said in each look is printed
//   AMEM_FAILURE_SEED=NUMBER  other random moments; the default is always the same
//   AMEM_FAILURE_JOBS=NUMBER  how many jobs run at once (8)
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>

#include "tests/scenarios/failure_job.h"

namespace amem::failure {
namespace {

std::string Setting(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : text;
}

struct PlannedJob {
  Failure failure;
  Teardown teardown;
  std::uint64_t seed = 0;
};

bool IsNight() {
#ifdef AMEM_BY_NIGHT
  return true;
#else
  return Setting("AMEM_NIGHTLY", "0") == "1";
#endif
}

std::vector<PlannedJob> Plan(bool night) {
  const std::string only = Setting("AMEM_FAILURE_ONLY", "");
  const std::uint64_t seed = std::strtoull(Setting("AMEM_FAILURE_SEED", "13").c_str(), nullptr, 10);
  std::vector<PlannedJob> plan;
  for (std::size_t round = 0; round < std::size(kTeardowns); ++round) {
    // At night every round has random moments of its own.
    const std::vector<Failure> failures = AllFailures(seed + round);
    for (std::size_t i = 0; i < failures.size(); ++i) {
      if (failures[i].name.find(only) == std::string::npos) continue;
      if (!night && only.empty() && (i + seed) % 6 != 0) continue;
      if (!night && (i / 6 + seed) % std::size(kTeardowns) != round) continue;
      if (failures[i].lives && round != 0 && night) continue;
      // A job that is well ends by itself: nothing is raised, so that looking at what exceptions leave would be no look at all.
      plan.push_back({failures[i], kTeardowns[failures[i].lives ? 0 : round], seed + i * 16 + round});
    }
  }
  return plan;
}

// A machine that stands still for seconds makes other things fail than those that were meant to: such a job is run again, twice
// at most, and that is said. A failure that never happens as it should stays one.
Result LookAtLast(const PlannedJob& planned, bool every_rank) {
  Result result;
  for (int tries = 0; tries < 3; ++tries) {
    result = LookAt(planned.failure, planned.teardown, every_rank, planned.seed);
    if (result.broken.empty()) break;
    std::printf("AGAIN  %s: %s\n", result.name.c_str(), result.broken.substr(0, result.broken.find('\n')).c_str());
  }
  return result;
}

std::vector<Result> RunAll(const std::vector<PlannedJob>& plan, bool every_rank) {
  std::vector<Result> results(plan.size());
  std::atomic<std::size_t> next = 0;
  const int at_once = std::max(1, std::atoi(Setting("AMEM_FAILURE_JOBS", "8").c_str()));
  std::vector<std::thread> threads;
  for (int i = 0; i < at_once; ++i) {
    threads.emplace_back([&] {
      for (std::size_t mine = next++; mine < plan.size(); mine = next++) results[mine] = LookAtLast(plan[mine], every_rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

struct Count {
  std::size_t looks = 0, right = 0, gaps = 0, alone = 0, alone_right = 0;
};

bool IsAlone(const Look& look) { return look.name.starts_with("alone"); }

void Judge(const Result& result, const Look& look, bool verbose, Count& count) {
  const std::string what = result.name + ", " + look.name + ": " + look.said;
  ++count.looks;
  count.alone += IsAlone(look) ? 1 : 0;
  if (look.wrong.empty()) {
    ++count.right;
    count.alone_right += IsAlone(look) ? 1 : 0;
    if (verbose) std::printf("right  %s\n", what.c_str());
  } else if (!look.gap.empty()) {
    ++count.gaps;
    std::printf("GAP    %s\n       known: %s\n", what.c_str(), look.gap.c_str());
  } else {
    ADD_FAILURE() << "WRONG " << look.wrong << " " << what;
  }
}

TEST(FailureMatrix, cause_ranks_and_remedy_are_right_in_every_look) {
  const bool night = IsNight(), verbose = std::getenv("AMEM_FAILURE_ONLY") != nullptr;
  const std::vector<PlannedJob> plan = Plan(night);
  const std::vector<Result> results = RunAll(plan, night);
  Count count;
  for (const Result& result : results) {
    EXPECT_EQ(result.broken, "") << result.name << ": the failure did not happen as it should";
    EXPECT_FALSE(result.looks.empty()) << result.name;
    for (const Look& look : result.looks) Judge(result, look, verbose, count);
  }
  std::printf("%zu failed jobs, %zu looks: %zu right, %zu known gaps; from one journal alone %zu of %zu right\n",
              results.size(), count.looks, count.right, count.gaps, count.alone_right, count.alone);
}

TEST(FailureMatrix, a_directory_without_journals_is_not_a_healthy_job) {
  const job::Job job;
  std::filesystem::create_directory(job.journals());
  const job::Rank said = job::RunProgram({AMEM_REPLAY, "why", "--json", job.journals()}, {}, job.directory());
  EXPECT_NE(said.status, 0) << said.out;
  EXPECT_EQ(said.out.find("\"healthy\": true"), std::string::npos) << said.out;
  EXPECT_NE(said.err.find("journal"), std::string::npos) << said.err;
}

TEST(FailureMatrix, has_at_least_forty_kinds_of_failure) {
  std::size_t kinds = 0;
  for (const Failure& failure : AllFailures(1)) kinds += failure.lives ? 0 : 1;
  EXPECT_GE(kinds, 40U);
}

}  // namespace
}  // namespace amem::failure
