// amem-patch as people run it, and what libamem_nccl.so shows to the process it is loaded into.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/scenarios/job.h"

namespace amem {
namespace {

namespace fs = std::filesystem;
using job::Job;
using job::RunProgram;

const std::string kPlain = std::string(AMEM_STAND_INS) + "/libnccl.so.2";

TEST(Patch, output_is_named_by_soname_and_finds_its_partner) {
  Job job;
  const auto copy = job.directory() / "a" / "b";
  const auto patch = RunProgram({AMEM_PATCH, kPlain, "-o", copy}, {}, job.directory());
  ASSERT_EQ(patch.status, 0) << patch.err;
  EXPECT_NE(patch.out.find("LD_LIBRARY_PATH=" + copy.string()), std::string::npos) << patch.out;
  for (const char* name : {"libnccl.so.2", "libamem_nccl.so", "libcapnp-0.9.2.so", "libkj-0.9.2.so", "liblmdb.so.0"})
    EXPECT_TRUE(fs::exists(copy / name)) << name;
  EXPECT_EQ(RunProgram({AMEM_PATCH, "--check", copy / "libnccl.so.2"}, {}, job.directory()).status, 0);
  fs::remove(copy / "libamem_nccl.so");
  const auto missing = RunProgram({AMEM_PATCH, "--check", copy / "libnccl.so.2"}, {}, job.directory());
  EXPECT_EQ(missing.status, 2);
  EXPECT_NE(missing.err.find("libamem_nccl.so is not where it looks"), std::string::npos) << missing.err;
}

TEST(Patch, twice_is_the_same_as_once) {
  Job job;
  const auto first = job.directory() / "first", second = job.directory() / "second";
  ASSERT_EQ(RunProgram({AMEM_PATCH, kPlain, "-o", first}, {}, job.directory()).status, 0);
  const auto again = RunProgram({AMEM_PATCH, first / "libnccl.so.2", "-o", second}, {}, job.directory());
  ASSERT_EQ(again.status, 0) << again.err;
  EXPECT_NE(again.out.find("was patched already"), std::string::npos);
  EXPECT_EQ(fs::file_size(first / "libnccl.so.2"), fs::file_size(second / "libnccl.so.2"));
  EXPECT_EQ(RunProgram({AMEM_PATCH, first / "libnccl.so.2", "-o", first}, {}, job.directory()).status, 0) << "in place";
}

TEST(Patch, links_when_asked) {
  Job job;
  const auto copy = job.directory() / "linked";
  ASSERT_EQ(RunProgram({AMEM_PATCH, kPlain, "-o", copy, "--link"}, {}, job.directory()).status, 0);
  EXPECT_TRUE(fs::is_symlink(copy / "libamem_nccl.so"));
  EXPECT_FALSE(fs::is_symlink(copy / "libnccl.so.2"));
}

TEST(Patch, refuses_with_a_reason) {
  Job job;
  const auto text = job.directory() / "text.so";
  std::ofstream(text) << "this is no library, but it is long enough to have a header in it, if it were one of those files";
  const auto truncated = job.directory() / "libnccl.so.2";
  fs::copy_file(kPlain, truncated);
  fs::resize_file(truncated, 4096);
  const auto expect = [&](const std::vector<std::string>& arguments, const job::Environment& environment, int status,
                          const char* reason) {
    std::vector<std::string> command = {AMEM_PATCH};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const auto run = RunProgram(command, environment, job.directory());
    EXPECT_EQ(run.status, status) << reason;
    EXPECT_NE((run.err + run.out).find(reason), std::string::npos) << run.err << run.out;
  };
  const std::string out = job.directory() / "out";
  expect({text, "-o", out}, {}, 2, "not an ELF file");
  expect({truncated, "-o", out}, {}, 2, "is the download complete?");
  expect({job.directory() / "nothing", "-o", out}, {}, 2, "No such file or directory");
  expect({AMEM_LIBRARY_FILE, "-o", out}, {}, 2, "is not an NCCL library");
  expect({kPlain, "-o", AMEM_STAND_INS}, {}, 2, "is the library to be patched itself");
  expect({kPlain, "-o", "/proc/here"}, {}, 2, "/proc/here");
  expect({kPlain, "-o", out}, {{"PATH", "/nowhere"}}, 2, "install it");
  // A patchelf that does half of what it is told, and a disk on which the copy has no room.
  const auto half = job.directory() / "half";
  fs::create_directory(half);
  std::ofstream(half / "patchelf") << R"(#!/bin/sh
[ "$1" = --add-needed ] || PATH="${PATH#*:}" exec patchelf "$@")";
  fs::permissions(half / "patchelf", fs::perms::owner_all);
  expect({kPlain, "-o", out}, {{"PATH", half.string() + ":" + std::getenv("PATH")}}, 2,
         "does not look for libamem_nccl.so beside itself");
  const auto nothing_is_half_done = [&] {
    EXPECT_FALSE(fs::exists(fs::path(out) / "libnccl.so.2"));
    for (const auto& left : fs::directory_iterator(out))
      EXPECT_EQ(left.path().string().find(".new"), std::string::npos) << left;
  };
  nothing_is_half_done();
  for (const bool link : {false, true}) {
    fs::remove_all(out);
    std::vector<std::string> command{"/bin/sh", "-c", R"(trap '' XFSZ; ulimit -f 1; exec "$@")", "sh", AMEM_PATCH, kPlain,
                                     "-o",      out};
    if (link) command.emplace_back("--link");
    const auto full = RunProgram(command, {}, job.directory());
    EXPECT_EQ(full.status, 2);
    EXPECT_NE(full.err.find(link ? "copying " + kPlain : "putting libamem_nccl.so"), std::string::npos) << full.err;
    nothing_is_half_done();
  }
  expect({kPlain}, {}, 1, "-o");
  expect({"--check", kPlain}, {}, 2, "is not patched");
  expect({"--help"}, {}, 0, "Exit codes");
}

TEST(Exports, are_the_c_interface_and_nothing_else) {
  Job job;
  const auto nm = RunProgram({"nm", "-D", "--defined-only", AMEM_LIBRARY_FILE}, {}, job.directory());
  ASSERT_EQ(nm.status, 0) << nm.err;
  std::set<std::string> names;
  std::istringstream lines(nm.out);
  for (std::string address, kind, name; lines >> address >> kind >> name;) names.insert(name);
  const std::set<std::string> expected = {
      "ncclPause", "ncclResume", "ncclMemStats", "ncclSetGroupID", "ncclGetGroupID", "amem_attach", "amem_last_error",
      "amem_json", "amem_version", "dlsym", "dlvsym", "amem_trim_pinned", "amem_pool", "amem_pool_enter", "amem_pool_leave",
      "amem_alloc", "amem_free", "amem_pause", "amem_resume", "amem_wait", "amem_safepoint", "amem_want", "amem_want_pause",
      "amem_want_resume",
      // NCCL's own, which AMem serves, and with which a preloaded library sees programs begin
      "ncclCommSuspend", "ncclCommResume", "ncclCommMemStats", "ncclGetUniqueId", "ncclCommInitRank", "ncclCommInitRankConfig",
      "ncclCommInitRankScalable", "ncclCommInitAll", "ncclCommGrow"};
  EXPECT_EQ(names, expected);
}

TEST(Exports, the_library_stays_loaded_and_looks_beside_itself) {
  Job job;
  const auto dynamic = RunProgram({"readelf", "-dW", AMEM_LIBRARY_FILE}, {}, job.directory()).out;
  EXPECT_NE(dynamic.find("NODELETE"), std::string::npos);
  EXPECT_NE(dynamic.find("rpath: [$ORIGIN]"), std::string::npos);
  EXPECT_EQ(dynamic.find("libcuda"), std::string::npos) << "the driver is found at run time";
}

}  // namespace
}  // namespace amem
