// tail: what live sessions do, as they do it. Their processes are not touched: only their journals are read.
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <memory>
#include <thread>

#include "replay/tool/command.h"
#include "replay/tool/printer.h"

namespace amem::tool {
namespace {

constexpr int kLooksBeforeForgotten = 5;  // at a journal that has ended

class Follower {
 public:
  static Result<std::unique_ptr<Follower>> Open(const std::filesystem::path& session) {
    auto reader = JournalReader::Open(session);
    if (!reader) return reader.status();
    auto info = (*reader)->Info();
    if (!info) return info.status();
    auto opening = OpeningOf(**reader, *info);
    if (!opening) return opening.status();
    return std::unique_ptr<Follower>(new Follower(*std::move(reader), *info, *std::move(opening)));
  }

  void Begin(Output& out, bool json, bool several, std::uint64_t last) {
    const std::string name = who_.rank < 0 ? "pid " + std::to_string(who_.pid) : "rank " + std::to_string(who_.rank);
    printer_ = std::make_unique<EventPrinter>(out, json, info_.session, who_.monotonic_ns, several ? name + " " : "");
    next_ = info_.last.value >= last ? info_.last.value - last + 1 : 1;
    if (!json) out << "# " << NameOf(who_) << ", " << ToText(info_.status) << ", " << Grouped(info_.events) << " events\n";
  }

  // Prints what is new. False: the session has ended, and all of it was printed.
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

// The sessions that a pid or a directory means: of a directory with several, the live ones.
std::vector<std::unique_ptr<Follower>> Find(const std::string& what, bool& failed) {
  std::int32_t pid = 0;
  const auto parsed = std::from_chars(what.data(), what.data() + what.size(), pid);
  const bool is_pid = parsed.ec == std::errc() && parsed.ptr == what.data() + what.size();
  const std::vector<std::filesystem::path> sessions =
      FindSessions({is_pid ? DefaultDirectory() : std::filesystem::path(what)}, failed);
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
    Complain(is_pid
                 ? "process " + what + " has no journal in " + DefaultDirectory().string() +
                       ": set AMEM_JOURNAL_DIR as for that process, or give the directory; `amem-replay ls` lists what is there"
                 : "no session under " + what + " is live: `amem-replay log` shows what the dead ones did");
    failed = true;
  }
  return followers;
}

}  // namespace

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
      // What a process appended last may become visible a little after its end.
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

}  // namespace amem::tool
