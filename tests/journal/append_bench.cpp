// What Append costs the calling thread, with the events of one rank of the reference workload in their proportions, and what
// reading them back costs.
//   journal_append_bench [events] [directory]
// Prints lines for people and, last, one for programs.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <vector>

#include "journal/journal.h"

namespace {

using namespace amem;

std::uint64_t Now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000U + static_cast<std::uint64_t>(t.tv_nsec);
}

// Per kind, how many of them the trace of one rank has: 30 795 calls in all.
std::vector<EventBody> Mix() {
  const CallSite site{{0xf05da, 0xf11cd, 0xf135f, 0x8a04f, 0}};
  const AllocationProperties properties{1, 1, {LocationType::kDevice, 3}, 0, 1, 0, 0};
  const Address at{0x7f1200000000};
  const Bytes bytes = 2 << 20;
  const std::pair<EventBody, int> kinds[] = {
      {AllocationReleased{AllocationId{17}}, 5913},
      {RangeFreed{at, bytes}, 2956},
      {Unmapped{at, bytes}, 2956},
      {AllocationRetained{AllocationId{17}, at}, 2956},
      {RangeReserved{at, bytes, bytes, {}, 0, site}, 2956},
      {Mapped{at, bytes, 0, AllocationId{17}, 0}, 2956},
      {AccessSet{at, bytes, {{{LocationType::kDevice, 3}, 3}}}, 2956},
      {AllocationCreated{AllocationId{17}, bytes, properties, 0, DriverHandle{0x1b4fcdf0}, site, {}}, 1773},
      {Imported{AllocationId{17}, {SessionId{5}, AllocationId{9}}, bytes, properties, 1, DriverHandle{0x1b4fcdf0}, site, {}},
       1184},
      {Exported{AllocationId{17}, 1}, 1184},
      {HostAllocated{at, bytes, 2, false}, 48},
  };
  std::vector<EventBody> mix;
  for (const auto& [body, count] : kinds) mix.insert(mix.end(), static_cast<std::size_t>(count), body);
  std::shuffle(mix.begin(), mix.end(), std::mt19937(1));
  return mix;
}

int Fail(const Status& status) {
  std::fprintf(stderr, "journal_append_bench: %s\n", status.message().c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t n = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 307'950;
  JournalOptions options;
  options.directory = argc > 2 ? argv[2] : (std::filesystem::temp_directory_path() / "amem-append-bench").string();
  std::vector<Event> events;
  for (const EventBody& body : Mix()) events.push_back({{}, 0, 4711, body});

  auto writer = JournalWriter::Open(options, SessionId{Now()});
  if (!writer) return Fail(writer.status());
  std::vector<std::uint64_t> costs(n);
  const std::uint64_t begin = Now();
  for (std::size_t i = 0; i < n; ++i) {
    Event& event = events[i % events.size()];
    event.seq = SequenceNumber{i + 1};
    event.time_ns = begin + i;
    const std::uint64_t before = Now();
    if (const Status status = (*writer)->Append(event); !status) return Fail(status);
    costs[i] = Now() - before;
  }
  const double seconds = static_cast<double>(Now() - begin) / 1e9;
  if (const Status status = (*writer)->Close(); !status) return Fail(status);

  std::sort(costs.begin(), costs.end());
  const auto at = [&](double q) { return costs[static_cast<std::size_t>(q * static_cast<double>(n - 1))]; };
  std::printf("%zu appends: median %lu ns, 90%% %lu ns, 99%% %lu ns, 99.9%% %lu ns, longest %.3f ms; %.2f million a second\n",
              n, at(0.5), at(0.9), at(0.99), at(0.999), static_cast<double>(costs.back()) / 1e6,
              static_cast<double>(n) / seconds / 1e6);
  std::uint64_t read = 0;
  const std::uint64_t reading = Now();
  auto reader = JournalReader::Open((*writer)->Directory());
  if (!reader) return Fail(reader.status());
  const auto report =
      (*reader)->Read(SequenceNumber{1}, SequenceNumber{n}, [&](const Event& e) { return e.seq.value == ++read; });
  if (!report) return Fail(report.status());
  const double each = static_cast<double>(Now() - reading) / static_cast<double>(n);
  std::printf("%lu events read back: %.0f ns each\n", read, each);
  std::printf("%s events=%zu median_ns=%lu p99_ns=%lu max_ns=%lu read_ns=%.0f\n", read == n ? "ok" : "failed", n, at(0.5),
              at(0.99), costs.back(), each);
  std::error_code ignored;
  std::filesystem::remove_all((*writer)->Directory(), ignored);
  return read == n ? 0 : 1;
}
