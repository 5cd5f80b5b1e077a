#include "replay/control/look.h"

#include <spdlog/fmt/fmt.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <deque>

#include "journal/base/clock.h"
#include "journal/base/process_sight.h"
#include "journal/base/process_stat.h"
#include "journal/base/unique_fd.h"
#include "journal/journal.h"

namespace amem::control {
namespace {

constexpr std::size_t kLastEvents = 3;

std::string Ago(std::uint64_t then_ns) {
  const std::uint64_t now = MonotonicNs();
  return fmt::format("{:.1f} s ago", static_cast<double>(now - std::min(now, then_ns)) / 1e9);
}

std::string Place(const Page& page) {
  const std::uint64_t at = page.at.load(std::memory_order_relaxed);
  return at != 0 ? fmt::format("in safe point {}", at) : "in its program's own resume";
}

std::string Running(const Page& page) {
  const std::uint64_t steps = page.steps.load(std::memory_order_relaxed);
  if (steps == 0) return "has made no safe point; it comes when its program pauses by itself";
  return fmt::format("has come to {} safe point{}, to the last one {}", steps, steps == 1 ? "" : "s",
                     Ago(page.last_step_ns.load(std::memory_order_relaxed)));
}

std::string MainThread(const Page& page) {
#ifdef SYS_pidfd_open
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, page.pid, 0)));
#else
  const UniqueFd process;
#endif
  if (!ProcessLives(page)) return "";
  const Sight sight = SeeProcess(page.pid, process.get());
  return fmt::format("; its process is {}{}", sight.state, sight.where.empty() ? "" : " " + sight.where);
}

std::string FromJournal(const std::filesystem::path& directory) {
  const auto reader = JournalReader::Open(directory);
  if (!reader.ok()) return "";
  const auto info = (*reader)->Info();
  if (!info.ok()) return "";
  std::deque<std::string> last;
  const SequenceNumber from{info->last.value - std::min<std::uint64_t>(info->last.value, kLastEvents - 1)};
  const auto read = (*reader)->Read(from, kToTheEnd, [&](const Event& event) {
    last.push_back(fmt::format("{}: {}", event.seq.value, ToText(event.body)));
    if (last.size() > kLastEvents) last.pop_front();
    return true;
  });
  std::string text = last.empty() ? "" : fmt::format("; last in its journal: {}", fmt::join(last, "; "));
  const auto state = (*reader)->StateAt(std::nullopt);
  if (!state.ok() || !read.ok()) return text;
  if (state->lifecycle == Lifecycle::kPausing) text += "; a pause is under way";
  if (state->lifecycle == Lifecycle::kResuming) text += "; a resume is under way";
  return text;
}

}  // namespace

std::string NameOfRank(const Page& page) {
  return page.rank >= 0 ? fmt::format("rank {}", page.rank) : fmt::format("pid {}", page.pid);
}

bool ProcessLives(const Page& page) {
  return page.start_ticks != 0 && page.pid_namespace == PidNamespace() && StartTicks(page.pid) == page.start_ticks;
}

std::string Doing(const Page& page, bool alive) {
  if (!alive) return "has ended";
  const bool own = page.own_pause.load(std::memory_order_acquire) == static_cast<std::uint32_t>(OwnPause::kPaused);
  switch (static_cast<Phase>(page.phase.load(std::memory_order_acquire))) {
    case Phase::kHeld:
      return fmt::format("waits {} until a step is agreed on", Place(page));
    case Phase::kArrived:
      return fmt::format("waits {} for the others, came {}", Place(page), Ago(page.at_ns.load(std::memory_order_relaxed)));
    case Phase::kPausing:
      return "pauses";
    case Phase::kPaused: {
      const bool failed = page.code.load(std::memory_order_relaxed) != 0;
      return fmt::format("is paused, waits {} for a resume{}", Place(page),
                         failed ? "; the last one failed: " + GetText(page.message, sizeof page.message) : "");
    }
    case Phase::kResuming:
      return "resumes";
    case Phase::kFailed:
      return fmt::format("{}; its last pause failed: {}", Running(page), GetText(page.message, sizeof page.message));
    case Phase::kRunning:
      break;
  }
  return own ? "is paused by its program" : Running(page);
}

std::string DoingInDetail(const Page& page, const std::filesystem::path& directory) {
  if (!ProcessLives(page)) return "has ended";
  return Doing(page, true) + MainThread(page) + FromJournal(directory);
}

}  // namespace amem::control
