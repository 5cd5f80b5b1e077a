// The GPU programs on stand-ins for the driver and NCCL: that they pass on a library that behaves, that each check of theirs
// fails on one that does not, that nothing hangs, and that what cannot run is skipped visibly. It is what makes a pass on real
// GPUs mean something.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/gpu/workload.h"

#define PAUSING_NCCL AMEM_BUILD "/lib/stand_ins_pausing/libnccl.so.2"

namespace amem::gpu {
namespace {

struct Ran {
  int code = -1;
  std::string output;
  double seconds = 0;
};

class Programs : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "amem-gpu-host-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  // `variables` come before the command, in the shell's way.
  Ran Run(const std::string& command, const std::string& variables = "") {
    const std::string line = "env NCCL_NVLS_ENABLE=0 " + libraries_ + " AMEM_SIM_WORLD=" + (directory_ / "world").string() +
                             " " + variables + " " + command + " 2>&1";
    const double start = Now();
    Ran ran;
    FILE* pipe = popen(line.c_str(), "r");
    if (pipe == nullptr) return ran;
    char buffer[4096];
    while (fgets(buffer, sizeof buffer, pipe) != nullptr) ran.output += buffer;
    const int status = pclose(pipe);
    ran.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    ran.seconds = Now() - start;
    return ran;
  }
  Ran Bench(const std::string& arguments, const std::string& variables = "") {
    return Run(AMEM_GPU_BENCH " --time-limit 40 --elements 256,65536 --nccl " PAUSING_NCCL " " + arguments, variables);
  }
  Ran Tests(const std::string& only, const std::string& fault = "none") {
    return Run(
        AMEM_GPU_TEST " --nccl " PAUSING_NCCL " --elements 256,65536 --cycles 3 --leak-cycles 6 --budget 50 --only " + only,
        "STAND_IN_FAULT=" + fault);
  }
  nlohmann::json Json(const std::string& name) {
    std::ifstream file(directory_ / name);
    return nlohmann::json::parse(file, nullptr, false);
  }

  std::filesystem::path directory_;
  std::string libraries_ = "LD_LIBRARY_PATH=" AMEM_BUILD "/lib/stand_ins";
};

// The same programs with AMem itself between them and the simulator, through a stand-in for NCCL that is patched as NCCL is.
class ProgramsUnderAMem : public Programs {
 protected:
  void SetUp() override {
    Programs::SetUp();
    libraries_ = "LD_LIBRARY_PATH=" AMEM_BUILD "/lib/stand_ins" + std::string(" STAND_IN_BUFFERS=3 AMEM_JOURNAL_DIR=") +
                 (directory_ / "journal").string();
    const Ran patched =
        Run(AMEM_BUILD "/bin/amem-patch " AMEM_BUILD "/lib/stand_ins/libnccl.so.2 -o " + (directory_ / "nccl").string());
    ASSERT_EQ(patched.code, 0) << patched.output;
    common_ = " --gpus 3 --elements 256,65536 --ops all-reduce --nccl " + (directory_ / "nccl/libnccl.so.2").string() + " ";
  }
  std::string common_;
};

TEST(ReferenceData, a_flipped_bit_anywhere_changes_the_checksum) {
  std::vector<unsigned char> data(1003);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 7);
  const std::uint64_t sum = Checksum(data.data(), data.size());
  for (std::size_t i = 0; i < data.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      data[i] ^= static_cast<unsigned char>(1 << bit);
      EXPECT_NE(Checksum(data.data(), data.size()), sum) << "byte " << i << " bit " << bit;
      data[i] ^= static_cast<unsigned char>(1 << bit);
    }
  }
  EXPECT_EQ(Checksum(data.data(), data.size()), sum);
}

TEST(ReferenceData, swapped_words_and_other_lengths_change_the_checksum) {
  std::vector<std::uint64_t> words(64);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = i * i;
  const std::uint64_t sum = Checksum(words.data(), 512);
  EXPECT_NE(Checksum(words.data(), 504), sum);
  std::swap(words[3], words[11]);  // the same lane of the checksum
  EXPECT_NE(Checksum(words.data(), 512), sum);
  std::swap(words[3], words[11]);
  std::swap(words[3], words[4]);  // two lanes
  EXPECT_NE(Checksum(words.data(), 512), sum);
}

TEST(ReferenceData, checksum_does_not_slow_the_workload_down) {
  const std::vector<char> data(std::size_t{64} << 20, 3);
  const double start = Now();
  volatile std::uint64_t sum = Checksum(data.data(), data.size());
  (void)sum;
  EXPECT_LT(Now() - start, 0.5);  // more than 128 MiB/s even on a busy machine; some GB/s are usual
}

TEST(ReferenceData, values_depend_on_rank_and_index_and_stay_in_range) {
  int same = 0;
  for (std::size_t i = 0; i < 10'000; ++i) {
    EXPECT_GE(Value(0, i), -1.0F);
    EXPECT_LT(Value(0, i), 1.0F);
    same += Value(0, i) == Value(1, i) ? 1 : 0;
    same += Value(0, i) == Value(0, i + 1) ? 1 : 0;
  }
  EXPECT_LT(same, 5);
}

TEST_F(Programs, refuse_to_start_unless_nvls_is_off) {
  for (const char* value : {"NCCL_NVLS_ENABLE=1", "NCCL_NVLS_ENABLE="}) {
    EXPECT_EQ(Bench("--mode stock", value).code, 2);
    EXPECT_EQ(Run(AMEM_GPU_TEST " --nccl x", value).code, 2);
    EXPECT_EQ(Run("python3 " AMEM_GPU_SOURCES "/run_gpu_tests", value).code, 2);
  }
  EXPECT_EQ(Run("python3 " AMEM_GPU_SOURCES "/run_gpu_tests", "env -u NCCL_NVLS_ENABLE").code, 2);
  EXPECT_NE(Bench("--mode floor", "NCCL_NVLS_ENABLE=2").output.find("NCCL_NVLS_ENABLE=0"), std::string::npos);
}

TEST_F(Programs, wrong_usage_is_told_from_failure) {
  EXPECT_EQ(Bench("--mode quick").code, 2);
  EXPECT_EQ(Bench("--mode amem --cycles").code, 2);
  EXPECT_EQ(Bench("--mode native --single-process").code, 2);
  EXPECT_EQ(Bench("--mode stock --nccl /no/such/libnccl.so.2").code, 1);
}

TEST_F(Programs, skip_visibly_where_there_is_no_gpu) {
  const Ran bench = Bench("--mode floor", "AMEM_SIM_DEVICES=0");
  EXPECT_EQ(bench.code, 77);
  EXPECT_NE(bench.output.find("SKIPPED"), std::string::npos);
  EXPECT_EQ(Run(AMEM_GPU_TEST " --nccl x", "AMEM_SIM_DEVICES=0").code, 77);
  const Ran all = Run("python3 -B " AMEM_GPU_SOURCES "/run_gpu_tests --build " AMEM_BUILD, "AMEM_SIM_DEVICES=0");
  EXPECT_EQ(all.code, 0) << all.output;
  EXPECT_NE(all.output.find("SKIPPED"), std::string::npos);
}

TEST_F(Programs, every_mode_gives_numbers_for_each_cycle) {
  for (const std::string mode :
       {"amem", "recreate", "floor --scale 32", "floor --scale 32 --slab-mib 64", "amem --single-process",
        "recreate --single-process", "amem --gpus 2 --ops all", "floor --scale 32 --gpus 3"}) {
    const Ran ran = Bench("--mode " + mode + " --cycles 3 --json " + (directory_ / "run.json").string());
    ASSERT_EQ(ran.code, 0) << mode << "\n" << ran.output;
    const auto run = Json("run.json");
    ASSERT_EQ(run["cycles"].size(), 3U) << mode;
    if (mode.starts_with("floor")) {
      EXPECT_FALSE(run.contains("identical")) << "nothing was compared";
    } else {
      EXPECT_TRUE(run["identical"].get<bool>()) << mode;
    }
    EXPECT_TRUE(run["memory_after_cycles"]["equal"].get<bool>()) << mode;
    EXPECT_GT(run["median"]["freed_mib"].get<double>(), 0.0) << mode;
    EXPECT_EQ(run["median"]["freed_mib"], run["held_mib"]) << mode;
    EXPECT_EQ(run["held_destroyed_mib"].get<double>(), 0.0) << mode;
  }
}

TEST_F(Programs, steady_state_is_timed_before_and_after_cycles_on_as_many_communicators_as_asked) {
  const Ran ran =
      Bench("--mode amem --gpus 2 --worlds 3 --steady 32768 --cycles 2 --json " + (directory_ / "run.json").string());
  ASSERT_EQ(ran.code, 0) << ran.output;
  const auto run = Json("run.json");
  EXPECT_EQ(run["worlds"], 3);
  for (const char* when : {"steady_before", "steady_after"}) {
    ASSERT_EQ(run[when].size(), 8U) << "5 sizes, of which 3 can be divided among all ranks";
    for (const auto& row : run[when]) EXPECT_GT(row["us"].get<double>(), 0.0) << row;
  }
}

TEST_F(Programs, native_mode_needs_a_library_that_has_it) {
  const Ran without = Bench("--mode native");
  EXPECT_EQ(without.code, 77);
  EXPECT_NE(without.output.find("no ncclCommSuspend"), std::string::npos) << without.output;
  const Ran with = Bench("--mode native --nccl " AMEM_BUILD "/lib/stand_ins_suspending/libnccl.so.2 --cycles 2");
  EXPECT_EQ(with.code, 0) << with.output;
}

TEST_F(Programs, floor_makes_the_reference_workloads_allocations) {
  const Ran ran = Bench("--mode floor --cycles 1 --gpus 4 --json " + (directory_ / "run.json").string());
  ASSERT_EQ(ran.code, 0) << ran.output;
  const auto run = Json("run.json");
  EXPECT_EQ(run["allocations"], 1772);
  EXPECT_EQ(run["imports"], 1184);
  EXPECT_EQ(run["own_mib"], 8280.0);
}

TEST_F(Programs, tests_pass_on_a_library_that_behaves) {
  const Ran ran =
      Tests("before_any,twice,reference,communicators,user_memory_keeps,refused,flight,thread,one_process,legacy,RTLD");
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_NE(ran.output.find("11 passed, 0 FAILED, 1 skipped"), std::string::npos) << ran.output;
  // On the stand-in work has ended when its launch returns, so there is none in flight to look at.
  EXPECT_NE(ran.output.find("the collectives ended before the pause began"), std::string::npos) << ran.output;
}

TEST_F(Programs, test_of_an_absent_rank_passes_when_the_others_give_up) { EXPECT_EQ(Tests("absent").code, 0); }

TEST_F(ProgramsUnderAMem, ranks_that_are_killed_in_a_resume_or_pause_leave_nothing_and_fail_the_others) {
  const Ran ran = Run(AMEM_GPU_TEST " --only a_rank_killed" + common_);
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_NE(ran.output.find("4 passed, 0 FAILED, 0 skipped"), std::string::npos) << ran.output;
  for (const char* point : {"cuMemCreate 1 of", "cuMemImportFromShareableHandle 1 of", "message 3 after cuMemSetAccess",
                            "in phase resume: ", "in phase pause: "})
    EXPECT_NE(ran.output.find(point), std::string::npos) << point << "\n" << ran.output;
}

TEST_F(ProgramsUnderAMem, symmetric_windows_work_over_cycles) {
  const Ran ran = Run(AMEM_GPU_TEST " --only symmetric_windows --cycles 3" + common_);
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_NE(ran.output.find("1 passed, 0 FAILED, 0 skipped"), std::string::npos) << ran.output;
}

TEST_F(ProgramsUnderAMem, many_cycles_leak_nothing) {
  const Ran ran = Run(AMEM_GPU_TEST " --only two_hundred --leak-cycles 8" + common_);
  EXPECT_EQ(ran.code, 0) << ran.output;
  for (const char* held : {"descriptors", "threads", "pinned bytes", "address_ranges", "free bytes of lane 0"})
    EXPECT_NE(ran.output.find("\"" + std::string(held) + "\":"), std::string::npos) << held << "\n" << ran.output;
}

TEST_F(ProgramsUnderAMem, a_program_uses_and_frees_its_memory_while_paused) {
  const Ran ran = Run(AMEM_GPU_TEST " --only user_memory" + common_);
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_NE(ran.output.find("4 passed, 0 FAILED, 0 skipped"), std::string::npos) << ran.output;
}

TEST_F(ProgramsUnderAMem, the_cost_of_votes_is_a_part_of_pause_and_resume) {
  const Ran ran =
      Run(AMEM_GPU_BENCH " --mode amem --worlds 1 --cycles 2 --json " + (directory_ / "run.json").string() + common_);
  ASSERT_EQ(ran.code, 0) << ran.output;
  const auto cycle = Json("run.json")["cycles"][1];
  EXPECT_GT(cycle["votes_ms"].get<double>(), 0.0);
  EXPECT_LT(cycle["votes_ms"].get<double>(), cycle["pause_ms"].get<double>() + cycle["resume_ms"].get<double>());
  EXPECT_NE(ran.output.find("all votes of a pause and its resume"), std::string::npos) << ran.output;
}

// A test ran and failed: an exit code of 1 alone is also that of a name which no test has.
bool SomethingFailed(const Ran& ran) {
  return ran.output.find(" FAILED") != std::string::npos && ran.output.find(" 0 FAILED") == std::string::npos;
}

TEST_F(Programs, rank_that_survives_its_end_is_found) {
  const Ran ran = Tests("before_it_created_anything");  // a library that makes none of the calls at which it is killed
  EXPECT_EQ(ran.code, 1) << ran.output;
  EXPECT_TRUE(SomethingFailed(ran)) << ran.output;
}

TEST_F(Programs, corrupt_results_are_found) {
  const Ran ran = Tests("reference", "corrupt");
  EXPECT_EQ(ran.code, 1);
  EXPECT_NE(ran.output.find("not bit-identical"), std::string::npos) << ran.output;
  EXPECT_NE(ran.output.find("all-reduce of 256 floats"), std::string::npos) << ran.output;
  EXPECT_EQ(Bench("--mode amem --cycles 1", "STAND_IN_FAULT=corrupt").code, 1);
}

TEST_F(Programs, growing_memory_is_found) {
  const Ran ran = Tests("reference", "leak");
  EXPECT_EQ(ran.code, 1);
  EXPECT_NE(ran.output.find("after cycle 1"), std::string::npos) << ran.output;
  EXPECT_EQ(Tests("two_hundred").code, 0);
  const Ran many = Tests("two_hundred", "leak");
  EXPECT_EQ(many.code, 1);
  EXPECT_NE(many.output.find("after cycle 6"), std::string::npos) << many.output;
}

TEST_F(Programs, pause_that_does_nothing_is_found) {
  const Ran ran = Tests("reference", "silent");
  EXPECT_EQ(ran.code, 1);
  EXPECT_TRUE(SomethingFailed(ran)) << ran.output;
}

TEST_F(Programs, launch_accepted_while_paused_is_found) {
  const Ran ran = Tests("refused", "accept");
  EXPECT_EQ(ran.code, 1);
  EXPECT_NE(ran.output.find("was accepted"), std::string::npos) << ran.output;
}

TEST_F(Programs, rank_that_dies_is_named_with_what_it_did) {
  const Ran ran = Tests("thread", "crash");
  EXPECT_EQ(ran.code, 1);
  EXPECT_NE(ran.output.find("rank 1: signal 11"), std::string::npos) << ran.output;
  EXPECT_NE(ran.output.find("ncclPause"), std::string::npos) << ran.output;
}

TEST_F(Programs, hang_ends_at_the_time_limit) {
  const Ran ran = Bench("--mode stock --time-limit 2", "STAND_IN_FAULT=hang");
  EXPECT_EQ(ran.code, 1);
  EXPECT_LT(ran.seconds, 15);
  EXPECT_NE(ran.output.find("hangs"), std::string::npos) << ran.output;
}

TEST_F(Programs, one_command_runs_everything_and_leaves_results) {
  const Ran ran =
      Run("python3 -B " AMEM_GPU_SOURCES "/run_gpu_tests --build " AMEM_BUILD " --nccl " PAUSING_NCCL " --patched " PAUSING_NCCL
          " --gpus 2,9 --only bench,startup,test --cycles 2"
          " --bench-cycles 2 --startup-runs 1 --elements 256,65536 --scale 32 --tests twice,RTLD --out " +
          (directory_ / "out").string());
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_NE(ran.output.find(" 0 FAILED"), std::string::npos) << ran.output;
  const auto results = Json("out/results.json");
  ASSERT_TRUE(results.is_object());
  int skipped = 0;
  for (const auto& step : results["steps"]) skipped += step["outcome"] == "SKIPPED" ? 1 : 0;
  EXPECT_EQ(skipped, 6);  // native, the stand-in's journals, and four parts (two layouts) with more GPUs than there are
  EXPECT_TRUE(std::filesystem::exists(directory_ / "out/summary.txt"));
  EXPECT_TRUE(std::filesystem::exists(directory_ / "out/summary.md"));
}

TEST_F(Programs, a_run_that_tried_nothing_fails) {
  const std::string command = "python3 -B " AMEM_GPU_SOURCES "/run_gpu_tests --build " AMEM_BUILD " --nccl " PAUSING_NCCL
                              " --patched " PAUSING_NCCL " --gpus 2 --only test --out " +
                              (directory_ / "out").string();
  const Ran misspelt = Run(command + " --tests twcie");
  EXPECT_EQ(misspelt.code, 1) << misspelt.output;
  EXPECT_NE(misspelt.output.find("--only twcie: no test has that in its name"), std::string::npos) << misspelt.output;
  const Ran no_time = Run(command + " --budget 5");
  EXPECT_EQ(no_time.code, 1) << no_time.output;
  EXPECT_NE(no_time.output.find("nothing was run"), std::string::npos) << no_time.output;
}

}  // namespace
}  // namespace amem::gpu
