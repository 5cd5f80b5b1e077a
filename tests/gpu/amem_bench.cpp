// amem-gpu-bench: the reference workload of NCCL, paused and resumed in one of several ways, with the memory and the time it
// takes. `--help` lists the modes. Results: a table for people on stdout, one JSON file for programs.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>

#include "tests/gpu/floor.h"
#include "tests/gpu/options.h"
#include "tests/gpu/workload.h"

namespace amem::gpu {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAbout = R"(The reference workload of NCCL, paused and resumed in one of these ways:
  amem      ncclPause / ncclResume of a libnccl patched by amem-patch, or of a preloaded libamem_nccl.so
  native    ncclCommSuspend / ncclCommResume on each communicator (NCCL 2.29.7 and later)
  recreate  all communicators destroyed, created again, first collectives run
  stock     start-up only: no pause, --cycles is ignored
  floor     raw driver calls for the same allocations; needs no NCCL)";
constexpr const char* kFooter =
    R"(votes_ms, of mode amem: what the votes of one pause and resume cost beside waiting for the slowest rank. For each phase, the time
from the last vote that any rank cast until the last rank knew the decision (on the host's monotonic clock); their sum.
Exit codes: 0 done, 1 failed, 2 wrong usage or NCCL_NVLS_ENABLE is not 0, 77 skipped (the last line says why))";

struct Options : CommonOptions {
  std::string mode, layout = "slab", label;
  int cycles = 6, worlds = 0;
  double time_limit_s = 180;
  bool single_process = false, probe = false;
  std::size_t steady = 0;  // bytes of the largest
  std::vector<Op> ops = kReferenceOps;
  FloorOptions floor;
};

// Empty: the program ends with `code`; see ParseCommandLine.
std::optional<Options> Parse(int argc, char** argv, int& code) {
  Options options;
  options.collectives = "reference";
  constexpr int kMany = 1'000'000'000;  // the library's own bound for such numbers has 309 digits, and its messages show it
  CLI::App app(kAbout);
  app.footer(kFooter);
  AddCommonOptions(app, options);
  app.add_option("--mode", options.mode, "As above")
      ->check(CLI::IsMember({"amem", "native", "recreate", "stock", "floor"}))
      ->type_name("MODE");
  app.add_option("--cycles", options.cycles, "The first is reported apart, the others by their median")
      ->check(CLI::Range(0, kMany))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--time-limit", options.time_limit_s, "Everything is ended then, and the exit code is 1")
      ->check(CLI::Range(1, kMany))
      ->type_name("S")
      ->capture_default_str();
  app.add_option("--layout", options.layout, "AMEM_LAYOUT for mode amem; a label for the others")
      ->check(CLI::IsMember({"direct", "slab"}))
      ->capture_default_str();
  app.add_option("--slab-mib", options.floor.slab_mib, "Mode floor: cut everything from slabs of M MiB, an even number")
      ->check(CLI::Range(0, kMany))
      ->type_name("M");
  const std::string how_many =
      "Mode floor: how many allocations of each rank, by default those of the reference workload on 4 GPUs";
  app.add_option("--private-2mib", options.floor.private_2mib, how_many)
      ->check(CLI::Range(0, kMany))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--shared-2mib", options.floor.shared_2mib, "Likewise, with one importer each")
      ->check(CLI::Range(0, kMany))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--shared-10mib", options.floor.shared_10mib, "Likewise")
      ->check(CLI::Range(0, kMany))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--scale", options.floor.scale, "Mode floor: a K-th of the allocations")
      ->check(CLI::Range(1, kMany))
      ->type_name("K");
  app.add_flag("--single-process", options.single_process, "One process drives all GPUs");
  app.add_option("--worlds", options.worlds, "N communicators of all ranks in place of the reference workload's six")
      ->check(CLI::Range(0, kMany))
      ->type_name("N");
  app.add_option("--steady", options.steady, "Time of single collectives from 8 B to so many, before the cycles and after them")
      ->type_name("BYTES");
  app.add_option("--label", options.label, "Put into the result")->type_name("TEXT");
  app.add_flag("--probe", options.probe, "Print the GPUs as JSON and stop");
  const auto check = [&] {
    if (options.probe) return;
    if (options.mode.empty()) throw CLI::RequiredError("--mode");
    if (options.mode != "floor" && options.nccl.empty()) throw CLI::RequiredError("--nccl");
    if (options.floor.slab_mib % 2 != 0) throw CLI::ValidationError("--slab-mib", "not an even number");
    if (options.single_process && (options.mode == "floor" || options.mode == "native"))
      throw CLI::ValidationError("--single-process", "is for the modes amem, recreate and stock");
  };
  if (!ParseCommandLine(app, argc, argv, check, code)) return std::nullopt;
  options.ops = *ParseOps(options.collectives);
  if (options.mode == "stock") options.cycles = 0;
  return options;
}

double Mib(std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }
double MibBetween(std::uint64_t more, std::uint64_t less) {
  return (static_cast<double>(more) - static_cast<double>(less)) / (1 << 20);
}

// ---- a rank --------------------------------------------------------------------------------------------------------------

// AMem's own account, as JSON. Long lists (one entry for each allocation) are cut to their length: the file is for reading.
Json Shorten(Json value) {
  if (value.is_array() && value.size() > 40) return Json{{"entries", value.size()}, {"left_out", true}};
  if (value.is_structured()) {
    for (auto& item : value) item = Shorten(item);
  }
  return value;
}

Json Stats(const Amem& amem) {
  const std::string text = amem.StatsJson();
  if (text.empty()) return nullptr;
  Json parsed = Json::parse(text, nullptr, false);
  return parsed.is_discarded() ? Json{{"not_json", text.substr(0, 2000)}} : Shorten(std::move(parsed));
}

std::vector<double> Freed(const std::vector<std::uint64_t>& after, const std::vector<std::uint64_t>& before) {
  std::vector<double> mib;
  for (std::size_t i = 0; i < after.size(); ++i) mib.push_back(MibBetween(after[i], before[i]));
  return mib;
}

void StartUp(Child& child, Workload& work, Json& result) {
  child.Barrier("before start-up");
  const double start = Now();
  work.CreateAll();
  const double created = Now();
  work.RunAll();
  const double end = Now();
  child.Barrier("after start-up");
  result = {{"create_ms", 1e3 * (created - start)},
            {"first_collectives_ms", 1e3 * (end - created)},
            {"total_ms", 1e3 * (end - start)}};
}

// [{op, bytes, us}], on the first communicator: 8 B, 64 B, 512 B and so on.
Json SteadyState(Workload& work, std::size_t most_bytes) {
  Json rows = Json::array();
  for (const Op op : {Op::kAllReduce, Op::kAllToAll}) {
    for (std::size_t bytes = 8; bytes <= most_bytes; bytes *= 8) {
      if (op == Op::kAllToAll && bytes / 4 < kMaxProcesses) continue;  // not to be divided
      rows.push_back({{"op", OpText(op)}, {"bytes", bytes}, {"us", work.SteadyState(work.communicators()[0], op, bytes / 4)}});
    }
  }
  return rows;
}

// One way to give the memory up and take it back; each is collective.
struct Way {
  std::function<void()> pause;
  std::function<void()> resume;
  std::function<void()> first_collectives;  // run once more after a resume, as part of the cost; null: none
};

Way MakeWay(const Options& options, Child& child, const Nccl& nccl, Workload& work, const std::optional<Amem>& amem) {
  if (options.mode == "amem") {
    return {[&] { amem->Check(amem->Pause(nullptr), nccl, "ncclPause"); },
            [&] { amem->Check(amem->Resume(nullptr), nccl, "ncclResume"); }, nullptr};
  }
  if (options.mode == "native") {
    const auto each = [&](const char* what, const std::function<ncclResult_t(ncclComm_t)>& call) {
      for (Communicator& communicator : work.communicators()) {
        if (communicator.handles[0] == nullptr) continue;
        child.Stage(std::string(what) + " of " + communicator.name);
        nccl.Check(call(communicator.handles[0]), std::string(what) + " of " + communicator.name);
      }
    };
    return {
        [=, &nccl] { each("ncclCommSuspend", [&](ncclComm_t comm) { return nccl.CommSuspend(comm, kNcclSuspendMemory); }); },
        [=, &nccl] { each("ncclCommResume", [&](ncclComm_t comm) { return nccl.CommResume(comm); }); }, nullptr};
  }
  return {[&] { work.DestroyAll(); }, [&] { work.CreateAll(); }, [&] { work.RunAll(); }};
}

void RunNcclRank(const Options& options, Child& child) {
  Cuda::Get();
  const Nccl& nccl = Nccl::Load(options.nccl);
  std::optional<Amem> amem;
  if (options.mode == "amem") {
    amem = Amem::Find(nccl);
    if (!amem) throw Failure(options.nccl + " offers no ncclPause: is it the copy that amem-patch made?");
  }
  if (options.mode == "native" && (nccl.CommSuspend == nullptr || nccl.CommResume == nullptr))
    throw Skip("NCCL " + nccl.VersionText() + " has no ncclCommSuspend (2.29.7 and later have)");

  WorkloadOptions work_options;
  work_options.gpus = options.gpus;
  work_options.single_process = options.single_process;
  work_options.sizes = options.elements;
  work_options.ops = options.ops;
  work_options.worlds = options.worlds;
  work_options.room = options.steady / 4;
  Workload work(child, nccl, work_options);
  child.Barrier("buffers filled");

  Json result;
  result["nccl_version"] = nccl.VersionText();
  const auto before = work.FreeBytes();
  child.Barrier("memory read before start-up");
  StartUp(child, work, result["startup"]);
  const auto running = work.FreeBytes();
  result["held_mib"] = Freed(before, running);
  child.Barrier("memory read after start-up");
  if (amem) result["amem_after_start"] = Stats(*amem);

  const auto reference = work.VerifyAll();
  result["checksums"] = reference.size();
  if (options.steady > 0) result["steady_before"] = SteadyState(work, options.steady);
  result["cycles"] = Json::array();
  const Way way = MakeWay(options, child, nccl, work, amem);
  for (int cycle = 1; cycle <= options.cycles; ++cycle) {
    Json row{{"cycle", cycle}};
    const auto free_running = work.FreeBytes();
    child.Stage(Format("cycle %d: pause", cycle));
    child.Barrier("before the pause");
    double start = Now();
    way.pause();
    row["pause_ms"] = 1e3 * (Now() - start);
    child.Barrier("paused");
    const auto free_paused = work.FreeBytes();
    if (amem) row["amem_paused"] = Stats(*amem);
    child.Stage(Format("cycle %d: resume", cycle));
    child.Barrier("before the resume");
    start = Now();
    way.resume();
    const double resumed = Now();
    if (way.first_collectives) way.first_collectives();
    const double end = Now();
    row["resume_ms"] = 1e3 * (resumed - start);
    row["first_collectives_ms"] = 1e3 * (end - resumed);
    row["resume_total_ms"] = 1e3 * (end - start);
    child.Barrier("resumed");
    if (amem) row["amem_resumed"] = Stats(*amem);
    const auto sums = work.VerifyAll();
    row["identical"] = sums == reference;
    row["freed_mib"] = Freed(free_paused, free_running);
    row["held_paused_mib"] = Freed(before, free_paused);
    child.Barrier("cycle checked");
    row["held_after_mib"] = Freed(before, work.FreeBytes());
    result["cycles"].push_back(row);
    if (sums != reference) throw Failure(Format("cycle %d: ", cycle) + Difference(sums, reference, work.names()));
  }
  if (options.steady > 0 && options.cycles > 0) result["steady_after"] = SteadyState(work, options.steady);
  work.DestroyAll();
  result["held_destroyed_mib"] = Freed(before, work.FreeBytes());
  child.Result(result.dump());
  child.Barrier("the end");
}

void RunFloorRank(const Options& options, Child& child) {
  if (options.gpus > Cuda::Get().devices)
    throw Skip(Format("%d GPUs needed, the driver reports %d", options.gpus, Cuda::Get().devices));
  const Device device = Device::Open(child.rank());
  child.Barrier("devices open");
  Json result;
  const auto before = device.Memory().free_bytes;
  Floor floor(child, device, options.floor);
  double start = Now();
  floor.Build();
  result["startup"] = {
      {"create_ms", 1e3 * (Now() - start)}, {"first_collectives_ms", 0.0}, {"total_ms", 1e3 * (Now() - start)}};
  result["allocations"] = floor.allocations();
  result["imports"] = floor.imports();
  result["own_mib"] = Mib(floor.own_bytes());
  result["held_mib"] = {MibBetween(before, device.Memory().free_bytes)};
  result["cycles"] = Json::array();
  for (int cycle = 1; cycle <= options.cycles; ++cycle) {
    const auto running = device.Memory().free_bytes;
    const FloorTimes down = floor.Pause();
    const auto paused = device.Memory().free_bytes;
    child.Barrier("memory read while paused");
    const FloorTimes up = floor.Resume();
    result["cycles"].push_back({{"cycle", cycle},
                                {"pause_ms", down.pause_ms},
                                {"drop_imports_ms", down.drop_imports_ms},
                                {"release_own_ms", down.release_own_ms},
                                {"resume_ms", up.resume_ms},
                                {"first_collectives_ms", 0.0},
                                {"resume_total_ms", up.resume_ms},
                                {"create_own_ms", up.create_own_ms},
                                {"share_ms", up.share_ms},
                                {"freed_mib", {MibBetween(paused, running)}},
                                {"held_paused_mib", {MibBetween(before, paused)}},
                                {"held_after_mib", {MibBetween(before, device.Memory().free_bytes)}}});
    child.Barrier("cycle done");
  }
  floor.TearDown();
  result["held_destroyed_mib"] = {MibBetween(before, device.Memory().free_bytes)};
  child.Result(result.dump());
  child.Barrier("the end");
}

// ---- the parent ----------------------------------------------------------------------------------------------------------

std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string DriverVersion() {
  // "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build …": the first word with two dots.
  std::stringstream words(FirstLine("/proc/driver/nvidia/version"));
  for (std::string word; words >> word;) {
    if (!word.empty() && isdigit(static_cast<unsigned char>(word[0])) != 0 && word.find('.') != std::string::npos) return word;
  }
  const std::string module = FirstLine("/sys/module/nvidia/version");
  return module.empty() ? "unknown" : module;
}

Json Probe() {
  const Cuda& cuda = Cuda::Get();
  char name[128] = "unknown";
  CUdevice device = 0;
  if (cuda.DeviceGetName != nullptr && cuda.DeviceGet(&device, 0) == CUDA_SUCCESS)
    cuda.DeviceGetName(name, sizeof name, device);
  int api = 0;
  if (cuda.DriverGetVersion != nullptr) cuda.DriverGetVersion(&api);
  return {{"gpus", cuda.devices},
          {"gpu", name},
          {"driver", DriverVersion()},
          {"cuda", Format("%d.%d", api / 1000, api % 1000 / 10)}};
}

// `pick` of a key over all ranks and lanes; 0 when there is none.
double Over(const std::vector<Json>& ranks, const std::function<Json(const Json&)>& get, bool largest) {
  std::optional<double> best;
  const auto take = [&](double value) { best = !best ? value : largest ? std::max(*best, value) : std::min(*best, value); };
  for (const Json& rank : ranks) {
    const Json value = get(rank);
    if (value.is_number()) take(value.get<double>());
    if (value.is_array()) {
      for (const Json& item : value) take(item.get<double>());
    }
  }
  return best.value_or(0);
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// The time at which the last rank did `what` in that phase; kFooter explains votes_ms.
double Latest(const std::vector<Json>& ranks, std::size_t cycle, const char* kind, std::size_t phase, const char* what) {
  double latest = 0;
  for (const Json& rank : ranks)
    latest =
        std::max(latest, rank.at("cycles").at(cycle).at("amem_resumed").at(kind).at("phases").at(phase).at(what).get<double>());
  return latest;
}

// Nothing where the ranks do not tell.
std::optional<double> VotesMs(const std::vector<Json>& ranks, std::size_t cycle) {
  try {
    double sum = 0;
    for (const char* kind : {"pause", "resume"}) {
      const std::size_t phases = ranks[0].at("cycles").at(cycle).at("amem_resumed").at(kind).at("phases").size();
      for (std::size_t phase = 0; phase < phases; ++phase)
        sum += Latest(ranks, cycle, kind, phase, "decided_at_ms") - Latest(ranks, cycle, kind, phase, "voted_at_ms");
    }
    return sum;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

constexpr const char* kLargest[] = {"pause_ms", "drop_imports_ms",      "release_own_ms",  "resume_ms",       "create_own_ms",
                                    "share_ms", "first_collectives_ms", "resume_total_ms", "held_paused_mib", "held_after_mib"};

Json Summarize(const std::vector<Json>& ranks) {
  Json run;
  for (const char* key : {"nccl_version", "checksums", "allocations", "imports", "own_mib", "amem_after_start"}) {
    if (ranks[0].contains(key)) run[key] = ranks[0][key];
  }
  for (const char* key : {"create_ms", "first_collectives_ms", "total_ms"})
    run["startup"][key] = Over(
        ranks, [&](const Json& rank) { return rank["startup"][key]; }, true);
  run["held_mib"] = Over(
      ranks, [](const Json& rank) { return rank["held_mib"]; }, true);
  run["held_destroyed_mib"] = Over(
      ranks, [](const Json& rank) { return rank["held_destroyed_mib"]; }, true);
  for (const char* key : {"steady_before", "steady_after"}) {
    if (!ranks[0].contains(key)) continue;
    run[key] = ranks[0][key];
    for (std::size_t i = 0; i < run[key].size(); ++i)
      run[key][i]["us"] = Over(
          ranks, [&](const Json& rank) { return rank[key][i]["us"]; }, true);
  }
  run["cycles"] = Json::array();
  const std::size_t cycles = ranks[0]["cycles"].size();
  for (std::size_t i = 0; i < cycles; ++i) {
    Json row{{"cycle", i + 1}};
    for (const char* key : kLargest) {
      if (!ranks[0]["cycles"][i].contains(key)) continue;
      row[key] = Over(
          ranks, [&](const Json& rank) { return rank["cycles"][i][key]; }, true);
      row["per_rank"][key] = Json::array();
      for (const Json& rank : ranks) row["per_rank"][key].push_back(rank["cycles"][i][key]);
    }
    row["freed_mib"] = Over(
        ranks, [&](const Json& rank) { return rank["cycles"][i]["freed_mib"]; }, false);
    if (const auto votes = VotesMs(ranks, i)) row["votes_ms"] = *votes;
    if (ranks[0]["cycles"][i].contains("identical")) {  // the raw driver calls have no results to compare
      row["identical"] = std::all_of(ranks.begin(), ranks.end(),
                                     [&](const Json& rank) { return rank["cycles"][i].at("identical").get<bool>(); });
    }
    for (const char* key : {"amem_paused", "amem_resumed"}) {
      if (ranks[0]["cycles"][i].contains(key)) row[key] = ranks[0]["cycles"][i][key];
    }
    run["cycles"].push_back(row);
  }
  if (cycles == 0) return run;
  run["first"] = run["cycles"][0];
  for (const char* key : {"per_rank", "amem_paused", "amem_resumed"}) run["first"].erase(key);
  run["median"] = Json::object();
  for (const auto& [key, value] : run["first"].items()) {
    if (!value.is_number_float()) continue;
    std::vector<double> values;
    for (std::size_t i = 1; i < cycles; ++i) values.push_back(run["cycles"][i][key].get<double>());
    if (!values.empty()) run["median"][key] = Median(values);
  }
  if (run["first"].contains("identical")) {
    run["identical"] =
        std::all_of(run["cycles"].begin(), run["cycles"].end(), [](const Json& row) { return row["identical"].get<bool>(); });
  }
  const double after_first = run["cycles"][0]["held_after_mib"];
  const double after_last = run["cycles"][cycles - 1]["held_after_mib"];
  run["memory_after_cycles"] = {{"first_mib", after_first}, {"last_mib", after_last}, {"equal", after_first == after_last}};
  return run;
}

Json Environment() {
  Json variables = Json::object();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "AMEM_", 5) != 0 && std::strncmp(*entry, "NCCL_", 5) != 0 &&
        std::strncmp(*entry, "CUDA_", 5) != 0 && std::strncmp(*entry, "LD_PRELOAD=", 11) != 0)
      continue;
    if (const char* equals = std::strchr(*entry, '='))
      variables[std::string(static_cast<const char*>(*entry), equals)] = equals + 1;
  }
  return variables;
}

void PrintTable(const Options& options, const Json& run) {
  printf("\n%s%s, %d x %s, NCCL %s, driver %s%s\n", options.mode.c_str(),
         options.mode == "amem"                                  ? (" (" + options.layout + ")").c_str()
         : options.mode == "floor" && options.floor.slab_mib > 0 ? Format(" (%d MiB slabs)", options.floor.slab_mib).c_str()
                                                                 : "",
         options.gpus, run["gpu"].get<std::string>().c_str(), run.value("nccl_version", "-").c_str(),
         run["driver"].get<std::string>().c_str(), options.single_process ? ", one process" : "");
  printf("start-up: create %.0f ms + first collectives %.0f ms = %.0f ms; holds %.0f MiB per GPU\n",
         run["startup"]["create_ms"].get<double>(), run["startup"]["first_collectives_ms"].get<double>(),
         run["startup"]["total_ms"].get<double>(), run["held_mib"].get<double>());
  if (run["cycles"].empty()) return;
  printf("%8s %10s %10s %12s %10s %14s %10s\n", "cycle", "pause ms", "resume ms", "first coll.", "freed MiB", "held after MiB",
         "identical");
  const auto line = [](const char* name, const Json& row, const char* identical) {
    printf("%8s %10.1f %10.1f %12.1f %10.0f %14.0f %10s\n", name, row["pause_ms"].get<double>(), row["resume_ms"].get<double>(),
           row["first_collectives_ms"].get<double>(), row["freed_mib"].get<double>(), row["held_after_mib"].get<double>(),
           identical);
  };
  const bool checked = options.mode != "floor";
  for (const Json& row : run["cycles"])
    line(Format("%d", row["cycle"].get<int>()).c_str(), row, !checked ? "-" : row["identical"].get<bool>() ? "yes" : "NO");
  if (!run["median"].empty()) line("median*", run["median"], "");
  if (!run["median"].empty()) printf("* of the cycles after the first\n");
  if (run["median"].contains("votes_ms"))
    printf("all votes of a pause and its resume: %.2f ms at the median\n", run["median"]["votes_ms"].get<double>());
}

int Main(int argc, char** argv) {
  int region_fd = -1;
  int rank = 0;
  const std::vector<std::string> command(argv, argv + argc);
  const bool child = IsChild(argc, argv, region_fd, rank);
  int code = kExitUsage;
  const std::optional<Options> parsed = Parse(argc, argv, code);
  if (!parsed) return code;
  Options options = *parsed;
  if (RefusedForNvls("amem-gpu-bench")) return kExitUsage;
  if (child) {
    return RunChild(region_fd, rank, [&](Child& self) {
      if (options.mode == "floor")
        RunFloorRank(options, self);
      else
        RunNcclRank(options, self);
    });
  }
  Json machine;
  try {
    machine = Probe();
  } catch (const Skip& skip) {
    printf("SKIPPED: %s\n", skip.what());
    return kExitSkipped;
  }
  if (options.probe) {
    printf("%s\n", machine.dump().c_str());
    return kExitPass;
  }
  if (options.gpus == 0) options.gpus = machine["gpus"].get<int>();

  JobSpec spec;
  spec.name = "bench " + options.mode + (options.label.empty() ? "" : " " + options.label);
  spec.processes = options.single_process ? 1 : options.gpus;
  spec.time_limit_s = options.time_limit_s;
  spec.arguments.assign(command.begin() + 1, command.end());
  spec.arguments.insert(spec.arguments.end(), {"--gpus", std::to_string(options.gpus)});
  spec.log_path = options.log;
  spec.verbose = options.verbose;
  if (options.mode == "amem") spec.environment["AMEM_LAYOUT"] = options.layout;
  const JobResult job = RunJob(spec);

  Json run{{"program", "amem-gpu-bench"},
           {"mode", options.mode},
           {"layout", options.layout},
           {"label", options.label},
           {"gpus", options.gpus},
           {"single_process", options.single_process},
           {"slab_mib", options.floor.slab_mib},
           {"scale", options.floor.scale},
           {"worlds", options.worlds},
           {"outcome", OutcomeText(job.outcome)},
           {"reason", job.reason},
           {"seconds", job.seconds}};
  run.update(machine);
  run["gpus"] = options.gpus;
  run["nccl_path"] = options.nccl;
  run["command"] = command;
  run["environment"] = Environment();
  run["unix_time"] = static_cast<long>(time(nullptr));
  if (job.outcome == Outcome::kPass) {
    std::vector<Json> ranks;
    for (const std::string& text : job.results) ranks.push_back(Json::parse(text));
    run.update(Summarize(ranks));
    PrintTable(options, run);
  } else {
    printf("%s: %s: %s\n", spec.name.c_str(), OutcomeText(job.outcome), job.reason.c_str());
  }
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << run.dump(1) << "\n";
    if (!file.flush()) {
      fprintf(stderr, "amem-gpu-bench: cannot write %s\n", options.json.c_str());
      return kExitFail;
    }
  }
  return job.outcome == Outcome::kPass ? kExitPass : job.outcome == Outcome::kSkipped ? kExitSkipped : kExitFail;
}

}  // namespace
}  // namespace amem::gpu

int main(int argc, char** argv) {
  try {
    return amem::gpu::Main(argc, argv);
  } catch (const std::exception& failure) {
    fprintf(stderr, "amem-gpu-bench: %s\n", failure.what());
    return amem::gpu::kExitFail;
  }
}
