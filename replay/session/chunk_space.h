// How chunks on one device, of a tag or of cuMemAlloc, are cut into parts. Sums and addresses only: nothing here calls a
// driver.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "statemachine/types.h"

namespace amem {

// Not for several threads at once.
class ChunkSpace {
 public:
  static constexpr Bytes kGranule = 512;                // sizes of parts, and distances between them
  static constexpr Bytes kOwnChunk = Bytes{128} << 20;  // a request from here on gets a chunk of its own

  static constexpr Bytes kLeastChunk = Bytes{32} << 20;  // of requests that share

  struct Chunk {
    AllocationId allocation;
    Address address;
    Bytes bytes = 0;
    friend bool operator==(const Chunk&, const Chunk&) = default;
  };
  struct Part {
    AllocationId chunk;
    Bytes offset = 0;
    Bytes bytes = 0;
    friend bool operator==(const Part&, const Part&) = default;
  };

  // Takes a part from the smallest free place that it fits in, of those the one with the lowest address; nullopt: a new chunk
  // is needed. A request for nothing gets a granule.
  std::optional<Address> Take(Bytes bytes);
  // Gives a part back. The chunk that has emptied, if it has: it must be given back now, and is not known any more. nullopt for
  // the whole: nothing was taken at that address.
  struct Given {
    Part part;
    std::optional<Chunk> emptied;
  };
  std::optional<Given> Give(Address part);

  // The chunk that a request is worth which no place is left for: the request itself from kOwnChunk on; otherwise a power of
  // two of 32 MiB to 1 GiB that grows with what is held, so that all chunks together are few and at most a third is unused in
  // advance. A multiple of `granularity`. `attempt` counts from 0: where memory is short, each further one is half as large.
  // nullopt: the attempt before was for no more than was asked for.
  [[nodiscard]] std::optional<Bytes> ChunkFor(Bytes bytes, Bytes granularity, std::size_t attempt = 0) const;
  Address Add(const Chunk& chunk, Bytes first);  // and takes its first part, which must fit

  [[nodiscard]] std::optional<Part> PartAt(Address address) const;  // that begins there
  [[nodiscard]] Bytes held() const { return held_; }                // chunks, whole
  [[nodiscard]] Bytes taken() const { return taken_; }
  [[nodiscard]] std::size_t parts() const { return parts_.size(); }
  [[nodiscard]] const std::map<Address, Chunk>& chunks() const { return chunks_; }

  static Bytes Rounded(Bytes bytes) { return bytes == 0 ? kGranule : (bytes + kGranule - 1) / kGranule * kGranule; }

 private:
  [[nodiscard]] const Chunk& ChunkAt(Address address) const;
  void TakeAt(Address address, Bytes room, Bytes bytes);
  void AddFree(Address address, Bytes bytes);
  void RemoveFree(std::map<Address, Bytes>::iterator free);

  std::map<Address, Chunk> chunks_;
  std::map<Address, Bytes> parts_;
  std::map<Address, Bytes> free_;                // no two are neighbours in one chunk
  std::set<std::pair<Bytes, Address>> by_size_;  // the same
  Bytes held_ = 0, taken_ = 0;
};

}  // namespace amem
