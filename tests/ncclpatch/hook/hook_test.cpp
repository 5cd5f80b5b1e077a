// The hook inside one process, on the library that behaves like NCCL.
#include "ncclpatch/hook/hook.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "ncclpatch/hook/call_site.h"
#include "ncclpatch/hook/replacements.h"
#include "ncclpatch/intercept/intercept.h"

namespace amem {
namespace {

void* Nccl() {
  static void* library = [] {
    void* loaded = dlopen(AMEM_STAND_INS "/libnccl.so.2", RTLD_LAZY | RTLD_LOCAL);
    EXPECT_NE(loaded, nullptr) << dlerror();
    return loaded;
  }();
  return library;
}

CallSite g_site;
std::vector<double> g_microseconds;
int Capture() {
  g_microseconds.clear();
  for (int i = 0; i < 2000; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    g_site = CaptureCallSite();
    g_microseconds.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  return 0;
}

TEST(Hook, attaches_to_a_library_that_has_not_called_the_driver) {
  ASSERT_NE(Nccl(), nullptr);
  EXPECT_TRUE(hook::Attach().ok()) << hook::Attach().message();
  ASSERT_EQ(hook::Libraries().size(), 1U);
  const hook::Library library = hook::Libraries()[0];
  EXPECT_STREQ(library.way, "attach");
  EXPECT_EQ(hook::LibraryAt(library.text_begin)->base, library.base);
  EXPECT_EQ(hook::LibraryAt(reinterpret_cast<std::uintptr_t>(&Capture)), nullptr);
  EXPECT_EQ(hook::Describe(library).nccl_version, "2.28.9");
}

TEST(Hook, call_sites_are_frames_inside_the_library_and_cheap) {
  ASSERT_NE(Nccl(), nullptr);
  ASSERT_TRUE(hook::Attach().ok());
  const auto call_back = reinterpret_cast<int (*)(int, int (*)())>(dlsym(Nccl(), "stand_in_nccl_call_back"));
  ASSERT_NE(call_back, nullptr);
  call_back(3, &Capture);
  EXPECT_NE(g_site.frames[2], 0U);
  EXPECT_EQ(g_site.frames[3], 0U);
  EXPECT_EQ(g_site.frames[0] == g_site.frames[1], false) << "the innermost frame calls the callback, the next ones recurse";
  call_back(9, &Capture);
  EXPECT_NE(g_site.frames[4], 0U) << "five frames, no more";
  std::nth_element(g_microseconds.begin(), g_microseconds.begin() + 1000, g_microseconds.end());
  std::printf("call site, five frames: %.2f us at the median\n", g_microseconds[1000]);
#ifndef AMEM_SANITIZED
  EXPECT_LT(g_microseconds[1000], 10.0) << "3 us on an idle machine";
#endif
}

[[maybe_unused]] const bool g_installed = [] {
  replacements::Install(intercept::Tables());
  return true;
}();

TEST(Symbols, each_real_function_gets_an_entry_of_its_own) {
  int a = 0, b = 0;
  bool replaced = false;
  void* first = replacements::Bind("cuMemcpyAsync", 12000, &a, &replaced);
  EXPECT_TRUE(replaced);
  EXPECT_NE(first, &a);
  void* second = replacements::Bind("cuMemcpyAsync", 12000, &b, nullptr);
  EXPECT_NE(second, first) << "the per-thread stream's version must not call the legacy stream's";
  EXPECT_EQ(replacements::Bind("cuMemcpyAsync", 12000, &a, nullptr), first);
  EXPECT_EQ(replacements::Bind("cuMemcpyAsync", 12000, first, nullptr), first) << "an entry of ours is not wrapped again";
}

TEST(Symbols, more_variants_than_known_pass_untouched) {
  int reals[6] = {};
  bool replaced = true;
  for (int& real : reals) replacements::Bind("cuGraphLaunch", 12000, &real, &replaced);
  EXPECT_FALSE(replaced);
  EXPECT_EQ(replacements::Bind("cuGraphLaunch", 12000, &reals[5], nullptr), &reals[5]);
}

TEST(Symbols, names_and_versions_choose_the_signature) {
  int reals[6] = {};
  bool replaced = false;
  replacements::Bind("cuMemAlloc", 3000, &reals[0], &replaced);
  EXPECT_FALSE(replaced) << "before CUDA 3.2 device pointers had 32 bits";
  replacements::Bind("cuMemAlloc", 12000, &reals[1], &replaced);
  EXPECT_TRUE(replaced);
  replacements::BindExported("cuMemAlloc", &reals[2], &replaced);
  EXPECT_FALSE(replaced) << "libcuda's plain name is the old signature";
  replacements::BindExported("cuMemcpyAsync_ptsz", &reals[3], &replaced);
  EXPECT_TRUE(replaced);
  replacements::Bind("cuDeviceGet", 12000, &reals[4], &replaced);
  EXPECT_FALSE(replaced);
  EXPECT_EQ(replacements::Bind("cuMemCreate", 12000, nullptr, &replaced), nullptr);
}

}  // namespace
}  // namespace amem
