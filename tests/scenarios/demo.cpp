// The demo: four processes under AMem on the simulator, without a GPU.
//
// Each rank makes the allocations that NCCL makes for its communicators (the mix of the reference trace, scaled down), hands
// them to its neighbours as NCCL's proxy does (a descriptor over a Unix socket), runs a ring all-reduce through the mapped peer
// memory, pauses, resumes, runs it again. The parent compares, prints a table, verifies the journals, and says what to look at
// next.
//
// A line for programs: "ok ranks=4 held_mib=... freed_mib=... identical=yes driver=sim". Exit status 0 only with that.
#include <pthread.h>
#include <spdlog/fmt/fmt.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "journal/base/clock.h"
#include "journal/journal.h"
#include "replay/job/postmortem.h"
#include "tests/pass_descriptor.h"
#include "tests/scenarios/start_session.h"

namespace amem {
namespace {

constexpr Bytes kMiB = Bytes{1} << 20;
constexpr int kMaxRanks = 16;
constexpr std::size_t kElements = 262'144;  // of the all-reduce, float32
constexpr int kCommunicators = 6;
constexpr int kLimitSeconds = 120;

struct Report {  // one rank's, in shared memory
  SessionId session;
  Bytes held = 0, imported = 0, paused_held = 0, resumed_held = 0;
  double pause_ms = 0, resume_ms = 0;
  std::uint64_t allocations = 0, before = 0, after = 0;
  char error[512] = {};
};
struct Shared {
  pthread_barrier_t barrier;
  Report ranks[kMaxRanks];
};

double Milliseconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

std::uint64_t Hash(const float* data, std::size_t count) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &data[i], sizeof(bits));
    hash = (hash ^ bits) * 0x100000001b3ULL;
  }
  return hash;
}

class Rank {
 public:
  Rank(int rank, int ranks, Shared& shared, int to_next, int from_previous)
      : rank_(rank),
        ranks_(ranks),
        shared_(shared),
        report_(shared.ranks[rank]),
        to_next_(to_next),
        from_previous_(from_previous) {}

  Status Run(const std::filesystem::path& directory, const std::filesystem::path& journals) {
    AMEM_TRY(Start(directory, journals));
    AMEM_TRY(Allocate());
    Wait();
    Fill();
    AllReduce();
    report_.before = Hash(data_, kElements);
    Wait();
    const State running = session_->CopyState();
    const Holdings held = Measure(running);
    report_.held = simulator_->BytesInUse(device());
    report_.imported = held.imported;
    report_.allocations = held.own_count;
    Status status;
    report_.pause_ms = Milliseconds([&] { status = session_->Pause(); });
    AMEM_TRY(status);
    report_.paused_held = simulator_->BytesInUse(device());
    Wait();
    report_.resume_ms = Milliseconds([&] { status = session_->Resume(); });
    AMEM_TRY(status);
    report_.resumed_held = simulator_->BytesInUse(device());
    // The result of the first run must be back at its address.
    if (Hash(data_, kElements) != report_.before) return {Code::kCorrupt, "contents differ after the resume"};
    Wait();
    Fill();
    AllReduce();
    report_.after = Hash(data_, kElements);
    Wait();
    return session_->Close("exit");
  }

 private:
  struct Buffer {
    AllocationId allocation;
    Address address;
    Bytes bytes = 0;
  };

  DeviceOrdinal device() const { return DeviceOrdinal{rank_}; }
  void Wait() { pthread_barrier_wait(&shared_.barrier); }

  Status Start(const std::filesystem::path& directory, const std::filesystem::path& journals) {
    test::RankProcessOptions options{.directory = directory};
    options.journal.directory = journals;
    options.simulated.devices = ranks_;
    if (::getrandom(&report_.session.value, sizeof(report_.session.value), 0) < 0) return {Code::kIo, "choose a session id"};
    SessionOpened who = test::RankOf(rank_, report_.session);
    who.realtime_ns = RealtimeNs();  // without these its journals would be dated 1970
    who.monotonic_ns = MonotonicNs();
    auto started = test::StartProcess(std::move(options), std::move(who));
    if (!started.ok()) return started.status();
    simulator_ = std::move(started->simulator);
    session_ = std::move(started->session);
    return {};
  }

  // As NCCL does: create, reserve, map, access.
  Result<Buffer> New(Bytes bytes) {
    AllocationProperties properties;
    properties.handle_types = 1;
    properties.location = {LocationType::kDevice, rank_};
    properties.gpu_direct_rdma = 1;
    auto id = session_->nccl().Create(bytes, properties, 0, {});
    if (!id.ok()) return id.status();
    return Place(*id, bytes);
  }
  Result<Buffer> Place(AllocationId id, Bytes bytes) {
    auto address = session_->nccl().Reserve(bytes, 0, {}, 0, {});
    if (!address.ok()) return address.status();
    AMEM_TRY(session_->nccl().Map(*address, bytes, 0, id, 0));
    const AccessDescriptor access{{LocationType::kDevice, rank_}, 3};
    AMEM_TRY(session_->nccl().SetAccess(*address, bytes, std::span(&access, 1)));
    return Buffer{id, *address, bytes};
  }
  // Exports one of ours to the next rank, and imports one of the previous rank's.
  Result<Buffer> Exchange(const Buffer& mine) {
    auto token = session_->sharing().Export(mine.allocation);
    if (!token.ok()) return token.status();
    if (!test::SendDescriptor(to_next_, token->get())) return Status{Code::kIo, "send a descriptor to the next rank"};
    const UniqueFd received = test::ReceiveDescriptor(from_previous_);
    if (!received) return Status{Code::kIo, "receive a descriptor of the previous rank"};
    auto id = session_->sharing().Import(received.get(), {});
    if (!id.ok()) return id.status();
    return Place(*id, mine.bytes);
  }

  // A communicator's allocations in the mix of the trace: two of 2 MiB for each of 10 MiB; two thirds are shared.
  Status Allocate() {
    for (int communicator = 0; communicator < kCommunicators; ++communicator) {
      for (const Bytes mib : {Bytes{2}, Bytes{2}, Bytes{10}}) {
        auto mine = New(mib * kMiB);
        if (!mine.ok()) return mine.status();
        if (mib == 2 && communicator % 2 == 1) continue;
        auto theirs = Exchange(*mine);
        if (!theirs.ok()) return theirs.status();
        mine_.push_back(*mine);
        theirs_.push_back(*theirs);
      }
    }
    auto data = New(kElements * sizeof(float) + kMiB);
    if (!data.ok()) return data.status();
    data_ = reinterpret_cast<float*>(data->address.value);
    return {};
  }

  void Fill() {
    for (std::size_t i = 0; i < kElements; ++i)
      data_[i] = static_cast<float>((i * 2654435761U + static_cast<unsigned>(rank_) * 40503U) % 1000) / 7.0F;
  }

  // Ring all-reduce: each rank leaves its part in a buffer that the next rank has mapped.
  void AllReduce() {
    float* out = reinterpret_cast<float*>(mine_.back().address.value);
    const float* in = reinterpret_cast<const float*>(theirs_.back().address.value);
    const std::size_t chunk = kElements / static_cast<std::size_t>(ranks_);
    const auto part = [&](int index) { return static_cast<std::size_t>((index % ranks_ + ranks_) % ranks_) * chunk; };
    for (int pass = 0; pass < 2; ++pass) {
      for (int step = 0; step < ranks_ - 1; ++step) {
        const std::size_t send = part(rank_ - step + pass), receive = part(rank_ - step - 1 + pass);
        std::memcpy(out, data_ + send, chunk * sizeof(float));
        Wait();
        for (std::size_t i = 0; i < chunk; ++i) data_[receive + i] = pass == 0 ? data_[receive + i] + in[i] : in[i];
        Wait();
      }
    }
  }

  int rank_, ranks_;
  Shared& shared_;
  Report& report_;
  int to_next_, from_previous_;
  std::unique_ptr<Simulator> simulator_;
  std::unique_ptr<Session> session_;
  std::vector<Buffer> mine_, theirs_;
  float* data_ = nullptr;
};

Status VerifyJournals(const std::filesystem::path& directory, std::span<const Report> ranks, std::uint64_t& events) {
  std::vector<JournalFindings> findings;
  for (const Report& rank : ranks) {
    auto reader = JournalReader::Open(directory / fmt::format("{:016x}", rank.session.value));
    if (!reader.ok()) return reader.status();
    auto found = VerifyJournal(**reader);
    if (!found.ok()) return found.status();
    if (!found->violations.empty()) return {Code::kInvalid, found->violations.front().text};
    events += found->events;
    findings.push_back(*std::move(found));
  }
  const JobFindings job = VerifyJob(findings);
  return job.violations.empty() ? Status{} : Status{Code::kInvalid, job.violations.front().text};
}

int Fail(const std::string& why) {
  std::fprintf(stderr, "demo: %s\n", why.c_str());
  return 1;
}

struct Places {
  std::filesystem::path directory;  // of the simulated world and the sockets
  std::filesystem::path journals;
  std::string tool = "amem";  // what reads journals
};

void SayWhatIsNext(const Places& places, bool by_default) {
  const std::string of = by_default ? "" : " " + places.journals.string();
  std::printf(
      "\nNext, look at what was recorded (in %s):\n"
      "  %s ls%s\n"
      "  %s log%s\n"
      "  %s report%s -o demo.html\n",
      places.journals.c_str(), places.tool.c_str(), of.c_str(), places.tool.c_str(), of.c_str(), places.tool.c_str(),
      of.c_str());
}

int Main(int ranks, const Places& places, bool by_default) {
  auto* shared =
      static_cast<Shared*>(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (shared == MAP_FAILED) return Fail("no shared memory");
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&shared->barrier, &attributes, static_cast<unsigned>(ranks));
  std::vector<std::array<int, 2>> rings(static_cast<std::size_t>(ranks));
  for (auto& ring : rings) {
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ring.data()) != 0) return Fail("no socket pair");
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    if (child < 0) return Fail("cannot fork");
    if (child == 0) {
      ::alarm(kLimitSeconds);
      const auto previous = static_cast<std::size_t>((rank + ranks - 1) % ranks);
      Rank process(rank, ranks, *shared, rings[static_cast<std::size_t>(rank)][0], rings[previous][1]);
      const Status status = process.Run(places.directory, places.journals);
      std::snprintf(shared->ranks[rank].error, sizeof(shared->ranks[rank].error), "%s", status.message().c_str());
      ::_exit(status.ok() ? 0 : 1);
    }
    children.push_back(child);
  }
  // A rank that fails never reaches the next barrier, so the parent ends the others and prints the first error.
  for (std::size_t left = children.size(); left > 0; --left) {
    int status = 0;
    const pid_t ended = ::wait(&status);
    if (status == 0) continue;
    for (const pid_t child : children) {
      if (child != ended) ::kill(child, SIGKILL);
    }
    const auto rank = std::find(children.begin(), children.end(), ended) - children.begin();
    return Fail("rank " + std::to_string(rank) + " failed: " + shared->ranks[rank].error);
  }

  Bytes held = 0, freed = 0;
  bool identical = true, back = true;
  std::printf(
      "rank  allocations  held MiB  imported MiB  paused MiB  resumed MiB  pause ms  resume ms  result before   result "
      "after\n");
  for (int rank = 0; rank < ranks; ++rank) {
    const Report& r = shared->ranks[rank];
    std::printf("%4d  %11lu  %8lu  %12lu  %10lu  %11lu  %8.1f  %9.1f  %013lx   %013lx\n", rank, r.allocations, r.held / kMiB,
                r.imported / kMiB, r.paused_held / kMiB, r.resumed_held / kMiB, r.pause_ms, r.resume_ms,
                r.before & 0xfffffffffffffUL, r.after & 0xfffffffffffffUL);
    held += r.held;
    freed += r.held - r.paused_held;
    back = back && r.resumed_held == r.held && r.paused_held == 0;
    identical = identical && r.before == shared->ranks[0].before && r.after == r.before;
  }
  std::uint64_t events = 0;
  const std::span<const Report> reports(shared->ranks, static_cast<std::size_t>(ranks));
  if (const Status verified = VerifyJournals(places.journals, reports, events); !verified.ok())
    return Fail("journals: " + verified.message());
  std::printf("journals: %d verified, %lu events, no violation (%s)\n", ranks, events, places.journals.c_str());
  if (!identical) return Fail("the results differ");
  if (!back) return Fail("memory was not given back, or did not come back");
  std::printf("ok ranks=%d held_mib=%lu freed_mib=%lu identical=yes driver=sim\n", ranks, held / kMiB, freed / kMiB);
  SayWhatIsNext(places, by_default);
  return 0;
}

}  // namespace
}  // namespace amem

int main(int argc, char** argv) {
  int ranks = 4;
  amem::Places places;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--ranks") == 0) ranks = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--directory") == 0) places.directory = argv[i + 1];
    if (std::strcmp(argv[i], "--tool") == 0) places.tool = argv[i + 1];
  }
  const bool asks_for_help = argc == 2 && std::strcmp(argv[1], "--help") == 0;
  if (ranks < 2 || ranks > amem::kMaxRanks || argc % 2 == 0) {
    std::fprintf(asks_for_help ? stdout : stderr, "usage: amem-demo [--ranks 2..%d] [--directory DIR] [--tool NAME]\n",
                 amem::kMaxRanks);
    return asks_for_help ? 0 : 1;
  }
  if (!places.directory.empty()) {
    std::error_code ignored;  // who cannot write there says so
    std::filesystem::create_directories(places.directory, ignored);
    places.journals = places.directory / "journal";
    return amem::Main(ranks, places, false);
  }
  // Where every job has its journals, so that the tool finds these without being told.
  const char* set = std::getenv("AMEM_JOURNAL_DIR");
  places.journals = set && *set ? std::string(set) : fmt::format("/tmp/amem-{}/journal", ::getuid());
  std::string name = std::filesystem::temp_directory_path() / "amem-demo-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr)
    return amem::Fail("cannot make a directory in " + std::filesystem::temp_directory_path().string());
  places.directory = name;
  const int code = amem::Main(ranks, places, true);
  std::error_code ignored;
  std::filesystem::remove_all(places.directory, ignored);
  return code;
}
