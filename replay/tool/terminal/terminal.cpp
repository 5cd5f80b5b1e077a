#include "replay/tool/terminal/terminal.h"

#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "replay/tool/command.h"
#include "statemachine/event.h"

namespace amem::tool {
namespace {

constexpr std::size_t kWidthElsewhere = 100, kWidthLeast = 40, kWidthMost = 120;

const char* Set(const char* name) {  // null: unset or empty
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

bool WantsColor(const TerminalOptions& options, bool terminal) {
  if (options.color != "auto") return options.color == "always";
  const char* kind = Set("TERM");
  return terminal && Set("NO_COLOR") == nullptr && (kind == nullptr || std::strcmp(kind, "dumb") != 0);
}

// The command of the pager; null: none is wanted.
const char* PagerCommand() {
  const char* command = std::getenv("PAGER");
  if (command != nullptr) return *command == '\0' || std::strcmp(command, "cat") == 0 ? nullptr : command;
  return "if command -v less >/dev/null 2>&1; then exec less; else exec cat; fi";
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// Whether a line must not end between the two words: "32 256", "256 KiB", "3 min".
bool BelongTogether(std::string_view before, std::string_view after) {
  static constexpr std::string_view kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "ns", "us", "ms", "s", "min", "h", "%"};
  if (before.empty() || !IsDigit(before.back())) return false;
  const std::size_t digits = std::min(after.find_first_not_of("0123456789"), after.size());
  const std::string_view word = after.substr(0, after.find_first_of(",.;:)"));
  return digits == 3 || std::ranges::find(kUnits, word) != std::end(kUnits);
}

}  // namespace

void AddTerminalOptions(Arguments& arguments, TerminalOptions& options) {
  arguments.Flag("--no-pager", options.no_pager, "Straight to the terminal, without PAGER or less").common = true;
  arguments.Add("--color", "WHEN", options.color, "Whether to use colours; auto is the default")
      .OneOf({"auto", "always", "never"})
      .common = true;
}

std::size_t TextWidth() {
  // Asked once: a pager takes the terminal's place as standard output.
  static const std::size_t width = [] {
    winsize size{};
    if (::isatty(STDOUT_FILENO) == 0 || ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0)
      return kWidthElsewhere;
    return std::clamp<std::size_t>(size.ws_col, kWidthLeast, kWidthMost);
  }();
  return width;
}

std::vector<std::string> BrokenIntoLines(std::string_view text, std::size_t width) {
  std::vector<std::string> lines(1);
  while (!text.empty()) {
    // A unit of several words: what must stay together.
    std::size_t end = std::min(text.find(' '), text.size());
    while (end < text.size() && BelongTogether(text.substr(0, end), text.substr(end + 1)))
      end = std::min(text.find(' ', end + 1), text.size());
    const std::string_view words = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!lines.back().empty() && lines.back().size() + 1 + words.size() > width) lines.emplace_back();
    (lines.back() += lines.back().empty() ? "" : " ") += words;
  }
  return lines;
}

// ---- pager -----------------------------------------------------------------------------------------------------------------

Pager::Pager(const TerminalOptions& options, bool paged, Output& out) : out_(out) {
  const bool terminal = ::isatty(STDOUT_FILENO) != 0;
  out.set_color(WantsColor(options, terminal));
  (void)TextWidth();
  const char* command = PagerCommand();
  if (!terminal || !paged || options.no_pager || command == nullptr) return;
  int ends[2];
  if (::pipe(ends) != 0) return;
  std::fflush(nullptr);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(ends[0], STDIN_FILENO);
    ::close(ends[0]);
    ::close(ends[1]);
    ::setenv("LESS", "FRX", 0);
    std::signal(SIGPIPE, SIG_DFL);
    ::execl("/bin/sh", "sh", "-c", command, nullptr);
    ::_exit(127);
  }
  if (pid_ > 0) ::dup2(ends[1], STDOUT_FILENO);
  ::close(ends[0]);
  ::close(ends[1]);
  std::signal(SIGINT, SIG_IGN);  // the pager's
}

Pager::~Pager() {
  if (pid_ <= 0) return;
  (void)out_.Finish();
  ::close(STDOUT_FILENO);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

// ---- progress --------------------------------------------------------------------------------------------------------------

namespace {

constexpr auto kQuiet = std::chrono::seconds(1);
constexpr auto kEvery = std::chrono::milliseconds(200);

// Draws until it is told to stop.
class ProgressLine {
 public:
  void Begin(std::uint64_t journals, Bytes bytes) {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    journals_ = journals;
    bytes_ = bytes;
    done_ = 0;
    if (!thread_.joinable()) thread_ = std::jthread([this](const std::stop_token& stop) { Draw(stop); });
  }
  void OneDone() { ++done_; }
  void End() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    if (!thread_.joinable()) return;
    thread_.request_stop();
    thread_.join();
    thread_ = {};
  }

 private:
  void Draw(const std::stop_token& stop) {
    const auto began = std::chrono::steady_clock::now();
    std::condition_variable_any stopped;
    std::mutex own;
    std::unique_lock lock(own);
    bool drawn = false;
    for (auto wait = std::chrono::milliseconds(kQuiet);
         !stopped.wait_for(lock, stop, wait, [&] { return stop.stop_requested(); }); wait = kEvery) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - began).count();
      std::string line;
      {
        const std::lock_guard guard(mutex_);
        line = program_name + ": " + (done_ == 0 ? "" : std::to_string(done_) + " of ") + std::to_string(journals_) +
               (journals_ == 1 ? " journal, " : " journals, ") + FormatBytes(bytes_ >> 20 << 20) + ", " +
               std::to_string(seconds) + " s";
      }
      std::fprintf(stderr, "\r%s\x1b[K", line.c_str());
      std::fflush(stderr);
      drawn = true;
    }
    if (drawn) std::fprintf(stderr, "\r\x1b[K");
  }

  std::mutex mutex_;
  std::uint64_t journals_ = 0;
  Bytes bytes_ = 0;
  std::atomic<std::uint64_t> done_ = 0;
  bool ended_ = false;
  std::jthread thread_;
};

ProgressLine& TheLine() {
  static ProgressLine line;
  return line;
}
bool Shown() {
  static const bool shown = [] {
    const char* kind = Set("TERM");
    return ::isatty(STDERR_FILENO) != 0 && (kind == nullptr || std::strcmp(kind, "dumb") != 0);
  }();
  return shown;
}

}  // namespace

void Progress::Begin(std::uint64_t journals, Bytes bytes) {
  if (Shown()) TheLine().Begin(journals, bytes);
}
void Progress::OneDone() {
  if (Shown()) TheLine().OneDone();
}
void Progress::End() {
  if (Shown()) TheLine().End();
}

}  // namespace amem::tool
