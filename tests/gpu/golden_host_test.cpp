// The golden jobs on the simulator, from the one command to the verdicts: what `run_gpu_tests --only golden` leaves has to pass
// the test that its files from GPUs will have to pass.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace amem::gpu {
namespace {

namespace fs = std::filesystem;

int Shell(const std::string& command, std::string& output) {
  output.clear();
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return -1;
  char buffer[4096];
  while (fgets(buffer, sizeof buffer, pipe) != nullptr) output += buffer;
  const int status = pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(GoldenJobs, journals_of_the_one_command_get_their_verdicts) {
  std::string pattern = (fs::temp_directory_path() / "amem-golden-XXXXXX").string();
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  const fs::path directory = pattern, out = directory / "out";
  std::string output;
  EXPECT_EQ(Shell("env NCCL_NVLS_ENABLE=0 LD_LIBRARY_PATH=" AMEM_BUILD "/lib/stand_ins AMEM_SIM_WORLD=" +
                      (directory / "world").string() +
                      " STAND_IN_BUFFERS=3 python3 -B " AMEM_GPU_SOURCES "/run_gpu_tests --build " AMEM_BUILD
                      " --nccl " AMEM_BUILD "/lib/stand_ins/libnccl.so.2 --ops all-reduce --gpus 4 --only golden --out " +
                      out.string(),
                  output),
            0)
      << output;
  EXPECT_NE(output.find("4 passed, 0 FAILED, 0 skipped"), std::string::npos) << output;
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(out)) files += entry.is_regular_file() ? 1 : 0;
  EXPECT_LE(files, 8U) << "a machine may hand back no more";
  for (const auto& entry : fs::directory_iterator(AMEM_GOLDEN_GPU_EXPECTATIONS)) {
    if (entry.path().extension() == ".json") fs::copy(entry.path(), out);
  }
  EXPECT_EQ(Shell("env AMEM_GOLDEN_GPU=" + out.string() + " " AMEM_TOOL_TEST " --gtest_filter=*GpuGolden*", output), 0)
      << output;
  EXPECT_NE(output.find("[  PASSED  ] 4 tests"), std::string::npos) << output;
  fs::remove_all(directory);
}

}  // namespace
}  // namespace amem::gpu
