#include "replay/peers/unix/loop.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <array>
#include <cerrno>

#include "journal/base/file.h"
#include "journal/base/thread.h"
#include "replay/peers/unix/connection.h"

namespace amem {
namespace {

constexpr auto kServiceSpin = std::chrono::milliseconds(1);  // stays awake for so long after the last event

// If memory runs out, the turn is cut short and the host's process goes on.
template <class Work>
void Guarded(const Work& work) {
  try {
    work();
  } catch (const std::exception&) {
  }
}

}  // namespace

Status ServiceLoop::Open() {
  epoll_.Reset(::epoll_create1(EPOLL_CLOEXEC));
  command_.Reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const auto commanded = [this](Key, std::uint32_t) {
    ReadEvent(command_.get());
    RunCommands();
    if (!Stopping()) Guarded([this] { client_.Woken(); });
  };
  if (epoll_ && command_ && Add(command_.get(), EPOLLIN, commanded) != 0) return {};
  return {CodeOfErrno(errno), "starting the service of peers: epoll and eventfd: " + ErrnoText(errno)};
}

Status ServiceLoop::Start() {
  auto started = StartThread("amem-peers", [this] {
    Guarded([&] { client_.Begin(); });
    while (!Stopping()) Turn();
    Guarded([&] { client_.End(); });
    const std::lock_guard lock(mutex_);
    ended_ = true;
    ended_changed_.notify_all();
  });
  if (!started) return started.status().Within("starting the service of peers");
  thread_ = *std::move(started);
  return {};
}

bool ServiceLoop::Stop(std::optional<std::chrono::milliseconds> patience) {
  bool ended = true;
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    if (thread_.joinable()) {
      SignalEvent(command_.get());
      if (patience) ended = ended_changed_.wait_for(lock, *patience, [&] { return ended_; });
    }
  }
  if (ended && thread_.joinable()) thread_.join();
  RunCommands();  // threads may wait for the last of them
  return ended;
}

bool ServiceLoop::Stopping() {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

// ---- work of other threads -------------------------------------------------------------------------------------------------

void ServiceLoop::Post(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    commands_.emplace_back([this, work = std::move(work)] {
      if (!Stopping()) Guarded(work);
    });
  }
  SignalEvent(command_.get());
}

void ServiceLoop::Wake() noexcept { SignalEvent(command_.get()); }

void ServiceLoop::RunCommands() {
  std::deque<std::function<void()>> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (const auto& command : commands) command();
}

// ---- descriptors -----------------------------------------------------------------------------------------------------------

ServiceLoop::Key ServiceLoop::Add(int fd, std::uint32_t events, Ready ready) {
  const Key key = ++last_key_;
  const auto at = entries_.emplace(key, Entry{fd, std::make_shared<const Ready>(std::move(ready))}).first;
  epoll_event event{.events = events, .data = {.u64 = key}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return key;
  entries_.erase(at);
  return 0;
}

void ServiceLoop::Modify(Key key, std::uint32_t events) {
  const auto at = entries_.find(key);
  if (at == entries_.end()) return;
  epoll_event event{.events = events, .data = {.u64 = key}};
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, at->second.fd, &event);
}

void ServiceLoop::Remove(Key key) {
  const auto at = entries_.find(key);
  if (at == entries_.end()) return;
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, at->second.fd, nullptr);
  entries_.erase(at);
}

int ServiceLoop::Patience() const {
  const auto deadline = client_.NextDeadline();
  return deadline ? MillisecondsUntil(*deadline) : -1;
}

void ServiceLoop::Turn() {
  std::array<epoll_event, 32> events;
  // Imports come in rows: the peer asks again sooner than this thread could be woken.
  const bool spin = HasIdleCores() && Clock::now() - last_event_ < kServiceSpin;
  const int n = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), spin ? 0 : Patience());
  if (n > 0) last_event_ = Clock::now();
  if (n == 0 && spin) ::sched_yield();
  for (int i = 0; i < n; ++i) {
    if (Stopping()) return;
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    const std::uint64_t key = event.data.u64;  // a copy: the structure is packed
    const auto at = entries_.find(key);
    if (at == entries_.end()) continue;   // an earlier event removed it
    const auto ready = at->second.ready;  // it may remove itself
    Guarded([&] { (*ready)(key, event.events); });
  }
  Guarded([&] { client_.Timers(Clock::now()); });
  Guarded([&] { client_.Sweep(); });
}

// ---- processes -------------------------------------------------------------------------------------------------------------

void ProcessWatch::Begin(ServiceLoop& loop, pid_t pid, std::function<void()> died) {
  End();
  process_ = WatchProcess(pid);
  if (!process_) return;
  pid_ = pid;
  loop_ = &loop;
  key_ = loop.Add(process_.get(), EPOLLIN, [died = std::move(died)](ServiceLoop::Key, std::uint32_t) { died(); });
}

void ProcessWatch::End() {
  if (key_ != 0) loop_->Remove(key_);
  key_ = 0;
  pid_ = 0;
  process_.Reset();
}

}  // namespace amem
