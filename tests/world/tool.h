// Stops of all ranks between two launches, by a process of its own that is killed now and then, as a user's command may be.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "statemachine/types.h"
#include "tests/world/page.h"
#include "tests/world/settings.h"

namespace amem::world {

struct Asked {
  enum class What : std::uint8_t { kPause, kPark, kResume } what{};
  std::chrono::milliseconds deadline{};
  std::chrono::milliseconds killed_after{0};  // 0: never
};

class Tool {
 public:
  Tool(const Settings& settings, std::shared_ptr<Page> page, std::function<void()> look)
      : settings_(settings), page_(std::move(page)), look_(std::move(look)) {}
  struct Answered {
    bool killed = false;  // on purpose, or because it did not end
    Status status;
    std::string fell;  // how it ended without an answer, and nobody meant it to
  };
  Answered Ask(const Asked& asked);

 private:
  [[noreturn]] void Run(const Asked& asked);

  const Settings settings_;
  const std::shared_ptr<Page> page_;
  const std::function<void()> look_;
};

}  // namespace amem::world
