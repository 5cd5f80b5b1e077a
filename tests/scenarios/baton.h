// A scheduler that runs one thread at a time, in simulated time: a task hands the baton on wherever it would wait for a peer or
// call one, and a seeded generator chooses the next task. The same seed makes the same run, and a time-out of a minute takes no
// time.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tests/stand_ins/peers/local_peers.h"

namespace amem::test {

class Baton final : public LocalScheduler {
 public:
  explicit Baton(int tasks) {
    for (int i = 0; i < tasks; ++i) tasks_.push_back(std::make_unique<Task>());
    for (int i = 0; i < tasks; ++i) tasks_[static_cast<std::size_t>(i)]->thread = std::thread([this, i] { Serve(i); });
  }
  ~Baton() override {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
      for (auto& task : tasks_) task->chosen.notify_one();
    }
    for (auto& task : tasks_) task->thread.join();
  }

  // Runs each piece of work (empty: none) as a task of its own, until all are done. `delays`: of their beginnings, in
  // milliseconds. `step` is called in a task whenever it may be interrupted.
  void Run(std::uint64_t seed, std::vector<std::function<void()>> work, const std::vector<int>& delays,
           std::function<void(int task)> step) {
    std::unique_lock lock(mutex_);
    random_.seed(seed);
    step_ = std::move(step);
    running_ = 0;
    for (std::size_t i = 0; i < work.size(); ++i) {
      if (!work[i]) continue;
      tasks_[i]->work = std::move(work[i]);
      tasks_[i]->waits_until = now_ + std::chrono::milliseconds(delays[i]);
      tasks_[i]->active = true;
      tasks_[i]->deaf = delays[i] > 0;
      ++running_;
    }
    Next();
    done_.wait(lock, [&] { return running_ == 0; });
  }

  // ---- LocalScheduler
  Time Now() override { return now_; }
  void Step() override {
    if (mine_ < 0) return;
    if (step_) step_(mine_);
    std::unique_lock lock(mutex_);
    tasks_[static_cast<std::size_t>(mine_)]->waits_until = now_;
    HandOn(lock);
  }
  void Wait(std::unique_lock<std::mutex>& network, Time until) override {
    network.unlock();
    {
      std::unique_lock lock(mutex_);
      tasks_[static_cast<std::size_t>(mine_)]->waits_until = until;
      HandOn(lock);
    }
    network.lock();
  }
  void Changed() override {
    const std::lock_guard lock(mutex_);
    for (auto& task : tasks_) {
      if (task->active && !task->deaf) task->waits_until = std::min(task->waits_until, now_);
    }
  }

 private:
  struct Task {
    std::thread thread;
    std::condition_variable chosen;  // or ended_
    std::function<void()> work;
    Time waits_until{};
    bool active = false;
    bool deaf = false;  // has not begun, and is not woken by changes before its time
  };

  void Serve(int index) {
    mine_ = index;
    Task& me = *tasks_[static_cast<std::size_t>(index)];
    std::unique_lock lock(mutex_);
    while (true) {
      me.chosen.wait(lock, [&] { return ended_ || (me.active && holder_ == index); });
      if (ended_) return;
      me.deaf = false;
      lock.unlock();
      me.work();
      lock.lock();
      me.active = false;
      me.work = nullptr;
      if (--running_ == 0) done_.notify_one();
      Next();
    }
  }
  void HandOn(std::unique_lock<std::mutex>& lock) {
    Next();
    tasks_[static_cast<std::size_t>(mine_)]->chosen.wait(lock, [&] { return holder_ == mine_; });
  }
  // Chooses at random among the tasks that can go on now; if none can, advances the time.
  void Next() {
    std::vector<int> ready;
    while (ready.empty()) {
      Time soonest = Time::max();
      for (std::size_t i = 0; i < tasks_.size(); ++i) {
        if (!tasks_[i]->active) continue;
        soonest = std::min(soonest, tasks_[i]->waits_until);
        if (tasks_[i]->waits_until <= now_) ready.push_back(static_cast<int>(i));
      }
      if (soonest == Time::max()) {
        holder_ = -1;
        return;
      }
      now_ = std::max(now_, soonest);
    }
    holder_ = ready[random_() % ready.size()];
    if (holder_ != mine_) tasks_[static_cast<std::size_t>(holder_)]->chosen.notify_one();
  }

  static thread_local inline int mine_ = -1;
  std::mutex mutex_;
  std::condition_variable done_;  // running_ is 0
  std::vector<std::unique_ptr<Task>> tasks_;
  std::function<void(int)> step_;
  std::mt19937_64 random_;
  Time now_{std::chrono::hours(1)};
  int holder_ = -1, running_ = 0;
  bool ended_ = false;
};

}  // namespace amem::test
