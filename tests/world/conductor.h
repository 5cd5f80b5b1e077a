// Who has all ranks of a world pause and resume together, again and again, and judges how it went.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <string>

#include "tests/world/page.h"
#include "tests/world/settings.h"
#include "tests/world/tool.h"

namespace amem::world {

class Conductor {
 public:
  // `look` is called often while the conductor waits.
  Conductor(const Settings& settings, std::shared_ptr<Page> page, std::function<void()> look);
  void Run();  // for the life of the world, up to the end of all ranks

 private:
  std::uint64_t Pick(std::uint64_t below) { return random_() % below; }
  void Sleep(std::chrono::milliseconds time);
  void AwaitAll(const char* what, std::chrono::milliseconds patience, const std::function<bool(std::size_t rank)>& done);
  void RunBetweenLaunches();
  Tool::Answered AskTool(const Asked& asked);
  void StopOnce();
  void JudgeStop(const Status& failed, bool hurried);
  void AllAreBack();
  void AllGoOn();
  [[nodiscard]] std::string WhoDoesNotStand() const;  // empty: all do
  void Bring(CycleKind kind);                         // all ranks to be paused, or running
  bool Give(CycleKind kind, bool faulty);             // an order
  Fate FateOf(CycleKind kind);
  void Judge(CycleKind kind);  // an order that failed and need not have
  void CheckAgreement(std::uint64_t order);
  [[nodiscard]] bool Capturing() const;   // a rank, when it answered last
  [[nodiscard]] bool IsHalf() const;      // a rank, when it answered last
  [[nodiscard]] bool WasShort() const;    // of memory or disk, since the last order was given
  [[nodiscard]] bool WasStopped() const;  // a rank, since the last order was given
  [[nodiscard]] bool Starved() const;     // a rank, since the last order was given
  [[nodiscard]] std::string Answers() const;
  [[noreturn]] void Found(const std::string& what);
  void End();
  [[nodiscard]] bool HangsStill() const { return std::chrono::steady_clock::now() < hangs_until_; }

  const Settings settings_;
  const std::shared_ptr<Page> page_;
  const std::function<void()> look_;
  std::mt19937_64 random_;
  Tool tool_;
  std::chrono::steady_clock::time_point hangs_until_;                   // perhaps, a call of the program in the driver
  std::uint64_t deaths_ = 0, starved_ = 0, shortages_ = 0, stops_ = 0;  // known when the last order was given
};

}  // namespace amem::world
