// A job whose journals are on a file system that stands still: it computes as before, and a pause says why there is none.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/journal/small_disk.h"
#include "tests/scenarios/job.h"

namespace amem {
namespace {

using job::Job;
using job::Rank;

struct Calls {
  int count = 0;
  std::int64_t median_us = 0, longest_us = 0;
};
Calls CallsOf(const Rank& rank, int nth) {
  Calls calls;
  std::istringstream(rank.Said("calls", nth)) >> calls.count >> calls.median_us >> calls.longest_us;
  return calls;
}

// AMEM_STILL_DISK_MS: for how long it stands still.
int StandsStillMs() {
  const char* const given = std::getenv("AMEM_STILL_DISK_MS");
#ifdef AMEM_BY_NIGHT
  constexpr int kDefault = 30'000;
#else
  constexpr int kDefault = 2'000;
#endif
  return given != nullptr ? std::atoi(given) : kDefault;
}

std::string RunOnStillDisk() {
  Job job;
  const auto disk = job.directory() / "disk", still = job.directory() / "still", goes_on = job.directory() / "goes-on";
  std::filesystem::create_directory(disk);
  if (!test::MountDisk(disk, "mkfs.ext4 -q", "64M")) return "cannot";
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["AMEM_JOURNAL_DIR"] = disk / "journal";
  job.environment["AMEM_TIMEOUT_MS"] = "2000";
  const std::string calls = "calls=" + std::to_string(StandsStillMs());
  job.Start(2, {"cuda", "load", "init", "reduce", "calls=1000", "await=" + still.string(), calls, "reduce", "barrier", "pause",
                "await=" + goes_on.string(), "pause", "barrier", "resume", "reduce"});
  for (int rank = 0; rank < 2; ++rank)
    for (int waited = 0; waited < 6000 && job.SoFar(rank).Said("calls") == "(not run)"; ++waited)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  std::chrono::milliseconds patience{StandsStillMs()};
  {
    const test::Frozen frozen(disk, patience + std::chrono::seconds(20));
    if (!frozen.is()) return "cannot";
    std::ofstream{still};
    for (int rank = 0; rank < 2; ++rank)
      for (int waited = 0; waited < 6000 + patience.count() / 10 && job.SoFar(rank).Said("pause") == "(not run)"; ++waited)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::ofstream{goes_on};
  const auto ranks = job.Finish(std::chrono::seconds(60));
  ::umount2(disk.c_str(), MNT_DETACH);
  std::ostringstream wrong;
  for (const Rank& rank : ranks) {
    const Calls before = CallsOf(rank, 0), during = CallsOf(rank, 1);
    std::printf(
        "an allocation and its end: median %ld us, longest %ld us of %d; while the disk stood still: median %ld us, longest "
        "%ld us of %d\n",
        before.median_us, before.longest_us, before.count, during.median_us, during.longest_us, during.count);
    if (rank.status != 0) wrong << "status " << rank.status << "; ";
    if (before.count == 0 || during.count == 0) wrong << "nothing was measured; ";
    if (during.median_us > before.median_us + 1000) wrong << "calls took longer than before; ";
    if (during.longest_us > 1'000'000) wrong << "a call waited for the disk; ";  // the machine may be busy
    const std::string refused = rank.Said("pause", 0);
    if (refused == "0") wrong << "it paused without a journal; ";
    if (refused.find("has not answered for") == refused.npos) wrong << "the reason: " << refused << "; ";
    if (rank.Said("pause", 1) != "0" || rank.Said("resume") != "0") wrong << "no pause afterwards; ";
    if (rank.Said("reduce", 1) != rank.Said("reduce", 0) || rank.Said("reduce", 2) != rank.Said("reduce", 0))
      wrong << "other results; ";
    if (!wrong.str().empty()) wrong << rank.out << rank.err;
  }
  std::fflush(stdout);
  return wrong.str();
}

TEST(StillDisk, changes_no_call_and_refuses_a_pause_with_the_reason) { EXPECT_FINE_IN_CHILD(RunOnStillDisk); }

}  // namespace
}  // namespace amem
