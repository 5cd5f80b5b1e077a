// A process that can open nothing more, as one whose program leaks descriptors.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "journal/base/unique_fd.h"

namespace amem::test {

// Takes all of this process's descriptors but `left`, until it is destroyed.
class NoDescriptors {
 public:
  explicit NoDescriptors(std::size_t left = 0) {
    rlim_t highest = 0;
    for (const auto& open : std::filesystem::directory_iterator("/proc/self/fd"))
      highest = std::max<rlim_t>(highest, std::stoul(open.path().filename()));
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit tight{std::min(highest + 1, before_.rlim_max), before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &tight);
    for (int fd = 0; (fd = ::dup(STDERR_FILENO)) >= 0;) taken_.emplace_back(fd);
    taken_.resize(taken_.size() - std::min(left, taken_.size()));
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
  std::vector<UniqueFd> taken_;
};

}  // namespace amem::test
