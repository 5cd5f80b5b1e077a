// A disk of a few pages, in a child process with mounts of its own.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace amem::test {

inline constexpr int kCannot = 77;  // what a child returns when the machine does not let it try

// Runs `body` in a process of its own, whose expectations count here. A text that is not empty is a failure.
template <class Body>
int RunInChild(const Body& body, std::string& complaint) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) return -1;
  const pid_t child = fork();
  if (child == 0) {
    const std::string text = body();
    if (text == "cannot") _exit(kCannot);
    (void)!write(pipe_ends[1], text.data(), text.size());
    _exit(text.empty() ? 0 : 1);
  }
  close(pipe_ends[1]);
  char buffer[4096];
  for (ssize_t n = 0; (n = read(pipe_ends[0], buffer, sizeof buffer)) > 0;)
    complaint.append(buffer, static_cast<std::size_t>(n));
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) complaint = "killed by signal " + std::to_string(WTERMSIG(status));
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#define EXPECT_FINE_IN_CHILD(...)                                                             \
  do {                                                                                        \
    std::string complaint;                                                                    \
    const int rc = RunInChild((__VA_ARGS__), complaint);                                      \
    if (rc == kCannot) GTEST_SKIP() << "WAIVED: needs the right to mount a file system here"; \
    EXPECT_EQ(rc, 0) << complaint;                                                            \
    EXPECT_EQ(complaint, "");                                                                 \
  } while (false)

inline bool MountTmpfs(const std::filesystem::path& where, const char* size) {
  return unshare(CLONE_NEWNS) == 0 && mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", where.c_str(), "tmpfs", 0, (std::string("mode=0700,size=") + size).c_str()) == 0;
}

}  // namespace amem::test
