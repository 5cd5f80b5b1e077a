// The hash by which NCCL tells communicators apart (commHash), equal in all their ranks.
//
// For a communicator made from a unique id it follows from the id: by DJB2a up to NCCL 2.21, later by two accumulators over
// eight bytes at a time. No NCCL call tells it. From such communicators AMem learns which way it is and where NCCL keeps it,
// and reads it there for others.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "ncclpatch/nccl/calls.h"

namespace amem::nccl {
namespace {

// NCCL's communicators have a mebibyte and more, and the hash lies beyond the first.
constexpr std::size_t kMostBytes = std::size_t{4} << 20, kPage = 4096;

constinit std::mutex g_mutex;

// By library, the places where every communicator with a known hash has it.
struct Places : std::map<std::uint64_t, std::vector<std::size_t>> {};

// By the kernel, which stops at unmapped memory without a fault.
std::size_t Copy(const void* from, void* to, std::size_t bytes) {
  const iovec local{to, bytes};
  const iovec remote{const_cast<void*>(from), bytes};
  const ssize_t copied = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
  return copied < 0 ? 0 : static_cast<std::size_t>(copied);
}

// Copies through the stack, because the next search would find copies in the heap.
std::vector<std::size_t> PlacesOf(std::uint64_t hash, const ncclComm* comm) {
  std::vector<std::size_t> found;
  const auto begin = reinterpret_cast<std::uintptr_t>(comm);
  std::uint64_t words[kPage / sizeof(std::uint64_t)];
  for (std::size_t done = 0; done < kMostBytes;) {  // up to the first unreadable page
    const std::size_t piece = kPage - (begin + done) % kPage;
    if (Copy(reinterpret_cast<const void*>(begin + done), words, piece) != piece) break;
    for (std::size_t i = 0; i < piece / sizeof(std::uint64_t); ++i)
      if (words[i] == hash) found.push_back(done + i * sizeof(std::uint64_t));
    done += piece;
  }
  return found;
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

// Searches a whole communicator only until NCCL's place is clear. Learns nothing from one whose hash is at none of the places
// so far.
std::uint64_t Learn(std::vector<std::size_t>& places, const ncclComm* comm, const ExpectedHashes& expected) {
  if (const std::uint64_t here = ReadAt(places, comm); here != 0 && std::ranges::find(expected, here) != expected.end())
    return here;
  for (const std::uint64_t hash : expected) {
    std::vector<std::size_t> found = PlacesOf(hash, comm);
    if (!places.empty())
      std::erase_if(found, [&](std::size_t place) { return std::ranges::find(places, place) == places.end(); });
    if (found.empty()) continue;
    places = std::move(found);
    return hash;
  }
  return 0;
}

// char has the sign that it has in NCCL, which is built for the same processor.
std::uint64_t BytewiseHash(const UniqueId& id) {
  std::uint64_t hash = 5381;
  for (const char byte : id.bytes) hash = (hash * 33) ^ static_cast<std::uint64_t>(byte);
  return hash;
}

// Mixes the two accumulators before each word, which is then added to the first.
std::uint64_t WordwiseHash(const UniqueId& id) {
  std::uint64_t first = 1 ^ sizeof id.bytes, second = 1;
  for (std::size_t at = 0; at < sizeof id.bytes; at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, id.bytes + at, sizeof word);
    first += second;
    second ^= first;
    first = (first ^ (first >> 31)) * 0x9de62bbc8cef3ce3;
    second = (second ^ (second >> 32)) * 0x485cd6311b599e79;
    first += word;
  }
  std::uint64_t hash = (first ^ (first >> 31)) * 0xbac3bd562846de6b + second;
  hash = (hash ^ (hash >> 32)) * 0x995a187a14e7b445;
  return hash;
}

}  // namespace

ExpectedHashes HashesOf(const UniqueId& id) { return {BytewiseHash(id), WordwiseHash(id)}; }

std::uint64_t ReadHash(std::uint64_t library, const ncclComm* comm, const ExpectedHashes& expected) noexcept {
  try {
    const std::lock_guard lock(g_mutex);
    std::vector<std::size_t>& places = Forever<Places>()[library];
    return expected != ExpectedHashes{} ? Learn(places, comm, expected) : ReadAt(places, comm);
  } catch (...) {
    return 0;
  }
}

}  // namespace amem::nccl
