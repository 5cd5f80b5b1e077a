// What pauses and resumes have in common: the pages of a job.
#include "replay/control/asking.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "journal/base/clock.h"
#include "journal/base/process_stat.h"
#include "journal/tail.h"
#include "replay/control/look.h"
#include "statemachine/event.h"

namespace amem::control {
namespace {

// How long ranks take a tool for alive that shows no sign of it, because it was stopped.
constexpr std::uint64_t kPatienceNs = 30'000'000'000;
constexpr std::chrono::milliseconds kLookAtTold{1};
constexpr std::chrono::seconds kForTold{60};  // the pause of a rank's memory

Status OpenOne(const std::filesystem::path& directory, std::vector<Asking::Rank>& ranks) {
  auto page = MappedPage::Open(directory);
  if (!page.ok() && page.status().code() == Code::kNotFound) {
    if (ProcessOfWriter(directory / "tail") == 0) return {};  // it has ended
    return {Code::kRefused,
            directory.string() +
                ": its process takes no requests: its libamem_nccl.so is older than this program, or its journal was "
                "begun anew after a failure"};
  }
  if (!page.ok()) return page.status();
  if ((*page)->pid_namespace != PidNamespace())
    return {Code::kRefused, directory.string() + ": its process is in another pid namespace (a container); ask from inside"};
  if (ProcessLives(page->page())) ranks.push_back({directory, *std::move(page)});
  return {};
}

}  // namespace

Result<Asking> Asking::Open(std::span<const std::filesystem::path> session_directories) {
  std::vector<std::filesystem::path> directories(session_directories.begin(), session_directories.end());
  std::ranges::sort(directories);
  std::vector<Rank> ranks;
  for (const auto& directory : directories) AMEM_TRY(OpenOne(directory, ranks));
  if (ranks.empty()) return Status{Code::kNotFound, "none of the job's processes lives on this host"};
  for (const Rank& rank : ranks) AMEM_TRY(rank.page.Lock().Within(NameOfRank(rank.page.page())));
  Asking asking(std::move(ranks));
  for (const Rank& rank : asking.ranks_) {
    rank.page->by_pid.store(::getpid(), std::memory_order_release);
    asking.request_ = std::max({asking.request_, rank.page->last_request.load(), rank.page->asked.load()});
  }
  asking.TellTheRest();
  asking.standing_ = false;
  asking.Withdraw();  // what a tool that died has left
  return asking;
}

// A tool that died between its last word to one rank and that to another has decided for all: those that it told already wait
// for the others in the pause of NCCL's memory. The others are told now, and nothing else is asked before they have heard.
void Asking::TellTheRest() {
  const auto is_told = [&](const Rank& rank) {
    return request_ != 0 && rank.page->asked.load() == request_ &&
           rank.page->kind.load() == static_cast<std::uint32_t>(Ask::kPause) &&
           rank.page->stage.load() == static_cast<std::uint32_t>(Stage::kNccl);
  };
  const auto pauses = [&](const Rank& rank) {
    return rank.page->asked.load() == request_ && Has(rank, Phase::kPausing) && ProcessLives(rank.page.page());
  };
  if (std::ranges::none_of(ranks_, is_told) || std::ranges::all_of(ranks_, is_told)) return;
  for (const Rank& rank : ranks_) {
    if (!pauses(rank)) continue;
    rank.page->stage.store(static_cast<std::uint32_t>(Stage::kNccl), std::memory_order_release);
    rank.page->bell.Ring();
  }
  const auto until = Clock::now() + kForTold;
  while (std::ranges::any_of(ranks_, pauses) && Clock::now() < until) std::this_thread::sleep_for(kLookAtTold);
}

void Asking::Withdraw() {
  if (standing_) return;
  standing_ = true;
  for (const Rank& rank : ranks_) {
    if (rank.page->stage.load() == static_cast<std::uint32_t>(Stage::kNccl)) continue;  // it stands
    rank.page->asked.store(0, std::memory_order_seq_cst);
    rank.page->bell.Ring();
  }
}

void Asking::Beat() {
  for (const Rank& rank : ranks_) rank.page->void_after_ns.store(MonotonicNs() + kPatienceNs, std::memory_order_release);
}

void Asking::Post(Ask ask, bool all_tags, Stage stage) {
  ++request_;
  standing_ = stage == Stage::kNccl;
  Beat();
  std::error_code unknown;
  const std::string first = std::filesystem::absolute(ranks_.front().directory, unknown).string();
  for (const Rank& rank : ranks_) {
    Page& page = rank.page.page();
    // No rank that waits may take what follows for the stage of an earlier request. One that is paused looks at the number
    // alone.
    if (PhaseOf(rank) != Phase::kPaused) page.asked.store(0, std::memory_order_seq_cst);
    page.last_request.store(request_, std::memory_order_relaxed);
    page.kind.store(static_cast<std::uint32_t>(ask), std::memory_order_relaxed);
    page.all_tags.store(all_tags ? 1 : 0, std::memory_order_relaxed);
    page.target.store(0, std::memory_order_relaxed);
    PutText(page.told_first, sizeof page.told_first, first.size() < sizeof page.told_first ? first : "");
    page.stage.store(static_cast<std::uint32_t>(stage), std::memory_order_release);
    page.asked.store(request_, std::memory_order_seq_cst);
    page.bell.Ring();
  }
}

// In the order of the ranks: the first one's page is where the others look when the tool has died (Page::told_first).
void Asking::SetStage(Stage stage) {
  if (stage == Stage::kNccl) standing_ = true;
  for (const Rank& rank : ranks_) {
    rank.page->stage.store(static_cast<std::uint32_t>(stage), std::memory_order_release);
    rank.page->bell.Ring();
  }
}

Phase Asking::PhaseOf(const Rank& rank) { return static_cast<Phase>(rank.page->phase.load(std::memory_order_acquire)); }

OwnPause Asking::OwnPauseOf(const Rank& rank) {
  return static_cast<OwnPause>(rank.page->own_pause.load(std::memory_order_seq_cst));
}

bool Asking::IsAbout(const Rank& rank) const { return rank.page->about.load(std::memory_order_acquire) == request_; }

bool Asking::HasCome(const Rank& rank) const {
  return Has(rank, Phase::kArrived) || Has(rank, Phase::kPaused) || OwnPauseOf(rank) == OwnPause::kPaused;
}

bool Asking::HasDone(const Rank& rank, Stage stage) const {
  if (!IsAbout(rank)) return OwnPauseOf(rank) == OwnPause::kPaused;  // what its program paused, it has paused
  const bool done = rank.page->stage_done.load(std::memory_order_acquire) >= static_cast<std::uint32_t>(stage);
  return stage == Stage::kNccl ? done && PhaseOf(rank) == Phase::kPaused : done;
}

Status Asking::FirstFailure(Ask asked) const {
  for (const Rank& rank : ranks_) {
    const Page& page = rank.page.page();
    // A rank whose pause fails runs on, which is all that a resume wants.
    const bool failed =
        (asked == Ask::kPause && Has(rank, Phase::kFailed)) || (Has(rank, Phase::kPaused) && page.code.load() != 0);
    if (failed)
      return {static_cast<Code>(page.code.load(std::memory_order_relaxed)),
              NameOfRank(page) + ": " + GetText(page.message, sizeof page.message)};
  }
  return {};
}

Status Asking::LeaveNote(SessionId session, const FrozenNote& note) {
  for (const Rank& rank : ranks_) {
    Page& page = rank.page.page();
    if (page.session != session.value) continue;
    page.note_from_ns.store(note.from_ns, std::memory_order_relaxed);
    page.note_to_ns.store(note.to_ns, std::memory_order_relaxed);
    page.note_bytes.store(note.bytes, std::memory_order_relaxed);
    PutText(page.note_gpus, sizeof page.note_gpus, note.moved_gpus);
    page.note.fetch_add(1, std::memory_order_release);
    return {};
  }
  return {Code::kNotFound, ToText(session) + " is none of this job's"};
}

}  // namespace amem::control
