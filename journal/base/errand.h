// Work on files, by a thread of its own: a file system may stand still for as long as it likes (a frozen one, a silent server).
// Whoever waits for the work may give up. It goes on then, and what it makes is freed with it.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "journal/base/deadline.h"
#include "journal/base/no_memory.h"
#include "journal/base/thread.h"

namespace amem {

template <class T>
class Errand {
 public:
  // Where there is no thread left, the calling one does it.
  explicit Errand(std::function<T()> work) {
    const auto run = [shared = shared_, work = std::move(work)] {
      T made = Made(work);
      const std::lock_guard lock(shared->mutex);
      shared->made = std::move(made);
      shared->done.notify_all();
    };
    auto thread = StartThread("amem-files", run);
    thread.ok() ? thread->detach() : run();
  }
  // Once; nothing: it has not ended until then.
  std::optional<T> Wait(Deadline until) {
    std::unique_lock lock(shared_->mutex);
    shared_->done.wait_until(lock, until, [&] { return shared_->made.has_value(); });
    return std::exchange(shared_->made, std::nullopt);
  }

 private:
  static T Made(const std::function<T()>& work) {
    if constexpr (std::is_convertible_v<Status, T>)
      return OrNoMemory(work);
    else
      return work();
  }
  struct Shared {
    std::mutex mutex;
    std::condition_variable done;
    std::optional<T> made;
  };
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace amem
