// Fails a test that leaves something behind that one place can see, for programs whose tests share nothing (CENSUS of
// amem_test):
//
//   * a descriptor: a socket, a file, and a lock on a file, which lives as long as one of these
//   * a thread that runs: a call that waits for ever. Threads that were told to end have a moment for it
//   * memory that is mapped and shared with others: a page, a board, a journal's tail, a claim on host memory
//   * a mutex that the test's thread holds (builds of type Debug)
//   * another current context on the test's thread than before
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>

namespace amem::lock_order {
[[gnu::weak]] std::string Held();  // journal/base/lock_order.h, where the program has it
}

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

// By address, as /proc/self/maps has it; of what is mapped shared its file.
std::map<std::string, std::string> SharedMappings() {
  std::map<std::string, std::string> mapped;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string range, access, offset, device, node, file;
    words >> range >> access >> offset >> device >> node;
    std::getline(words >> std::ws, file);
    if (access.ends_with('s') && file != "/dev/zero (deleted)") mapped.emplace(range, file);  // that is anonymous memory
  }
  return mapped;
}

// With threads that were told to end; shorter in the census's own tests.
std::chrono::milliseconds Patience() {
  const char* const given = std::getenv("AMEM_CENSUS_MS");
  return std::chrono::milliseconds(given != nullptr ? std::atoi(given) : 5000);
}

std::string HeldLocks() { return lock_order::Held == nullptr ? "" : lock_order::Held(); }

// Null also where the program has no driver.
const void* CurrentContext() {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return nullptr;
  const auto current = reinterpret_cast<int (*)(void**)>(::dlsym(driver, "cuCtxGetCurrent"));
  void* context = nullptr;
  if (current == nullptr || current(&context) != 0) context = nullptr;
  ::dlclose(driver);
  return context;
}

class Census final : public testing::EmptyTestEventListener {
  // ThreadSanitizer has a thread of its own from the first that is made.
  void OnTestProgramStart(const testing::UnitTest&) override {
    std::thread([] {}).join();
  }
  void OnTestStart(const testing::TestInfo&) override {
    descriptors_ = Descriptors();
    threads_ = Threads();
    mapped_ = SharedMappings();
    context_ = CurrentContext();
  }
  void OnTestEnd(const testing::TestInfo&) override {
    const auto until = std::chrono::steady_clock::now() + Patience();
    while (Left() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (const auto& [number, what] : Descriptors())
      if (!descriptors_.contains(number)) ADD_FAILURE() << "descriptor " << number << " is left open: " << what;
    for (const std::string& thread : Threads())
      if (!threads_.contains(thread)) ADD_FAILURE() << "thread " << thread << " is left running";
    for (const auto& [range, file] : SharedMappings())
      if (!mapped_.contains(range)) ADD_FAILURE() << "shared memory is left mapped: " << range << " " << file;
    EXPECT_EQ(HeldLocks(), "") << "locks that this thread still holds";
    EXPECT_EQ(CurrentContext(), context_) << "another context is left current";
  }

  [[nodiscard]] bool Left() const {
    for (const auto& [number, what] : Descriptors())
      if (!descriptors_.contains(number)) return true;
    for (const std::string& thread : Threads())
      if (!threads_.contains(thread)) return true;
    for (const auto& [range, file] : SharedMappings())
      if (!mapped_.contains(range)) return true;
    return false;
  }

  std::map<std::string, std::string> descriptors_;
  std::set<std::string> threads_;
  std::map<std::string, std::string> mapped_;
  const void* context_ = nullptr;
};

const bool kListens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Census);
  return true;
}();

}  // namespace
}  // namespace amem::test
