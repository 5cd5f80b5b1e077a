#include "ncclpatch/runtime/log.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <mutex>
#include <utility>

#include "journal/base/clock.h"

namespace amem::log {

// Leaked, so that it outlives every thread and destructor that may log.
static spdlog::logger& Logger() {
  static auto* logger = [] {
    auto made = std::make_shared<spdlog::logger>("amem", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("[amem %P] %l %v");
    made->set_level(spdlog::level::warn);
    made->flush_on(spdlog::level::warn);
    return new std::shared_ptr<spdlog::logger>(std::move(made));
  }();
  return **logger;
}

static_assert(static_cast<int>(Level::kTrace) == SPDLOG_LEVEL_TRACE && static_cast<int>(Level::kError) == SPDLOG_LEVEL_ERROR);

void Configure(const std::string& level, int rank) noexcept {
  try {
    spdlog::logger& logger = Logger();
    logger.set_pattern(rank >= 0 ? fmt::format("[amem %P rank {}] %l %v", rank) : "[amem %P] %l %v");
    logger.set_level(spdlog::level::from_str(level));
    spdlog::set_default_logger(std::shared_ptr<spdlog::logger>(&logger, [](auto*) {}));
  } catch (...) {  // a log that cannot be set up must not make anything fail
  }
}

void Write(Level level, std::string_view message) noexcept {
  try {
    Logger().log(static_cast<spdlog::level::level_enum>(level), spdlog::string_view_t(message.data(), message.size()));
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
