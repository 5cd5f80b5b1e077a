#include "tests/world/stops.h"

#include <fmt/format.h>
#include <signal.h>

#include <cerrno>
#include <thread>
#include <utility>

#include "replay/driver/simulator/world_table.h"
#include "tests/world/findings.h"

namespace amem::world {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::uint64_t kStopsMost = 8;  // in a world, which must come to an end

bool IsFree(pthread_mutex_t& mutex) {
  for (int tries = 0; tries < 20; ++tries) {
    const int result = pthread_mutex_trylock(&mutex);
    if (result == EOWNERDEAD) pthread_mutex_consistent(&mutex);
    if (result == 0 || result == EOWNERDEAD) return pthread_mutex_unlock(&mutex) == 0;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

}  // namespace

Stops::Stops(const Settings& settings, std::shared_ptr<Page> page, std::shared_ptr<SimulatorWorld> memory)
    : settings_(settings), page_(std::move(page)), memory_(std::move(memory)), random_(settings.seed * 15'485'863) {
  next_ = settings_.stops ? Clock::now() + milliseconds(50 + random_() % 300) : Clock::time_point::max();
}

void Stops::Advance(const std::vector<pid_t>& ranks) {
  const auto now = Clock::now();
  if (stopped_ != 0) {
    page_->stopped_us[rank_] += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::microseconds>(now - std::exchange(counted_, now)).count());
    if (page_->dead[rank_] || page_->found) End();
  }
  if (now < next_) return;
  if (stopped_ != 0) {
    End();
    next_ = now + milliseconds(20 + random_() % 400);
  } else if (page_->stage != kRunning || page_->found || page_->stops >= kStopsMost) {
    next_ = Clock::time_point::max();
  } else {
    Begin(ranks);
  }
}

// In a real driver no process holds up another one by what it holds there.
bool Stops::HoldsNothing() const { return IsFree(memory_->table().mutex) && IsFree(page_->mutex); }

void Stops::Begin(const std::vector<pid_t>& ranks) {
  rank_ = random_() % ranks.size();
  const bool longer = random_() % 3 == 0;
  const auto deadline = static_cast<std::uint64_t>(settings_.session.deadlines.call().count());
  const milliseconds time(longer ? deadline + random_() % (deadline / 2) : random_() % (deadline / 4));
  next_ = Clock::now() + milliseconds(5);
  if (ranks[rank_] <= 0 || page_->dead[rank_] || !page_->begun[rank_]) return;
  ++page_->stops;  // before it begins, so that nobody waits for one of which the page does not know
  counted_ = Clock::now();
  ::kill(stopped_ = ranks[rank_], SIGSTOP);
  if (!HoldsNothing()) return End();
  Trace(fmt::format("rank {} is stopped for {} ms", rank_, time.count()));
  next_ = Clock::now() + time;
}

void Stops::End() {
  ::kill(stopped_, SIGCONT);
  stopped_ = 0;
  Trace(fmt::format("rank {} goes on", rank_));
  page_->stops_ended = page_->stops.load();
}

}  // namespace amem::world
