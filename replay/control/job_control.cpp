#include "replay/control/job_control.h"

#include "replay/control/asking.h"
#include "replay/control/look.h"

namespace amem::control {
namespace {

RankLook LookAtPage(const Page& page, const std::filesystem::path& directory) {
  RankLook look;
  look.session = SessionId{page.session};
  look.pid = page.pid;
  look.start_ticks = page.start_ticks;
  look.rank_name = NameOfRank(page);
  look.directory = directory;
  look.alive = ProcessLives(page);
  look.phase = static_cast<Phase>(page.phase.load(std::memory_order_acquire));
  look.steps = page.steps.load(std::memory_order_relaxed);
  look.paused_by_program = page.own_pause.load(std::memory_order_acquire) == static_cast<std::uint32_t>(OwnPause::kPaused);
  look.doing = Doing(page, look.alive);
  look.held = page.held_bytes.load(std::memory_order_relaxed);
  look.freed = page.freed_bytes.load(std::memory_order_relaxed);
  return look;
}

}  // namespace

struct JobControl::Implementation {
  Asking asking;
};

JobControl::JobControl(std::unique_ptr<Implementation> implementation) : implementation_(std::move(implementation)) {}
JobControl::JobControl(JobControl&&) noexcept = default;
JobControl& JobControl::operator=(JobControl&&) noexcept = default;
JobControl::~JobControl() {
  if (implementation_ != nullptr) implementation_->asking.Withdraw();
}

Result<JobControl> JobControl::Open(std::span<const std::filesystem::path> session_directories) {
  auto asking = Asking::Open(session_directories);
  if (!asking.ok()) return asking.status();
  return JobControl(std::make_unique<Implementation>(Implementation{*std::move(asking)}));
}

std::vector<RankLook> JobControl::Look() {
  std::vector<RankLook> all;
  for (const Asking::Rank& rank : implementation_->asking.ranks()) all.push_back(LookAtPage(rank.page.page(), rank.directory));
  return all;
}

Status JobControl::Pause(const AskOptions& options, const Progress& progress) {
  return implementation_->asking.Pause(options, progress);
}
Status JobControl::Resume(std::chrono::milliseconds deadline, const Progress& progress) {
  return implementation_->asking.Resume(deadline, progress);
}
Status JobControl::LeaveNote(SessionId session, const FrozenNote& note) {
  return implementation_->asking.LeaveNote(session, note);
}

std::vector<RankLook> LookAt(std::span<const std::filesystem::path> session_directories) {
  std::vector<RankLook> all;
  for (const auto& directory : session_directories) {
    const auto page = MappedPage::Open(directory);
    if (page.ok()) all.push_back(LookAtPage(page->page(), directory));
  }
  return all;
}

}  // namespace amem::control
