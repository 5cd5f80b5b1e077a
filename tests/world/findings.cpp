#include "tests/world/findings.h"

#include <dirent.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>

#if defined(AMEM_SANITIZED)
#include <sanitizer/common_interface_defs.h>
#endif

namespace amem::world {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kObeys = "/control";  // the end of such a thread's name

struct Line {
  std::int64_t at_us = 0;
  std::string thread, what;
};
template <std::size_t N>
struct Ring {
  std::array<Line, N> lines;
  std::size_t next = 0;
  void Add(const Line& line) { lines[next++ % N] = line; }
  [[nodiscard]] const Line& At(std::size_t i) const { return lines[(next + i) % N]; }  // the oldest first
};
struct Lines {
  std::mutex mutex;
  Ring<600> all;
  Ring<20> orders;  // of the thread that obeys them, which says less than the others
  std::string world;
  std::uint64_t seed = 0;
};
Lines& All() {
  static auto* lines = new Lines;  // threads that nobody joined may still write when the process ends
  return *lines;
}

struct Watched {  // a thread
  std::atomic<const char*> what = nullptr;
  std::atomic<std::int64_t> until = 0;  // 0: it is in no call
  std::atomic<bool> strict = false;
  std::atomic<std::int64_t> stops = 0;  // until then, of all ranks; negative: of this one, less one
  std::atomic<int> id = 0;
};
std::array<Watched, 256>& Threads() {
  static auto* threads = new std::array<Watched, 256>;
  return *threads;
}

std::int64_t NowUs() { return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count(); }

class Mine {
 public:
  Mine() {
    for (Watched& one : Threads()) {
      int free = 0;
      if (!one.id.compare_exchange_strong(free, static_cast<int>(::syscall(SYS_gettid)))) continue;
      watched_ = &one;
      return;
    }
    std::abort();  // more threads than a world has
  }
  ~Mine() {
    watched_->until = 0;
    watched_->id = 0;
  }
  Mine(const Mine&) = delete;
  Mine& operator=(const Mine&) = delete;
  Watched& operator*() const { return *watched_; }
  std::string name = "a thread";

 private:
  Watched* watched_ = nullptr;
};
Mine& Self() {
  thread_local Mine mine;
  return mine;
}

std::span<std::atomic<std::uint64_t>> shared_stops;
int own_rank = 0;

std::int64_t StopsOf(bool own) {
  std::int64_t us = 0;
  for (std::size_t rank = 0; rank < shared_stops.size(); ++rank)
    if (!own || static_cast<int>(rank) == own_rank) us += static_cast<std::int64_t>(shared_stops[rank].load());
  return us;
}
// By how much the watched call may be longer.
std::int64_t StopsDuring(const Watched& one) {
  const std::int64_t before = one.stops;
  return before < 0 ? StopsOf(true) - (-before - 1) : StopsOf(false) - before;
}

std::atomic<int> printed = 0;  // stacks

void PrintStack(int) {
#if defined(AMEM_SANITIZED)
  __sanitizer_print_stack_trace();
#else
  std::array<void*, 40> frames{};
  const int depth = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  // Of a program that is about to end, so whatever works will do. A copy that is run elsewhere may have another name and be
  // stripped, and the machine may lack addr2line: so the offsets are said as well, for the program that it is a copy of.
  std::string offsets;
  Dl_info own{};
  ::dladdr(reinterpret_cast<void*>(&PrintStack), &own);
  for (int i = 0; i < depth; ++i) {
    Dl_info info{};
    if (::dladdr(frames.at(i), &info) == 0 || info.dli_fbase != own.dli_fbase) continue;
    offsets += fmt::format(" {:#x}", static_cast<char*>(frames.at(i)) - static_cast<char*>(info.dli_fbase));
  }
  std::fprintf(stderr, "at%s\n", offsets.c_str());
  const std::string command = fmt::format("addr2line -Cfpse /proc/{}/exe{} >&2 </dev/null", ::getpid(), offsets);
  if (std::system(command.c_str()) != 0) ::backtrace_symbols_fd(frames.data(), depth, STDERR_FILENO);
#endif
  ++printed;
}

void PrintStackOf(int thread) {
  std::fprintf(stderr, "---- thread %d\n", thread);
  const int before = printed;
  ::syscall(SYS_tgkill, ::getpid(), thread, SIGUSR2);
  for (int tries = 300; tries > 0 && printed == before; --tries) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (printed == before) std::fprintf(stderr, "it does not answer its signal\n");
}

void PrintStacks(int first) {
  ::signal(SIGUSR2, PrintStack);
  if (first != 0) PrintStackOf(first);
  DIR* tasks = ::opendir("/proc/self/task");
  while (const dirent* task = tasks != nullptr ? ::readdir(tasks) : nullptr) {
    const int thread = std::atoi(task->d_name);
    if (thread > 0 && thread != first && thread != ::syscall(SYS_gettid)) PrintStackOf(thread);
  }
}

void PrintTrace() {
  Lines& all = All();
  const std::lock_guard lock(all.mutex);
  const std::int64_t now = NowUs();
  const auto print = [&](const Line& line) {
    if (!line.what.empty())
      std::fprintf(stderr, "  %8.1f ms  %-12s %s\n", static_cast<double>(line.at_us - now) / 1000, line.thread.c_str(),
                   line.what.c_str());
  };
  for (std::size_t i = 0; i < all.orders.lines.size(); ++i)
    if (all.orders.At(i).at_us < all.all.At(0).at_us) print(all.orders.At(i));
  for (std::size_t i = 0; i < all.all.lines.size(); ++i) print(all.all.At(i));
}

std::atomic<std::atomic<bool>*> shared_found = nullptr;

[[noreturn]] void Say(const std::string& what, bool stacks, int thread = 0) {
  static std::atomic<bool> once = false;
  if (once.exchange(true)) {  // somebody else is saying something
    while (true) ::pause();
  }
  if (std::atomic<bool>* const found = shared_found; found != nullptr) *found = true;
  std::fprintf(stderr, "last actions:\n");
  PrintTrace();
  const std::string found = fmt::format("FOUND, seed {} ({}), {}: {}\n", All().seed, All().world, Self().name, what);
  if (stacks)
    std::fputs(("stacks of what is " + found).c_str(), stderr);  // whoever waits for this process may end it meanwhile
  if (stacks) PrintStacks(thread);
  std::fputs(found.c_str(), stderr);
  ::_exit(kFoundExit);
}

void Watch() {
  NameThread("watchdog");
  while (true) {
    if (std::atomic<bool>* const found = shared_found; found != nullptr && *found)
      Say("another process has found something", false);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (Watched& one : Threads()) {
      const std::int64_t until = one.until.load();
      if (one.id == 0 || until == 0 || NowUs() < until + StopsDuring(one)) continue;
      Say(fmt::format("{} on thread {} has not returned within its deadline; it is {} ms late", one.what.load(), one.id.load(),
                      (NowUs() - until) / 1000),
          true, one.id);
    }
  }
}

}  // namespace

// Whoever killed the context knows more than those who notice.
void Found(const std::string& what) {
  if (what.find("killed the context") != what.npos) std::this_thread::sleep_for(std::chrono::seconds(1));
  Say(what, what.find("has not ended within") != what.npos);
}

bool WantsDescriptors(const Status& status) {
  return status.code() == Code::kNoDescriptors || status.message().find("open files") != std::string::npos;
}

void SetWorld(const Settings& settings, int rank) {
  Lines& all = All();
  const std::lock_guard lock(all.mutex);
  all.seed = settings.seed;
  all.world = Describe(settings) + (rank < 0 ? "" : fmt::format(", rank {}", rank));
  all.all = {};
  all.orders = {};
}

void Trace(const std::string& what) {
  Lines& all = All();
  const std::lock_guard lock(all.mutex);
  const Line line{NowUs(), Self().name, what};
  all.all.Add(line);
  if (line.thread.ends_with(kObeys)) all.orders.Add(line);
}

void NameThread(const std::string& name) { Self().name = name; }

void AllowFor(std::chrono::milliseconds hang) {
  for (Watched& one : Threads()) {
    if (!one.strict && one.until != 0) one.until += std::chrono::duration_cast<std::chrono::microseconds>(hang).count();
  }
}

Within::Within(const char* what, std::chrono::milliseconds limit, bool strict)
    : before_((*Self()).what.load()),
      before_until_((*Self()).until.load()),
      before_strict_((*Self()).strict),
      before_stops_((*Self()).stops) {
  (*Self()).stops = StopsOf(false);
  (*Self()).what = what;
  (*Self()).strict = strict;
  (*Self()).until = NowUs() + std::chrono::duration_cast<std::chrono::microseconds>(limit).count();
}
Within::~Within() {
  (*Self()).what = before_;
  (*Self()).strict = before_strict_;
  (*Self()).stops = before_stops_;
  (*Self()).until = before_until_;
}
void Within::EndsWithoutOthers() { (*Self()).stops = -StopsOf(true) - 1; }

void Share(std::atomic<bool>& found) { shared_found = &found; }
void ShareStops(std::span<std::atomic<std::uint64_t>> stopped_us, int rank) {
  shared_stops = stopped_us;
  own_rank = rank;
}

void StartWatchdog() {
  static std::once_flag once;
  std::call_once(once, [] { std::thread(Watch).detach(); });
}

}  // namespace amem::world
