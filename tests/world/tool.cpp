#include "tests/world/tool.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "replay/control/job_control.h"
#include "tests/world/findings.h"

namespace amem::world {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void Tool::Run(const Asked& asked) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (settings_.lose == "tool") std::abort();
  std::vector<control::RankPlace> places;
  for (int rank = 0; rank < settings_.ranks; ++rank)
    if (!page_->dead[static_cast<std::size_t>(rank)])
      places.push_back({SessionOf(rank), settings_.directory / "journal" / std::to_string(rank), rank});
  Status status;
  if (auto control = control::JobControl::Open(places, settings_.directory / "sockets"); !control.ok()) {
    status = control.status();
  } else if (asked.what == Asked::What::kResume) {
    status = control->Resume(asked.deadline);
  } else {
    control::AskOptions options{.deadline = asked.deadline, .at_step = {}, .may_pause = {}};
    options.where = control::Where::kBetweenLaunches;
    options.parks = asked.what == Asked::What::kPark;
    status = control->Pause(options);
  }
  page_->tool.code = status.code();
  std::snprintf(page_->tool.text.data(), page_->tool.text.size(), "%s", status.message().c_str());
  ::_exit(0);
}

Tool::Answered Tool::Ask(const Asked& asked) {
  page_->tool.code = {};
  page_->tool.text.front() = '\0';
  const pid_t child = ::fork();
  if (child == 0) Run(asked);
  if (child < 0) std::abort();
  const auto began = Clock::now();
  const auto most = asked.deadline + 2 * settings_.CallLimit();
  int status = 0;
  bool killed = false;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    look_();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!killed && asked.killed_after.count() > 0 && Clock::now() - began > asked.killed_after) {
      killed = true;
      Trace("the tool is killed");
      ::kill(child, SIGKILL);
    }
    if (Clock::now() - began > most) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return {true, {Code::kTimeout, "the tool did not end"}, {}};
    }
  }
  if (killed && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return {true, {}, {}};
  if (WIFSIGNALED(status)) return {false, {}, fmt::format("the tool was ended by signal {}", WTERMSIG(status))};
  if (WEXITSTATUS(status) != 0) return {false, {}, fmt::format("the tool ended with exit code {}", WEXITSTATUS(status))};
  return {false, {page_->tool.code.load(), page_->tool.text.data()}, {}};
}

}  // namespace amem::world
