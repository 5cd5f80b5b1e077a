// tail: what live sessions do, as they do it. Their processes are not touched: only their journals are read.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <chrono>
#include <memory>
#include <thread>

#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/tool/command.h"
#include "replay/tool/printer.h"

namespace amem::tool {
namespace {

struct TailOptions {
  std::string what;  // a pid or a directory
  std::uint64_t last = 10;
  std::uint32_t interval_ms = 200;
  bool json = false;
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

  void Begin(Output& out, bool json, bool several, std::uint64_t last) {
    printer_ =
        std::make_unique<EventPrinter>(out, json, info_.session, who_.monotonic_ns, several ? ShortNameOf(who_) + " " : "");
    next_ = info_.last.value >= last ? info_.last.value - last + 1 : 1;
    if (!json) out << "# " << NameOf(who_) << ", " << ToText(info_.status) << ", " << Grouped(info_.events) << " events\n";
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
  const bool is_pid = parsed.ec == std::errc() && parsed.ptr == what.data() + what.size();
  const std::vector<std::filesystem::path> sessions =
      FindSessions({is_pid ? DefaultJournalDirectory() : std::filesystem::path(what)}, failed);
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
                    : fmt::format("no session under {} is live: `amem-replay log` shows what the dead ones did", what));
    failed = true;
  }
  return followers;
}

int RunTail(const TailOptions& options, Output& out) {
  bool failed = false;
  std::vector<std::unique_ptr<Follower>> followers = Find(options.what, failed);
  const bool several = followers.size() > 1;
  for (const auto& follower : followers) follower->Begin(out, options.json, several, options.last);
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

void AddOptions(CLI::App& app, TailOptions& options) {
  app.add_option("PID|DIR", options.what, "A process, the directory of a session, or one that holds several")->required();
  app.add_option("--last", options.last, "Begin with the last N events")->type_name("N");
  app.add_option("--interval", options.interval_ms, "Look every so many milliseconds")->type_name("MS");
  AddForce(app);
  AddJson(app, options.json, "One JSON object a line");
}

}  // namespace

Command TailCommand() {
  return {"tail", "What live sessions do, as they do it; ends when they do",
          "  amem-replay tail 4711                            the session of that process\n"
          "  amem-replay tail /tmp/amem-1000/journal          all that live\n"
          "  amem-replay tail DIR --json | grep step-failed\n",
          [](CLI::App& app) { return SetUp<TailOptions>(app, AddOptions, RunTail); }};
}

}  // namespace amem::tool
