// The hook inside one process, on the library that behaves like NCCL.
#include "ncclpatch/hook/hook.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

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

// ---- libraries that come and go
// ----------------------------------------------------------------------------------------------

struct Loaded {
  explicit Loaded(const char* path) : handle(dlopen(path, RTLD_LAZY | RTLD_LOCAL)) { EXPECT_NE(handle, nullptr) << dlerror(); }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;
  ~Loaded() {
    if (handle != nullptr) dlclose(handle);
  }
  [[nodiscard]] ElfImage image() const {
    ElfImage found;
    EXPECT_TRUE(ElfImage::Containing(dlsym(handle, "ncclGetVersion"), &found));
    return found;
  }
  void* handle;
};

std::size_t CountUnderAmem(const std::string& path) {
  const auto all = hook::Libraries();
  return static_cast<std::size_t>(std::count_if(all.begin(), all.end(), [&](const auto& one) { return one.path == path; }));
}

// The import table of a library that is bound at load is a page that the loader has sealed.
TEST(Hook, threads_that_attach_at_once_do_not_seal_the_page_under_each_other) {
  const Loaded library(AMEM_NCCL_BOUND_NOW);
  const ElfImage image = library.image();
  const auto slot = image.ImportSlot("dlsym");
  const auto* original = reinterpret_cast<const void*>(*slot.where);
  constexpr int kRounds = 3'000;
  std::atomic<int> round{-1}, done{0};
  // Without sleeping at first, so that both threads begin within some nanoseconds.
  const auto wait = [](const std::atomic<int>& value, int wanted) {
    for (int spins = 0; value.load() < wanted; ++spins)
      if (spins > 2'000) std::this_thread::yield();
  };
  const auto attach = [&] {
    for (int n = 0; n < kRounds; ++n) {
      wait(round, n);
      EXPECT_TRUE(hook::Attach().ok());
      ++done;
    }
  };
  std::thread other(attach);
  for (int n = 0; n < kRounds; ++n) {
    ASSERT_TRUE(image.Write(slot, original).ok());
    round = n;
    EXPECT_TRUE(hook::Attach().ok());
    wait(done, n + 1);
  }
  other.join();
  EXPECT_EQ(CountUnderAmem(AMEM_NCCL_BOUND_NOW), 1U);
}

// The child would find a page unsealed, or half of a table written.
TEST(Hook, no_thread_attaches_while_the_process_forks) {
  const Loaded library(AMEM_NCCL_BOUND_NOW);
  std::atomic<bool> attached{false};
  hook::BeforeFork();
  std::thread attaches([&] {
    EXPECT_TRUE(hook::Attach().ok());
    attached = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(attached);
  hook::AfterFork();
  attaches.join();
}

TEST(Hook, a_library_that_was_unloaded_is_forgotten) {
  std::uintptr_t code = 0;
  {
    const Loaded library(AMEM_NCCL_OTHER);
    ASSERT_TRUE(hook::Attach().ok());
    EXPECT_EQ(CountUnderAmem(AMEM_NCCL_OTHER), 1U);
    code = library.image().text_begin();
  }
  ASSERT_EQ(dlopen(AMEM_NCCL_OTHER, RTLD_LAZY | RTLD_NOLOAD), nullptr) << "it must be possible to unload the stand-in";
  EXPECT_EQ(CountUnderAmem(AMEM_NCCL_OTHER), 0U);
  EXPECT_EQ(hook::LibraryAt(code), nullptr) << "what is loaded there next is not NCCL";
}

TEST(Hook, libraries_beyond_the_room_for_them_are_forgotten_in_turn) {
  for (int round = 0; round < 40; ++round) {
    const std::string path = testing::TempDir() + "libnccl-" + std::to_string(round) + ".so";
    unlink(path.c_str());
    ASSERT_EQ(symlink(AMEM_NCCL_OTHER, path.c_str()), 0);
    const Loaded library(path.c_str());
    ASSERT_TRUE(hook::Attach().ok());
    EXPECT_EQ(CountUnderAmem(path), 1U) << round;
    unlink(path.c_str());
  }
}

TEST(Hook, a_framework_with_nccl_linked_into_it_is_left_alone_and_named) {
  const Loaded framework(AMEM_FRAMEWORK);
  const ElfImage image = framework.image();
  ASSERT_NE(image.Find("ncclCommInitRank"), nullptr);
  EXPECT_FALSE(hook::IsNccl(image));
  const std::uintptr_t before = *image.ImportSlot("dlsym").where;
  ASSERT_NE(Nccl(), nullptr);
  ASSERT_TRUE(hook::Attach().ok());
  EXPECT_EQ(*image.ImportSlot("dlsym").where, before);
  const auto all = hook::Survey();
  const auto found = std::find_if(all.begin(), all.end(), [](const auto& one) { return one.path == AMEM_FRAMEWORK; });
  ASSERT_NE(found, all.end());
  EXPECT_EQ(found->way, "");
  EXPECT_NE(found->why.find("linked into"), std::string::npos) << found->why;
}

TEST(Hook, a_build_of_nccl_under_another_name_is_nccl) {
  const std::string renamed = testing::TempDir() + "libmy_collectives.so";
  ASSERT_EQ(std::system(("sed s/libnccl.so.2/libncxx.so.2/ " AMEM_STAND_INS "/libnccl.so.2 > " + renamed).c_str()), 0);
  const Loaded library(renamed.c_str());
  ASSERT_STREQ(library.image().soname(), "libncxx.so.2");
  EXPECT_TRUE(hook::IsNccl(library.image()));
}

TEST(Hook, every_nccl_of_the_process_is_named_with_its_version) {
  ASSERT_NE(Nccl(), nullptr);
  const Loaded other(AMEM_NCCL_OTHER);
  ASSERT_TRUE(hook::Attach().ok());
  std::map<std::string, hook::Presence> all;
  for (const hook::Presence& one : hook::Survey()) all[one.path] = one;
  EXPECT_EQ(all[AMEM_STAND_INS "/libnccl.so.2"].version, "2.28.9");
  EXPECT_EQ(all[AMEM_NCCL_OTHER].version, "2.29.7");
  for (const char* path : {AMEM_STAND_INS "/libnccl.so.2", AMEM_NCCL_OTHER}) EXPECT_EQ(all[path].way, "attach") << path;
}

[[maybe_unused]] const bool g_installed = [] {
  replacements::Install(intercept::Tables());
  return true;
}();

TEST(Replacements, each_real_function_gets_an_entry_of_its_own) {
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

TEST(Replacements, more_variants_than_known_pass_untouched) {
  int reals[6] = {};
  bool replaced = true;
  for (int& real : reals) replacements::Bind("cuGraphLaunch", 12000, &real, &replaced);
  EXPECT_FALSE(replaced);
  EXPECT_EQ(replacements::Bind("cuGraphLaunch", 12000, &reals[5], nullptr), &reals[5]);
}

TEST(Replacements, names_and_versions_choose_the_signature) {
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

TEST(Replacements, a_signature_begins_with_the_version_that_brought_it) {
  int old = 0, real = 0;
  void* const before = replacements::Bind("cuStreamGetCaptureInfo", 11020, &old, nullptr);
  void* const first = replacements::Bind("cuStreamGetCaptureInfo", 11030, &real, nullptr);
  EXPECT_NE(before, &old);
  EXPECT_NE(first, &real);
  EXPECT_NE(before, first);
  EXPECT_EQ(replacements::Bind("cuStreamGetCaptureInfo", 12020, &real, nullptr), first);
  EXPECT_NE(replacements::Bind("cuStreamGetCaptureInfo", 12030, &real, nullptr), first);
}

}  // namespace
}  // namespace amem
