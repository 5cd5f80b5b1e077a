#include "tests/world/streams.h"

#include <algorithm>
#include <utility>

#include "tests/world/findings.h"

namespace amem::world {

Stream::Stream() : thread_([this] { Work(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Stream::Submit(std::function<void()> kernel) {
  {
    const std::lock_guard lock(mutex_);
    kernels_.push_back(std::move(kernel));
    counts_->submitted.fetch_add(1);
  }
  changed_.notify_all();
}

void Stream::Await() {
  const auto done = Submitted();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, done);
}

std::function<bool()> Stream::Submitted() const {
  return [counts = counts_, until = counts_->submitted.load()] { return counts->done.load() >= until; };
}

void Stream::Work() {
  NameThread("a kernel");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !kernels_.empty(); });
    if (kernels_.empty()) return;
    const auto kernel = std::move(kernels_.front());
    kernels_.pop_front();
    lock.unlock();
    kernel();
    lock.lock();
    counts_->done.fetch_add(1);
    changed_.notify_all();
  }
}

Stream* Streams::Add() { return streams_.emplace_back(std::make_unique<Stream>()).get(); }

bool Streams::Capturing(std::optional<void*> stream) {
  return std::ranges::any_of(
      streams_, [&](const auto& one) { return one->capturing() && (!stream || *stream == static_cast<void*>(one.get())); });
}

std::function<bool()> Streams::Submitted(std::optional<void*> stream) {
  std::vector<std::function<bool()>> each;
  for (const auto& one : streams_) {
    if (!stream || *stream == static_cast<void*>(one.get())) each.push_back(one->Submitted());
  }
  return [each = std::move(each)] { return std::ranges::all_of(each, [](const auto& done) { return done(); }); };
}

void Streams::Await() {
  for (const auto& one : streams_) one->Await();
}

}  // namespace amem::world
