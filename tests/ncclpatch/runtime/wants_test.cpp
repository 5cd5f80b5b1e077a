// Who wants a scope paused, and what becomes of a want that ends.
#include "ncclpatch/runtime/wants.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>
#include <thread>

#include "tests/without_memory.h"

namespace amem {
namespace {

// A scope's memory, which a cycle pauses and resumes.
struct Scope {
  PoolId id;
  std::atomic<bool> paused = false;

  Wants::Memory To(bool pauses) {
    return {.name = "tag weights",
            .is_resident = [this] { return !paused; },
            .cycle =
                [this, pauses] {
                  paused = pauses;
                  return Status{};
                }};
  }
};

constexpr std::chrono::milliseconds kSoon{20};

TEST(WantsTest, a_scope_is_resumed_by_whoever_ends_its_last_want) {
  Wants& wants = Wants::Get();
  Scope scope{.id = PoolId{101}};
  const WantId first = wants.New(), second = wants.New();
  EXPECT_TRUE(wants.Pause(scope.id, first, In(kSoon), scope.To(true)).ok());
  EXPECT_TRUE(wants.Pause(scope.id, second, In(kSoon), scope.To(true)).ok());
  EXPECT_TRUE(wants.Resume(scope.id, first, {}, scope.To(false)).ok());
  EXPECT_TRUE(scope.paused);
  EXPECT_EQ(wants.Resume(scope.id, kPlainWant, {}, scope.To(false)).code(), Code::kRefused);
  EXPECT_TRUE(wants.Resume(scope.id, second, {}, scope.To(false)).ok());
  EXPECT_FALSE(scope.paused);
}

// As at the end of a block, which does not come again: else nobody could resume the memory any more.
TEST(WantsTest, a_want_ends_also_if_another_thread_is_busy_with_the_scope) {
  Wants& wants = Wants::Get();
  Scope scope{.id = PoolId{102}};
  const WantId want = wants.New();
  EXPECT_TRUE(wants.Pause(scope.id, want, In(kSoon), scope.To(true)).ok());
  std::promise<void> begun, may_end;
  std::thread busy([&] {
    Wants::Memory slow = scope.To(true);
    slow.cycle = [&] {
      begun.set_value();
      may_end.get_future().wait();
      return Status{};
    };
    EXPECT_TRUE(wants.Pause(scope.id, {}, In(kSoon), slow).ok());  // from outside, so that it names nothing
  });
  begun.get_future().wait();
  EXPECT_EQ(wants.Resume(scope.id, want, In(kSoon), scope.To(false)).code(), Code::kTimeout);
  EXPECT_FALSE(wants.IsNamedBy(scope.id, want));
  may_end.set_value();
  busy.join();
  EXPECT_TRUE(scope.paused);
  EXPECT_TRUE(wants.Resume(scope.id, kPlainWant, {}, scope.To(false)).ok());
  EXPECT_FALSE(scope.paused);
}

#ifndef AMEM_SANITIZED
// Else the caller would hear of a failure, and nobody would come to resume what is paused.
TEST(WantsTest, what_is_paused_is_named_although_there_is_no_memory_after_the_pause) {
  Wants& wants = Wants::Get();
  Scope scope{.id = PoolId{103}};
  const WantId want = wants.New();
  std::optional<test::WithoutMemory> none;
  Wants::Memory memory = scope.To(true);
  memory.cycle = [&] {
    scope.paused = true;
    none.emplace();
    return Status{};
  };
  EXPECT_NO_THROW(EXPECT_TRUE(wants.Pause(scope.id, want, In(kSoon), memory).ok()));
  none.reset();
  EXPECT_TRUE(wants.IsNamedBy(scope.id, want));
  EXPECT_TRUE(wants.Resume(scope.id, want, {}, scope.To(false)).ok());
  EXPECT_FALSE(scope.paused);
}
#endif

}  // namespace
}  // namespace amem
