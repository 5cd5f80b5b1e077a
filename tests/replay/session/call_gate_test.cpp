// Calls inside gates: nested, of many gates at once, beside whoever closes one.
#include "replay/cycle/call_gate.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

namespace amem {
namespace {

using namespace std::chrono_literals;
using Inside = std::shared_lock<CallGate>;

TEST(CallGate, is_closed_once_nobody_is_inside_and_names_who_is) {
  CallGate gate;
  Inside call = gate.Enter("cuMemcpy", reinterpret_cast<void*>(0x77));
  std::thread([&gate] {
    const Status refused = gate.Close(20ms);
    EXPECT_EQ(refused.code(), Code::kRefused);
    EXPECT_NE(refused.message().find("cuMemcpy on thread "), std::string::npos) << refused.message();
    EXPECT_NE(refused.message().find("for stream 0x77"), std::string::npos) << refused.message();
  }).join();
  call.unlock();
  ASSERT_TRUE(gate.Close(20ms).ok());
  gate.Open();
}

TEST(CallGate, the_thread_that_closed_it_passes_and_others_wait) {
  CallGate gate;
  ASSERT_TRUE(gate.Close(1s).ok());
  { const Inside own(gate); }
  std::atomic<bool> passed = false;
  std::thread other([&] {
    const Inside call(gate);
    passed = true;
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(passed);
  { const Inside own(gate); }
  gate.Open();
  other.join();
  EXPECT_TRUE(passed);
}

// Of more gates than a thread remembers, and left in another order than they were entered.
TEST(CallGate, each_of_many_is_closed_again_after_its_call) {
  constexpr std::size_t kHeld = 12;
  std::array<CallGate, kHeld + 2> gates;
  for (int round = 0; round < 3; ++round) {
    std::vector<Inside> calls;
    for (std::size_t i = 0; i < kHeld; ++i) calls.emplace_back(gates[i]);
    for (std::size_t i = 0; i < 8; i += 2) calls[i].unlock();  // holes between those that it remembers
    { const Inside one(gates[kHeld]), nested(gates[kHeld]), other(gates[kHeld + 1]); }
    calls.clear();
    for (CallGate& gate : gates) {
      ASSERT_TRUE(gate.Close(1s).ok());
      { const Inside own(gate); }
      gate.Open();
    }
  }
  std::thread([&gates] {
    for (CallGate& gate : gates) {
      EXPECT_TRUE(gate.Close(1s).ok()) << "nobody is inside any more";
      gate.Open();
    }
  }).join();
}

}  // namespace
}  // namespace amem
