// The loop of a session's service thread: waits for descriptors, runs the work that other threads hand over, keeps deadlines.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "journal/base/deadline.h"
#include "journal/base/unique_fd.h"
#include "statemachine/types.h"

namespace amem {

class ServiceLoop {
 public:
  using Clock = std::chrono::steady_clock;
  using Key = std::uint64_t;                                     // a descriptor's name in the loop; 0: none
  using Ready = std::function<void(Key, std::uint32_t events)>;  // `events`: of epoll

  // What the loop's owner does once a turn, on the service thread.
  class Client {
   public:
    virtual ~Client() = default;
    [[nodiscard]] virtual std::optional<Clock::time_point> NextDeadline() const = 0;
    virtual void Timers(Clock::time_point now) = 0;
    virtual void Sweep() = 0;  // last in the turn: nothing refers to what it removes
  };

  explicit ServiceLoop(Client& client) : client_(client) {}
  ~ServiceLoop() { Stop(); }
  ServiceLoop(const ServiceLoop&) = delete;
  ServiceLoop& operator=(const ServiceLoop&) = delete;

  // Makes what Add needs. Start then runs the loop on its own thread.
  Status Open();
  Status Start();
  // Waits for the thread to end; without `patience`, for ever. False: it is still inside a call and is left alone; destroying
  // the loop waits for it.
  bool Stop(std::optional<std::chrono::milliseconds> patience = std::nullopt);

  // Any thread. Runs `work` on the service thread and waits for its result, at most until then. Nothing: the service has
  // stopped, had no memory, or hangs in this or an earlier call. The work may still run later, so it must own all it uses. For
  // work without a result: whether it ran.
  template <class Work>
  auto Run(Work work, Deadline until = In(std::chrono::seconds(10))) {
    using Made = std::invoke_result_t<Work&>;
    if constexpr (std::is_void_v<Made>) {
      return RunAndWait(std::move(work), until);
    } else {
      const auto made = std::make_shared<std::optional<Made>>();
      const bool done = RunAndWait([made, work = std::move(work)]() mutable { made->emplace(work()); }, until);
      return done ? std::move(*made) : std::optional<Made>();
    }
  }
  // The same without waiting; dropped if the service has stopped.
  void Post(std::function<void()> work);

  // On the service thread, or before Start. The descriptor stays the caller's, who removes it before closing: closing alone is
  // not enough if forked children hold it. 0: the kernel refused it.
  Key Add(int fd, std::uint32_t events, Ready ready);
  void Modify(Key key, std::uint32_t events);
  void Remove(Key key);

 private:
  struct Entry {
    int fd = -1;
    std::shared_ptr<const Ready> ready;
  };

  bool RunAndWait(std::function<void()> work, Deadline until);
  bool Stopping();
  [[nodiscard]] int Patience() const;  // milliseconds, for epoll
  void Turn();
  void RunCommands();

  Client& client_;
  UniqueFd epoll_, command_;
  std::thread thread_;
  std::mutex mutex_;
  std::deque<std::function<void()>> commands_;  // guarded by mutex_
  bool stopping_ = false;                       // guarded by mutex_
  bool ended_ = false;                          // the thread has ended; guarded by mutex_
  std::condition_variable ended_changed_;

  // The service thread's own.
  std::map<Key, Entry> entries_;
  Key last_key_ = 0;
  Clock::time_point last_event_;
};

// Watches a process: calls `died` once it is dead, even if children it forked hold its sockets.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  ~ProcessWatch() { End(); }
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  // Does nothing if the process cannot be seen from here.
  void Begin(ServiceLoop& loop, pid_t pid, std::function<void()> died);
  void End();
  explicit operator bool() const { return key_ != 0; }
  [[nodiscard]] pid_t pid() const { return pid_; }              // 0: there is none
  [[nodiscard]] int process() const { return process_.get(); }  // a pidfd, or -1

 private:
  ServiceLoop* loop_ = nullptr;
  pid_t pid_ = 0;
  UniqueFd process_;
  ServiceLoop::Key key_ = 0;
};

}  // namespace amem
