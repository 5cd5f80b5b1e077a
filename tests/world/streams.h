// Streams of a program: what is submitted to one runs in order, on a thread of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "replay/driver/simulator/simulator.h"

namespace amem::world {

class Stream {
 public:
  Stream();
  ~Stream();  // runs what is submitted first
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void Submit(std::function<void()> kernel);
  void Await();
  void SetCapturing(bool capturing) { capturing_ = capturing; }
  [[nodiscard]] bool capturing() const { return capturing_; }
  // Whether all that was submitted before this call has ended.
  [[nodiscard]] std::function<bool()> Submitted() const;

 private:
  void Work();

  struct Counts {
    std::atomic<std::uint64_t> submitted = 0, done = 0;
  };
  const std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
  std::atomic<bool> capturing_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> kernels_;
  bool stop_ = false;
  std::thread thread_;
};

// All of a rank. A stream's handle is its address.
class Streams final : public SimulatedStreams {
 public:
  Stream* Add();  // before the first call about streams
  bool Capturing(std::optional<void*> stream) override;
  std::function<bool()> Submitted(std::optional<void*> stream) override;
  void Await();

 private:
  std::vector<std::unique_ptr<Stream>> streams_;
};

}  // namespace amem::world
