// amem-hash-check: the hash of contents on a real GPU. One JSON line says how fast it is, whether the kernel's values are those
// of its twin on the CPU, and whether it misses random changes. Exit code: 1 if one differed or a change was missed.
//
// It needs one GPU with --gib of free memory, and neither NCCL nor AMem.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "replay/driver/cuda/cuda_driver.h"
#include "tests/replay/driver/hash_unit.h"

namespace amem {
namespace {

constexpr Bytes kMiB = Bytes{1} << 20, kGiB = kMiB << 10;
constexpr DeviceOrdinal kGpu{0};

using Clock = std::chrono::steady_clock;

template <class T>
T Get(Result<T> result, const char* doing) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "%s: %s\n", doing, result.status().message().c_str());
  std::exit(1);
}
void Ok(const Status& status, const char* doing) { Get(status.ok() ? Result<int>(0) : Result<int>(status), doing); }

Deadline Soon() { return In(std::chrono::minutes(1)); }

struct Memory {
  Address address;
  Bytes bytes = 0;
};

Memory Allocate(Driver& driver, Bytes gib) {
  const AllocationProperties properties{.handle_types = 1, .location = {LocationType::kDevice, 0}};
  const AccessDescriptor access{properties.location, 3};
  const Memory memory{Get(driver.Reserve(gib * kGiB, 0, {}, 0), "reserve"), gib * kGiB};
  for (Bytes at = 0; at < memory.bytes; at += kGiB) {
    const DriverHandle handle = Get(driver.Create(kGiB, properties, 0), "create");
    Ok(driver.Map(memory.address + at, kGiB, 0, handle, 0), "map");
  }
  Ok(driver.SetAccess(memory.address, memory.bytes, std::span(&access, 1)), "access");
  return memory;
}

std::vector<Extent> Cut(const Memory& memory, Bytes each) {
  std::vector<Extent> extents;
  for (Bytes at = 0; at < memory.bytes; at += each) extents.push_back({memory.address + at, std::min(each, memory.bytes - at)});
  return extents;
}

// Milliseconds of looking at all extents, a gibibyte at a time as a pause does: the median of seven, after one that is not
// counted.
double Milliseconds(Copier& copier, const ContentKey& key, const std::vector<Extent>& extents, Bytes at_once) {
  std::vector<double> times;
  const std::size_t count = std::max<std::size_t>(1, at_once / extents.front().bytes);
  for (int i = 0; i < 8; ++i) {
    const auto began = Clock::now();
    for (std::size_t first = 0; first < extents.size(); first += count) {
      const auto some = std::span(extents).subspan(first, std::min(count, extents.size() - first));
      const NonZero found = Get(copier.FindNonZero(kGpu, some, &key, Soon()), "look");
      if (found.unscanned.empty()) continue;
      std::fprintf(stderr, "%s\n", found.unscanned.c_str());
      std::exit(1);
    }
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - began).count());
  }
  std::sort(times.begin() + 1, times.end());
  return times[4];
}

class Check {
 public:
  Check(CudaDriver& driver, std::uint64_t seed) : driver_(driver), random_(seed) {}

  // Contents that do not compress, with some zero pages and pages of one byte, in all of the memory.
  void Fill(const Memory& memory) {
    Randomize(0, mirror_->size());
    for (Bytes page = 0; page < mirror_->size(); page += kPageBytes) {
      if (Below(16) != 0) continue;
      std::memset(mirror_->data() + page, 0, kPageBytes);
      if (Below(2) == 0) mirror_->data()[page + Below(kPageBytes)] = std::byte{1};
    }
    for (Bytes at = 0; at < memory.bytes; at += mirror_->size())
      Ok(driver_.CopyToDevice(kGpu, memory.address + at, mirror_->data(), std::min(mirror_->size(), memory.bytes - at)),
         "fill");
    Ok(driver_.FinishCopies(kGpu, Soon()), "finish");
  }

  // Units that the kernel and its twin do not agree about, of the mirrored part cut in extents of that size.
  std::size_t Differing(const Memory& memory, const ContentKey& key, Bytes each) {
    const auto extents = Cut({memory.address, mirror_->size()}, each);
    const NonZero found = Get(driver_.FindNonZero(kGpu, extents, &key, Soon()), "look");
    std::size_t unit = 0, differing = 0;
    for (const Extent& extent : extents) {
      for (Bytes done = 0; done < extent.bytes; done += kUnitBytes, ++unit) {
        const std::byte* const host = mirror_->data() + (extent.address.value - memory.address.value) + done;
        std::uint32_t pages = 0;
        const ContentHash hash = HashUnit(key, {host, std::min(kUnitBytes, extent.bytes - done)}, &pages);
        if (hash != found.hashes[unit] || pages != found.pages[unit]) ++differing;
      }
    }
    return differing;
  }

  // Changes some units of the mirrored part at once, and looks which the hash says are changed.
  struct Changes {
    std::size_t made = 0, missed = 0, imagined = 0;
  };
  Changes Change(const Memory& memory, const ContentKey& key, std::size_t wanted) {
    const Extent all{memory.address, mirror_->size()};
    const std::size_t units = all.bytes / kUnitBytes;
    Changes changes;
    auto before = Get(driver_.FindNonZero(kGpu, std::span(&all, 1), &key, Soon()), "look").hashes;
    while (changes.made < wanted) {
      std::vector<bool> changed(units, false);
      for (int i = 0; i < 256; ++i) {
        const std::size_t unit = Below(units), other = Below(units);
        if (changed[unit] || changed[other] || unit == other) continue;
        ChangeOne(memory, unit, other, changed);
      }
      Ok(driver_.FinishCopies(kGpu, Soon()), "finish");
      const auto after = Get(driver_.FindNonZero(kGpu, std::span(&all, 1), &key, Soon()), "look").hashes;
      for (std::size_t unit = 0; unit < units; ++unit) {
        changes.made += changed[unit] ? 1 : 0;
        changes.missed += changed[unit] && before[unit] == after[unit] ? 1 : 0;
        changes.imagined += !changed[unit] && before[unit] != after[unit] ? 1 : 0;
      }
      before = after;
    }
    return changes;
  }

 private:
  std::uint64_t Below(std::uint64_t n) { return random_() % n; }
  void Randomize(Bytes from, Bytes bytes) {
    for (Bytes at = 0; at < bytes; at += 8) {
      const std::uint64_t word = random_();
      std::memcpy(mirror_->data() + from + at, &word, 8);
    }
  }
  void Send(const Memory& memory, Bytes from, Bytes bytes) {
    Ok(driver_.CopyToDevice(kGpu, memory.address + from, mirror_->data() + from, bytes), "change");
  }
  void ChangeOne(const Memory& memory, std::size_t unit, std::size_t other, std::vector<bool>& changed) {
    const Bytes begin = unit * kUnitBytes, at = begin + Below(kUnitBytes);
    changed[unit] = true;
    switch (Below(4)) {
      case 0:
        mirror_->data()[at] ^= std::byte{1} << Below(8);
        return Send(memory, at / kPageBytes * kPageBytes, kPageBytes);
      case 1:
        mirror_->data()[at] ^= static_cast<std::byte>(1 + Below(255));
        return Send(memory, at / kPageBytes * kPageBytes, kPageBytes);
      case 2:
        Randomize(begin, kUnitBytes);
        return Send(memory, begin, kUnitBytes);
      default:
        changed[other] = true;
        std::swap_ranges(mirror_->data() + begin, mirror_->data() + begin + kUnitBytes, mirror_->data() + other * kUnitBytes);
        Send(memory, begin, kUnitBytes);
        return Send(memory, other * kUnitBytes, kUnitBytes);
    }
  }

  CudaDriver& driver_;
  std::mt19937_64 random_;
  const std::unique_ptr<PinnedBuffer> mirror_ = Get(driver_.AllocatePinned(256 * kMiB), "pin");
};

int Run(Bytes gib, std::size_t wanted, std::uint64_t seed) {
  const auto driver = Get(CudaDriver::LoadSystem(), "load the CUDA driver");
  const auto lane = Get(driver->OpenLane(), "open a lane");
  const auto key = Get(RandomContentKey(), "key");
  const Memory memory = Allocate(*driver, gib);
  Ok(driver->Clear(kGpu, memory.address, memory.bytes), "clear");
  Ok(driver->FinishCopies(kGpu, Soon()), "finish");
  const double zero = Milliseconds(*driver, *key, Cut(memory, 64 * kMiB), memory.bytes);
  Check check(*driver, seed);
  check.Fill(memory);
  const double at_once = Milliseconds(*driver, *key, Cut(memory, 64 * kMiB), memory.bytes);
  const double by_gib = Milliseconds(*driver, *key, Cut(memory, 64 * kMiB), kGiB);
  const double in_lane = Milliseconds(*lane, *key, Cut(memory, 64 * kMiB), kGiB);
  const double small = Milliseconds(*lane, *key, Cut(memory, 2 * kMiB), kGiB);
  const std::size_t differing = check.Differing(memory, *key, 64 * kMiB) + check.Differing(memory, *key, 300 * 1024);
  const Check::Changes changes = check.Change(memory, *key, wanted);
  const bool ok = differing == 0 && changes.missed == 0 && changes.imagined == 0;
  const double terabytes = static_cast<double>(memory.bytes) / 1e9;
  std::printf(
      "{\"part\": \"hash\", \"gpu\": \"%s\", \"driver\": \"%s\", \"gib\": %llu, \"all_at_once_ms\": %.3f, \"tb_per_s\": %.2f, "
      "\"zero_ms\": %.3f, \"by_gib_ms\": %.3f, \"lane_by_gib_ms\": %.3f, \"lane_in_2_mib_ms\": %.3f, "
      "\"differs_from_twin\": %zu, \"changes\": %zu, \"missed\": %zu, \"imagined\": %zu, \"ok\": %s}\n",
      Get(driver->DeviceUuid(kGpu), "uuid").c_str(), driver->Version().c_str(), static_cast<unsigned long long>(gib), at_once,
      terabytes / at_once, zero, by_gib, in_lane, small, differing, changes.made, changes.missed, changes.imagined,
      ok ? "true" : "false");
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace amem

int main(int argc, char** argv) {
  CLI::App app("The hash of contents on a GPU");
  amem::Bytes gib = 16;
  std::size_t changes = 100'000;
  std::uint64_t seed = 1;
  app.add_option("--gib", gib, "of GPU memory that are looked at");
  app.add_option("--changes", changes, "random changes, none of which may be missed");
  app.add_option("--seed", seed, "of contents and changes");
  CLI11_PARSE(app, argc, argv);
  return amem::Run(gib, changes, seed);
}
