// What pauses and resumes have in common: the connections to a job's ranks, and the order that they all have.
#include "replay/control/job_control.h"

#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "journal/journal.h"

namespace amem::control {

constexpr std::chrono::milliseconds kBeat{1000};                              // between signs of life to the ranks
constexpr std::chrono::milliseconds kForWaiting{3'000}, kForPausing{60'000};  // for an earlier tool

static std::vector<RankView> ViewsOf(std::vector<RankLink>& ranks) {
  AskAll(ranks);
  std::vector<RankView> all;
  for (const RankLink& rank : ranks)
    if (rank.refused().ok()) all.push_back(rank.view());
  return all;
}

std::string_view ToText(Phase phase) {
  constexpr std::string_view kTexts[] = {"running", "held", "arrived", "pausing", "paused", "resuming", "failed"};
  const auto index = static_cast<std::size_t>(phase);
  return index < std::size(kTexts) ? kTexts[index] : "unknown";
}

Result<JobControl> JobControl::Open(const std::vector<RankPlace>& ranks, const std::filesystem::path& socket_directory) {
  std::vector<RankPlace> sorted = ranks;
  std::ranges::sort(sorted, {}, &RankPlace::directory);
  auto sockets = std::make_unique<ToolSockets>(socket_directory);
  std::vector<RankLink> links;
  for (const RankPlace& place : sorted) {
    AMEM_ASSIGN(auto link, RankLink::Connect(*sockets, place));
    if (link) links.push_back(*std::move(link));
  }
  JobControl job(std::move(sockets), std::move(links));
  job.GiveAll();  // nothing yet; but from now on the ranks take this tool's orders only
  Await(job.ranks_, In(kAnswerSoon), [&] { return job.AllAnswered(); });
  for (const RankLink& rank : job.ranks_) AMEM_TRY(rank.refused().Within(rank.name()));
  std::erase_if(job.ranks_, [](const RankLink& rank) { return !rank->alive; });
  if (job.ranks_.empty()) return Status{Code::kNotFound, "none of the job's processes lives on this host"};
  job.AwaitEndOfEarlier();
  return job;
}

// Ranks that come, or wait, for a tool that has died see its end, and go on or pause as the order of the first of them says. A
// program that was interrupted in its safe point may never come back to it, and is not waited for.
void JobControl::AwaitEndOfEarlier() {
  const auto none = [&](std::initializer_list<Phase> phases) {
    return std::ranges::none_of(
        ranks_, [&](const RankLink& rank) { return rank->alive && std::ranges::find(phases, rank->is.phase) != phases.end(); });
  };
  Await(ranks_, In(kForWaiting), [&] { return none({Phase::kHeld, Phase::kArrived, Phase::kPausing}); });
  Await(ranks_, In(kForPausing), [&] { return none({Phase::kPausing}); });
  for (const RankLink& rank : ranks_) order_.request = std::max(order_.request, rank->is.last_request);
}

std::vector<RankView> JobControl::Ranks() { return ViewsOf(ranks_); }

std::vector<RankView> RanksAt(const std::vector<RankPlace>& ranks, const std::filesystem::path& socket_directory) {
  const ToolSockets sockets(socket_directory);
  std::vector<RankLink> links;
  for (const RankPlace& place : ranks) {
    auto link = RankLink::Connect(sockets, place);
    if (link && *link) links.push_back(**std::move(link));
  }
  return ViewsOf(links);
}

Status JobControl::LeaveNote(SessionId session, EventBody note) {
  const auto rank = std::ranges::find(ranks_, session, [](const RankLink& one) { return one->process.session; });
  if (rank == ranks_.end()) return {Code::kNotFound, ToText(session) + " is none of this job's"};
  const bool told = rank->SendNote(std::move(note));
  Await(ranks_, In(kAnswerSoon), [&] { return rank->answered() || !(*rank)->alive; });
  if (!told || !(*rank)->alive || !rank->answered()) return {Code::kPeerLost, rank->name() + " " + (*rank)->Doing()};
  return {};
}

Result<State> JobControl::MemoryOf(const RankProcess& process) {
  AMEM_ASSIGN(const auto reader, JournalReader::Open(process.directory));
  return reader->StateAt(std::nullopt);
}

// ---- orders ----------------------------------------------------------------------------------------------------------------

void JobControl::GiveAll() {
  order_.by_pid = ::getpid();
  for (RankLink& rank : ranks_) {
    rank.Give(order_);
    // It is the first to have the order only once that is sent, and not while it waits for room.
    if (rank->process.session == order_.told_first)
      Await({&rank, 1}, In(kAnswerSoon), [&] { return rank.has_room() || !rank->alive; });
  }
}

void JobControl::Post(Ask ask, bool all_tags, Stage stage, const agreement::LaunchOrder& launches) {
  const auto first = std::ranges::find_if(ranks_, [](const RankLink& rank) { return rank->alive; });
  order_ = {.request = order_.request + 1, .ask = ask, .stage = stage, .all_tags = all_tags};
  order_.launches = launches;
  if (first != ranks_.end()) order_.told_first = (*first)->process.session;
  irrevocable_ = stage == Stage::kNccl;
  GiveAll();
}

void JobControl::SetStage(Stage stage) {
  if (stage == Stage::kNccl) irrevocable_ = true;
  order_.stage = stage;
  GiveAll();
}

void JobControl::Withdraw() {
  if (std::exchange(irrevocable_, true)) return;
  order_.ask = Ask::kNothing;
  GiveAll();
}

bool JobControl::AllAnswered() const {
  return std::ranges::all_of(ranks_, [](const RankLink& rank) { return rank.answered() || !rank->alive; });
}

void JobControl::Wait(std::chrono::milliseconds most) {
  if (Passed(next_beat_)) {
    next_beat_ = In(kBeat);
    for (RankLink& rank : ranks_)
      if (rank.answered()) rank.Give({});
  }
  bool first = true;
  Await(ranks_, In(most), [&] { return !std::exchange(first, false); });
}

Result<const RankLink*> JobControl::AwaitRanks(Ask asked, Deadline until,
                                               const std::function<Result<bool>(const RankLink&)>& done) {
  for (;;) {
    AMEM_TRY(FirstFailure(asked));
    const RankLink* waits_for = nullptr;
    for (const RankLink& rank : ranks_) {
      AMEM_ASSIGN(const bool has, done(rank));
      if (!has) waits_for = &rank;
    }
    if (waits_for == nullptr || Passed(until)) return waits_for;
    Wait(std::min(kSlice, LeftUntil(until)));
  }
}

// ---- status of the ranks ---------------------------------------------------------------------------------------------------

bool JobControl::HasCome(const RankLink& rank) const {
  return Has(rank, Phase::kArrived) || Has(rank, Phase::kPaused) || rank->is.own_pause == OwnPause::kPaused;
}

bool JobControl::HasDone(const RankLink& rank, Stage stage) const {
  const RankStatus& is = rank->is;
  if (!IsAbout(rank)) return is.own_pause == OwnPause::kPaused;  // what its program paused, it has paused
  return is.stage_done >= stage && (stage != Stage::kNccl || is.phase == Phase::kPaused);
}

bool JobControl::Runs(const RankLink& rank) {
  const Phase phase = rank->is.phase;
  return rank->heard && (phase == Phase::kRunning || phase == Phase::kHeld || phase == Phase::kFailed);
}

bool JobControl::HasGivenUp(const RankLink& rank) const {
  return rank.answered() && Has(rank, Phase::kRunning) && rank->is.asked.request == 0;
}

Status JobControl::LostContact(const RankLink& rank) {
  return {Code::kPeerLost, rank.name() + " got no message from this command for 30 s, and runs on"};
}

Status JobControl::FirstFailure(Ask asked) const {
  for (const RankLink& rank : ranks_) {
    if (!rank.refused().ok()) return rank.refused().Within(rank.name());
    // A rank whose pause fails runs on, which is all that a resume wants.
    const Status& why = rank->is.failure;
    const bool failed = (asked == Ask::kPause && Has(rank, Phase::kFailed)) || (Has(rank, Phase::kPaused) && !why.ok());
    if (failed) return why.Within(rank.name());
  }
  return {};
}

}  // namespace amem::control
