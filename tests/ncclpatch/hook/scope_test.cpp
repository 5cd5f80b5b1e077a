// Whose import tables are written, and what is known of libraries that call the driver past AMem. Each test needs a process of
// its own, because what was written stays.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/hook/replacements.h"
#include "ncclpatch/intercept/others.h"

extern "C" void* amem_route_dlsym(void* return_address, void* handle, const char* name);  // what the stub of dlsym asks

namespace amem {
namespace {

constexpr const char* kSharing[] = {"cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"};
int in_this_program;

class Reach : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* path :
         {AMEM_STAND_INS "/libcuda.so.1", AMEM_STAND_INS "/libnccl.so.2", AMEM_ONE_SHOT, AMEM_ONE_SHOT_DIRECT})
      ASSERT_NE(loaded_.emplace_back(dlopen(path, RTLD_NOW | RTLD_LOCAL)), nullptr) << dlerror();
    replacements::Install(intercept::CountingTables(), replacements::Caller::kOther);
  }
  // The slots of other objects that lead into this program, which has AMem in it: "libnccl.so.2 dlsym".
  static std::set<std::string> Written() {
    ElfImage own;
    EXPECT_TRUE(ElfImage::Containing(&in_this_program, &own));
    std::set<std::string> written;
    ElfImage::ForEach([&](const ElfImage& image) {
      image.ForEachImport([&](const char* name, const ElfImage::Slot& slot) {
        if (image.base() != own.base() && own.InText(*slot.where)) written.insert(FileName(image) + " " + name);
      });
      return false;
    });
    return written;
  }
  void CallTheRuntime() const {
    void* function = nullptr;
    const auto get =
        reinterpret_cast<int (*)(const char*, void**, unsigned long long, int*)>(dlsym(loaded_[2], "cudaGetDriverEntryPoint"));
    ASSERT_NE(get, nullptr);
    EXPECT_EQ(get("cuInit", &function, 0, nullptr), 0);
  }

 private:
  std::vector<void*> loaded_;
};

using Slots = std::set<std::string>;

TEST_F(Reach, nccl_writes_no_other_library) {
  const Slots before = Written();
  ASSERT_TRUE(hook::Attach().ok());
  CallTheRuntime();
  hook::PatchAtLoad();
  Slots written = Written();
  for (const std::string& slot : before) written.erase(slot);
  EXPECT_EQ(written, (Slots{"libnccl.so.2 dlsym", "libnccl.so.2 dlvsym"}));
  EXPECT_FALSE(hook::InterceptsOthers());
  EXPECT_EQ(hook::PastAmem(kSharing), std::vector<std::string>{"libone_shot_direct.so"});
}

TEST_F(Reach, shared_reaches_a_library_by_what_it_imports) {
  const Slots before = Written();
  hook::ReachOthers(intercept::CountingTables());
  ASSERT_TRUE(hook::Attach().ok());
  hook::PatchAtLoad();
  Slots written = Written();
  for (const std::string& slot : before) written.erase(slot);
  for (const char* slot : {"libnccl.so.2 dlsym", "libcudart.so.13 dlsym", "libone_shot_direct.so cuIpcGetMemHandle",
                           "libone_shot_direct.so cuIpcOpenMemHandle_v2", "libone_shot_direct.so cuMemFree_v2",
                           "libone_shot_direct.so cuGetProcAddress_v2"})
    EXPECT_TRUE(written.contains(slot)) << slot;
  for (const char* slot : {"libone_shot_direct.so cuMemAlloc_v2", "libcuda.so.1 dlsym"})
    EXPECT_FALSE(written.contains(slot)) << slot;
  CallTheRuntime();
  EXPECT_TRUE(hook::InterceptsOthers());
  EXPECT_EQ(hook::PastAmem(kSharing), std::vector<std::string>{"libone_shot_direct.so"}) << "it may have called before";
}

// A library that imports the driver's functions and those of libibverbs, and looks nothing up.
TEST_F(Reach, from_the_first_tag_on_the_default_scope_reaches_what_gets_hold_of_memory_by_imports) {
  const Slots before = Written();
  ASSERT_TRUE(hook::Attach().ok());
  intercept::Guard();
  Slots written = Written();
  for (const std::string& slot : before) written.erase(slot);
  EXPECT_TRUE(written.contains("libone_shot_direct.so cuIpcGetMemHandle"));
  EXPECT_FALSE(written.contains("libone_shot_direct.so cuMemFree_v2")) << "nobody holds memory by that";
  ASSERT_NE(dlopen(AMEM_HOLDER, RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  hook::PatchIfLoaded();
  written = Written();
  for (const char* slot : {"libholder.so cuMemRetainAllocationHandle", "libholder.so cuMemRelease", "libholder.so ibv_reg_mr",
                           "libholder.so ibv_dereg_mr"})
    EXPECT_TRUE(written.contains(slot)) << slot;
  EXPECT_FALSE(hook::InterceptsOthers()) << "what libraries shared before was not seen";
  EXPECT_EQ(hook::PastAmem(kSharing), std::vector<std::string>{"libone_shot_direct.so"}) << "it may have called before";
}

TEST_F(Reach, shared_names_a_library_that_had_looked_up_the_driver) {
  CallTheRuntime();
  hook::ReachOthers(intercept::CountingTables());
  ASSERT_TRUE(hook::Attach().ok());
  hook::PatchAtLoad();
  EXPECT_FALSE(Written().contains("libcudart.so.13 dlsym"));
  const std::vector<std::string> past = hook::PastAmem(kSharing);
  EXPECT_TRUE(std::ranges::find(past, "libcudart.so.13") != past.end());
}

// What is the next one depends on who asks, and an answer from here would be that of AMem's own question.
TEST_F(Reach, a_library_that_asks_for_the_next_definition_gets_the_answer_to_its_own_question) {
  hook::ReachOthers(intercept::CountingTables());
  ASSERT_TRUE(hook::Attach().ok());
  ElfImage library;
  ElfImage::ForEach(
      [&](const ElfImage& image) { return FileName(image) == "libone_shot_direct.so" && (library = image, true); });
  void* const caller = library.Find("one_shot_free");
  ASSERT_NE(caller, nullptr);
  const auto answers = [&](void* handle, const char* name) { return amem_route_dlsym(caller, handle, name); };
  void* const driver = dlopen(AMEM_STAND_INS "/libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  EXPECT_NE(answers(driver, "cuMemFree_v2"), answers(driver, "unknown")) << "it is answered here";
  EXPECT_EQ(answers(RTLD_NEXT, "cuMemFree_v2"), answers(RTLD_NEXT, "unknown"));
}

TEST(PastAmem, a_library_that_comes_later_is_noticed_and_one_that_goes) {
  const auto is_past = [] {
    Forever<intercept::Outside>().FindLibrariesPastAmem();
    return Forever<intercept::Outside>().Sums().contains({"libone_shot_direct.so", OutsideKind::kUnseen});
  };
  ASSERT_NE(dlopen(AMEM_STAND_INS "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  EXPECT_FALSE(is_past());
  void* const library = dlopen(AMEM_ONE_SHOT_DIRECT, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  EXPECT_TRUE(is_past());
  dlclose(library);
  EXPECT_FALSE(is_past());
  const std::uint64_t imports = hook::ImportCount();
  EXPECT_EQ(hook::ImportCount(), imports);
  hook::PatchAtLoad();
  EXPECT_GT(hook::ImportCount(), imports) << "it may be told apart from now on";
}

}  // namespace
}  // namespace amem
