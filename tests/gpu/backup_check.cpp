// amem-backup-check: the backup of memory contents on a real GPU. It checks that every byte is restored, and times each stage.
//
// It needs one GPU and some 10 GiB of its memory, and neither NCCL nor AMem. Fills memory like the reference
// workload's (a seventh is not zero, in runs of up to 1 MiB), and for each size of a batch: saves, gives the memory back, makes
// it anew, fills it with 0xAB, restores, and compares every byte. Exit code 1: something differed or failed.
#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "replay/driver/cuda/cuda_driver.h"
#include "tests/replay/cycle/lone_backup.h"

extern "C" const char amem_nonzero_ptx[];
extern "C" const unsigned char amem_nonzero_fatbin[];

namespace amem {
namespace {

constexpr Bytes kKiB = 1024, kMiB = kKiB * 1024, kGiB = kMiB * 1024;
constexpr DeviceOrdinal kGpu{0};
int failures = 0;

using Clock = std::chrono::steady_clock;
double MsSince(Clock::time_point began) { return std::chrono::duration<double, std::milli>(Clock::now() - began).count(); }
double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

bool Ok(const Status& status, const char* doing) {
  if (status.ok()) return true;
  std::printf("FAILED %s: %s\n", doing, status.message().c_str());
  ++failures;
  return false;
}
template <class T>
T Get(Result<T> result, const char* doing) {
  if (Ok(result.status(), doing)) return *std::move(result);
  std::exit(1);
}

// ---- memory on the device and what it must hold ---------------------------------------------------------------------------

struct Part {
  Address address;
  Bytes bytes = 0, offset = 0;  // offset in the reference
  DriverHandle handle;
};

AllocationProperties Properties() { return {.handle_types = 1, .location = {LocationType::kDevice, 0}}; }

class Memory {
 public:
  Memory(Driver& driver, const std::vector<Bytes>& sizes) : driver_(driver) {
    for (const Bytes bytes : sizes) {
      Part part{.bytes = bytes, .offset = total_};
      part.address = Get(driver.Reserve(bytes, 0, {}, 0), "reserve");
      total_ += bytes;
      parts_.push_back(part);
    }
    Up();
  }
  ~Memory() {
    Down();
    for (const Part& part : parts_) Ok(driver_.FreeRange(part.address, part.bytes), "free range");
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void Up() {
    const AccessDescriptor access{Properties().location, 3};
    for (Part& part : parts_) {
      part.handle = Get(driver_.Create(part.bytes, Properties(), 0), "create");
      Ok(driver_.Map(part.address, part.bytes, 0, part.handle, 0), "map");
      Ok(driver_.SetAccess(part.address, part.bytes, std::span(&access, 1)), "access");
    }
  }
  void Down() {
    for (Part& part : parts_) {
      Ok(driver_.Unmap(part.address, part.bytes), "unmap");
      Ok(driver_.Release(part.handle), "release");
    }
  }
  [[nodiscard]] const std::vector<Part>& parts() const { return parts_; }
  [[nodiscard]] Bytes total() const { return total_; }
  [[nodiscard]] std::vector<Backup::Item> Items() const {
    std::vector<Backup::Item> items;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      items.push_back({AllocationId{i + 1}, kGpu, parts_[i].address, parts_[i].bytes});
    }
    return items;
  }
  [[nodiscard]] std::vector<Extent> Extents() const {
    std::vector<Extent> extents;
    for (const Part& part : parts_) extents.push_back({part.address, part.bytes});
    return extents;
  }

 private:
  Driver& driver_;
  std::vector<Part> parts_;
  Bytes total_ = 0;
};

std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// What the memory must hold: zeros, and runs of other bytes that follow from a seed.
class Reference {
 public:
  explicit Reference(Bytes bytes) : bytes_(bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) std::exit(1);
    data_ = static_cast<std::byte*>(at);
    std::uint64_t random = 1;
    const auto below = [&](std::uint64_t n) { return (random = Mix(random)) % n; };
    for (Bytes block = 0; block < bytes; block += 2 * kMiB) {
      if (below(1000) >= 482) continue;
      for (std::uint64_t runs = below(4) == 0 ? 2 : 1; runs > 0; --runs) {
        const Bytes pages = 1 + below(235), first = below(512 - pages);
        Fill(block / 4096 + first, pages, below(16) == 0);
      }
    }
  }
  ~Reference() { munmap(data_, bytes_); }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  [[nodiscard]] const std::byte* data() const { return data_; }
  [[nodiscard]] const std::vector<Extent>& runs() const { return runs_; }  // addresses are offsets

 private:
  void Fill(Bytes first, Bytes pages, bool hardly) {
    runs_.push_back({Address{first * 4096}, pages * 4096});
    for (Bytes page = first; page < first + pages; ++page) {
      std::byte* const at = data_ + page * 4096;
      if (hardly) {  // one byte only, the first and the last of the page too
        const Bytes where = page % 3 == 0 ? 0 : page % 3 == 1 ? 4095 : Mix(page) % 4096;
        at[where] = std::byte{1};
        continue;
      }
      for (Bytes i = 0; i < 512; ++i) {
        const std::uint64_t word = Mix(page * 512 + i);
        std::memcpy(at + i * 8, &word, 8);
      }
    }
  }
  Bytes bytes_;
  std::byte* data_ = nullptr;
  std::vector<Extent> runs_;
};

// In pieces of a pinned buffer, with several threads for the host's part.
class Mover {
 public:
  Mover(Driver& driver, const Reference& reference)
      : driver_(driver), reference_(reference), pinned_(Get(driver.AllocatePinned(256 * kMiB), "pin")) {}

  void Upload(const Memory& memory) {
    for (const Part& part : memory.parts()) Ok(driver_.Clear(kGpu, part.address, part.bytes), "clear");
    Ok(driver_.FinishCopies(kGpu, In(std::chrono::minutes(1))), "finish");
    std::size_t index = 0;
    Bytes filled = 0;
    const auto& parts = memory.parts();
    for (const Extent& run : reference_.runs()) {
      if (run.address.value >= memory.total()) break;
      while (parts[index].offset + parts[index].bytes <= run.address.value) ++index;
      const Part& part = parts[index];
      if (filled + run.bytes > pinned_->size()) {
        Ok(driver_.FinishCopies(kGpu, In(std::chrono::minutes(1))), "finish");
        filled = 0;
      }
      std::memcpy(pinned_->data() + filled, reference_.data() + run.address.value, run.bytes);
      const Bytes in_part = run.address.value - part.offset;
      Ok(driver_.CopyToDevice(kGpu, part.address + in_part, pinned_->data() + filled, run.bytes), "upload");
      filled += run.bytes;
    }
    Ok(driver_.FinishCopies(kGpu, In(std::chrono::minutes(1))), "finish");
  }

  bool Verify(const Memory& memory) {
    std::size_t wrong = 0;
    for (const Part& part : memory.parts()) {
      for (Bytes done = 0; done < part.bytes; done += pinned_->size()) {
        const Bytes bytes = std::min(part.bytes - done, pinned_->size());
        Ok(driver_.CopyToHost(kGpu, pinned_->data(), part.address + done, bytes), "read back");
        Ok(driver_.FinishCopies(kGpu, In(std::chrono::minutes(1))), "finish");
        if (!Equal(reference_.data() + part.offset + done, bytes)) ++wrong;
      }
    }
    if (wrong == 0) return true;
    std::printf("FAILED: %zu parts differ\n", wrong);
    ++failures;
    return false;
  }

 private:
  bool Equal(const std::byte* expected, Bytes bytes) {
    constexpr Bytes kThreads = 8;
    if (bytes < 16 * kMiB) return std::memcmp(pinned_->data(), expected, bytes) == 0;
    bool equal[kThreads];
    std::vector<std::thread> threads;
    for (Bytes t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        const Bytes from = bytes / kThreads * t, to = t + 1 == kThreads ? bytes : bytes / kThreads * (t + 1);
        equal[t] = std::memcmp(pinned_->data() + from, expected + from, to - from) == 0;
      });
    }
    for (std::thread& thread : threads) thread.join();
    return std::all_of(equal, equal + kThreads, [](bool one) { return one; });
  }
  Driver& driver_;
  const Reference& reference_;
  std::unique_ptr<PinnedBuffer> pinned_;
};

// ---- cycles ----------------------------------------------------------------------------------------------------------------

void Poison(CudaDriver& driver, const Memory& memory, PinnedBuffer& pattern) {
  std::memset(pattern.data(), 0xAB, pattern.size());
  for (const Part& part : memory.parts()) {
    for (Bytes done = 0; done < part.bytes; done += pattern.size()) {
      Ok(driver.CopyToDevice(kGpu, part.address + done, pattern.data(), std::min(pattern.size(), part.bytes - done)), "poison");
    }
  }
  Ok(driver.FinishCopies(kGpu, In(std::chrono::minutes(1))), "finish");
}

struct Variant {
  const char* name;
  Bytes batch = kGiB;
};

enum class Between { kNothing, kPoison, kAnew, kAnewAndPoison };  // of saving and restoring

void Cycles(CudaDriver& driver, Memory& memory, Mover& mover, PinnedBuffer& pattern, const Variant& variant, int cycles,
            Between between = Between::kAnewAndPoison) {
  test::LoneBackup backup(driver, {.batch = variant.batch});
  const auto items = memory.Items();
  double first = 0;
  std::vector<double> scan, queue, save, restore_queue, restore;
  BackupStatistics statistics;
  for (int cycle = 0; cycle <= cycles; ++cycle) {
    auto began = Clock::now();
    if (!Ok(backup.Save(items), "save")) return;
    const double queued = MsSince(began);
    if (!Ok(backup.Finish(), "finish saving")) return;
    const double saved = MsSince(began);
    statistics = backup.Statistics();
    if (between == Between::kAnew || between == Between::kAnewAndPoison) {
      memory.Down();
      memory.Up();
    }
    if (between == Between::kPoison || between == Between::kAnewAndPoison) Poison(driver, memory, pattern);
    began = Clock::now();
    if (!Ok(backup.Restore(items), "restore")) return;
    const double restore_queued = MsSince(began);
    if (!Ok(backup.Finish(), "finish restoring")) return;
    const double restored = MsSince(began);
    backup.ForgetAll();
    if (cycle == cycles && !mover.Verify(memory)) return;
    if (cycle == 0) {
      first = saved;
      continue;
    }
    scan.push_back(static_cast<double>(statistics.scan_ns) / 1e6);
    queue.push_back(queued);
    save.push_back(saved);
    restore_queue.push_back(restore_queued);
    restore.push_back(restored);
  }
  const double gb = static_cast<double>(statistics.bytes_saved) / 1e6;  // per ms: GB/s
  std::printf(
      "%-34s saved %5.0f MiB  first %6.1f | scan %5.2f queued %5.2f save %6.2f (%4.1f GB/s) | "
      "queued %5.2f restore %6.2f (%4.1f GB/s)%s\n",
      variant.name, static_cast<double>(statistics.bytes_saved) / static_cast<double>(kMiB), first, Median(scan), Median(queue),
      Median(save), gb / Median(save), Median(restore_queue), Median(restore), gb / Median(restore),
      statistics.unscanned.empty() ? "" : (" UNSCANNED: " + statistics.unscanned).c_str());
  std::fflush(stdout);
}

// The time of each stage alone, for all of the memory at once.
void Stages(CudaDriver& driver, const Memory& memory, const char* layout) {
  const auto extents = memory.Extents();
  const auto key = Get(RandomContentKey(), "key");
  std::vector<double> find, nothing;
  for (int i = 0; i < 6; ++i) {
    auto began = Clock::now();
    static_cast<void>(Get(driver.FindNonZero(kGpu, extents, key.get(), In(std::chrono::minutes(1))), "find"));
    find.push_back(MsSince(began));
    began = Clock::now();
    Ok(driver.FinishCopies(kGpu, In(std::chrono::minutes(1))), "finish");
    nothing.push_back(MsSince(began));
  }
  std::printf("%s: find everything %.2f ms, close the buffer %.2f ms (medians); with the first one %.2f ms\n", layout,
              Median(find), Median(nothing), find.front());
}

void Clears(CudaDriver& driver, const Memory& memory, const char* layout) {
  const auto extents = memory.Extents();
  std::vector<double> kernel, memsets;
  for (int i = 0; i < 6; ++i) {
    auto began = Clock::now();
    Ok(driver.ClearAll(kGpu, extents), "clear all");
    Ok(driver.FinishCopies(kGpu, In(std::chrono::minutes(1))), "finish");
    kernel.push_back(MsSince(began));
    began = Clock::now();
    Ok(driver.Driver::ClearAll(kGpu, extents), "memsets");
    Ok(driver.FinishCopies(kGpu, In(std::chrono::minutes(1))), "finish");
    memsets.push_back(MsSince(began));
  }
  std::printf("%s: clear everything by kernel %.2f ms (buffer and all), by %zu memsets %.2f ms\n", layout, Median(kernel),
              extents.size(), Median(memsets));
}

// How much the mappings of a resume and copies at the same time slow each other down.
struct Imports {
  std::vector<UniqueFd> descriptors;
  std::vector<Address> addresses;
};

double ImportAndMap(CudaDriver& driver, const Imports& imports, Bytes bytes, std::vector<DriverHandle>& handles) {
  const auto began = Clock::now();
  const AccessDescriptor access{Properties().location, 3};
  for (std::size_t i = 0; i < imports.descriptors.size(); ++i) {
    handles.push_back(Get(driver.Import(imports.descriptors[i]), "import"));
    Ok(driver.Map(imports.addresses[i], bytes, 0, handles.back(), 0), "map");
    Ok(driver.SetAccess(imports.addresses[i], bytes, std::span(&access, 1)), "access");
  }
  return MsSince(began);
}

void Drop(CudaDriver& driver, const Imports& imports, Bytes bytes, std::vector<DriverHandle>& handles) {
  for (const Address address : imports.addresses) Ok(driver.Unmap(address, bytes), "unmap");
  for (const DriverHandle handle : handles) Ok(driver.Release(handle), "release");
  handles.clear();
}

void Beside(CudaDriver& driver, const Memory& memory) {
  test::LoneBackup backup(driver);
  const auto items = memory.Items();
  if (!Ok(backup.Save(items), "save") || !Ok(backup.Finish(), "finish")) return;
  constexpr Bytes kSlab = 256 * kMiB;
  const Memory owner(driver, std::vector<Bytes>(16, kSlab));
  Imports imports;
  for (const Part& part : owner.parts()) {
    imports.descriptors.push_back(Get(driver.Export(part.handle), "export"));
    imports.addresses.push_back(Get(driver.Reserve(kSlab, 0, {}, 0), "reserve"));
  }
  std::vector<double> alone, only, beside, restore;
  std::vector<DriverHandle> handles;
  for (int i = 0; i < 5; ++i) {
    alone.push_back(ImportAndMap(driver, imports, kSlab, handles));
    Drop(driver, imports, kSlab, handles);
    auto began = Clock::now();
    if (!Ok(backup.Restore(items), "restore") || !Ok(backup.Finish(), "finish")) return;
    only.push_back(MsSince(began));
    began = Clock::now();
    if (!Ok(backup.Restore(items), "restore")) return;
    beside.push_back(ImportAndMap(driver, imports, kSlab, handles));
    if (!Ok(backup.Finish(), "finish")) return;
    restore.push_back(MsSince(began));
    Drop(driver, imports, kSlab, handles);
  }
  for (const Address address : imports.addresses) Ok(driver.FreeRange(address, kSlab), "free range");
  std::printf(
      "import, map and access of 16 slabs of 256 MiB: alone %.2f ms, while contents come back %.2f ms; contents "
      "alone %.2f ms, beside %.2f ms\n",
      Median(alone), Median(beside), Median(only), Median(restore));
}

// ---- pinning, and what a running kernel does to it ------------------------------------------------------------------------

constexpr const char* kSpin = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 nanoseconds) {
  .reg .u64 %t<4>;
  .reg .pred %p<2>;
  ld.param.u64 %t1, [nanoseconds];
  mov.u64 %t2, %globaltimer;
  add.u64 %t2, %t2, %t1;
LOOP:
  mov.u64 %t3, %globaltimer;
  setp.lt.u64 %p1, %t3, %t2;
  @%p1 bra LOOP;
  ret;
}
)";

struct Raw {
  template <class F>
  F Find(const char* name) {
    return reinterpret_cast<F>(dlsym(library, name));
  }
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  decltype(&cuDevicePrimaryCtxRetain) retain = Find<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain");
  decltype(&cuCtxSetCurrent) set_current = Find<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent");
  decltype(&cuModuleLoadData) load = Find<decltype(&cuModuleLoadData)>("cuModuleLoadData");
  decltype(&cuModuleUnload) unload = Find<decltype(&cuModuleUnload)>("cuModuleUnload");
  decltype(&cuModuleGetFunction) function = Find<decltype(&cuModuleGetFunction)>("cuModuleGetFunction");
  decltype(&cuLaunchKernel) launch = Find<decltype(&cuLaunchKernel)>("cuLaunchKernel");
  decltype(&cuStreamCreate) stream_create = Find<decltype(&cuStreamCreate)>("cuStreamCreate");
  decltype(&cuStreamSynchronize) synchronize = Find<decltype(&cuStreamSynchronize)>("cuStreamSynchronize");
  decltype(&cuMemHostAlloc) host_alloc = Find<decltype(&cuMemHostAlloc)>("cuMemHostAlloc");
  decltype(&cuMemFreeHost) host_free = Find<decltype(&cuMemFreeHost)>("cuMemFreeHost");
  decltype(&cuMemHostRegister) host_register = Find<decltype(&cuMemHostRegister)>("cuMemHostRegister_v2");
  decltype(&cuMemHostUnregister) host_unregister = Find<decltype(&cuMemHostUnregister)>("cuMemHostUnregister");
};

void* Mapped(Bytes bytes, bool huge) {
  void* at = mmap(nullptr, bytes + 2 * kMiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto aligned = (reinterpret_cast<std::uintptr_t>(at) + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
  at = reinterpret_cast<void*>(aligned);
  madvise(at, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return at;
}

void Pinning(CudaDriver& driver, Raw& raw) {
  constexpr Bytes kBytes = 512 * kMiB;
  for (int round = 0; round < 2; ++round) {
    auto began = Clock::now();
    std::vector<void*> allocated(8);
    for (void*& one : allocated) raw.host_alloc(&one, kBytes / 8, CU_MEMHOSTALLOC_PORTABLE);
    const double alloc = MsSince(began);
    began = Clock::now();
    for (void* one : allocated) raw.host_free(one);
    std::printf("pin 512 MiB, cuMemHostAlloc 8 x 64 MiB: %.1f ms, free %.1f ms\n", alloc, MsSince(began));
    began = Clock::now();
    std::vector<std::unique_ptr<PinnedBuffer>> buffers;
    for (int i = 0; i < 8; ++i) buffers.push_back(Get(driver.AllocatePinned(kBytes / 8), "pin"));
    const double ours = MsSince(began);
    began = Clock::now();
    buffers.clear();
    std::printf("pin 512 MiB, AllocatePinned 8 x 64 MiB: %.1f ms, free %.1f ms\n", ours, MsSince(began));
    for (const bool huge : {false, true}) {
      void* at = Mapped(kBytes, huge);
      began = Clock::now();
      for (Bytes i = 0; i < kBytes; i += 4096) static_cast<volatile char*>(at)[i] = 0;
      const double touch = MsSince(began);
      began = Clock::now();
      CUresult result = CUDA_SUCCESS;
      for (Bytes i = 0; i < 8 && result == CUDA_SUCCESS; ++i) {
        result = raw.host_register(static_cast<char*>(at) + i * (kBytes / 8), kBytes / 8, CU_MEMHOSTREGISTER_PORTABLE);
      }
      const double registered = MsSince(began);
      began = Clock::now();
      for (Bytes i = 0; i < 8; ++i) raw.host_unregister(static_cast<char*>(at) + i * (kBytes / 8));
      std::printf("pin 512 MiB, %s pages: touch %.1f ms, cuMemHostRegister %.1f ms (%d), unregister %.1f ms\n",
                  huge ? "huge" : "small", touch, registered, result, MsSince(began));
      munmap(at, kBytes);
    }
  }
}

// Each call alone and while a kernel runs: one that waits takes the kernel's 300 ms.
void Hazards(Raw& raw) {
  CUmodule module = nullptr;
  CUfunction spin = nullptr;
  CUstream stream = nullptr;
  if (raw.load(&module, kSpin) != CUDA_SUCCESS || raw.function(&spin, module, "spin") != CUDA_SUCCESS ||
      raw.stream_create(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) {
    std::printf("no hazards: the spinning kernel does not load\n");
    return;
  }
  void* pinned = nullptr;
  void* mapped = Mapped(64 * kMiB, true);
  std::memset(mapped, 1, 64 * kMiB);
  CUmodule loaded = nullptr;
  CUfunction found = nullptr;
  const std::vector<std::pair<const char*, std::function<int()>>> calls = {
      {"cuMemHostAlloc 64 MiB", [&] { return raw.host_alloc(&pinned, 64 * kMiB, CU_MEMHOSTALLOC_PORTABLE); }},
      {"cuMemFreeHost 64 MiB", [&] { return raw.host_free(pinned); }},
      {"cuMemHostRegister 64 MiB", [&] { return raw.host_register(mapped, 64 * kMiB, CU_MEMHOSTREGISTER_PORTABLE); }},
      {"cuMemHostUnregister 64 MiB", [&] { return raw.host_unregister(mapped); }},
      {"cuModuleLoadData fatbin", [&] { return raw.load(&loaded, amem_nonzero_fatbin); }},
      {"cuModuleGetFunction", [&] { return raw.function(&found, loaded, "amem_sparse_look"); }},
      {"cuModuleUnload", [&] { return raw.unload(loaded); }},
      {"cuModuleLoadData PTX", [&] { return raw.load(&loaded, amem_nonzero_ptx); }},
      {"cuModuleGetFunction", [&] { return raw.function(&found, loaded, "amem_sparse_copy"); }},
      {"cuModuleUnload", [&] { return raw.unload(loaded); }},
  };
  for (const bool busy : {false, true, true}) {
    for (const auto& [name, call] : calls) {
      std::uint64_t nanoseconds = 300'000'000;
      void* arguments[] = {&nanoseconds};
      if (busy) raw.launch(spin, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr);
      if (busy) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const auto began = Clock::now();
      const int result = call();
      std::printf("%-28s %s: %.2f ms (%d)\n", name, busy ? "while a kernel runs 300 ms" : "alone", MsSince(began), result);
      raw.synchronize(stream);
    }
  }
}

// With the device's memory used up, AMem gets smaller buffers or none, and must still restore every byte.
void Full(CudaDriver& driver, Memory& memory, Mover& mover, PinnedBuffer& pattern, int cycles) {
  std::vector<DriverHandle> ballast;
  for (Bytes bytes = 4 * kGiB; bytes >= 2 * kMiB; bytes /= 2) {
    for (;;) {
      auto handle = driver.Create(bytes, Properties(), 0);
      if (!handle.ok()) break;
      ballast.push_back(*handle);
    }
  }
  const auto left = driver.Memory(kGpu);
  std::printf("device filled with %zu handles; %.0f MiB free\n", ballast.size(),
              left.ok() ? static_cast<double>(left->free) / static_cast<double>(kMiB) : -1);
  Cycles(driver, memory, mover, pattern, {"full device", {}}, cycles, Between::kPoison);
  for (const DriverHandle handle : ballast) Ok(driver.Release(handle), "release");
}

int Main(int argc, char** argv) {
  int cycles = 5;
  bool hazards = true, quick = false;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  CLI::App app("The backup of memory contents on GPU 0: every byte must be restored, and each stage is timed");
  app.add_option("--cycles", cycles, "For each size of a batch")
      ->check(CLI::Range(1, 1'000'000))
      ->type_name("N")
      ->capture_default_str();
  app.add_flag("!--no-hazards", hazards, "Without the calls that wait for a running kernel");
  app.add_flag("--quick", quick, "Only as AMem copies, in slabs");
  CLI11_PARSE(app, argc, argv);
  auto loaded = CudaDriver::LoadSystem();
  if (!loaded.ok()) {
    std::printf("WAIVED: %s\n", loaded.status().message().c_str());
    return 77;
  }
  CudaDriver& driver = **loaded;
  auto pattern = Get(driver.AllocatePinned(64 * kMiB), "pin");
  const auto memory_info = Get(driver.Memory(kGpu), "memory");
  std::printf("driver %s, device 0 %s, %.0f of %.0f MiB free\n", driver.Version().c_str(),
              Get(driver.DeviceUuid(kGpu), "uuid").c_str(), static_cast<double>(memory_info.free) / static_cast<double>(kMiB),
              static_cast<double>(memory_info.total) / static_cast<double>(kMiB));
  Raw raw;
  CUcontext context = nullptr;
  raw.retain(&context, 0);
  raw.set_current(context);
  if (!quick) Pinning(driver, raw);
  if (hazards && !quick) Hazards(raw);

  std::vector<Bytes> slabs(33, 256 * kMiB), allocations(1180, 2 * kMiB);
  slabs.push_back(slabs.back() - 512 * kMiB / 4 + 2 * kMiB);
  allocations.insert(allocations.end(), 592, 10 * kMiB);
  const Reference reference(9 * kGiB);
  Mover mover(driver, reference);
  if (!quick) {
    Memory memory(driver, allocations);
    mover.Upload(memory);
    std::printf("layout direct, %zu allocations, %llu MiB\n", memory.parts().size(),
                static_cast<unsigned long long>(memory.total() / kMiB));
    Stages(driver, memory, "direct");
    Cycles(driver, memory, mover, *pattern, {"direct: as it is used"}, cycles);
    Clears(driver, memory, "direct");
  }
  Memory memory(driver, slabs);
  mover.Upload(memory);
  std::printf("layout slabs, %zu slabs, %llu MiB\n", memory.parts().size(),
              static_cast<unsigned long long>(memory.total() / kMiB));
  Stages(driver, memory, "slabs");
  const Variant variants[] = {
      {"as it is used"},
      {"batch 256 MiB", 256 * kMiB},
      {"one batch", 1024 * kGiB},
  };
  for (const Variant& variant : variants) {
    Cycles(driver, memory, mover, *pattern, variant, cycles);
    if (quick) return failures == 0 ? 0 : 1;
  }
  std::printf("restored at once when the memory is made anew:\n");
  for (const Variant& variant : {Variant{"as it is used, anew"}, Variant{"one batch, anew", 1024 * kGiB}})
    Cycles(driver, memory, mover, *pattern, variant, cycles, Between::kAnew);
  Beside(driver, memory);
  Full(driver, memory, mover, *pattern, 1);
  {  // the first pause with everything prepared
    test::LoneBackup backup(driver);
    auto began = Clock::now();
    backup.Prepare(backup.Expected(memory.total()));
    while (backup.pinned_bytes() < backup.Expected(memory.total())) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::printf("prepared %llu MiB in %.1f ms\n", static_cast<unsigned long long>(backup.pinned_bytes() / kMiB),
                MsSince(began));
    for (int i = 0; i < 3; ++i) {
      began = Clock::now();
      Ok(backup.Save(memory.Items()), "save");
      Ok(backup.Finish(), "finish");
      std::printf("save %d after preparing: %.2f ms, pinned in it %llu MiB\n", i + 1, MsSince(began),
                  static_cast<unsigned long long>(backup.Statistics().pinned_in_save / kMiB));
      backup.ForgetAll();
    }
  }
  Clears(driver, memory, "slabs");
  std::printf("%s\n", failures == 0 ? "ALL BYTES EQUAL" : "FAILED");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace amem

int main(int argc, char** argv) { return amem::Main(argc, argv); }
