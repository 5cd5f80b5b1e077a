#include "ncclpatch/runtime/log.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <mutex>
#include <string>
#include <utility>

#include "journal/base/clock.h"

namespace amem::log {
namespace {

struct Settings {
  std::mutex mutex;
  Level least = Level::kWarn;
  bool off = false;
  std::string who;  // " rank R"
};

// Leaked, so that they outlive every thread and every destructor that may still log.
Settings& TheSettings() {
  static auto* settings = new Settings;
  return *settings;
}

constexpr std::array<const char*, 5> kNames{"trace", "debug", "info", "warning", "error"};  // in the order of Level

}  // namespace

void Configure(const std::string& level, int rank) noexcept {
  try {
    Settings& settings = TheSettings();
    const auto name = std::find(kNames.begin(), kNames.end(), level == "warn" ? "warning" : level);
    const std::lock_guard lock(settings.mutex);
    settings.who = rank >= 0 ? fmt::format(" rank {}", rank) : "";
    settings.off = name == kNames.end();
    if (!settings.off) settings.least = static_cast<Level>(name - kNames.begin());
  } catch (...) {  // a log that cannot be set up is no reason to fail
  }
}

void Write(Level level, std::string_view message) noexcept {
  try {
    Settings& settings = TheSettings();
    const std::lock_guard lock(settings.mutex);
    if (settings.off || level < settings.least) return;
    const std::string line =
        fmt::format("[amem {}{}] {} {}\n", getpid(), settings.who, kNames[static_cast<std::size_t>(level)], message);
    std::fwrite(line.data(), 1, line.size(), stderr);  // in one piece, between the lines of others
    std::fflush(stderr);
  } catch (...) {
  }
}

void Limited::Error(std::string_view message) noexcept {
  static std::mutex mutex;
  const auto now = static_cast<long long>(MonotonicNs() / 1'000'000);
  unsigned long long left_out = 0;
  {
    const std::lock_guard lock(mutex);
    if (now - last_ms_ < 1000) {
      ++left_out_;
      return;
    }
    last_ms_ = now;
    left_out = std::exchange(left_out_, 0);
  }
  try {
    Write(Level::kError,
          left_out == 0 ? std::string(message) : fmt::format("{} ({} more such calls in between)", message, left_out));
  } catch (...) {
  }
}

}  // namespace amem::log
