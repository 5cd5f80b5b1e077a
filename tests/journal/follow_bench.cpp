// What `amem log -f` costs the process whose journal it follows: an append with it, and without.
//   journal_follow_bench [rounds] [directory] [tail | watch]
//
// A process and its twin write journals at the same pace, each at its end of the machine, and one tail follows: nobody, the
// process that is measured, or its twin. The processors have the same work in the last two, so their difference is what it
// costs to be the one who is followed; against nobody it is also what this machine makes of a busy neighbour, and nobody
// against nobody is what it makes of nothing. A round has each of these once, in an order that turns. A cost is processor time
// of the appending thread; wall time is beside it. tail must have printed every event. With `watch`, that command follows in
// place of tail.
//
// Such rounds are seconds apart, and machines drift by more than a hundredth in that time. So the same is measured in turns of
// some milliseconds, too: one tail follows, and is stopped and let go on by turns (stop, go, go, stop). What is left of the
// drift shows where it is stopped in all four.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "journal/journal.h"
#include "tests/journal/mix.h"

namespace {

using namespace amem;
namespace fs = std::filesystem;

// `burst` events, `chunk` at a time and a millisecond apart, as between NCCL's own work; then nothing for a while.
struct Pace {
  const char* name;
  std::size_t bursts, burst, chunk;
  std::chrono::milliseconds idle;
};
constexpr Pace kPaces[] = {
    {"bursts: 30 800 events in 0.3 s, then nothing for 0.1 s", 3, 30'800, 103, std::chrono::milliseconds(100)},
    {"flat out: 616 000 events without a pause", 1, 616'000, 616'000, std::chrono::milliseconds(0)},
};

struct Cost {  // of one append
  double processor_ns = 0, wall_ns = 0;
};

double Nanoseconds(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "journal_follow_bench: %s\n", why.c_str());
  std::exit(1);
}
void Require(const Status& status) {
  if (!status.ok()) Fail(status.message());
}

// The calling thread, and what it starts from here on. Without `processor`: anywhere but on the appending thread's.
constexpr int kAppender = 0;
void StayOn(std::optional<int> processor) {
  const int processors = static_cast<int>(std::thread::hardware_concurrency());
  if (processors < 2) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = 0; i < processors; ++i) {
    if (processor ? i == *processor : i != kAppender) CPU_SET(i, &set);
  }
  (void)sched_setaffinity(0, sizeof set, &set);
}

// Beside this program, wherever that was carried; else where it was built.
std::string Replay() {
  std::error_code failed;
  const fs::path beside = fs::read_symlink("/proc/self/exe", failed).replace_filename("amem-replay");
  return !failed && access(beside.c_str(), X_OK) == 0 ? beside.string() : AMEM_REPLAY;
}

void Tool(const fs::path& output, const std::vector<std::string>& arguments) {
  dup2(open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(argv.front(), argv.data());
  _exit(127);
}

const char* follows = "tail";  // the command that follows

bool PrintsEvents() { return std::string_view(follows) == "tail"; }

// It, in a process of its own; `Wait` is for its end, which comes with that of the session.
class Follower {
 public:
  Follower(const fs::path& session, const fs::path& output) : output_(output) {
    pid_ = fork();
    if (pid_ == 0) {
      StayOn({});
      if (PrintsEvents()) Tool(output, {Replay(), "log", "-f", session});
      Tool(output, {Replay(), follows, "--interval", "200", session});  // as often as tail looks
    }
    const auto attached = [&] {  // it has said whom it follows
      std::error_code failed;
      const auto bytes = fs::file_size(output, failed);
      return !failed && bytes != 0;
    };
    for (int i = 0; i < 2000 && !attached(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  void Stop() {
    if (stopped_) return;
    stopped_ = true;
    kill(pid_, SIGSTOP);
    int status = 0;
    waitpid(pid_, &status, WUNTRACED);
    if (!WIFSTOPPED(status)) Fail(Replay() + " " + follows + " ended");
  }
  void GoOn() {
    stopped_ = false;
    kill(pid_, SIGCONT);
  }
  // How many events it printed.
  std::size_t Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) Fail(Replay() + " " + follows + " failed");
    std::ifstream lines(output_);
    std::size_t events = 0;
    for (std::string line; std::getline(lines, line);) events += line.starts_with('#') ? 0 : 1;
    return events;
  }

 private:
  fs::path output_;
  pid_t pid_ = -1;
  bool stopped_ = false;
};

// `processor` is for the appending thread; nullopt: with everybody else.
std::unique_ptr<JournalWriter> OpenJournal(const fs::path& directory, std::optional<int> processor) {
  JournalOptions options;
  options.directory = directory;
  StayOn({});  // the journal's own thread
  auto writer = JournalWriter::Open(options, SessionId{static_cast<std::uint64_t>(Nanoseconds(CLOCK_MONOTONIC))});
  Require(writer.status());
  StayOn(processor);
  return *std::move(writer);
}

class Run {
 public:
  Run(const fs::path& directory, std::optional<int> processor, std::vector<Event>& events, const Pace& pace)
      : events_(events), pace_(pace), writer_(OpenJournal(directory, processor)) {
    const SessionOpened opened{.session = SessionId{5}, .host = "bench", .pid = getpid()};
    Require(writer_->Append({SequenceNumber{++seq_}, 1, 1, opened}));
  }
  Cost Write() {
    Cost cost;
    for (std::size_t i = 0; i < pace_.bursts; ++i) Burst(cost);
    Require(writer_->Close());
    const double appended = static_cast<double>(pace_.bursts * pace_.burst);
    return {cost.processor_ns / appended, cost.wall_ns / appended};
  }
  // `chunks` of the pace's, and what an append cost on the average.
  Cost Chunks(std::size_t chunks) {
    Cost cost;
    Append(cost, chunks * pace_.chunk);
    const double appended = static_cast<double>(chunks * pace_.chunk);
    return {cost.processor_ns / appended, cost.wall_ns / appended};
  }
  void Close() { Require(writer_->Close()); }
  [[nodiscard]] fs::path Directory() const { return writer_->Directory(); }
  [[nodiscard]] std::size_t Appended() const { return seq_; }

 private:
  void Burst(Cost& cost) {
    Append(cost, pace_.burst);
    std::this_thread::sleep_for(pace_.idle);
  }
  void Append(Cost& cost, std::size_t events) {
    auto next = std::chrono::steady_clock::now();
    for (std::size_t done = 0; done < events;) {
      const std::size_t until = std::min(done + pace_.chunk, events);
      const double wall = Nanoseconds(CLOCK_MONOTONIC), processor = Nanoseconds(CLOCK_THREAD_CPUTIME_ID);
      for (; done < until; ++done) {
        Event& event = events_[done % events_.size()];
        event.seq = SequenceNumber{++seq_};
        event.time_ns = seq_;
        Require(writer_->Append(event));
      }
      cost.processor_ns += Nanoseconds(CLOCK_THREAD_CPUTIME_ID) - processor;
      cost.wall_ns += Nanoseconds(CLOCK_MONOTONIC) - wall;
      next += std::chrono::milliseconds(1);
      if (done < events) std::this_thread::sleep_until(next);
    }
  }

  std::vector<Event>& events_;
  const Pace& pace_;
  std::unique_ptr<JournalWriter> writer_;
  std::uint64_t seq_ = 0;
};

// The same in a process of its own. It waits for Go once its journal is there.
class Twin {
 public:
  Twin(const fs::path& directory, std::vector<Event>& events, const Pace& pace) {
    int ready[2], go[2];
    if (pipe(ready) != 0 || pipe(go) != 0) Fail("no pipe");
    pid_ = fork();
    char byte = 0;
    if (pid_ == 0) {
      close(go[1]);
      Run run(directory, {}, events, pace);
      if (write(ready[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 1) _exit(1);
      (void)run.Write();
      _exit(0);
    }
    close(ready[1]), close(go[0]);
    if (read(ready[0], &byte, 1) != 1) Fail("the twin did not open its journal");
    close(ready[0]);
    go_ = go[1];
  }
  void Go() const {
    const char byte = 0;
    if (write(go_, &byte, 1) != 1) Fail("the twin is gone");
  }
  void Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    close(go_);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) Fail("the twin failed");
  }

 private:
  pid_t pid_ = -1;
  int go_ = -1;
};

enum class Followed { kNobody, kMeasured, kTwin };

Cost Once(const fs::path& directory, std::vector<Event>& events, const Pace& pace, Followed whom) {
  const fs::path output = directory / "output", of_twin = directory / "twin", own = directory / "own";
  Twin twin(of_twin, events, pace);
  Run run(own, kAppender, events, pace);
  std::optional<Follower> follower;
  if (whom != Followed::kNobody) follower.emplace(whom == Followed::kTwin ? of_twin : run.Directory(), output);
  twin.Go();
  const Cost cost = run.Write();
  twin.Wait();
  if (const std::size_t seen = follower ? follower->Wait() : run.Appended(); PrintsEvents() && seen != run.Appended()) {
    Fail("amem log -f printed " + std::to_string(seen) + " of " + std::to_string(run.Appended()) + " events");
  }
  std::error_code ignored;
  for (const fs::path& path : {output, of_twin, own}) fs::remove_all(path, ignored);
  return cost;
}

double At(std::vector<double> values, double quantile) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(std::lround(quantile * static_cast<double>(values.size() - 1)))];
}

constexpr Followed kKinds[] = {Followed::kNobody, Followed::kMeasured, Followed::kTwin, Followed::kNobody};
using Costs = std::vector<std::array<double, std::size(kKinds)>>;  // of each round, by kind

void Print(const char* what, const Costs& costs) {
  const auto of = [&](std::size_t kind) {
    std::vector<double> values;
    for (const auto& round : costs) values.push_back(round[kind]);
    return values;
  };
  const auto against = [&](const char* name, std::size_t kind, std::size_t base) {
    std::vector<double> percent;
    for (const auto& round : costs) percent.push_back((round[kind] / round[base] - 1) * 100);
    std::printf("    %-42s %+6.1f %%   quartiles %+6.1f %+6.1f\n", name, At(percent, 0.5), At(percent, 0.25),
                At(percent, 0.75));
  };
  std::printf("  %s: %.0f ns when followed, %.0f ns when its twin is, %.0f ns when nobody is\n", what, At(of(1), 0.5),
              At(of(2), 0.5), At(of(0), 0.5));
  against("followed, against its twin being followed", 1, 2);
  against("followed, against nobody", 1, 0);
  against("nobody, against nobody", 3, 0);
}

void Measure(const Pace& pace, std::size_t rounds, const fs::path& directory, std::vector<Event>& events) {
  Costs processor, wall;
  for (std::size_t round = 0; round <= rounds; ++round) {
    std::array<double, std::size(kKinds)> of_processor{}, of_wall{};
    for (std::size_t turn = 0; turn < std::size(kKinds); ++turn) {
      const std::size_t kind = (round + turn) % std::size(kKinds);
      const Cost cost = Once(directory, events, pace, kKinds[kind]);
      of_processor[kind] = cost.processor_ns, of_wall[kind] = cost.wall_ns;
    }
    if (round == 0) continue;  // files, caches and clocks get warm
    processor.push_back(of_processor), wall.push_back(of_wall);
  }
  std::printf("%s; an append costs, medians of %zu rounds:\n", pace.name, rounds);
  Print("processor time", processor);
  Print("wall time", wall);
  std::fflush(stdout);
}

// ---- in turns --------------------------------------------------------------------------------------------------------------

constexpr std::size_t kTurnChunks = 10;                      // a turn: 1 030 events in 10 ms
constexpr auto kBeforeTurn = std::chrono::milliseconds(15);  // tail catches up with what it missed
constexpr std::size_t kFoursPerRound = 40;

// The median of what following adds, in percent, and where it lies with a confidence of 95 %.
void PrintTurns(const char* name, std::vector<double> percent) {
  const auto n = static_cast<double>(percent.size());
  const double half = 0.98 * std::sqrt(n) / n;  // of the binomial's 95 %, in quantiles
  std::printf("    %-42s %+6.2f %%   95 %% sure: %+.2f to %+.2f\n", name, At(percent, 0.5),
              At(percent, std::max(0.0, 0.5 - half)), At(percent, std::min(1.0, 0.5 + half)));
}

void InTurns(bool followed, std::size_t fours, const fs::path& directory, std::vector<Event>& events) {
  const fs::path output = directory / "output", own = directory / "own";
  Run run(own, kAppender, events, kPaces[0]);
  Follower follower(run.Directory(), output);
  std::vector<double> processor, wall;
  for (std::size_t four = 0; four <= fours; ++four) {
    std::array<Cost, 4> turns;
    for (std::size_t turn = 0; turn < turns.size(); ++turn) {
      const bool goes = followed && (turn == 1 || turn == 2);
      goes ? follower.GoOn() : follower.Stop();
      std::this_thread::sleep_for(kBeforeTurn);
      turns[turn] = run.Chunks(kTurnChunks);
    }
    if (four == 0) continue;
    processor.push_back(
        100 * ((turns[1].processor_ns + turns[2].processor_ns) / (turns[0].processor_ns + turns[3].processor_ns) - 1));
    wall.push_back(100 * ((turns[1].wall_ns + turns[2].wall_ns) / (turns[0].wall_ns + turns[3].wall_ns) - 1));
  }
  follower.GoOn();
  run.Close();
  if (const std::size_t seen = follower.Wait(); PrintsEvents() && seen != run.Appended())
    Fail("amem log -f printed " + std::to_string(seen) + " of " + std::to_string(run.Appended()) + " events");
  std::printf("in turns of 1 030 events in 10 ms, %s %s; what following adds to an append, medians of %zu:\n", follows,
              followed ? "stopped, going on, going on, stopped" : "stopped all the time", fours);
  PrintTurns("processor time", processor);
  PrintTurns("wall time", wall);
  std::fflush(stdout);
  std::error_code ignored;
  for (const fs::path& path : {output, own}) fs::remove_all(path, ignored);
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 11;
  std::string pattern = (argc > 2 ? fs::path(argv[2]) : fs::temp_directory_path()) / "amem-follow-bench-XXXXXX";
  if (rounds == 0 || mkdtemp(pattern.data()) == nullptr) Fail("usage: journal_follow_bench [rounds] [directory]");
  if (argc > 3) follows = argv[3];
  std::vector<Event> events;
  for (const EventBody& body : test::Mix()) events.push_back({{}, 0, 4711, body});
  for (const bool followed : {true, false}) InTurns(followed, rounds * kFoursPerRound, pattern, events);
  for (const Pace& pace : kPaces) Measure(pace, rounds, pattern, events);
  std::error_code ignored;
  fs::remove_all(pattern, ignored);
  return 0;
}
