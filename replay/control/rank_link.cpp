#include "replay/control/rank_link.h"

#include <poll.h>
#include <spdlog/fmt/fmt.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <span>

#include "journal/base/clock.h"
#include "journal/base/process_sight.h"
#include "journal/journal.h"
#include "journal/tail.h"

namespace amem::control {
namespace {

constexpr std::size_t kLastEvents = 3;
constexpr std::size_t kMostThreads = 4;              // that are named
constexpr std::chrono::milliseconds kForRoom{1000};  // in the queue of a rank that is busy

std::string Ago(std::uint64_t then_ns) {
  const std::uint64_t now = MonotonicNs();
  return fmt::format("{:.1f} s ago", static_cast<double>(now - std::min(now, then_ns)) / 1e9);
}

std::string Running(const RankStatus& is) {
  if (is.steps == 0)
    return "runs, and has not called amem.safepoint(): its program has to do so once a step, or pause by itself; " +
           (is.launches.why_not.empty() ? "it can be stopped between launches: --between-launches"
                                        : "it cannot be stopped between launches, because " + is.launches.why_not);
  return fmt::format("runs, and has made {} safe point{}, the last one {}", is.steps, is.steps == 1 ? "" : "s",
                     Ago(is.last_step_ns));
}

std::string Text(const RankStatus& is) {
  const std::string place = is.at != 0                 ? fmt::format("in safe point {}", is.at)
                            : is.launches.version != 0 ? "between two launches"
                                                       : "in its program's own resume";
  if (is.parked) return "is parked " + place + ", with all its memory";
  switch (is.phase) {
    case Phase::kHeld:
      return is.launches.version != 0 ? "launches only what the others wait for"
                                      : fmt::format("waits {} until a step is agreed on", place);
    case Phase::kArrived:
      return fmt::format("waits {} for the others, came {}", place, Ago(is.at_ns));
    case Phase::kPausing:
      return "pauses";
    case Phase::kPaused:
      return fmt::format("is paused, waits {} for a resume{}", place,
                         is.failure.ok() ? "" : "; the last one failed: " + is.failure.message());
    case Phase::kResuming:
      return "resumes";
    case Phase::kFailed:
      return fmt::format("{}; its last pause failed: {}", Running(is), is.failure.message());
    case Phase::kRunning:
      break;
  }
  return is.own_pause == OwnPause::kPaused ? "is paused by its program" : Running(is);
}

std::string FromJournal(const std::filesystem::path& directory) {
  const auto reader = JournalReader::Open(directory);
  if (!reader.ok()) return "";
  const auto info = (*reader)->Info();
  if (!info.ok()) return "";
  std::vector<std::string> last;
  const SequenceNumber from{info->last.value - std::min<std::uint64_t>(info->last.value, kLastEvents - 1)};
  const auto read = (*reader)->Read(from, info->last, [&](const Event& event) {
    last.push_back(fmt::format("{}: {}", event.seq.value, ToText(event.body)));
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

// ---- connecting ------------------------------------------------------------------------------------------------------------

ToolSockets::ToolSockets(const std::filesystem::path& place) {
  std::error_code missing;
  if (std::filesystem::exists(place, missing))
    if (auto opened = OpenSocketDirectory(place)) directory = *std::move(opened);
  context = {directory.get(), &elsewhere, -1, ::geteuid()};
  while (self.session == SessionId())
    if (getrandom(&self.session.value, sizeof self.session.value, 0) < 0) self.session.value = MonotonicNs();
  self.pid = ::getpid();
}

RankLink::RankLink(const RankPlace& place, pid_t pid, std::unique_ptr<PeerConnection> connection)
    : connection_(std::move(connection)) {
  view_.process = {place.session, pid, StartTicks(pid), {}, place.directory};
  SetRank(place.rank);
}

void RankLink::SetRank(std::int32_t rank) {
  view_.rank = rank;
  view_.process.name = rank >= 0 ? fmt::format("rank {}", rank) : fmt::format("pid {}", view_.process.pid);
}

Result<std::optional<RankLink>> RankLink::Connect(const ToolSockets& sockets, const RankPlace& place) {
  const std::string where = place.directory.string();
  auto connection = PeerConnection::Begin(sockets.context, place.session, Purpose::kRequest, sockets.self, In(kForRoom));
  if (!connection) {
    if (connection.status().code() != Code::kPeerLost) return connection.status().Within(where);
    if (!WriterMayLive(place.directory / "tail")) return std::optional<RankLink>();
    return Status{Code::kRefused,
                  where +
                      ": its process takes no requests: its libamem_nccl.so is older than this program, or its sockets cannot "
                      "be reached from here (set AMEM_SOCKET_DIR as in the job; for a container, run this command inside it)"};
  }
  const auto process = CredentialsOf((*connection)->fd());
  if (!process || process->pid == 0)
    return Status{Code::kRefused,
                  where + ": its process is in another pid namespace (a container); run this command inside it"};
  return std::optional<RankLink>(RankLink(place, process->pid, *std::move(connection)));
}

// ---- talking ---------------------------------------------------------------------------------------------------------------

bool RankLink::Send(MessageBody body) {
  const std::uint64_t number = connection_->NextRequest();
  const auto sent = connection_->TrySend({number, std::move(body)});
  if (sent && *sent) sent_ = number;
  return !sent || *sent;  // what is lost is found by Take
}

void RankLink::Give(const Order& order) {
  if (!view_.alive) return;
  unsent_.reset();
  if (!Send(OrderMessage{order})) unsent_ = order;
}

bool RankLink::Ask() { return view_.alive && answered() && Send(AskStatusMessage{}); }

bool RankLink::SendNote(EventBody note) { return view_.alive && Send(NoteMessage{std::move(note)}); }

void RankLink::TakeMessage(const Message& message) {
  if (message.request != 0) answered_ = std::max(answered_, message.request);
  if (const auto* welcome = std::get_if<WelcomeMessage>(&message.body)) {
    if (view_.rank < 0) SetRank(welcome->self.rank);
  } else if (const auto* told = std::get_if<RankStatusMessage>(&message.body)) {
    view_.is = told->status;
    view_.heard = true;
  } else if (const auto* failure = std::get_if<FailureMessage>(&message.body)) {
    refused_ = failure->status;
  }
}

void RankLink::Take() {
  if (!view_.alive) return;
  if (unsent_ && Send(OrderMessage{*unsent_})) unsent_.reset();
  const bool died = CanBeRead(connection_->process_fd());  // what it said last counts
  for (;;) {
    const auto came = connection_->TryReceive();
    if (!came) view_.alive = false;
    if (!came || !*came) break;
    TakeMessage((*came)->message);
  }
  if (died) view_.alive = false;
  const ProcessIdentity process{view_.process.pid, view_.process.start_ticks};
  if (!view_.alive && !LifeOf(process, connection_->process_fd()).HasEnded()) view_.lost = "has lost contact with this program";
}

void Await(std::span<RankLink> links, Deadline until, const std::function<bool()>& done) {
  for (;;) {
    std::vector<pollfd> polled;
    for (RankLink& link : links) {
      link.Take();
      if (!link->alive) continue;
      polled.push_back({link.connection_->fd(), static_cast<short>(link.unsent_ ? POLLIN | POLLOUT : POLLIN), 0});
      polled.push_back({link.connection_->process_fd(), POLLIN, 0});
    }
    if (done() || Passed(until)) return;
    static_cast<void>(::poll(polled.data(), polled.size(), MillisecondsUntil(until)));
  }
}

void AskAll(std::span<RankLink> links) {
  std::vector<const RankLink*> asked;
  for (RankLink& link : links)
    if (link.Ask()) asked.push_back(&link);
  Await(links, In(kAnswerSoon),
        [&] { return std::ranges::all_of(asked, [](const RankLink* link) { return link->answered() || !(*link)->alive; }); });
}

Result<RankStatus> StatusOf(const ToolSockets& sockets, SessionId session) {
  AMEM_ASSIGN(auto link, RankLink::Connect(sockets, {.session = session}));
  if (!link) return Status{Code::kPeerLost, ToText(session) + " has ended"};
  RankLink& rank = *link;
  static_cast<void>(rank.Ask());
  Await({&rank, 1}, In(kForRoom), [&] { return rank->heard || !rank->alive; });
  if (rank->heard) return rank->is;
  return Status{rank->has_ended() ? Code::kPeerLost : Code::kTimeout, rank.name() + " " + rank->Doing()};
}

// ---- what is said of it ----------------------------------------------------------------------------------------------------

std::string RankView::Doing() const {
  if (!alive) return lost;
  return heard ? Text(is) : "does not answer";
}

std::string RankLink::DoingInDetail() const {
  if (!view_.alive) return view_.Doing();
  const auto text = [](const Sight& sight) { return sight.state + (sight.where.empty() ? "" : " " + sight.where); };
  const pid_t pid = view_.process.pid;
  const int process = connection_->process_fd();
  std::string doing = fmt::format("{}; its process is {}", view_.Doing(), text(SeeThread(pid, pid, process)));
  const std::span<const std::uint32_t> threads = view_.is.launches.threads;
  std::size_t told = 0;
  for (const std::uint32_t thread : threads) {
    const auto other = static_cast<pid_t>(thread);
    if (other == pid || told == kMostThreads) continue;
    const Sight sight = SeeThread(pid, other, process);
    if (sight.state == "unknown") continue;  // it has ended, or a container numbers it otherwise than this program sees it
    doing += fmt::format("; its thread {}, which calls NCCL, is {}", other, text(sight));
    ++told;
  }
  return doing + FromJournal(view_.process.directory);
}

}  // namespace amem::control
