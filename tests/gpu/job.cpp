#include "tests/gpu/job.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amem::gpu {

namespace {

constexpr std::size_t kResultBytes = std::size_t{8} << 20;
constexpr int kMaxIds = 64;

struct Slot {
  char stage[160];
  char text[2048];
  double value;
  std::atomic<std::uint32_t> arrivals;  // how many barriers this rank has come to
  std::atomic<std::uint64_t> result_bytes;
};

}  // namespace

struct SharedRegion {
  int processes;
  double deadline;
  std::atomic<std::uint32_t> stop;  // a rank ended early
  std::atomic<std::uint32_t> arrived;
  std::atomic<std::uint32_t> generation;
  int sockets[kMaxProcesses][kMaxProcesses];  // [mine][peer]
  ncclUniqueId ids[kMaxIds];
  Slot slots[kMaxProcesses];
};

namespace {

std::size_t RegionBytes(int processes) { return sizeof(SharedRegion) + kResultBytes * static_cast<std::size_t>(processes); }

char* ResultOf(SharedRegion* region, int rank) {
  return reinterpret_cast<char*>(region) + sizeof(SharedRegion) + kResultBytes * static_cast<std::size_t>(rank);
}

void CopyText(char* to, std::size_t size, const std::string& text) {
  const std::size_t length = std::min(size - 1, text.size());
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

void Futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

std::string LastLines(const std::string& text, std::size_t lines) {
  std::size_t at = text.size();
  while (at > 0 && text[at - 1] == '\n') --at;
  const std::size_t end = at;
  while (lines > 0 && at > 0) {
    --at;
    if (text[at] == '\n' && --lines == 0) {
      ++at;
      break;
    }
  }
  return text.substr(at, end - at);
}

}  // namespace

double Now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

bool RefusedForNvls(const char* program) {
  const char* value = getenv("NCCL_NVLS_ENABLE");
  if (value != nullptr && std::strcmp(value, "0") == 0) return false;
  fprintf(stderr,
          "%s: refused: NCCL_NVLS_ENABLE is %s, and must be 0. Multicast objects can put a shared GPU host out of service;"
          " run again with NCCL_NVLS_ENABLE=0.\n",
          program, value == nullptr ? "not set" : value);
  return true;
}

const char* OutcomeText(Outcome outcome) {
  switch (outcome) {
    case Outcome::kPass:
      return "pass";
    case Outcome::kFail:
      return "FAIL";
    case Outcome::kSkipped:
      return "SKIPPED";
  }
  return "?";
}

// ---- child ---------------------------------------------------------------------------------------------------------------

Child::Child(int region_fd, int rank) : rank_(rank) {
  // The first page tells how many processes there are, and so how long the region is.
  void* head = mmap(nullptr, sizeof(SharedRegion), PROT_READ, MAP_SHARED, region_fd, 0);
  if (head == MAP_FAILED) throw Failure(Format("mmap of the job's region: %s", strerror(errno)));
  const int processes = static_cast<SharedRegion*>(head)->processes;
  munmap(head, sizeof(SharedRegion));
  void* region = mmap(nullptr, RegionBytes(processes), PROT_READ | PROT_WRITE, MAP_SHARED, region_fd, 0);
  if (region == MAP_FAILED) throw Failure(Format("mmap of the job's region: %s", strerror(errno)));
  close(region_fd);
  region_ = static_cast<SharedRegion*>(region);
  for (int other = 0; other < processes; ++other) {
    for (int peer = 0; peer < processes; ++peer) {
      if (other != rank && other != peer) close(region_->sockets[other][peer]);
    }
  }
}

int Child::processes() const { return region_->processes; }
double Child::deadline() const { return region_->deadline; }

void Child::Stage(const std::string& text) { CopyText(region_->slots[rank_].stage, sizeof(Slot::stage), text); }

void Child::Barrier(const char* name) {
  Slot& slot = region_->slots[rank_];
  slot.arrivals.fetch_add(1);
  const std::uint32_t generation = region_->generation.load();
  if (region_->arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(processes() - (ended_ >= 0 ? 1 : 0))) {
    region_->arrived.store(0);
    region_->generation.fetch_add(1);
    Futex(region_->generation, FUTEX_WAKE, kMaxProcesses, nullptr);
    return;
  }
  while (region_->generation.load() == generation) {
    if (region_->stop.load() != 0) throw Aborted(Format("at barrier '%s': another rank ended", name));
    if (Now() > deadline()) {
      std::string missing;
      for (int rank = 0; rank < processes(); ++rank) {
        if (rank != ended_ && region_->slots[rank].arrivals.load() < slot.arrivals.load())
          missing += Format(" rank %d (doing: %s)", rank, region_->slots[rank].stage);
      }
      throw Failure(Format("barrier '%s': time is up; did not come:%s", name, missing.c_str()));
    }
    const timespec slice{0, 20'000'000};
    Futex(region_->generation, FUTEX_WAIT, generation, &slice);
  }
}

void Child::Without(int rank) { ended_ = rank; }

std::vector<ncclUniqueId> Child::ExchangeIds(const std::vector<int>& makers, const std::function<ncclUniqueId()>& make) {
  if (makers.size() > kMaxIds) throw Failure(Format("%zu communicators at once; at most %d", makers.size(), kMaxIds));
  for (std::size_t i = 0; i < makers.size(); ++i) {
    if (makers[i] == rank_) region_->ids[i] = make();
  }
  Barrier("unique ids made");
  std::vector<ncclUniqueId> ids(region_->ids, region_->ids + makers.size());
  Barrier("unique ids read");
  return ids;
}

double Child::Maximum(double value) {
  region_->slots[rank_].value = value;
  Barrier("maximum");
  for (int rank = 0; rank < processes(); ++rank) {
    if (rank != ended_) value = std::max(value, region_->slots[rank].value);
  }
  Barrier("maximum read");
  return value;
}

double Child::Minimum(double value) { return -Maximum(-value); }

int Child::Socket(int peer) const { return region_->sockets[rank_][peer]; }

void Child::Result(const std::string& json) {
  if (json.size() > kResultBytes) throw Failure(Format("a result of %zu bytes is too long", json.size()));
  std::memcpy(ResultOf(region_, rank_), json.data(), json.size());
  region_->slots[rank_].result_bytes.store(json.size());
}

void Child::Gone(const std::string& text) {
  CopyText(region_->slots[rank_].text, sizeof(Slot::text), text);
  fprintf(stderr, "rank %d: %s\n", rank_, text.c_str());
}
void Child::Failed(const std::string& text) {
  Gone(text);
  region_->stop.store(1);
}
void Child::Skipped(const std::string& text) { Failed(text); }

bool IsChild(int& argc, char**& argv, int& region_fd, int& rank) {
  if (argc < 4 || std::strcmp(argv[1], "--child") != 0) return false;
  region_fd = atoi(argv[2]);
  rank = atoi(argv[3]);
  argv[3] = argv[0];
  argv += 3;
  argc -= 3;
  return true;
}

int RunChild(int region_fd, int rank, const std::function<void(Child&)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  try {
    Child child(region_fd, rank);
    const double left = child.deadline() - Now();
    alarm(static_cast<unsigned>(std::max(1.0, left + 3)));
    // After a failure the process exits without orderly destruction, which would wait for ever for a stream that hangs.
    try {
      body(child);
      return kExitPass;
    } catch (const Skip& skip) {
      child.Skipped(skip.what());
      _exit(kExitSkipped);
    } catch (const Aborted& aborted) {
      child.Gone(aborted.what());
      _exit(kExitAborted);
    } catch (const std::exception& failure) {
      child.Failed(failure.what());
      _exit(kExitFail);
    }
  } catch (const std::exception& failure) {
    fprintf(stderr, "rank %d: %s\n", rank, failure.what());
  }
  return kExitFail;
}

// ---- parent --------------------------------------------------------------------------------------------------------------

namespace {

struct Process {
  pid_t pid = -1;
  int output = -1;  // a memfd with what it wrote
  bool running = false;
  int status = 0;
};

pid_t Spawn(const JobSpec& spec, int region_fd, int rank, int output) {
  // Everything that allocates happens before fork.
  std::vector<std::string> words{"/proc/self/exe", "--child", std::to_string(region_fd), std::to_string(rank)};
  words.insert(words.end(), spec.arguments.begin(), spec.arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const char* equals = std::strchr(*entry, '=');
    if (equals != nullptr) variables[std::string(static_cast<const char*>(*entry), equals)] = equals + 1;
  }
  for (const auto& [key, value] : spec.environment) variables[key] = value;
  variables["RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = std::to_string(spec.processes);
  std::vector<std::string> entries;
  for (const auto& [key, value] : variables) entries.push_back(key + "=" + value);
  std::vector<char*> envp;
  for (std::string& entry : entries) envp.push_back(entry.data());
  envp.push_back(nullptr);

  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExitAborted);
  if (!spec.verbose) {
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
  } else {
    dup2(STDERR_FILENO, STDOUT_FILENO);
  }
  execve("/proc/self/exe", argv.data(), envp.data());
  _exit(127);
}

std::string ReadAll(int fd) {
  std::string text;
  char buffer[65536];
  off_t at = 0;
  for (;;) {
    const ssize_t got = pread(fd, buffer, sizeof buffer, at);
    if (got <= 0) return text;
    text.append(buffer, static_cast<std::size_t>(got));
    at += got;
  }
}

bool WasKilled(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }

std::string HowItEnded(int status) {
  if (WIFEXITED(status)) return Format("exit code %d", WEXITSTATUS(status));
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) return "still not done at the time limit";
  if (WIFSIGNALED(status)) return Format("signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return "unknown end";
}

// The rank whose end explains the job's: first a rank that reported a failure, then one that crashed, then one that was
// skipped.
void Judge(const JobSpec& spec, SharedRegion* region, const std::vector<Process>& all, bool timed_out, JobResult& job) {
  std::string failures;
  std::string first_why;
  std::string skipped;
  for (int rank = 0; rank < spec.processes; ++rank) {
    const Process& process = all[static_cast<std::size_t>(rank)];
    const int code = WIFEXITED(process.status) ? WEXITSTATUS(process.status) : -1;
    const Slot& slot = region->slots[rank];
    if (rank == spec.victim && WasKilled(process.status)) continue;
    if (rank == spec.victim && code == kExitPass) {
      failures = Format("rank %d was to be killed and was not", rank);
      continue;
    }
    if (code == kExitPass || code == kExitAborted) continue;
    if (code == kExitSkipped) {
      skipped = slot.text;
      continue;
    }
    // Ranks that we killed did not fail by themselves.
    if (!timed_out && WasKilled(process.status) && slot.text[0] == '\0') continue;
    std::string why = slot.text[0] != '\0' ? slot.text : HowItEnded(process.status);
    if (!failures.empty() && why == first_why) {
      failures += Format("; rank %d: the same", rank);
      continue;
    }
    if (failures.empty()) first_why = why;
    failures += Format("%srank %d: %s [while: %s]", failures.empty() ? "" : "; ", rank, why.c_str(), slot.stage);
  }
  if (timed_out) failures = Format("time limit of %.0f s; ", spec.time_limit_s) + failures;
  if (!failures.empty()) {
    job.outcome = Outcome::kFail;
    job.reason = failures;
  } else if (!skipped.empty()) {
    job.outcome = Outcome::kSkipped;
    job.reason = skipped;
  } else {
    job.outcome = Outcome::kPass;
    for (int rank = 0; rank < spec.processes; ++rank) {
      const Process& process = all[static_cast<std::size_t>(rank)];
      if (process.status == 0 || (rank == spec.victim && WasKilled(process.status))) continue;
      job.outcome = Outcome::kFail;
      job.reason = "a rank was ended and none says why";
    }
  }
}

void Watch(const JobSpec& spec, SharedRegion* region, std::vector<Process>& all, bool& timed_out) {
  double kill_at = region->deadline + 4;  // the children's own deadline comes first and says more
  bool killed = false;
  for (;;) {
    bool running = false;
    for (int rank = 0; rank < spec.processes; ++rank) {
      Process& process = all[static_cast<std::size_t>(rank)];
      if (!process.running) continue;
      const pid_t ended = waitpid(process.pid, &process.status, WNOHANG);
      if (ended == process.pid) {
        process.running = false;
        if (process.status != 0 && !(rank == spec.victim && WasKilled(process.status))) {
          region->stop.store(1);
          kill_at = std::min(kill_at, Now() + 3);
        }
      } else {
        running = true;
      }
    }
    if (!running) return;
    if (!killed && Now() > kill_at) {
      timed_out = Now() > region->deadline;
      for (const Process& process : all) {
        if (process.running) kill(process.pid, SIGKILL);
      }
      killed = true;
    }
    const timespec nap{0, 5'000'000};
    nanosleep(&nap, nullptr);
  }
}

void KeepLog(const JobSpec& spec, const std::vector<Process>& all, const JobResult& job) {
  FILE* log = spec.log_path.empty() ? nullptr : fopen(spec.log_path.c_str(), "a");
  for (int rank = 0; rank < spec.processes; ++rank) {
    const std::string output = ReadAll(all[static_cast<std::size_t>(rank)].output);
    if (log != nullptr) {
      // A log with NCCL_DEBUG on can be huge; its end tells most.
      constexpr std::size_t kKeep = 256 << 10;
      const std::string tail = output.size() > kKeep ? "(…)\n" + output.substr(output.size() - kKeep) : output;
      fprintf(log, "==== %s, rank %d of %d: %s %s\n%s\n", spec.name.c_str(), rank, spec.processes, OutcomeText(job.outcome),
              job.reason.c_str(), tail.c_str());
    }
    if (job.outcome == Outcome::kFail && !output.empty() && !spec.verbose)
      fprintf(stderr, "---- last output of rank %d (%s)\n%s\n", rank, spec.name.c_str(), LastLines(output, 15).c_str());
  }
  if (log != nullptr) fclose(log);
}

}  // namespace

JobResult RunJob(const JobSpec& spec) {
  JobResult job;
  const double start = Now();
  if (spec.processes < 1 || spec.processes > kMaxProcesses) {
    job.reason = Format("%d processes; 1 to %d are possible", spec.processes, kMaxProcesses);
    return job;
  }
  fflush(stdout);
  fflush(stderr);
  const int region_fd = memfd_create("amem-gpu-job", 0);
  const std::size_t bytes = RegionBytes(spec.processes);
  void* memory = region_fd >= 0 && ftruncate(region_fd, static_cast<off_t>(bytes)) == 0
                     ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region_fd, 0)
                     : MAP_FAILED;
  if (memory == MAP_FAILED) {
    job.reason = Format("shared region of %zu bytes: %s", bytes, strerror(errno));
    return job;
  }
  auto* region = static_cast<SharedRegion*>(memory);
  region->processes = spec.processes;
  region->deadline = start + spec.time_limit_s;
  for (int a = 0; a < spec.processes; ++a) {
    for (int b = a + 1; b < spec.processes; ++b) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) != 0) {
        job.reason = Format("socketpair: %s", strerror(errno));
        return job;
      }
      region->sockets[a][b] = pair[0];
      region->sockets[b][a] = pair[1];
    }
  }
  std::vector<Process> all(static_cast<std::size_t>(spec.processes));
  for (int rank = 0; rank < spec.processes; ++rank) {
    Process& process = all[static_cast<std::size_t>(rank)];
    process.output = memfd_create("amem-gpu-output", MFD_CLOEXEC);
    CopyText(region->slots[rank].stage, sizeof(Slot::stage), "starting");
    // Appending keeps the lines of stdout and stderr in order.
    fcntl(process.output, F_SETFL, O_APPEND);
    process.pid = Spawn(spec, region_fd, rank, process.output);
    process.running = process.pid > 0;
    if (!process.running) process.status = kExitFail << 8;
  }
  for (int a = 0; a < spec.processes; ++a) {
    for (int b = 0; b < spec.processes; ++b) {
      if (a != b) close(region->sockets[a][b]);
    }
  }
  bool timed_out = false;
  Watch(spec, region, all, timed_out);
  Judge(spec, region, all, timed_out, job);
  for (int rank = 0; rank < spec.processes; ++rank)
    job.results.emplace_back(ResultOf(region, rank), region->slots[rank].result_bytes.load());
  job.seconds = Now() - start;
  KeepLog(spec, all, job);
  for (const Process& process : all) close(process.output);
  munmap(memory, bytes);
  close(region_fd);
  return job;
}

}  // namespace amem::gpu
