// Fails a test that leaves a descriptor open, or a thread running: a lock, a claim on memory, a socket or a call that waits for
// ever shows as one of these. For programs whose tests share nothing (CENSUS of amem_test). Threads that were told to end have
// a moment for it.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <thread>

namespace amem::test {
namespace {

namespace fs = std::filesystem;

// What each open descriptor is of; the one that reads the folder is gone when it is looked up.
std::map<std::string, std::string> Descriptors() {
  std::map<std::string, std::string> open;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const fs::path what = fs::read_symlink(entry.path(), gone);
    if (!gone && what != "/proc/self/fd" && !what.string().ends_with("/fd")) open.emplace(entry.path().filename(), what);
  }
  return open;
}

std::set<std::string> Threads() {
  std::set<std::string> running;
  for (const auto& entry : fs::directory_iterator("/proc/self/task")) running.insert(entry.path().filename());
  return running;
}

class Census final : public testing::EmptyTestEventListener {
  // ThreadSanitizer has a thread of its own from the first that is made.
  void OnTestProgramStart(const testing::UnitTest&) override {
    std::thread([] {}).join();
  }
  void OnTestStart(const testing::TestInfo&) override {
    descriptors_ = Descriptors();
    threads_ = Threads();
  }
  void OnTestEnd(const testing::TestInfo&) override {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (Left() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (const auto& [number, what] : Descriptors())
      if (!descriptors_.contains(number)) ADD_FAILURE() << "descriptor " << number << " is left open: " << what;
    for (const std::string& thread : Threads())
      if (!threads_.contains(thread)) ADD_FAILURE() << "thread " << thread << " is left running";
  }

  [[nodiscard]] bool Left() const {
    for (const auto& [number, what] : Descriptors())
      if (!descriptors_.contains(number)) return true;
    for (const std::string& thread : Threads())
      if (!threads_.contains(thread)) return true;
    return false;
  }

  std::map<std::string, std::string> descriptors_;
  std::set<std::string> threads_;
};

const bool kListens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Census);
  return true;
}();

}  // namespace
}  // namespace amem::test
