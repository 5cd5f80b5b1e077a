// What counting costs a launch of NCCL's: the entry point that ships, before a function that does nothing, beside that function
// alone, and beside an entry point that only notes the communicator. Processor time, medians of runs in turns.
//
// launches_bench
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ncclpatch/nccl/calls.h"
#include "ncclpatch/nccl/launches.h"

namespace amem::nccl {
namespace {

using AllReduce = int(const void*, void*, std::size_t, int, int, ncclComm*, void*);
using Register = int(ncclComm*, void*, std::size_t, void**);
[[gnu::noinline]] int NoReduce(const void*, void*, std::size_t, int, int, ncclComm*, void*) { return 0; }
[[gnu::noinline]] int NoRegister(ncclComm*, void*, std::size_t, void**) { return 0; }
[[gnu::noinline]] int NoGroup() { return 0; }

double ThreadNanoseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

void* EntryOf(const char* name, void* real) {
  for (const redirects::Table& table : Tables()) {
    for (const redirects::Redirect& redirect : table) {
      if (std::strcmp(redirect.name, name) != 0) continue;
      redirect.reals[0].store(real);
      return redirect.entries[0];
    }
  }
  std::abort();
}

ncclComm* Made(std::uintptr_t address, std::uint64_t clock) {
  auto* const comm = reinterpret_cast<ncclComm*>(address);
  Communicator known{.how = "init", .name = clock, .rank = 0, .ranks = 8, .device = DeviceOrdinal{0}};
  known.id = registry::Begin(known);
  registry::Bind(known.id, comm);
  registry::MarkReady(known);
  return comm;
}

constexpr int kRuns = 101, kCalls = 20'000;
template <class Call>
double Run(const Call& call) {
  const double begun = ThreadNanoseconds();
  for (int i = 0; i < kCalls; ++i) call(i);
  return (ThreadNanoseconds() - begun) / kCalls;
}
// What `other` takes beyond `alone`.
template <class Alone, class Other>
double More(const Alone& alone, const Other& other) {
  std::vector<double> differences;
  for (int i = 0; i < kRuns; ++i) {
    const double first = Run(alone);
    differences.push_back(Run(other) - first);
  }
  std::ranges::nth_element(differences, differences.begin() + kRuns / 2);
  return differences[kRuns / 2];
}

int Main() {
  AllReduce* volatile plain = &NoReduce;
  AllReduce* volatile counts = reinterpret_cast<AllReduce*>(EntryOf("ncclAllReduce", reinterpret_cast<void*>(&NoReduce)));
  Register* volatile plain_note = &NoRegister;
  Register* volatile notes = reinterpret_cast<Register*>(EntryOf("ncclCommRegister", reinterpret_cast<void*>(&NoRegister)));
  auto* const start = reinterpret_cast<int (*)()>(EntryOf("ncclGroupStart", reinterpret_cast<void*>(&NoGroup)));
  auto* const end = reinterpret_cast<int (*)()>(EntryOf("ncclGroupEnd", reinterpret_cast<void*>(&NoGroup)));
  ncclComm* const comms[] = {Made(0x7000, 1), Made(0x18000, 2), Made(0x2a000, 3)};
  const auto call = [&](AllReduce* function, ncclComm* comm) { function(nullptr, nullptr, 8, 7, 0, comm, nullptr); };
  const double note =
      More([&](int) { plain_note(comms[0], nullptr, 0, nullptr); }, [&](int) { notes(comms[0], nullptr, 0, nullptr); });
  const double one = More([&](int) { call(plain, comms[0]); }, [&](int) { call(counts, comms[0]); });
  const double three = More([&](int i) { call(plain, comms[i % 3]); }, [&](int i) { call(counts, comms[i % 3]); });
  const double grouped = More(
      [&](int) {
        for (int i = 0; i < 8; ++i) call(plain, comms[0]);
      },
      [&](int) {
        start();
        for (int i = 0; i < 8; ++i) call(counts, comms[0]);
        end();
      });
  std::printf("an entry that only notes the communicator: %.1f ns more than the call\n", note);
  std::printf("a launch: %.1f ns; on three communicators in turn: %.1f ns; of these for counting: %.1f ns\n", one, three,
              one - note);
  std::printf("a launch of eight in a group, with the group's calls: %.1f ns\n", grouped / 8);
  return 0;
}

}  // namespace
}  // namespace amem::nccl

int main() { return amem::nccl::Main(); }
