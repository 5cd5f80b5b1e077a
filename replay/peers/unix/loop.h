// The loop of a session's service thread: waits for descriptors, runs the work that other threads hand over, keeps deadlines.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "journal/base/deadline.h"
#include "journal/base/no_copies.h"
#include "journal/base/unique_fd.h"
#include "statemachine/types.h"

namespace amem {

class ServiceLoop : NoCopies {
 public:
  using Clock = std::chrono::steady_clock;
  using Key = std::uint64_t;                                     // a descriptor's name in the loop; 0: none
  using Ready = std::function<void(Key, std::uint32_t events)>;  // `events`: of epoll

  // What the loop's owner does once a turn, on the service thread.
  class Client {
   public:
    virtual ~Client() = default;
    virtual void Begin() {}  // first and last on the service thread
    virtual void End() {}
    [[nodiscard]] virtual std::optional<Clock::time_point> NextDeadline() const = 0;
    virtual void Timers(Clock::time_point now) = 0;
    virtual void Woken() {}    // after Wake, and sometimes without it
    virtual void Sweep() = 0;  // last in the turn: nothing refers to what it removes
  };

  explicit ServiceLoop(Client& client) : client_(client) {}
  ~ServiceLoop() { Stop(); }

  // Makes what Add needs. Start then runs the loop on its own thread.
  Status Open();
  Status Start();
  // Waits for the thread to end; without `patience`, for ever. False: it is still inside a call and is left alone; destroying
  // the loop waits for it.
  bool Stop(std::optional<std::chrono::milliseconds> patience = std::nullopt);

  // What work on the service thread comes to.
  template <class Made>
  class Asked {
   public:
    // Waits, at most until then. Nothing: the service has stopped, had no memory, or hangs in this or an earlier call. For work
    // without a result: whether it ran.
    auto Await(Deadline until) {
      const auto requester = std::exchange(requester_, nullptr);
      using Answer = std::conditional_t<std::is_void_v<Made>, bool, std::optional<Made>>;
      if (made_.wait_until(until) != std::future_status::ready) return Answer();
      try {
        if constexpr (!std::is_void_v<Made>) return Answer(made_.get());
        if constexpr (std::is_void_v<Made>) return made_.get(), true;
      } catch (const std::exception&) {  // the work's, or it was dropped
        return Answer();
      }
    }

   private:
    friend class ServiceLoop;
    std::future<Made> made_;
    std::shared_ptr<char> requester_ = std::make_shared<char>();  // once that is gone nobody waits, and the work need not begin
  };
  // Any thread. Has `work` done on the service thread. It may still run when nobody waits any more, so it must own all it uses.
  template <class Work>
  auto Ask(Work work) {
    using Made = std::invoke_result_t<Work&>;
    const auto task = std::make_shared<std::packaged_task<Made()>>(std::move(work));
    Asked<Made> asked;
    asked.made_ = task->get_future();
    Post([task, requester = std::weak_ptr<char>(asked.requester_)] {
      if (!requester.expired()) (*task)();
    });
    return asked;
  }
  template <class Work>
  auto Run(Work work, Deadline until = In(std::chrono::seconds(10))) {
    return Ask(std::move(work)).Await(until);
  }
  // Without a result; dropped if the service has stopped.
  void Post(std::function<void()> work);
  // Any thread, without memory: Client::Woken is called soon, once for several.
  void Wake() noexcept;

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
class ProcessWatch : NoCopies {
 public:
  ProcessWatch() = default;
  ~ProcessWatch() { End(); }

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
