// watch: ranks and phases of a job that runs, redrawn as it goes on. Its processes are not touched: only their journals are
// read.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "journal/base/clock.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/report/activity.h"
#include "replay/tool/answer.h"
#include "replay/tool/command.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {
namespace {

struct WatchOptions {
  Targets targets;
  std::optional<std::uint32_t> interval_ms;
  bool once = false, json = false;
};

constexpr std::uint64_t kRescan_ns = 2'000'000'000;  // how often new sessions are searched for
constexpr int kReadsAfterTheEnd = 5;                 // the last events of a process may become visible a little after its end

// One session, read as it grows.
class WatchedSession {
 public:
  static Result<std::unique_ptr<WatchedSession>> Open(const std::filesystem::path& directory) {
    std::unique_ptr<WatchedSession> session(new WatchedSession);
    AMEM_ASSIGN(session->reader_, JournalReader::Open(directory));
    AMEM_ASSIGN(session->info_, session->reader_->Info());
    AMEM_ASSIGN(auto before, StateBefore(*session->reader_, session->info_));
    session->folding_.Begin(std::move(before));
    return session;
  }
  // Reads what is new. A failure ends what is known of the session.
  void ReadOn() {
    if (ended_ > kReadsAfterTheEnd || !failure_.ok()) return;
    Result<ReadReport> read = ReadReport{};
    if (!folded_.broken) {
      read = reader_->Read(SequenceNumber{folded_.state.last.value + 1}, kToTheEnd,
                           [this](const Event& event) { return folding_.Take(event) && !folded_.broken; });
    }
    const auto info = read ? reader_->Info() : Result<JournalInfo>(read.status());
    failure_ = info.status();
    if (info) info_ = *info;
    ended_ = Lives() ? 0 : ended_ + 1;
  }
  [[nodiscard]] SessionActivity Now() const {
    SessionActivity now = ActivityOf(folded_, story_, info_.status);
    now.who = Completed(std::move(now.who), info_, 0);
    if (!failure_.ok()) now.trouble = failure_.message();
    return now;
  }
  [[nodiscard]] bool Over() const { return ended_ > kReadsAfterTheEnd || !failure_.ok(); }
  [[nodiscard]] bool Lives() const { return LivesNow(info_); }  // that of a pack did only then

 private:
  WatchedSession() = default;

  std::unique_ptr<JournalReader> reader_;
  Folded folded_;
  SessionStory story_;
  StoryBuilder builder_{story_, kAttemptsKept, false};
  const std::array<FoldObserver*, 1> observers_ = {&builder_};
  Folding folding_{folded_, observers_};
  JournalInfo info_;
  int ended_ = 0;  // how often it was read since it has ended
  Status failure_;
};

// The sessions of a place or those that were named: who lives, and who is known by the living and has ended.
class WatchedJob {
 public:
  WatchedJob(std::filesystem::path place, std::vector<std::filesystem::path> named)
      : place_(std::move(place)), named_(std::move(named)) {}

  // Finds sessions that are new. `all`: the dead, too.
  void Find(bool all) {
    const auto sessions = named_.empty() ? ListSessions(place_) : Result(named_);
    failure_ = sessions.status();
    if (!sessions) return;
    for (const auto& directory : *sessions) {
      if (watched_.contains(directory) || (dead_.contains(directory) && !all)) continue;
      Watch(directory, all || Known(directory));
    }
    if (!all) FindKnown();
  }

  void ReadOn() {
    for (auto& [directory, session] : watched_) session->ReadOn();
  }
  [[nodiscard]] bool Over() const {
    return std::ranges::all_of(watched_, [](const auto& entry) { return entry.second->Over(); });
  }
  [[nodiscard]] bool Empty() const { return watched_.empty(); }
  [[nodiscard]] const Status& Failure() const { return failure_; }  // why none was found
  [[nodiscard]] JobPicture Picture() const {
    std::vector<SessionActivity> activities;
    for (const auto& [directory, session] : watched_) activities.push_back(session->Now());
    return {std::move(activities), ThisHost::Now()};
  }

 private:
  [[nodiscard]] bool Known(const std::filesystem::path& directory) const { return known_.contains(directory.filename()); }
  void Watch(const std::filesystem::path& directory, bool dead_too) {
    auto session = WatchedSession::Open(directory);
    if (!session) {
      if (!session.status().message().empty()) failure_ = session.status();
    } else if (!dead_too && !(*session)->Lives()) {
      dead_.insert(directory);
    } else {
      (*session)->ReadOn();
      watched_.emplace(directory, *std::move(session));
    }
  }
  // A rank that died takes part in the picture when the others have been connected with it.
  void FindKnown() {
    for (const auto& [directory, session] : watched_) {
      const SessionActivity now = session->Now();
      for (const auto& peers : {now.peers, now.lost_peers})
        for (const SessionId peer : peers) known_.insert(SessionText(peer));
    }
    for (const auto& directory : dead_)
      if (Known(directory) && !watched_.contains(directory)) Watch(directory, true);
  }

  const std::filesystem::path place_;
  const std::vector<std::filesystem::path> named_;  // empty: all of the place
  std::map<std::filesystem::path, std::unique_ptr<WatchedSession>> watched_;
  std::set<std::filesystem::path> dead_;  // had ended before
  std::set<std::string> known_;           // sessions that a watched one has met
  Status failure_;
};

// ---- what is printed -------------------------------------------------------------------------------------------------------

std::string TitleLine(const JobPicture& picture) {
  return fmt::format("{}, {}", WallText(RealtimeNs()), Plural(picture.sessions.size(), "session"));
}

// Redraws in place: home, each line up to its end, then clear what is left below.
void Redraw(const JobPicture& picture, Output& out) {
  const winsize terminal = TerminalSize();
  const PictureSize size{terminal.ws_col, terminal.ws_row > 3 ? terminal.ws_row - 2U : terminal.ws_row};
  (out.Verbatim("\x1b[H") << TitleLine(picture)).Verbatim("\x1b[K\n");
  for (const std::string& line : PictureLines(picture, size)) (out << line).Verbatim("\x1b[K\n");
  out.Verbatim("\x1b[J");
}

// A line for each session whose activity has changed in more than its count of steps.
void PrintChanges(const JobPicture& picture, std::map<SessionId, std::string>& last, Output& out) {
  for (std::size_t i = 0; i < picture.sessions.size(); ++i) {
    std::string& before = last[picture.sessions[i].who.session];
    std::string now = ActivitySentence(picture, i, false);
    if (now == before) continue;
    out << WallText(RealtimeNs()) << " " << ActivitySentence(picture, i, true) << "\n";
    before = std::move(now);
  }
}

void WatchOnce(const WatchedJob& job, bool json, Output& out) {
  const JobPicture picture = job.Picture();
  if (json) return PrintJson(out, PictureJson(picture, RealtimeNs()), "watch", -1);
  out << TitleLine(picture) << "\n";
  for (const std::string& line : PictureLines(picture, {TerminalSize().ws_col, 0})) out << line << "\n";
}

void WatchOn(WatchedJob& job, const WatchOptions& options, Output& out) {
  const bool terminal = !options.json && isatty(STDOUT_FILENO) == 1;
  const std::chrono::milliseconds pause(options.interval_ms.value_or(options.json ? 1000 : 500));
  std::map<SessionId, std::string> last;  // what was printed of each
  if (terminal) out.Verbatim("\x1b[2J");
  std::uint64_t scanned_ns = MonotonicNs();
  while (true) {
    job.ReadOn();
    if (MonotonicNs() - scanned_ns >= kRescan_ns) {
      job.Find(false);
      scanned_ns = MonotonicNs();
    }
    const JobPicture picture = job.Picture();
    options.json ? PrintJson(out, PictureJson(picture, RealtimeNs()), "watch", -1)
    : terminal   ? Redraw(picture, out)
                 : PrintChanges(picture, last, out);
    const Status written = out.Finish();
    if (!written || out.ReaderGone() || job.Over()) return;
    std::this_thread::sleep_for(pause);
  }
}

// Where a target lies that is a directory of this machine, or the default; nothing: it is named otherwise, or is a pack.
std::optional<std::filesystem::path> DirectoryOf(const Targets& targets) {
  if (targets.names.empty()) return DefaultJournalDirectory();
  std::error_code failed;
  const bool directory = targets.names.size() == 1 && std::filesystem::is_directory(targets.names.front(), failed);
  return directory ? std::optional<std::filesystem::path>(targets.names.front()) : std::nullopt;
}

int RunWatch(const WatchOptions& options, Output& out) {
  const auto directory = options.targets.ranks.empty() ? DirectoryOf(options.targets) : std::nullopt;
  std::vector<std::filesystem::path> named;
  if (!directory) named = FindSessions(options.targets);
  if (!directory && named.empty()) return kCannotRead;
  WatchedJob job(directory.value_or(""), std::move(named));
  job.Find(false);
  if (job.Empty() && options.once) job.Find(true);  // a picture of the dead is one, too
  if (!job.Empty()) return options.once ? WatchOnce(job, options.json, out) : WatchOn(job, options, out), kFine;
  if (!job.Failure().ok()) return Complain(job.Failure().message());
  return Complain(
      fmt::format("no session of {} is live: `amem why` explains the dead ones, and `amem watch --once` shows where they "
                  "ended",
                  directory ? directory->string() : fmt::format("{}", fmt::join(options.targets.names, ", "))));
}

void AddOptions(Arguments& arguments, WatchOptions& options) {
  arguments.Add("--interval", "MS", options.interval_ms, "Poll interval in milliseconds; default: 500, with --json 1000", 1);
  arguments.Flag("--once", options.once, "Print one picture and end; also of sessions that have ended");
  AddJson(arguments, options.json, "One JSON object per poll, one per line");
}

}  // namespace

Json WatchSchema() {
  return CompleteSchema(PictureForm(), "watch", "A line of what amem watch --json prints",
                        "Where each rank of a job is at a moment. Sizes are bytes.");
}

Command WatchCommand() {
  return WithOptions<WatchOptions>(
      {kLivingGroup, "watch", "Ranks and phases as a job goes on: who waits for whom",
       "  amem watch                                the sessions of this user on this host\n"
       "  amem watch 4711                           the job of that process\n"
       "  amem watch /tmp/amem-1000/journal         those of a directory\n"
       "  amem watch --once job.amem                one picture, also of the dead and of a pack\n"
       "  amem watch --json | jq '.sessions[] | select(.waits_for != [])'\n"
       "It ends when the job does. On a terminal the picture is redrawn in place; elsewhere each change is a line.\n",
       false},
      AddOptions, RunWatch);
}

}  // namespace amem::tool
