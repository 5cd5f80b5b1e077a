// What Append costs the calling thread, with the events of one rank of the reference workload in their proportions, and what
// reading them back costs.
//   journal_append_bench [events] [directory] [calls]
// `calls`: as where there is no memory for the tail.
// Prints lines for people and, last, one for programs.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "journal/journal.h"
#include "tests/journal/mix.h"

namespace {

using namespace amem;

std::uint64_t Now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000U + static_cast<std::uint64_t>(t.tv_nsec);
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
  options.tail_in_memory = argc <= 3;
  std::vector<Event> events;
  for (const EventBody& body : test::Mix()) events.push_back({{}, 0, 4711, body});

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
