#include "journal/base/thread.h"

#include <pthread.h>

#include <csignal>
#include <exception>
#include <utility>

namespace amem {

Result<std::thread> StartThread(const std::string& name, std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread inherits the mask
  Result<std::thread> started = Status{Code::kIo, "start the thread " + name};
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name.c_str());
    started = std::move(thread);
  } catch (const std::exception& failure) {  // the system has no thread left, or no memory
    started = Status{Code::kIo, "start the thread " + name + ": " + failure.what()};
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

}  // namespace amem
