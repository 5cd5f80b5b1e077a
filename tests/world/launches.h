// Collectives of a world's ranks, whose threads never call a safe point. One thread of each rank launches them, by a script
// that follows from the seed, on communicators of all ranks, of every other rank, and of all but the first. (Threads that
// launch on several communicators in orders of their own would wait for each other, with AMem or without, where others
// synchronize the device.) Their kernels wait for those of the others, as NCCL's do, and whoever stops all ranks between two
// launches (tool.h) finds none of them running.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "ncclpatch/nccl/launches.h"
#include "replay/control/rank_control.h"
#include "tests/world/page.h"
#include "tests/world/settings.h"

namespace amem::world {

class Rank;
class Worker;
struct Place;

// The side of a rank that is asked from outside. Begins before the session does, and outlives it.
class Launches {
 public:
  Launches(const Settings& settings, std::shared_ptr<Page> page, int rank);
  ~Launches();
  Launches(const Launches&) = delete;
  Launches& operator=(const Launches&) = delete;
  [[nodiscard]] control::RequestServer& requests() { return control_; }
  void Begin(Rank& rank);  // once its session has started

  // The next launch of the script, if this thread makes those, which also reads or writes what `use` submits.
  void Next(Worker& worker, const std::function<void()>& use);
  // A kernel of a communicator of this thread alone.
  void Alone(Worker& worker, void* stream, const std::function<void()>& submit);

 private:
  class OnRank;
  using Stream = nccl::Stream;
  [[nodiscard]] bool MayLaunch() const;
  nccl::launches::Counted* Make(std::uint64_t clock, int rank, int ranks);
  void Submit(Worker& worker, std::size_t communicator);

  const Settings settings_;
  const std::shared_ptr<Page> page_;
  const int rank_;
  std::array<nccl::launches::Counted*, kCommunicators> together_{};  // null: this rank is no member
  std::array<nccl::launches::Counted*, kMostThreads> alone_{};
  std::uint64_t next_ = 0;  // of the script; the thread's that follows it
  std::unique_ptr<OnRank> actions_;
  control::RankControl control_;
};

}  // namespace amem::world
