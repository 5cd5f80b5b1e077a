// Log lines of AMem, on stderr: "[amem PID rank R] level message". Nothing here throws, and nothing writes to stdout.
#pragma once

#include <string>
#include <string_view>

namespace amem::log {

enum class Level { kTrace, kDebug, kInfo, kWarn, kError };

// Before this call warnings and errors are written without a rank. It also replaces the default spdlog logger, which would
// write to stdout. `level` as in Options::log_level.
void Configure(const std::string& level, int rank) noexcept;

void Write(Level level, std::string_view message) noexcept;

inline void Info(std::string_view message) noexcept { Write(Level::kInfo, message); }
inline void Warn(std::string_view message) noexcept { Write(Level::kWarn, message); }
inline void Error(std::string_view message) noexcept { Write(Level::kError, message); }

// Writes a line at most once a second, with the number of lines left out. Make it static at each call site.
class Limited {
 public:
  void Error(std::string_view message) noexcept;

 private:
  long long last_ms_ = -1'000'000;
  unsigned long long left_out_ = 0;
};

}  // namespace amem::log
