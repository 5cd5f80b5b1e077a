// A disk of a few pages, in a child process with mounts of its own.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
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

// The same for a body that says nothing; how the process ended, as of wait.
template <class Body>
int RunInChildQuietly(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

#define EXPECT_FINE_IN_CHILD(...)                                                                      \
  do {                                                                                                 \
    std::string complaint;                                                                             \
    const int rc = amem::test::RunInChild((__VA_ARGS__), complaint);                                   \
    if (rc == amem::test::kCannot)                                                                     \
      GTEST_SKIP() << "WAIVED: needs the right to mount a file system here, and the mkfs of its kind"; \
    EXPECT_EQ(rc, 0) << complaint;                                                                     \
    EXPECT_EQ(complaint, "");                                                                          \
  } while (false)

inline bool MountTmpfs(const std::filesystem::path& where, const char* size) {
  return unshare(CLONE_NEWNS) == 0 && mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", where.c_str(), "tmpfs", 0, (std::string("mode=0700,size=") + size).c_str()) == 0;
}

// A disk of its own, with a file system that `mkfs` makes ("mkfs.ext4 -q") in a file in memory.
inline bool MountDisk(const std::filesystem::path& where, const std::string& mkfs, const char* size) {
  const std::string image = "/dev/shm/" + where.filename().string() + ".image";
  const std::string make = "export PATH=$PATH:/usr/sbin:/sbin; truncate -s " + std::string(size) + " " + image + " && " + mkfs +
                           " " + image + " && mount -o loop " + image + " " + where.string();
  if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
  const bool mounted = std::system((make + " >/dev/null 2>&1").c_str()) == 0;
  unlink(image.c_str());
  return mounted;
}

// A file system that stands still, while this lives at most. It is thawed by a child, also when this process is killed, and
// when the time is over.
class Frozen {
 public:
  explicit Frozen(const std::filesystem::path& where, std::chrono::milliseconds at_most = std::chrono::seconds(20)) {
    int ready[2];
    if (pipe(ready) != 0 || pipe(go_on_) != 0) return;
    child_ = fork();
    if (child_ == 0) {
      const int fd = open(where.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      const char frozen = ioctl(fd, FIFREEZE, 0) == 0 ? 1 : 0;
      (void)!write(ready[1], &frozen, 1);
      close(go_on_[1]);
      pollfd wait{go_on_[0], POLLIN, 0};
      poll(&wait, 1, static_cast<int>(at_most.count()));
      (void)ioctl(fd, FITHAW, 0);
      _exit(0);
    }
    char frozen = 0;
    (void)!read(ready[0], &frozen, 1);
    is_ = frozen != 0;
    close(ready[0]);
    close(ready[1]);
  }
  ~Frozen() { Thaw(); }
  [[nodiscard]] bool is() const { return is_; }
  void Thaw() const {
    (void)!write(go_on_[1], "x", 1);
    if (child_ > 0) waitpid(child_, nullptr, 0);
  }

 private:
  int go_on_[2] = {-1, -1};
  pid_t child_ = 0;
  bool is_ = false;
};

// Takes all that a disk has but so many pages.
inline void FillUp(const std::filesystem::path& file, unsigned pages_left) {
  const auto reserve = [](const std::filesystem::path& path, off_t from, off_t bytes) {
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    const bool done = fallocate(fd, 0, from, bytes) == 0;
    syncfs(fd);
    close(fd);
    return done;
  };
  const std::filesystem::path spare = file.string() + ".spare";  // btrfs gives back what lies in an extent of its own
  if (pages_left != 0) reserve(spare, 0, static_cast<off_t>(pages_left) * 4096);
  struct stat st {};
  off_t end = stat(file.c_str(), &st) == 0 ? st.st_size : 0;
  for (off_t some = off_t{256} << 20; some >= 4096;) {
    reserve(file, end, some) ? end += some : some /= 2;
  }
  unlink(spare.c_str());
  reserve(file, 0, 4096);
}

}  // namespace amem::test
