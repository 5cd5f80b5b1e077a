// Pauses and resumes by the C interface for which one allocation fails, each in turn, or some in a row, or all from one on.
// Each time in a child of its own, forked before AMem is used. Prints "fine", or what was wrong.
//
//   shortage_program CALL IN_A_ROW EVERY
//     CALL: pause, resume (of NCCL's memory), tags (two, by a want); IN_A_ROW: 0 is all; EVERY: 1 is each, 2 each other, ...
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "ncclpatch/amem.h"
#include "tests/without_memory.h"

namespace {

using amem::test::WithoutMemory;

constexpr std::size_t kBytes = std::size_t{4} << 20;
constexpr std::array<const char*, 2> kTags{"a", "b"};
enum Ended { kRefused = 0, kWrong = 1, kNothingRefused = 9 };

[[noreturn]] void Wrong(const std::string& what, int code) {
  std::printf("%s: %d: %s\n", what.c_str(), code, amem_last_error());
  std::fflush(stdout);
  _exit(kWrong);
}
void Require(int code, const std::string& what) {
  if (code != 0) Wrong(what, code);
}

class Child {
 public:
  Child(std::string call, std::uint64_t spared, std::uint64_t most) : call_(std::move(call)), spared_(spared), most_(most) {
    for (std::size_t i = 0; i < kTags.size(); ++i) {
      Require(amem_pool(kTags[i], 0), "amem_pool");
      Require(amem_pool_enter(kTags[i]), "amem_pool_enter");
      memory_[i] = static_cast<char*>(amem_alloc(kBytes, 0, nullptr));
      if (memory_[i] == nullptr) Wrong("amem_alloc", 0);
      std::memset(memory_[i], 'a' + static_cast<int>(i), kBytes);
      Require(amem_pool_leave(), "amem_pool_leave");
    }
  }
  int Run() {
    if (call_ == "resume") Require(ncclPause(nullptr), "the pause before");
    const int result = Short();
    if (call_ == "tags") return AfterTags(result);
    Require(ncclResume(nullptr), "a resume afterwards");
    Require(ncclPause(nullptr), "a pause afterwards");
    Require(ncclResume(nullptr), "the resume after it");
    return Said();
  }

 private:
  int Short() {
    const std::uint64_t want = amem_want();
    int result = 0;
    {
      const WithoutMemory none(spared_, most_ == 0 ? WithoutMemory::kAlways : most_);
      result = call_ == "pause"    ? ncclPause(nullptr)
               : call_ == "resume" ? ncclResume(nullptr)
                                   : amem_want_pause(want, kTags.data(), kTags.size(), 0, nullptr);
      refused_ = WithoutMemory::HasRefused();
    }
    if (result == 0 && call_ == "tags")
      Require(amem_want_resume(want, kTags.data(), kTags.size(), 0, 0), "the resume of a pause that succeeded");
    return result;
  }
  // A pause that failed has left nothing that a plain resume does not bring back.
  int AfterTags(int result) {
    const std::string after = "after a pause that ended with " + std::to_string(result) + ": ";
    Require(amem_resume(kTags.data(), kTags.size(), 0, 0), after + "a plain resume");
    AreThere(after);
    Require(amem_pause(kTags.data(), kTags.size(), 0, nullptr), after + "another pause");
    Require(amem_resume(kTags.data(), kTags.size(), 0, 0), after + "its resume");
    AreThere(after);
    return Said();
  }
  void AreThere(const std::string& after) const {
    for (std::size_t i = 0; i < kTags.size(); ++i)
      if (memory_[i][0] != 'a' + static_cast<int>(i) || memory_[i][kBytes - 1] != 'a' + static_cast<int>(i))
        Wrong(after + "contents", 0);
  }
  [[nodiscard]] int Said() const { return refused_ ? kRefused : kNothingRefused; }

  const std::string call_;
  const std::uint64_t spared_, most_;
  std::array<char*, kTags.size()> memory_{};
  bool refused_ = false;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return std::puts("shortage_program CALL IN_A_ROW EVERY"), 2;
  constexpr std::uint64_t kTooMany = 20'000;
  constexpr unsigned kSeconds = 30;
  const std::uint64_t most = std::strtoull(arguments[2], nullptr, 10), every = std::strtoull(arguments[3], nullptr, 10);
  constexpr int kLeast = 5;
  bool fine = true;
  int refused = 0;
  for (std::uint64_t spared = 0; spared < kTooMany; spared += every) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(kSeconds);
      _exit(Child(arguments[1], spared, most).Run());
    }
    int status = 0;
    if (child < 0 || ::waitpid(child, &status, 0) != child) return std::puts("no child"), 1;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == kNothingRefused && refused < kLeast) return std::puts("next to nothing was refused"), 1;
    if (code == kNothingRefused) return std::puts(fine ? "fine" : "not fine"), fine ? 0 : 1;
    ++refused;
    if (code == kRefused) continue;
    std::printf("after %llu allocations: %s %d\n", static_cast<unsigned long long>(spared),
                WIFSIGNALED(status) ? "signal" : "exit", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    fine = false;
  }
  return std::puts("there is no end"), 1;
}
