#include "tests/scenarios/job_kinds.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace job_kinds {
namespace {

using Comm = void*;
struct UniqueId {
  char internal[128];
};

int Number(const char* name) { return std::atoi(std::getenv(name)); }

struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void Check(int result, const std::string& what) {
  if (result != 0) throw Wrong(what + " answered " + std::to_string(result));
}

// NCCL as this program knows it: by name, looked up once, as a compiled program has it.
struct Nccl {
  explicit Nccl(void* of) : library(of) {}
  template <class F>
  F* Function(const char* name) const {
    void* const found = dlsym(library, name);
    if (found == nullptr) throw Wrong(std::string(name) + " is missing");
    return reinterpret_cast<F*>(found);
  }
  void* library;
  int rank = Number("RANK"), world = Number("WORLD");

  Comm Make(const std::string& name, int ranks, int as) const {
    Comm made = nullptr;
    Make(name, ranks, as, made);
    return made;
  }
  void Make(const std::string& name, int ranks, int as, Comm& made) const {  // in a group: at its end
    UniqueId id{};
    std::snprintf(id.internal, sizeof id.internal, "%s-%s", std::getenv("JOB"), name.c_str());
    Check(Function<int(Comm*, int, UniqueId, int)>("ncclCommInitRank")(&made, ranks, id, as), "ncclCommInitRank");
  }
  Comm Split(Comm parent, int color) const {
    Comm made = nullptr;
    Check(Function<int(Comm, int, int, Comm*, void*)>("ncclCommSplit")(parent, color, rank, &made, nullptr), "ncclCommSplit");
    return made;
  }
  void Destroy(Comm comm) const { Check(Function<int(Comm)>("ncclCommDestroy")(comm), "ncclCommDestroy"); }
  void Start() const { Check(Function<int()>("ncclGroupStart")(), "ncclGroupStart"); }
  void End() const { Check(Function<int()>("ncclGroupEnd")(), "ncclGroupEnd"); }
  int Count(Comm comm) const {
    int count = 0;
    Check(Function<int(Comm, int*)>("ncclCommCount")(comm, &count), "ncclCommCount");
    return count;
  }
  void Send(Comm comm, const std::vector<float>& values, int to) const {
    using Call = int(const void*, std::size_t, int, int, Comm, void*);
    Check(Function<Call>("ncclSend")(values.data(), values.size(), 7, to, comm, nullptr), "ncclSend");
  }
  void Receive(Comm comm, std::vector<float>& values, int from) const {
    using Call = int(void*, std::size_t, int, int, Comm, void*);
    Check(Function<Call>("ncclRecv")(values.data(), values.size(), 7, from, comm, nullptr), "ncclRecv");
  }
  // The sum of ones and of a step's number over all ranks; true: one of them `stops`.
  bool Reduce(Comm comm, std::uint64_t step, bool stops = false) const {
    std::vector<float> in(300, static_cast<float>(step % 1000)), out(300);
    in[0] = stops ? 1 : 0;
    using Call = int(const void*, void*, std::size_t, int, int, Comm, void*);
    Check(Function<Call>("ncclAllReduce")(in.data(), out.data(), in.size(), 7, 0, comm, nullptr), "ncclAllReduce");
    const float sum = static_cast<float>(step % 1000) * static_cast<float>(Count(comm));
    for (std::size_t i = 1; i < out.size(); ++i)
      if (out[i] != sum)
        throw Wrong("step " + std::to_string(step) + ": " + std::to_string(out[i]) + " for " + std::to_string(sum));
    return out[0] != 0;
  }
};

class Job {
 public:
  Job(void* library, int most_ms) : nccl_(library), most_us_(most_ms * 1000), random_(static_cast<unsigned>(getpid())) {}

  std::string Run(const std::string& kind) {
    const std::map<std::string, void (Job::*)(std::uint64_t)> kinds = {{"data parallel", &Job::DataParallel},
                                                                       {"overlapping", &Job::Overlapping},
                                                                       {"pipeline", &Job::Pipeline},
                                                                       {"all to all", &Job::AllToAll},
                                                                       {"sleeper", &Job::Sleeper},
                                                                       {"barriers", &Job::Barriers},
                                                                       {"makes", &Job::Makes},
                                                                       {"makes after a while", &Job::MakesAfterAWhile},
                                                                       {"mismatched", &Job::Mismatched},
                                                                       {"away", &Job::Away}};
    world_ = nccl_.Make(kind + "-world", nccl_.world, nccl_.rank);
    if (kind == "overlapping") {
      row_ = nccl_.Split(world_, nccl_.rank / 2);
      column_ = nccl_.Split(world_, nccl_.rank % 2);
    }
    if (kind == "mismatched") row_ = nccl_.Make("second", nccl_.world, nccl_.rank);
    if (kind == "barriers" && nccl_.rank > 0) row_ = nccl_.Make("rest", nccl_.world - 1, nccl_.rank - 1);
    if (kind == "pipeline") {
      for (int first = 0; first + 1 < nccl_.world; ++first)
        if (nccl_.rank == first || nccl_.rank == first + 1)
          (nccl_.rank == first ? next_ : before_) = nccl_.Make("link" + std::to_string(first), 2, nccl_.rank - first);
    }
    if (kind == "threads") return Threads();
    const auto step = kinds.at(kind);
    std::uint64_t steps = 0;
    for (bool stops = false; !stops; ++steps) {
      Compute();
      (this->*step)(steps);
      stops = nccl_.Reduce(world_, steps, access(std::getenv("JOB_STOP"), F_OK) == 0);
      if (steps % 8 == 0) std::printf("at %llu\n", static_cast<unsigned long long>(steps)), std::fflush(stdout);
    }
    return "steps " + std::to_string(steps);
  }

 private:
  static void Say(const char* what) { std::puts(what), std::fflush(stdout); }
  void Compute() { std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<unsigned>(most_us_ + 1))); }

  void DataParallel(std::uint64_t step) {
    for (int bucket = 0; bucket < 3; ++bucket) nccl_.Reduce(world_, step);
  }
  void Overlapping(std::uint64_t step) {
    nccl_.Reduce(row_, step);
    Compute();
    nccl_.Reduce(column_, step);
    nccl_.Start();  // several communicators in one group, and a group in a group
    nccl_.Start();
    nccl_.End();
    nccl_.End();
    nccl_.Reduce(row_, step);
  }
  // Microbatches forward and back through the ranks.
  void Pipeline(std::uint64_t step) {
    std::vector<float> values(100, static_cast<float>(step % 1000));
    const auto pass = [&](Comm comm, bool sends, float adds) {
      if (comm == nullptr) return;
      const int other = nccl_.rank == 0 || comm == next_ ? 1 : 0;
      nccl_.Start();
      if (sends)
        nccl_.Send(comm, values, other);
      else
        nccl_.Receive(comm, values, other);
      nccl_.End();
      if (!sends)
        for (float& value : values) value += adds;
    };
    for (int batch = 0; batch < 2; ++batch) {
      pass(before_, false, 1);
      Compute();
      pass(next_, true, 0);
    }
    if (before_ != nullptr && values[0] != static_cast<float>(step % 1000) + static_cast<float>(nccl_.rank))
      throw Wrong("forward " + std::to_string(values[0]));
    pass(next_, false, 0);
    pass(before_, true, 0);
    if (values[7] != static_cast<float>(step % 1000) + static_cast<float>(nccl_.world - 1))
      throw Wrong("back " + std::to_string(values[7]));
  }
  void AllToAll(std::uint64_t step) {
    std::vector<std::vector<float>> out, in(static_cast<std::size_t>(nccl_.world), std::vector<float>(64));
    for (int to = 0; to < nccl_.world; ++to)
      out.emplace_back(64, static_cast<float>(step % 1000 * 100) + static_cast<float>(nccl_.rank * 10 + to));
    nccl_.Start();
    for (int other = 0; other < nccl_.world; ++other) {
      nccl_.Send(world_, out[static_cast<std::size_t>(other)], other);
      nccl_.Receive(world_, in[static_cast<std::size_t>(other)], other);
    }
    nccl_.End();
    for (int from = 0; from < nccl_.world; ++from)
      if (in[static_cast<std::size_t>(from)][9] !=
          static_cast<float>(step % 1000 * 100) + static_cast<float>(from * 10 + nccl_.rank))
        throw Wrong("all to all");
  }
  void Sleeper(std::uint64_t step) {
    if (nccl_.rank == 1 && step % 16 == 3) std::this_thread::sleep_for(std::chrono::milliseconds(250));
    nccl_.Reduce(world_, step);
  }
  // One rank waits outside of NCCL for others that launch meanwhile.
  void Barriers(std::uint64_t step) {
    if (row_ != nullptr) nccl_.Reduce(row_, step);
    Meet();
    if (nccl_.rank == 0) Compute();
    if (row_ != nullptr) nccl_.Reduce(row_, step);
    Meet();
  }
  void Makes(std::uint64_t step) {
    if (step % 4 != 1) return;
    const Comm part = nccl_.Split(world_, nccl_.rank % 2);
    nccl_.Reduce(part, step);
    nccl_.Destroy(part);
  }
  // While the file is there all compute, and what each calls of NCCL's after that makes a communicator, by a call that is
  // another one each time.
  void MakesAfterAWhile(std::uint64_t step) {
    if (!nccl_.Reduce(world_, step, access(std::getenv("JOB_AWAY"), F_OK) == 0)) return;
    Say("away");
    while (access(std::getenv("JOB_AWAY"), F_OK) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Say("makes");
    Comm made = nullptr;
    const std::string name = "after a while " + std::to_string(made_);
    switch (made_++ % 3) {
      case 0:
        made = nccl_.Split(world_, 0);
        break;
      case 1:
        made = nccl_.Make(name, nccl_.world, nccl_.rank);
        break;
      default:
        nccl_.Start();
        nccl_.Make(name, nccl_.world, nccl_.rank, made);
        nccl_.End();
    }
    nccl_.Reduce(made, step);
    nccl_.Destroy(made);
  }
  // From a step on one rank launches on another communicator than the rest: nobody goes on.
  void Mismatched(std::uint64_t step) {
    if (step == 16 && nccl_.rank == 0) nccl_.Reduce(row_, step);
  }
  // Rank 1, for as long as the file is there.
  void Away(std::uint64_t) {
    if (nccl_.rank != 1 || access(std::getenv("JOB_AWAY"), F_OK) != 0) return;
    Say("away");
    while (access(std::getenv("JOB_AWAY"), F_OK) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

  std::string Threads() {
    const Comm other = nccl_.Make("second", nccl_.world, nccl_.rank);
    std::string wrong;
    void* const cuda = dlopen("libcuda.so.1", RTLD_NOW);
    void* context = nullptr;
    Check(reinterpret_cast<int (*)(void**)>(dlsym(cuda, "cuCtxGetCurrent"))(&context), "cuCtxGetCurrent");
    const auto run = [&](Comm comm) {
      try {
        Check(reinterpret_cast<int (*)(void*)>(dlsym(cuda, "cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
        std::minstd_rand random(static_cast<unsigned>(getpid()));
        for (std::uint64_t step = 0;; ++step) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
          if (nccl_.Reduce(comm, step, access(std::getenv("JOB_STOP"), F_OK) == 0)) return;
          if (comm == world_ && step % 8 == 0)
            std::printf("at %llu\n", static_cast<unsigned long long>(step)), std::fflush(stdout);
        }
      } catch (const Wrong& what) {
        wrong = what.what();
      }
    };
    std::thread second(run, other);
    run(world_);
    second.join();
    return wrong.empty() ? "steps" : wrong;
  }

  // A barrier in shared memory, such as a launcher or gloo has.
  void Meet() {
    static std::atomic<std::uint64_t>* const count = [] {
      const int file = open(std::getenv("BARRIER"), O_RDWR);
      void* const shared = mmap(nullptr, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      close(file);
      return static_cast<std::atomic<std::uint64_t>*>(shared);
    }();
    const auto all = static_cast<std::uint64_t>(nccl_.world);
    const std::uint64_t target = (count->fetch_add(1) / all + 1) * all;
    while (count->load() < target) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

  const Nccl nccl_;
  const int most_us_;
  std::minstd_rand random_;
  int made_ = 0;  // communicators, after a while
  Comm world_ = nullptr, row_ = nullptr, column_ = nullptr, next_ = nullptr, before_ = nullptr;
};

}  // namespace

std::string Run(void* nccl, const std::string& what) {
  try {
    const auto comma = what.find(',');
    return Job(nccl, std::atoi(what.c_str() + comma + 1)).Run(what.substr(0, comma));
  } catch (const std::exception& wrong) {
    return wrong.what();
  }
}

}  // namespace job_kinds
