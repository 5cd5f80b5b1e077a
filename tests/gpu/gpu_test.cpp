// amem-gpu-test: claims about a patched libnccl on real GPUs. Each test is a job of its own processes with a time limit of its
// own, and passes, FAILs or is SKIPPED (waived) with a reason. Exit code 0 only when nothing failed.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "tests/gpu/claims.h"

namespace amem::gpu {
namespace {

// Empty: the program ends with `code`; see ParseCommandLine.
std::optional<Options> Parse(int argc, char** argv, int& code) {
  Options options;
  std::string churn = "3x20";
  CLI::App app(
      "Claims about a patched libnccl on real GPUs: each test is a job of processes of its own, with a time limit of its own");
  app.footer(
      "Exit codes: 0 nothing failed, 1 something failed, 2 wrong usage or NCCL_NVLS_ENABLE is not 0, 77 everything was "
      "skipped");
  options.collectives = "all";
  AddCommonOptions(app, options);
  app.add_option("--stock", options.stock, "An unpatched libnccl, and")->type_name("PATH");
  app.add_option("--amem-lib", options.amem_lib, "libamem_nccl.so, for the test that preloads it; without them it is skipped")
      ->type_name("PATH");
  app.add_option("--cycles", options.cycles, "Of the reference workload")
      ->check(CLI::Range(1, 1'000'000))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--leak-cycles", options.leak_cycles, "Of the test of two hundred cycles")
      ->check(CLI::Range(2, 1'000'000))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--churn", churn, "N communicators created, used and destroyed R times over")
      ->type_name("NxR")
      ->capture_default_str();
  app.add_option("--only", options.only, "Tests whose names contain one of these")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("A,B,...");
  app.add_flag("--list", options.list, "Names of the tests");
  CLI::Option* golden =
      app.add_option("--golden", options.golden, "Only the golden jobs: small ones whose journals go to DIR/NAME, by")
          ->type_name("DIR");
  CLI::Option* pack = app.add_option("--pack", options.pack, "COMMAND JOURNALS DIR/NAME, at the moment that they are about")
                          ->type_name("COMMAND");
  golden->needs(pack);
  pack->needs(golden);
  app.add_option("--budget", options.budget_s, "Tests that would end later than so many seconds from now are skipped")
      ->type_name("S");
  app.add_option("--run", options.child_test, "What a rank is to run")->group("");
  const auto check = [&] {
    if (options.list) return;
    if (options.nccl.empty()) throw CLI::RequiredError("--nccl");
    const bool pair = sscanf(churn.c_str(), "%dx%d", &options.churn, &options.churn_rounds) == 2;
    if (!pair || options.churn < 1 || options.churn_rounds < 6)
      throw CLI::ValidationError("--churn", churn + " is not NxR with at least 1x6");
  };
  return ParseCommandLine(app, argc, argv, check, code) ? std::optional(options) : std::nullopt;
}

// ---- the tests ------------------------------------------------------------------------------------------------------------

// Free memory of each device, for the parent. A new process reads it, which holds nothing of the job before.
void ReadMemory(Rank& rank) {
  rank.details["free_bytes"] = Json::array();
  for (int device = 0; device < rank.options.gpus; ++device)
    rank.details["free_bytes"].push_back(Device::Open(device).Memory().free_bytes);
}

struct Test {
  const char* name;
  void (*body)(Rank&);
  double limit_s;
  bool single_process = false;
  bool preload = false;
  bool bind_now = false;
  int least_gpus = 1;
  std::map<std::string, std::string> environment = {};
  std::optional<KillPoint> kill = std::nullopt;
  bool golden = false;
  int outsiders = 0;          // processes beside the ranks
  double communicator_s = 0;  // more of limit_s for each communicator of --churn
};

Test Killing(const char* name, const KillPoint& point) { return {name, KilledRank, 90, false, false, false, 2, {}, point}; }

// Few and small buffers, for journals that are small enough to be kept for ever.
Test Golden(const char* name, void (*body)(Rank&)) {
  Test test{name, body, 60, false, false, false, 2, {}, std::nullopt, true};
  test.environment = {{"NCCL_MAX_NCHANNELS", "2"},     {"NCCL_MIN_NCHANNELS", "1"},  {"NCCL_MAX_P2P_NCHANNELS", "1"},
                      {"NCCL_MIN_P2P_NCHANNELS", "1"}, {"NCCL_BUFFSIZE", "1048576"}, {"AMEM_LAYOUT", "slab"}};
  return test;
}

std::vector<Test> GoldenTests() {
  std::vector<Test> tests{Golden("golden-healthy", GoldenHealthy), Golden("golden-out-of-memory", GoldenOutOfMemory),
                          Golden("golden-killed", GoldenKilled), Golden("golden-never-came", GoldenNeverCame)};
  tests[1].outsiders = 1;
  tests[3].environment["AMEM_TIMEOUT_MS"] = "3000";
  // Between its create and its map: the others all wait for its vote, and none has begun to take its memory.
  tests[2].kill = KillPoint{.call = "cuMemMap", .share = 0.3, .victim = kGoldenRank};
  return tests;
}

constexpr const char* kReadMemory = "free memory of the devices";

const std::vector<Test>& Tests() {
  static std::vector<Test> tests{
      {"pause_before_any_communicator_is_fine", BeforeAnyCommunicator, 60},
      {"pause_twice_and_resume_when_running_change_nothing", Idempotent, 60},
      {"reference_workload_is_bit_identical_over_all_cycles", ReferenceWorkload, 240},
      {"communicators_come_and_go_before_between_and_after_cycles", Communicators, 90},
      {"user_memory_keeps_address_and_contents", UserMemory, 60},
      {.name = "user_memory_that_is_to_be_released_keeps_address_and_contents",
       .body = UserMemory,
       .limit_s = 60,
       .environment = {{"AMEM_USER_MEMORY", "release"}}},
      {"user_memory_is_used_and_freed_while_paused", WhilePaused, 60},
      {.name = "user_memory_that_was_released_is_freed_while_paused",
       .body = WhilePaused,
       .limit_s = 60,
       .environment = {{"AMEM_USER_MEMORY", "release"}}},
      {"symmetric_windows_work_over_cycles", SymmetricWindows, 120},
      {.name = "nccl_suspends_by_itself_between_cycles",
       .body = OwnSuspend,
       .limit_s = 240,
       .environment = {{"AMEM_SUSPEND", "native"}}},
      {.name = "nccl_suspends_by_itself_between_cycles_in_the_direct_layout",
       .body = OwnSuspend,
       .limit_s = 240,
       .environment = {{"AMEM_SUSPEND", "native"}, {"AMEM_LAYOUT", "direct"}}},
      {"amem_suspends_in_place_of_nccl_between_cycles", OwnSuspend, 240},
      {"collective_while_paused_is_refused_and_works_after", RefusedWhilePaused, 60},
      {"work_in_flight_is_not_harmed", WorkInFlight, 90},
      {.name = "a_message_that_was_sent_and_not_yet_received_survives",
       .body = MessageOnItsWay,
       .limit_s = 60,
       .least_gpus = 2},
      {"any_thread_may_pause", OtherThread, 60},
      {"late_rank_is_waited_for", LateRank, 60},
      {"absent_rank_fails_the_pause_and_nothing_is_lost",
       AbsentRank,
       90,
       false,
       false,
       false,
       2,
       {{"AMEM_TIMEOUT_MS", "3000"}}},
      {.name = "a_device_that_waits_fails_the_pause_of_all_in_time",
       .body = DeviceThatWaits,
       .limit_s = 60,
       .least_gpus = 2,
       .environment = {{"AMEM_TIMEOUT_MS", "3000"}}},
      {"one_full_device_fails_the_resume_of_all_and_the_retry_succeeds", OutOfMemory, 90, false, false, false, 2},
      {"a_rank_that_resumes_late_is_waited_for_beyond_the_timeout",
       ResumesLate,
       90,
       false,
       false,
       false,
       2,
       {{"AMEM_TIMEOUT_MS", "3000"}}},
      Killing("a_rank_killed_in_mid_resume_fails_the_others_who_clean_up_before_it_created_anything",
              {.call = "cuMemCreate", .share = 0.1, .victim = -1}),
      Killing("a_rank_killed_in_mid_resume_fails_the_others_who_clean_up_before_its_first_import",
              {.call = "cuMemImportFromShareableHandle", .share = 0.5, .victim = 1, .once_more = true}),
      // After its last mapping is set up a rank still votes that all is there, and that it runs.
      Killing("a_rank_killed_in_mid_resume_fails_the_others_who_clean_up_before_its_last_mapping",
              {.call = "cuMemSetAccess", .last = true, .share = 0.9, .victim = 0}),
      Killing("a_rank_killed_in_mid_pause_fails_the_others_who_clean_up",
              {.in_pause = true, .call = "cuMemRelease", .last = true, .share = 0.15, .victim = -1, .once_more = true}),
      {"two_hundred_cycles_leak_nothing", ManyCycles, 180},
      {.name = "communicators_that_come_and_go_leave_nothing", .body = Churn, .limit_s = 60, .communicator_s = 1},
      {"one_process_drives_all_gpus", SingleProcess, 150, true},
      {"legacy_memory_NCCL_CUMEM_ENABLE_0", Legacy, 120, false, false, false, 1, {{"NCCL_CUMEM_ENABLE", "0"}}},
      {"libnccl_loaded_with_RTLD_NOW_as_ctypes_does", BoundNow, 60, false, false, true},
      {"libamem_preloaded_beside_a_stock_libnccl", Preloaded, 60, false, true},
  };
  static const bool complete = [] {
    for (Test& one : GoldenTests()) tests.push_back(std::move(one));
    return true;
  }();
  (void)complete;
  return tests;
}

int RunRank(const Options& options, int region_fd, int rank_number) {
  return RunChild(region_fd, rank_number, [&](Child& child) {
    if (options.child_test == kReadMemory) {
      Rank rank{options, child, {}, {}};
      ReadMemory(rank);
      return child.Result(rank.details.dump());
    }
    const auto& tests = Tests();
    const auto test = std::find_if(tests.begin(), tests.end(), [&](const Test& one) { return options.child_test == one.name; });
    if (test == tests.end()) throw Failure("no test named " + options.child_test);
    const Cuda& cuda = Cuda::Get();
    if (cuda.devices < options.gpus) throw Skip(Format("%d GPUs needed, the driver reports %d", options.gpus, cuda.devices));
    const Nccl& nccl = Nccl::Load(test->preload ? options.stock : options.nccl, test->bind_now);
    const auto amem = Amem::Find(nccl);
    if (!amem) throw Failure(nccl.path + " offers no ncclPause: is it the copy that amem-patch made?");
    Rank rank{options, child, nccl, *amem, test->kill ? &*test->kill : nullptr};
    test->body(rank);
    child.Result(rank.details.dump(-1, ' ', false, Json::error_handler_t::replace));
    child.Barrier("the end");
  });
}

bool Names(const Test& test, const std::string& part) { return std::string(test.name).find(part) != std::string::npos; }

// A part of --only that selects nothing: most likely a slip.
std::string UnknownTest(const Options& options) {
  for (const std::string& part : options.only) {
    if (std::none_of(Tests().begin(), Tests().end(), [&](const Test& test) { return Names(test, part); })) return part;
  }
  return "";
}

// ---- the parent ----------------------------------------------------------------------------------------------------------

struct Row {
  std::string name;
  Outcome outcome;
  std::string reason;
  Json details;
  double seconds;
};

// As a new process sees it; empty when it cannot be read.
std::vector<std::uint64_t> FreeMemory(const Options& options) {
  JobSpec spec;
  spec.name = kReadMemory;
  spec.time_limit_s = 30;
  spec.arguments = {"--run", kReadMemory, "--nccl", options.nccl, "--gpus", std::to_string(options.gpus)};
  spec.log_path = options.log;
  const JobResult job = RunJob(spec);
  const Json read = job.outcome == Outcome::kPass ? Json::parse(job.results[0], nullptr, false) : Json();
  return read.is_object() ? read.value("free_bytes", std::vector<std::uint64_t>()) : std::vector<std::uint64_t>();
}

// What the dead had comes back a moment after their end. Some MiB are the driver's own.
std::string MemoryNotBack(const Options& options, const std::vector<std::uint64_t>& before) {
  std::string text;
  const double until = Now() + 5;
  do {
    const auto now = FreeMemory(options);
    if (now.empty() || now.size() != before.size()) return "free memory of the devices cannot be read";
    text.clear();
    for (std::size_t i = 0; i < now.size(); ++i) {
      if (now[i] + (8U << 20) < before[i])
        text += Format("%sdevice %zu has %.1f MiB less than before the job", text.empty() ? "" : ", ", i,
                       MibBetween(before[i], now[i]));
    }
  } while (!text.empty() && Now() < until);
  return text;
}

// Beside this program.
std::string KillAtLibrary() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  const std::string self(path, length > 0 ? static_cast<std::size_t>(length) : 0);
  const std::string library = self.substr(0, self.rfind('/') + 1) + "amem_kill_at.so";
  return access(library.c_str(), R_OK) == 0 ? library : "";
}

Row RunTest(const Test& test, const Options& options, double budget_ends) {
  if (options.gpus < test.least_gpus) return {test.name, Outcome::kSkipped, Format("needs %d GPUs", test.least_gpus), {}, 0};
  if (test.preload && (options.stock.empty() || options.amem_lib.empty()))
    return {test.name, Outcome::kSkipped, "needs --stock and --amem-lib", {}, 0};
  if (test.kill && KillAtLibrary().empty())
    return {test.name, Outcome::kSkipped, "amem_kill_at.so is not beside this program", {}, 0};
  JobSpec spec;
  spec.name = test.name;
  spec.processes = test.single_process ? 1 : options.gpus + test.outsiders;
  spec.time_limit_s = test.limit_s + test.communicator_s * options.churn * options.churn_rounds;
  if (budget_ends > 0) {
    const double left = budget_ends - Now();
    if (left < 20) return {test.name, Outcome::kSkipped, "no time left (--budget)", {}, 0};
    spec.time_limit_s = std::min(spec.time_limit_s, left);
  }
  spec.arguments = {"--run",         test.name,
                    "--nccl",        options.nccl,
                    "--gpus",        std::to_string(options.gpus),
                    "--cycles",      std::to_string(options.cycles),
                    "--leak-cycles", std::to_string(options.leak_cycles),
                    "--churn",       Format("%dx%d", options.churn, options.churn_rounds)};
  std::string elements;
  for (const std::size_t size : options.elements) elements += (elements.empty() ? "" : ",") + std::to_string(size);
  spec.arguments.insert(spec.arguments.end(), {"--elements", elements, "--ops", options.collectives});
  if (!options.golden.empty())
    spec.arguments.insert(spec.arguments.end(), {"--golden", options.golden, "--pack", options.pack});
  if (!options.stock.empty()) spec.arguments.insert(spec.arguments.end(), {"--stock", options.stock});
  spec.environment = test.environment;
  // A directory for each test, so that its sessions can be checked against each other afterwards.
  if (const char* journal = getenv("AMEM_JOURNAL_DIR"); journal != nullptr && *journal != '\0')
    spec.environment["AMEM_JOURNAL_DIR"] = std::string(journal) + "/" + test.name;
  if (test.preload) spec.environment["LD_PRELOAD"] = options.amem_lib;
  spec.log_path = options.log;
  spec.verbose = options.verbose;
  std::vector<std::uint64_t> free_before;
  if (test.kill) {
    spec.environment["LD_PRELOAD"] = KillAtLibrary();
    spec.victim = test.kill->Victim(options.gpus);
    free_before = FreeMemory(options);
  }
  const JobResult job = RunJob(spec);
  Row row{test.name, job.outcome, job.reason, {}, job.seconds};
  if (row.outcome == Outcome::kPass && !job.results.empty())
    row.details = Json::parse(job.results[spec.victim == 0 ? 1 : 0], nullptr, false);
  if (test.kill && row.outcome == Outcome::kPass) {
    row.reason = MemoryNotBack(options, free_before);
    if (!row.reason.empty()) row.outcome = Outcome::kFail;
  }
  return row;
}

int Main(int argc, char** argv) {
  int region_fd = -1;
  int rank = 0;
  const bool child = IsChild(argc, argv, region_fd, rank);
  int code = kExitUsage;
  const std::optional<Options> parsed = Parse(argc, argv, code);
  if (!parsed) return code;
  Options options = *parsed;
  if (options.list) {
    for (const Test& test : Tests()) {
      if (!test.golden) printf("%s\n", test.name);
    }
    return kExitPass;
  }
  if (RefusedForNvls("amem-gpu-test")) return kExitUsage;
  if (child) return RunRank(options, region_fd, rank);
  if (const std::string unknown = UnknownTest(options); !unknown.empty()) {
    fprintf(stderr, "amem-gpu-test: --only %s: no test has that in its name (--list prints them)\n", unknown.c_str());
    return kExitUsage;
  }

  int devices = 0;
  try {
    devices = Cuda::Get().devices;
  } catch (const Skip& skip) {
    printf("SKIPPED: %s\n", skip.what());
    return kExitSkipped;
  }
  if (options.gpus == 0) options.gpus = devices;
  const double budget_ends = options.budget_s > 0 ? Now() + options.budget_s : 0;
  std::vector<Row> rows;
  for (const Test& test : Tests()) {
    if (test.golden == options.golden.empty()) continue;
    const auto wanted = [&](const std::string& part) { return Names(test, part); };
    if (!options.only.empty() && std::none_of(options.only.begin(), options.only.end(), wanted)) continue;
    printf("[ run  ] %s (%d GPUs)\n", test.name, options.gpus);
    fflush(stdout);
    rows.push_back(RunTest(test, options, budget_ends));
    const Row& row = rows.back();
    printf("[%-6s] %s (%.1f s)%s%s%s%s\n", OutcomeText(row.outcome), row.name.c_str(), row.seconds,
           row.reason.empty() ? "" : ": ", row.reason.c_str(), row.details.empty() ? "" : " ",
           row.details.empty() ? "" : row.details.dump().c_str());
    fflush(stdout);
  }
  int count[3] = {0, 0, 0};
  printf("\n%-60s %-8s %7s  %s\n", Format("tests on %d GPUs", options.gpus).c_str(), "result", "s", "reason");
  Json results = Json::array();
  for (const Row& row : rows) {
    ++count[static_cast<int>(row.outcome)];
    printf("%-60s %-8s %7.1f  %s\n", row.name.c_str(), OutcomeText(row.outcome), row.seconds, row.reason.c_str());
    results.push_back({{"name", row.name},
                       {"gpus", options.gpus},
                       {"outcome", OutcomeText(row.outcome)},
                       {"reason", row.reason},
                       {"details", row.details},
                       {"seconds", row.seconds}});
  }
  printf("%d passed, %d FAILED, %d skipped\n", count[0], count[1], count[2]);
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << Json{{"program", "amem-gpu-test"}, {"gpus", options.gpus}, {"tests", results}}.dump(1) << "\n";
    if (!file.flush()) {
      fprintf(stderr, "amem-gpu-test: cannot write %s\n", options.json.c_str());
      return kExitFail;
    }
  }
  if (count[1] > 0 || rows.empty()) return kExitFail;
  return count[0] > 0 ? kExitPass : kExitSkipped;
}

}  // namespace
}  // namespace amem::gpu

int main(int argc, char** argv) {
  try {
    return amem::gpu::Main(argc, argv);
  } catch (const std::exception& failure) {
    fprintf(stderr, "amem-gpu-test: %s\n", failure.what());
    return amem::gpu::kExitFail;
  }
}
