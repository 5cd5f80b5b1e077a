// A process with pools on the simulator, and what tests of them look at.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "replay/session/pools/pools.h"
#include "tests/replay/session/bulk.h"
#include "tests/replay/session/session_process.h"

namespace amem::test {

using Work = Simulator::Work;

inline constexpr DeviceOrdinal kSecond{1};
inline constexpr Bytes kChunk = 32 * kMiB;

class PoolsTest : public TwoProcesses {
 protected:
  explicit PoolsTest(const SessionOptions& options = {}) : TwoProcesses(options, 512 * kMiB) {}
  void TearDown() override {
    a.simulator->SetHook({});
    a.simulator->SetWork(Work::kNone);
    TwoProcesses::TearDown();
  }

  Pools& pools() const { return a.session->pools(); }
  PoolId Open(const std::string& tag, PoolPolicy policy = PoolPolicy::kPreserve) const { return *pools().Open(tag, policy); }
  std::byte* Take(PoolId pool, Bytes bytes, DeviceOrdinal device = kDevice) const {
    const auto address = pools().Allocate(pool, bytes, device);
    EXPECT_TRUE(address.ok()) << address.status().message();
    return reinterpret_cast<std::byte*>(address.ok() ? address->value : 0);
  }
  Status Give(const std::byte* part) const { return pools().Free(AddressOf(part), nullptr); }
  static Address AddressOf(const std::byte* part) { return Address{reinterpret_cast<std::uint64_t>(part)}; }
  static void Fill(std::byte* memory, Bytes bytes, int seed) { test::Fill(memory, bytes, static_cast<unsigned>(seed)); }
  static bool Holds(const std::byte* memory, Bytes bytes, int seed) {
    return test::Holds(memory, bytes, static_cast<unsigned>(seed));
  }
  // A tag with a part that is full, before a second device is used; that comes by way of `running`.
  struct OneDevice {
    PoolId paused, running;
    std::byte* part = nullptr;
  };
  OneDevice FirstDeviceOnly() const {
    const OneDevice one{Open("weights"), Open("cache"), Take(Open("weights"), kMiB)};
    Fill(one.part, kMiB, 1);
    return one;
  }
  bool BothReach(const std::byte* part) const {
    const auto mapping = a.simulator->MappingAt(AddressOf(part));
    return mapping.ok() && mapping->access.size() == 2;
  }
  Status Pause(PoolId pool) const { return pools().Pause(pool, {}); }
  Status Resume(PoolId pool) const { return pools().Resume(pool, {}); }
  std::string StateOf(PoolId pool) const {
    for (const auto& standing : pools().Snapshot()) {
      if (standing.id == pool) return standing.state;
    }
    return "unknown";
  }
  // The end of the copies of a resume waits until a stream goes on behind them, and then fails while `fails` says so.
  void FailOnceLed(const std::atomic<bool>& led, std::function<bool()> fails) const {
    a.simulator->SetHook([&led, fails = std::move(fails)](std::string_view call, std::uint64_t) {
      if (call != "FinishCopies") return 0;
      while (!led) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return fails() ? cuda::kUnknown : 0;
    });
  }
  // Once calls of that name have begun, each waits until the gate is opened.
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false, open = false;
    void AwaitReached() {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return reached; });
    }
    void Open() {
      const std::lock_guard lock(mutex);
      open = true;
      changed.notify_all();
    }
  };
  std::shared_ptr<Gate> HoldAt(const std::string& call) {
    auto gate = std::make_shared<Gate>();
    gates_[call] = gate;
    a.simulator->SetHook([gates = gates_](std::string_view name, std::uint64_t) {
      const auto at = gates.find(name);
      if (at == gates.end()) return 0;
      std::unique_lock lock(at->second->mutex);
      at->second->reached = true;
      at->second->changed.notify_all();
      at->second->changed.wait(lock, [&] { return at->second->open; });
      return 0;
    });
    return gate;
  }

 private:
  std::map<std::string, std::shared_ptr<Gate>, std::less<>> gates_;
};

}  // namespace amem::test
