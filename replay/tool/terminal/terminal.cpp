#include "replay/tool/terminal/terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "replay/tool/command.h"
#include "statemachine/event.h"

namespace amem::tool {
namespace {

constexpr std::size_t kWidthElsewhere = 100, kWidthLeast = 40, kWidthMost = 120;

bool IsDumb() {
  const char* kind = Variable("TERM");
  return kind != nullptr && std::strcmp(kind, "dumb") == 0;
}

// The command of the pager; null: none is wanted.
const char* PagerCommand() {
  const char* command = std::getenv("PAGER");
  if (command != nullptr) return *command == '\0' || std::strcmp(command, "cat") == 0 ? nullptr : command;
  return "if command -v less >/dev/null 2>&1; then exec less; else exec cat; fi";
}

// Whether a line must not end between the two words: "32 256", "256 KiB", "3 min".
bool BelongTogether(std::string_view before, std::string_view after) {
  static constexpr std::string_view kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "ns", "us", "ms", "s", "min", "h", "%"};
  constexpr std::string_view kDigits = "0123456789";
  if (before.empty() || kDigits.find(before.back()) == kDigits.npos) return false;
  const std::size_t digits = std::min(after.find_first_not_of(kDigits), after.size());
  const std::string_view word = after.substr(0, after.find_first_of(",.;:)"));
  return digits == 3 || std::ranges::find(kUnits, word) != std::end(kUnits);
}

constexpr auto kQuiet = std::chrono::seconds(1);
constexpr auto kEvery = std::chrono::milliseconds(200);

struct ProgressLine {
  std::mutex mutex;
  std::uint64_t journals = 0;
  Bytes bytes = 0;
  std::atomic<std::uint64_t> done = 0;
  bool ended = false;
  std::jthread thread;
};

ProgressLine& TheLine() {
  static ProgressLine line;
  return line;
}

// Draws until it is told to stop.
void Draw(const std::stop_token& stop) {
  ProgressLine& is = TheLine();
  const auto began = std::chrono::steady_clock::now();
  std::condition_variable_any stopped;
  std::unique_lock lock(is.mutex);
  bool drawn = false;
  for (auto wait = std::chrono::milliseconds(kQuiet);
       !stopped.wait_for(lock, stop, wait, [&] { return stop.stop_requested(); }); wait = kEvery) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - began).count();
    const std::string done = is.done == 0 ? "" : fmt::format("{} of ", is.done.load());
    std::fputs(fmt::format("\r{}: {}{} journal{}, {}, {} s\x1b[K", program_name, done, is.journals, is.journals == 1 ? "" : "s",
                           FormatBytes(is.bytes >> 20 << 20), seconds)
                   .c_str(),
               stderr);
    std::fflush(stderr);
    drawn = true;
  }
  if (drawn) std::fputs("\r\x1b[K", stderr);
}

}  // namespace

void AddTerminalOptions(Arguments& arguments, TerminalOptions& options) {
  arguments.Flag("--no-pager", options.no_pager, "Straight to the terminal, without PAGER or less").common = true;
  arguments.Add("--color", "WHEN", options.color, "Whether to use colours; auto is the default")
      .OneOf({"auto", "always", "never"})
      .common = true;
}

winsize TerminalSize() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size : winsize{};
}

std::size_t TextWidth() {
  // Asked once: a pager takes the terminal's place as standard output.
  static const std::size_t columns = ::isatty(STDOUT_FILENO) == 0 ? 0 : TerminalSize().ws_col;
  return columns == 0 ? kWidthElsewhere : std::clamp(columns, kWidthLeast, kWidthMost);
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
  const bool suits = terminal && Variable("NO_COLOR") == nullptr && !IsDumb();
  out.set_color(options.color == "auto" ? suits : options.color == "always");
  (void)TextWidth();
  const char* command = PagerCommand();
  if (!terminal || !paged || options.no_pager || command == nullptr) return;
  ::setenv("LESS", "FRX", 0);
  std::signal(SIGPIPE, SIG_DFL);  // in the pager
  pipe_ = ::popen(command, "we");
  std::signal(SIGPIPE, SIG_IGN);
  if (pipe_ == nullptr) return;
  ::dup2(::fileno(pipe_), STDOUT_FILENO);
  std::signal(SIGINT, SIG_IGN);  // the pager's
}

Pager::~Pager() {
  if (pipe_ == nullptr) return;
  (void)out_.Finish();
  ::close(STDOUT_FILENO);
  ::pclose(pipe_);
}

// ---- progress --------------------------------------------------------------------------------------------------------------

void Progress::Begin(std::uint64_t journals, Bytes bytes) {
  ProgressLine& is = TheLine();
  const std::lock_guard lock(is.mutex);
  if (is.ended || ::isatty(STDERR_FILENO) == 0 || IsDumb()) return;
  is.journals = journals;
  is.bytes = bytes;
  is.done = 0;
  if (!is.thread.joinable()) is.thread = std::jthread(Draw);
}
void Progress::OneDone() { ++TheLine().done; }
void Progress::End() {
  ProgressLine& is = TheLine();
  std::jthread ends;  // asks it to stop, and joins it, once; several threads complain
  const std::lock_guard lock(is.mutex);
  is.ended = true;
  ends = std::move(is.thread);
}

}  // namespace amem::tool
