#include "ncclpatch/nccl/hash.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace amem::nccl {
namespace {

// NCCL's communicators have some 100 KiB, and the hash is near their beginning.
constexpr std::size_t kMostBytes = std::size_t{512} << 10, kPage = 4096;

std::mutex& Mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// Where the hash may be, by library: the places where every communicator with a known hash has it.
std::map<std::uint64_t, std::vector<std::size_t>>& Places() {
  static auto* places = new std::map<std::uint64_t, std::vector<std::size_t>>;
  return *places;
}

// Through the kernel, which stops where memory is not mapped in place of a fault.
std::size_t Copy(const void* from, void* to, std::size_t bytes) {
  const iovec local{to, bytes};
  const iovec remote{const_cast<void*>(from), bytes};
  const ssize_t copied = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
  return copied < 0 ? 0 : static_cast<std::size_t>(copied);
}

// By way of the stack, so that no copies are left in the heap, where the next search would find them.
std::vector<std::size_t> PlacesOf(std::uint64_t hash, const ncclComm* comm) {
  std::vector<std::size_t> found;
  const auto begin = reinterpret_cast<std::uintptr_t>(comm);
  std::uint64_t words[kPage / sizeof(std::uint64_t)];
  for (std::size_t done = 0; done < kMostBytes;) {  // up to the first page that cannot be read
    const std::size_t piece = kPage - (begin + done) % kPage;
    if (Copy(reinterpret_cast<const void*>(begin + done), words, piece) != piece) break;
    for (std::size_t i = 0; i < piece / sizeof(std::uint64_t); ++i)
      if (words[i] == hash) found.push_back(done + i * sizeof(std::uint64_t));
    done += piece;
  }
  return found;
}

// Nothing is learned from a communicator that has its hash nowhere that the others have it.
std::uint64_t Learn(std::vector<std::size_t>& places, const ncclComm* comm, std::uint64_t expected) {
  std::vector<std::size_t> found = PlacesOf(expected, comm);
  if (!places.empty())
    std::erase_if(found, [&](std::size_t place) { return std::find(places.begin(), places.end(), place) == places.end(); });
  if (found.empty()) return 0;
  places = std::move(found);
  return expected;
}

std::uint64_t ReadAt(const std::vector<std::size_t>& places, const ncclComm* comm) {
  std::uint64_t hash = 0;
  for (const std::size_t place : places) {
    std::uint64_t here = 0;
    if (Copy(reinterpret_cast<const char*>(comm) + place, &here, sizeof here) != sizeof here) return 0;
    if (hash != 0 && here != hash) return 0;
    hash = here;
  }
  return hash;
}

bool CanRead(const ncclComm* comm) {
  std::uint64_t word = 0;
  return Copy(comm, &word, sizeof word) == sizeof word;
}

}  // namespace

// char is signed or not as it is in NCCL, which is built for the same processor.
std::uint64_t HashOf(const UniqueId& id) {
  std::uint64_t hash = 5381;
  for (const char byte : id.bytes) hash = (hash * 33) ^ static_cast<std::uint64_t>(byte);
  return hash;
}

std::uint64_t ReadHash(std::uint64_t library, const ncclComm* comm, std::uint64_t expected) noexcept {
  try {
    if (!CanRead(comm)) return expected;  // a sandbox forbids the call: nothing speaks against what is expected
    const std::lock_guard lock(Mutex());
    std::vector<std::size_t>& places = Places()[library];
    return expected != 0 ? Learn(places, comm, expected) : ReadAt(places, comm);
  } catch (...) {
    return 0;
  }
}

}  // namespace amem::nccl
