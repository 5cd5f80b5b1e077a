// tail: what live sessions do, as they do it. Their processes are not touched: only their journals are read.
#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <memory>
#include <thread>

#include "replay/job/clock.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/tool/command.h"
#include "replay/tool/events/printer.h"

namespace amem::tool {
namespace {

struct TailOptions {
  std::string what;  // a pid or a directory
  std::uint64_t last = 10;
  std::uint32_t interval_ms = 200;
  bool json = false, wall = false;
};

constexpr int kLooksBeforeForgotten = 5;  // at a journal that has ended

class Follower {
 public:
  static Result<std::unique_ptr<Follower>> Open(const std::filesystem::path& session) {
    auto reader = JournalReader::Open(session);
    if (!reader) return reader.status();
    auto opening = ReadOpening(**reader);
    if (!opening) return opening.status();
    return std::unique_ptr<Follower>(new Follower(*std::move(reader), std::move(opening->info), std::move(opening->who)));
  }

  void Begin(Output& out, const TailOptions& options, bool several) {
    printer_ = std::make_unique<EventPrinter>(
        out, who_,
        PrinterOptions{.json = options.json,
                       .wall = options.wall,
                       .several = several,
                       .name = ShortNameOf(who_),
                       .origin_ns = who_.monotonic_ns,
                       .wall_offset_ns = WrappedDifference(static_cast<std::int64_t>(who_.realtime_ns),
                                                           static_cast<std::int64_t>(who_.monotonic_ns))});
    next_ = info_.last.value >= options.last ? info_.last.value - options.last + 1 : 1;
    if (!options.json)
      out << "# " << NameOf(who_) << ", " << ToText(info_.status) << ", " << Grouped(info_.events) << " events\n";
  }

  // Prints new events. False: the session has ended, and all of it was printed.
  Result<bool> Look() {
    const auto any = PrintNew();
    if (!any || *any) return any;
    const auto info = reader_->Info();
    if (!info) return info.status();
    return info->status == SessionStatus::kLive ? Result<bool>(true) : PrintNew();  // it may have ended between the two looks
  }
  [[nodiscard]] std::string Name() const { return NameOf(who_); }
  [[nodiscard]] const JournalInfo& info() const { return info_; }

 private:
  Follower(std::unique_ptr<JournalReader> reader, JournalInfo info, SessionOpened who)
      : reader_(std::move(reader)), info_(std::move(info)), who_(std::move(who)) {}

  Result<bool> PrintNew() {  // whether there was anything
    bool any = false;
    const auto read = reader_->Read(SequenceNumber{next_}, kToTheEnd, [&](const Event& event) {
      printer_->Print(event);
      next_ = event.seq.value + 1;
      any = true;
      return true;
    });
    if (!read) return read.status();
    return any;
  }

  std::unique_ptr<JournalReader> reader_;
  JournalInfo info_;
  SessionOpened who_;
  std::unique_ptr<EventPrinter> printer_;
  std::uint64_t next_ = 1;
};

// Finds the sessions that a pid or a directory stands for. Of a directory with several, those are the live ones.
std::vector<std::unique_ptr<Follower>> Find(const std::string& what, bool& failed) {
  std::int32_t pid = 0;
  const auto parsed = std::from_chars(what.data(), what.data() + what.size(), pid);
  const bool is_pid = !what.empty() && parsed.ec == std::errc() && parsed.ptr == what.data() + what.size();
  const std::vector<std::filesystem::path> sessions =
      FindSessions(is_pid || what.empty() ? Directories{} : Directories{what}, failed);
  std::vector<std::unique_ptr<Follower>> followers;
  for (const auto& session : sessions) {
    auto follower = Follower::Open(session);
    if (!follower) {
      if (!is_pid) Complain(follower.status().message());
      failed |= !is_pid;
      continue;
    }
    const JournalInfo& info = (*follower)->info();
    const bool wanted = is_pid ? info.pid == pid && (info.status == SessionStatus::kLive || followers.empty())
                               : sessions.size() == 1 || info.status == SessionStatus::kLive;
    if (wanted) followers.push_back(*std::move(follower));
  }
  if (followers.empty() && !failed) {
    Complain(is_pid ? fmt::format("process {} has no journal in {}: set AMEM_JOURNAL_DIR as for that process, or give the "
                                  "directory; `amem-replay ls` lists what is there",
                                  what, DefaultJournalDirectory().string())
                    : fmt::format("no session under {} is live: `amem-replay log` shows what the dead ones did",
                                  what.empty() ? DefaultJournalDirectory().string() : what));
    failed = true;
  }
  return followers;
}

int RunTail(const TailOptions& options, Output& out) {
  bool failed = false;
  std::vector<std::unique_ptr<Follower>> followers = Find(options.what, failed);
  const bool several = followers.size() > 1;
  for (const auto& follower : followers) follower->Begin(out, options, several);
  std::vector<int> ended(followers.size());
  const auto pause = std::chrono::milliseconds(options.interval_ms);
  while (!followers.empty()) {
    for (std::size_t i = 0; i < followers.size();) {
      const Result<bool> lives = followers[i]->Look();
      if (!lives) Complain(lives.status().message());
      failed |= !lives.ok();
      // The last events of a process may become visible a little after its end.
      ended[i] = lives.ok() && *lives ? 0 : ended[i] + 1;
      if (lives.ok() && ended[i] < kLooksBeforeForgotten) {
        ++i;
        continue;
      }
      if (!options.json) out << "# " << followers[i]->Name() << " has ended\n";
      followers.erase(followers.begin() + static_cast<std::ptrdiff_t>(i));
      ended.erase(ended.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (const Status written = out.Finish(); !written || out.ReaderGone()) break;
    if (!followers.empty()) std::this_thread::sleep_for(pause);
  }
  return failed ? kCannotRead : kFine;
}

void AddOptions(Arguments& arguments, TailOptions& options) {
  arguments
      .Add("PID|DIR", "PID|DIR", options.what,
           "A process, the directory of a session, or one that holds several; default: where sessions of this user are")
      .Offers(Completes::kFiles);
  arguments.Add("--last", "N", options.last, "Begin with the last N events; 10 by default");
  arguments.Flag("--wall", options.wall, "The date and time of each event in place of seconds since the opening");
  arguments.Add("--interval", "MS", options.interval_ms, "Look every so many milliseconds; 200 by default", std::uint32_t{1});
  AddForce(arguments);
  AddJson(arguments, options.json, "One JSON object a line");
}

}  // namespace

Command TailCommand() {
  return {"tail", "What live sessions do, as they do it; ends when they do",
          "  amem-replay tail 4711                            the session of that process\n"
          "  amem-replay tail /tmp/amem-1000/journal          all that live\n"
          "  amem-replay tail DIR --json | grep step-failed\n",
          [](Arguments& arguments) { return SetUp<TailOptions>(arguments, AddOptions, RunTail); }, false};
}

}  // namespace amem::tool
