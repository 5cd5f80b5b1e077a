#include "tests/scenarios/failure_job.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "journal/journal.h"

namespace amem::failure {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Json = nlohmann::json;

constexpr milliseconds kDeadline{3000};           // AMEM_TIMEOUT_MS
constexpr milliseconds kHangs{1600};              // without a word: longer than a second, well before the deadline
constexpr milliseconds kPatience{20'000};         // for a job to get to where its failure is, on a machine that is busy
constexpr const char* kSettled = "barrier: 0\n";  // the last word of a rank before its part in the failure begins

bool Ended(pid_t process) {
  siginfo_t info{};
  return waitid(P_PID, static_cast<id_t>(process), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == process;
}
char StateOf(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  std::getline(file, text);
  const auto at = text.rfind(')');
  return at == std::string::npos || at + 2 >= text.size() ? '?' : text[at + 2];
}
bool Within(milliseconds patience, const std::function<bool()>& condition) {
  for (const auto until = Clock::now() + patience; Clock::now() < until; std::this_thread::sleep_for(milliseconds(10)))
    if (condition()) return true;
  return condition();
}

// The prologue, the failure, and at the end an idle rank.
Commands Script(const Failure& failure) {
  Commands all = {"cuda", "load", "init"};
  if (failure.hosts == 1) all.emplace_back("reduce");
  if (failure.first_cycle) all.insert(all.end(), {"pause", "resume"});
  all.emplace_back("barrier");
  all.insert(all.end(), failure.commands.begin(), failure.commands.end());
  all.emplace_back("linger");
  return all;
}

class Case {
 public:
  Case(const Failure& failure, Teardown teardown, std::uint64_t seed) : failure_(failure), teardown_(teardown), random_(seed) {
    Prepare(job_, failure.environment);
    job_.environment_of = failure.environment_of;
    if (teardown == Teardown::kExceptions) job_.environment["JOB_ON_FAILURE"] = "exit";
    for (const int rank : failure.full_disk) {
      job_.environment_of[rank]["LD_PRELOAD"] = std::string(AMEM_FULL_DISK) + ":" + AMEM_LIBRARY_FILE;
      job_.environment_of[rank]["STAND_IN_FULL_DISK"] = job_.directory() / ("full" + std::to_string(rank));
    }
    if (failure.hosts > 1) SpreadOverHosts();
  }

  Result Run(bool every_rank) {
    result_.name = failure_.name + ", ended by " + ToText(teardown_);
    StartNeighbour();
    job_.Start(failure_.ranks, Script(failure_));
    processes_ = job_.processes();
    if (!Within(kPatience, [&] { return Settled(); })) {
      Break("the job did not get to where the failure is");
      return Finish();
    }
    if (!PrologueWentWell()) {
      Break("a pause or resume before the failure did not go well");
      return Finish();
    }
    if (failure_.silent) LookWhileItHangs();
    WaitForTheDeadline();
    CheckFate();
    if (teardown_ != Teardown::kExceptions) {
      Judge("deadline", failure_.hosts == 1 ? Directories() : Copies("later"), failure_.expected);
    }
    if (failure_.lives) return Finish();
    TearDown();
    NeighbourAfterwards();
    Judge(std::string("after ") + ToText(teardown_), Directories(), failure_.expected);
    LookAtEachAlone(every_rank);
    return Finish();
  }

 private:
  using Directories_ = std::vector<fs::path>;

  static void Prepare(job::Job& job, const job::Environment& more) {
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job.environment["AMEM_TIMEOUT_MS"] = std::to_string(kDeadline.count());
    job.environment["JOB_RESUMES_IN_TIME"] = "1";
    job.environment["AMEM_SIM_DEVICES"] = "16";
    // Of its own: whoever starts sweeps the sockets of the dead, and an end whose socket is gone counts as one in order.
    job.environment["AMEM_SOCKET_DIR"] = job.directory() / "sockets";
    job.environment["AMEM_LAYOUT"] = "slab,16M";  // little memory, because many jobs run at once
    job.environment["STAND_IN_BUFFERS"] = "3";
    for (const auto& [name, value] : more) job.environment[name] = value;
  }
  [[nodiscard]] fs::path HostDirectory(int host) const { return job_.directory() / ("host" + std::to_string(host)); }
  void SpreadOverHosts() {
    const int each = failure_.ranks / failure_.hosts;
    job_.environment["STAND_IN_RANKS_PER_HOST"] = std::to_string(each);
    for (int host = 0; host < failure_.hosts; ++host) {
      fs::create_directory(HostDirectory(host));
      const fs::path boot_id = HostDirectory(host) / "boot_id";
      std::ofstream(boot_id) << "0000000" << host << "-0000-4000-8000-000000000000\n";
      const auto at = static_cast<std::size_t>(host);
      const int ahead = at < failure_.clock_s.size() ? failure_.clock_s[at] : 0;
      for (int rank = host * each; rank < (host + 1) * each; ++rank) {
        job::Environment& own = job_.environment_of[rank];
        own["LD_PRELOAD"] = std::string(AMEM_OTHER_HOST) + ":" + AMEM_LIBRARY_FILE;
        own["STAND_IN_HOST"] = "node" + std::to_string(host);
        own["STAND_IN_BOOT_ID"] = boot_id;
        own["STAND_IN_CLOCK_S"] = std::to_string(ahead);
        own["AMEM_JOURNAL_DIR"] = HostDirectory(host) / "journal";
        own["AMEM_SOCKET_DIR"] = HostDirectory(host) / "sockets";
      }
    }
  }
  [[nodiscard]] Directories_ Directories() const {
    if (failure_.hosts == 1) return {job_.journals()};
    Directories_ all;
    for (int host = 0; host < failure_.hosts; ++host) all.push_back(HostDirectory(host) / "journal");
    return all;
  }

  // ---- the job and its neighbour ----

  void StartNeighbour() {
    const Neighbour& other = failure_.neighbour;
    if (other.when == Neighbour::When::kNone || other.when == Neighbour::When::kEndedAfter) return;
    RunNeighbour();
  }
  void RunNeighbour() {
    neighbour_ = std::make_unique<job::Job>();
    Prepare(*neighbour_, {});
    neighbour_->environment["AMEM_JOURNAL_DIR"] = job_.journals();
    Commands commands = {"cuda", "load", "init", "reduce", "barrier"};
    commands.insert(commands.end(), failure_.neighbour.commands.begin(), failure_.neighbour.commands.end());
    if (failure_.neighbour.when == Neighbour::When::kLivesOn) commands.emplace_back("linger");
    neighbour_->Start(failure_.neighbour.ranks, commands);
    if (failure_.neighbour.when == Neighbour::When::kLivesOn) {
      Within(kPatience, [&] { return neighbour_->SoFar(0).out.find(kSettled) != std::string::npos; });
      std::this_thread::sleep_for(milliseconds(300));
    } else {
      neighbour_->Finish(kPatience);
    }
  }
  void NeighbourAfterwards() {
    if (failure_.neighbour.when == Neighbour::When::kEndedAfter) RunNeighbour();
  }

  [[nodiscard]] bool Settled() const {
    for (int rank = 0; rank < failure_.ranks; ++rank) {
      if (job_.SoFar(rank).out.find(kSettled) == std::string::npos && !Ended(Process(rank))) return false;
    }
    return true;
  }
  [[nodiscard]] bool PrologueWentWell() const {
    for (int rank = 0; failure_.first_cycle && rank < failure_.ranks; ++rank) {
      const std::string out = job_.SoFar(rank).out, prologue = out.substr(0, out.find(kSettled));
      if (prologue.find("pause: 0\n") == std::string::npos || prologue.find("resume: 0\n") == std::string::npos) return false;
    }
    return true;
  }
  [[nodiscard]] pid_t Process(int rank) const { return job_.processes()[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] int culprit() const { return failure_.expected.ranks.empty() ? 0 : failure_.expected.ranks.front(); }

  // Whether a rank will do nothing more by itself: it has done all but the last of its commands, or cannot.
  [[nodiscard]] bool IsThrough(int rank) const {
    if (Ended(Process(rank)) || StateOf(Process(rank)) == 'T') return true;
    std::size_t commands = 0;
    const Commands script = Script(failure_);
    for (const std::string& command : script) {
      const auto colon = command.find(':');
      if (colon == std::string::npos) {
        ++commands;
        continue;
      }
      std::string who = command.substr(0, colon);
      const bool all_but = who.starts_with('!');
      if (all_but) who.erase(0, 1);
      commands += (("," + who + ",").find("," + std::to_string(rank) + ",") != std::string::npos) != all_but ? 1 : 0;
    }
    const std::string out = job_.SoFar(rank).out;
    // "linger" prints nothing before it ends.
    return static_cast<std::size_t>(std::count(out.begin(), out.end(), '\n')) + 1 >= commands;
  }
  // Until no rank has said anything for a while.
  void WaitForSilence() {
    std::size_t said = 0;
    const auto limit = Clock::now() + kPatience;
    for (auto since = Clock::now(); Clock::now() - since < kHangs && Clock::now() < limit;) {
      std::size_t now = 0;
      for (int rank = 0; rank < failure_.ranks; ++rank) now += job_.SoFar(rank).out.size();
      if (now != said) since = Clock::now();
      said = now;
      std::this_thread::sleep_for(milliseconds(20));
    }
  }
  Directories_ Copies(const std::string& name) {
    Directories_ copies;
    std::error_code ignored;
    for (const fs::path& directory : Directories()) {
      const fs::path to = job_.directory() / name / directory.parent_path().filename();
      fs::create_directories(to);
      static_cast<void>(JournalReader::Open(directory));  // as `amem ls` does: what a crash left in memory is on disk then
      fs::copy(directory, to, fs::copy_options::recursive, ignored);
      copies.push_back(to);
    }
    return copies;
  }
  void LookWhileItHangs() {
    WaitForSilence();
    if (Within(milliseconds(0), [&] { return AllAreThrough(); }) && failure_.fate != Fate::kStopped) {
      return;  // it was too slow to be seen in time, on a busy machine
    }
    const Directories_ copies = Copies("copy");
    const Expected& expected = failure_.in_hang.kinds.empty() ? failure_.expected : failure_.in_hang;
    // Journals of several hosts are looked at in copies always, as nobody has them in one place while the job runs.
    if (failure_.hosts == 1) Judge("hang", Directories(), expected);
    Expected of_copy = expected;
    if (failure_.fate == Fate::kStopped) {  // nobody has looked at the process yet, and whoever reads a copy cannot
      of_copy.remedy.insert(of_copy.remedy.end(), {"examine-process", "call-on-every-rank"});
    }
    Judge("copy", copies, of_copy);
  }
  [[nodiscard]] bool AllAreThrough() const {
    for (int rank = 0; rank < failure_.ranks; ++rank) {
      if (!IsThrough(rank)) return false;
    }
    return true;
  }
  void WaitForTheDeadline() {
    Within(kDeadline * 3, [&] {
      for (int rank = 0; rank < failure_.ranks; ++rank) {
        const bool stuck = rank == culprit() && failure_.fate == Fate::kBlocked;
        if (!stuck && !IsThrough(rank)) return false;
      }
      return true;
    });
    std::this_thread::sleep_for(milliseconds(250));  // a launcher looks now and then
  }

  void Break(const std::string& what) {
    result_.broken += what + "\n";
    for (int rank = 0; rank < failure_.ranks; ++rank) {
      const job::Rank so_far = job_.SoFar(rank);
      result_.broken += "rank " + std::to_string(rank) + ":\n" + so_far.out + so_far.err;
    }
  }
  void CheckFate() {
    if (failure_.expected.ranks.empty()) return;
    const pid_t process = Process(culprit());
    const std::string rank = "rank " + std::to_string(culprit());
    const bool through = IsThrough(culprit());
    switch (failure_.fate) {
      case Fate::kRuns:
        if (Ended(process) && teardown_ != Teardown::kExceptions) Break(rank + " was to go on running");
        return;
      case Fate::kStopped:
        for (const int stopped : failure_.expected.ranks) {
          if (StateOf(Process(stopped)) != 'T') Break("rank " + std::to_string(stopped) + " was not stopped");
        }
        return;
      case Fate::kBlocked:
        if (through) Break(rank + " was to hang");
        return;
      case Fate::kFails:
        if (!through || !SomeCycleFailed()) Break("no pause or resume of " + rank + " failed");
        return;
      case Fate::kEnded:
        CheckStatus(process, rank);
    }
  }
  // Of the rank at fault, behind the prologue.
  [[nodiscard]] bool SomeCycleFailed() const {
    std::istringstream lines(job_.SoFar(culprit()).out);
    bool settled = false, failed = false;
    for (std::string line; std::getline(lines, line);) {
      settled = settled || line + "\n" == kSettled;
      const bool cycle = line.starts_with("pause: ") || line.starts_with("pause idle: ") || line.starts_with("resume: ");
      failed = failed || (settled && cycle && !line.ends_with(": 0"));
    }
    return failed;
  }
  void CheckStatus(pid_t process, const std::string& rank) {
    siginfo_t info{};
    const int rc = waitid(P_PID, static_cast<id_t>(process), &info, WEXITED | WNOHANG | WNOWAIT);
    const int status = info.si_code == CLD_EXITED ? info.si_status : 256 + info.si_status;
    if (rc != 0 || info.si_pid != process) return Break(rank + " was to end");
    if (status != failure_.status) Break(rank + " ended with " + std::to_string(status));
  }

  void TearDown() {
    std::vector<int> order(static_cast<std::size_t>(failure_.ranks));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::shuffle(order.begin(), order.end(), random_);
    const int first = teardown_ == Teardown::kKill ? SIGKILL : teardown_ == Teardown::kInterrupt ? SIGINT : SIGTERM;
    for (const int rank : order) {
      if (!Ended(Process(rank))) kill(Process(rank), first);
      std::this_thread::sleep_for(milliseconds(3));
    }
    Within(milliseconds(600),
           [&] { return std::ranges::all_of(job_.processes(), [](pid_t process) { return Ended(process); }); });
    for (const int rank : order) {
      if (!Ended(Process(rank))) kill(Process(rank), SIGKILL);
    }
    job_.Finish(kPatience);
  }
  Result Finish() {
    if (!job_.processes().empty()) job_.Finish(milliseconds(0));
    neighbour_.reset();
    Keep();
    return std::move(result_);
  }
  // AMEM_FAILURE_KEEP=DIR: the job's directory goes there, with a list of its looks, so that a verdict can be worked on
  // without running the job again. It is moved: a journal that was copied is known as a copy.
  void Keep() const {
    const char* keep = std::getenv("AMEM_FAILURE_KEEP");
    if (keep == nullptr) return;
    const fs::path to = fs::path(keep) / job_.directory().filename();
    std::error_code error;
    fs::create_directories(keep, error);
    fs::rename(job_.directory(), to, error);
    if (!error) std::ofstream(to / "looks.json") << Json{{"name", result_.name}, {"looks", kept_}}.dump(1);
  }

  // ---- looking ----

  // The session of each rank of this job, by what the journals say of themselves.
  [[nodiscard]] std::map<int, fs::path> Sessions() const {
    std::map<int, fs::path> sessions;
    const std::set<pid_t> mine(processes_.begin(), processes_.end());
    for (const fs::path& directory : Directories()) {
      const auto found = ListSessions(directory);
      if (!found.ok()) continue;
      for (const fs::path& path : *found) {
        auto reader = JournalReader::Open(path);
        if (!reader.ok()) continue;
        (void)(*reader)->Read(SequenceNumber{1}, SequenceNumber{4}, [&](const Event& event) {
          const auto* opened = std::get_if<SessionOpened>(&event.body);
          if (opened != nullptr && (mine.empty() || mine.contains(opened->pid))) sessions[opened->rank] = path;
          return opened == nullptr;
        });
      }
    }
    return sessions;
  }
  void LookAtEachAlone(bool every_rank) {
    if (failure_.damage != Damage::kNone || failure_.expected.ranks.empty() || failure_.ranks < 2) return;
    const std::map<int, fs::path> sessions = Sessions();
    bool survivor_seen = false;
    for (const auto& [rank, path] : sessions) {
      const int each = failure_.ranks / failure_.hosts;
      if (rank / each != culprit() / each) continue;  // another host's ranks share nothing with it
      const bool at_fault = std::ranges::find(failure_.expected.ranks, rank) != failure_.expected.ranks.end();
      if (at_fault && rank != culprit() && !every_rank) continue;
      if (!at_fault && std::exchange(survivor_seen, true) && !every_rank) continue;
      const std::string name = "alone " + std::to_string(rank);
      if (at_fault && !failure_.culprit_knows) {
        // After exceptions, the others have indeed left before it.
        if (teardown_ != Teardown::kExceptions) JudgeModesty(name, {path});
      } else {
        Judge(name, {path}, ExpectedAlone(rank, at_fault));
      }
    }
  }

  // The rank at fault knows it as all do.
  [[nodiscard]] const Expected& ExpectedAlone(int rank, bool at_fault) const {
    const auto own = failure_.alone_of.find(rank);
    if (own != failure_.alone_of.end()) return own->second;
    const Expected& chain = failure_.alone_after_exceptions;
    if (!at_fault && teardown_ == Teardown::kExceptions && !chain.kinds.empty()) return chain;
    return at_fault || failure_.alone.kinds.empty() ? failure_.expected : failure_.alone;
  }

  struct Said {
    std::string kind, headline, remedy, action;
    std::set<int> ranks;
    std::string trouble;  // no verdict came
  };
  Said Ask(const Directories_& directories) {
    std::vector<std::string> command = {AMEM_REPLAY, "why", "--json"};
    for (const fs::path& directory : directories) command.push_back(directory);
    const job::Rank answer = job::RunProgram(command, {}, job_.directory());
    Said said;
    Json json = Json::parse(answer.out, nullptr, false);
    if (json.is_object() && json.contains("jobs")) json = json["jobs"];
    if (json.is_array() && !json.empty()) json = Json(json[0]);
    if (!json.is_object() || !json.contains("kind")) {
      said.trouble = "status " + std::to_string(answer.status) + ": " + answer.out.substr(0, 300) + answer.err.substr(0, 300);
      return said;
    }
    const auto text = [&](const char* key) {
      return json.contains(key) && json[key].is_string() ? json[key].get<std::string>() : std::string();
    };
    said.kind = text("kind");
    said.headline = text("headline");
    said.remedy = text("remedy");
    said.action = text("remedy_action");
    if (json.contains("ranks") && json["ranks"].is_array()) {
      for (const Json& rank : json["ranks"])
        if (rank.is_number_integer()) said.ranks.insert(rank.get<int>());
    } else if (json["rank"].is_number_integer()) {
      said.ranks.insert(json["rank"].get<int>());
    }
    return said;
  }
  static std::string Text(const Said& said) {
    if (!said.trouble.empty()) return said.trouble;
    std::string text = said.kind + ", ranks";
    for (const int rank : said.ranks) text += " " + std::to_string(rank);
    return text + ": " + said.headline + " TO DO [" + said.action + "]: " + said.remedy;
  }
  void RememberForKeeping(const std::string& name, const Directories_& directories, const Expected& expected) {
    Json look{{"name", name},
              {"kinds", expected.kinds},
              {"ranks", expected.ranks},
              {"whoever", expected.whoever},
              {"remedy", expected.remedy}};
    for (const fs::path& directory : directories)
      look["directories"].push_back(fs::relative(directory, job_.directory()).string());
    kept_.push_back(std::move(look));
  }
  void Add(std::string name, std::string wrong, const Said& said) {
    Look look{std::move(name), std::move(wrong), "", Text(said)};
    for (const Gap& gap : failure_.gaps)
      if (look.name.starts_with(gap.look)) look.gap = gap.reason;
    result_.looks.push_back(std::move(look));
  }

  void Judge(const std::string& name, Directories_ directories, const Expected& expected) {
    directories = WithDamage(std::move(directories));
    RememberForKeeping(name, directories, expected);
    const Said said = Ask(directories);
    std::string wrong = said.trouble.empty() ? "" : "no verdict";
    if (std::ranges::find(expected.kinds, said.kind) == expected.kinds.end()) wrong += "kind; ";
    const std::set<int> ranks(expected.ranks.begin(), expected.ranks.end());
    // Of several ranks at fault, one survivor may have met the first only.
    const bool some = name.starts_with("alone") && !said.ranks.empty() && std::ranges::includes(ranks, said.ranks);
    if (said.ranks != ranks && !some && !expected.whoever) wrong += "ranks; ";
    const bool remedied = expected.remedy.empty() || std::ranges::any_of(expected.remedy, [&](const std::string& word) {
                            return said.action == word || said.remedy.find(word) != std::string::npos;
                          });
    if (!remedied) wrong += "remedy; ";
    Add(name, wrong, said);
  }
  // What cannot be known must not be guessed: nobody may be accused in place of the rank at fault.
  void JudgeModesty(const std::string& name, const Directories_& directories) {
    RememberForKeeping(name, directories, {.kinds = {}, .ranks = failure_.expected.ranks});
    const Said said = Ask(directories);
    std::string wrong = said.trouble.empty() ? "" : "no verdict";
    for (const int rank : said.ranks) {
      if (said.ranks.contains(culprit())) break;
      if (std::ranges::find(failure_.expected.ranks, rank) == failure_.expected.ranks.end()) wrong = "accuses another rank";
    }
    Add(name, wrong, said);
  }

  // The directories with the culprit's journal left out or damaged; the originals stay as they are.
  Directories_ WithDamage(Directories_ directories) {
    if (failure_.damage == Damage::kNone) return directories;
    std::map<int, fs::path> sessions = Sessions();
    const auto culprits = sessions.find(culprit());
    if (culprits == sessions.end()) return directories;
    if (failure_.damage != Damage::kMissing) {
      const fs::path copy = job_.directory() / ("damaged" + std::to_string(result_.looks.size()));
      fs::create_directories(copy);
      const fs::path to = copy / culprits->second.filename();
      fs::copy(culprits->second, to, fs::copy_options::recursive);
      DamageFiles(to);
      culprits->second = to;
    } else {
      sessions.erase(culprits);
    }
    directories.clear();
    for (const auto& [rank, path] : sessions) directories.push_back(path);
    return directories;
  }
  void DamageFiles(const fs::path& session) const {
    for (const char* name : {"data.mdb", "tail"}) {
      const fs::path file = session / name;
      if (!fs::exists(file)) continue;
      if (failure_.damage == Damage::kCutShort) {
        fs::resize_file(file, std::min<std::uintmax_t>(fs::file_size(file), 100));
      } else {
        std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
        const std::string noise(std::min<std::uintmax_t>(fs::file_size(file), 64 << 10), '\x5a');
        stream.write(noise.data(), static_cast<std::streamsize>(noise.size()));
      }
    }
  }

  const Failure& failure_;
  const Teardown teardown_;
  std::mt19937_64 random_;
  job::Job job_;
  std::unique_ptr<job::Job> neighbour_;
  std::vector<pid_t> processes_;
  Result result_;
  Json kept_ = Json::array();  // see Keep
};

}  // namespace

const char* ToText(Teardown teardown) {
  switch (teardown) {
    case Teardown::kTerminate:
      return "SIGTERM";
    case Teardown::kKill:
      return "SIGKILL";
    case Teardown::kInterrupt:
      return "Ctrl-C";
    case Teardown::kExceptions:
      return "exceptions";
  }
  return "?";
}

Result LookAt(const Failure& failure, Teardown teardown, bool every_rank, std::uint64_t seed) {
  return Case(failure, teardown, seed).Run(every_rank);
}

}  // namespace amem::failure
