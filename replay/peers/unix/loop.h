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
  using Key = std::uint64_t;                                     // of a descriptor in the loop; 0: none
  using Ready = std::function<void(Key, std::uint32_t events)>;  // of epoll

  // What the loop's owner does once a turn, on the service thread.
  class Client {
   public:
    virtual ~Client() = default;
    [[nodiscard]] virtual std::optional<Clock::time_point> NextDeadline() const = 0;
    virtual void Timers(Clock::time_point now) = 0;
    virtual void Sweep() = 0;  // at the very end: nothing refers to what is removed now
  };

  explicit ServiceLoop(Client& client) : client_(client) {}
  ~ServiceLoop() { Stop(); }
  ServiceLoop(const ServiceLoop&) = delete;
  ServiceLoop& operator=(const ServiceLoop&) = delete;

  // Makes what Add needs; then Start begins to wait, on a thread of its own.
  Status Open();
  Status Start();
  // Waits for the thread to end, for ever where no patience is given. False: it is still inside a call, and is left alone;
  // what destroys the loop will wait for it.
  bool Stop(std::optional<std::chrono::milliseconds> patience = std::nullopt);

  // From any thread. Runs `work` on the service thread and waits for its result, until then at most; nothing: the service has
  // stopped, had no memory, or hangs in this call or in one before it. The work may then still be done, or going on, so it must
  // hold all that it uses. Of work without a result: whether it was done.
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

  // On the service thread only, or before Start. The descriptor stays the caller's, which removes it before closing it: closing
  // is not enough where forked children hold it open, too. 0: the kernel does not take it.
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
  std::deque<std::function<void()>> commands_;  // with mutex_
  bool stopping_ = false;                       // with mutex_
  bool ended_ = false;                          // the thread has; with mutex_
  std::condition_variable ended_changed_;

  // The service thread's own.
  std::map<Key, Entry> entries_;
  Key last_key_ = 0;
  Clock::time_point last_event_;
};

// A process in the loop: `died` is called once it has died, even while children that it forked hold its sockets open.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  ~ProcessWatch() { End(); }
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  // Nothing happens where the process cannot be seen from here.
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
