// How chunks on one device, of a tag or of cuMemAlloc, are cut into parts. Only addresses and sums: nothing here calls a
// driver. For one thread at a time.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "statemachine/types.h"

namespace amem {

class ChunkSpace {
 public:
  static constexpr Bytes kGranule = 512;                // sizes and distances of parts
  static constexpr Bytes kOwnChunk = Bytes{128} << 20;  // a request of this size or more gets a chunk of its own

  static constexpr Bytes kLeastChunk = Bytes{32} << 20;  // for requests that share

  // More than any address space has. Callers compare sizes with this first, so that no sum of them overflows.
  static constexpr Bytes kTooMany = Bytes{1} << 47;

  // `whole`: each chunk is made for one request and is one part of just that size; nothing is cut.
  explicit ChunkSpace(bool whole = false) : whole_(whole) {}

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

  // Takes a part from the smallest free place that fits, of equal ones the lowest. nullopt: a new chunk is needed. A request of
  // zero bytes gets a granule.
  std::optional<Address> Take(Bytes bytes);
  // Gives a part back. The result has the chunk if it is empty now; the caller gives that back, and it is forgotten here.
  // nullopt: no part begins at that address.
  struct Given {
    Part part;
    std::optional<Chunk> emptied;
  };
  std::optional<Given> Give(Address part);

  // The size of the chunk to make for a request that finds no place: the request itself from kOwnChunk on, otherwise a power of
  // two from 32 MiB to 1 GiB that grows with what is held, so that chunks are few and at most a third is unused. A multiple of
  // `granularity`. `attempt` counts from 0; each further one is half as large. nullopt: the last attempt had already asked for
  // no more than the request.
  [[nodiscard]] std::optional<Bytes> ChunkFor(Bytes bytes, Bytes granularity, std::size_t attempt = 0) const;
  Address Add(const Chunk& chunk, Bytes first);  // and takes its first part

  [[nodiscard]] std::optional<Part> PartAt(Address address) const;  // one that begins there
  // What holds between the tables after each change; a failure names what does not.
  [[nodiscard]] Status Check() const;
  [[nodiscard]] Bytes held() const { return held_; }  // whole chunks
  [[nodiscard]] Bytes taken() const { return taken_; }
  [[nodiscard]] const std::map<Address, Chunk>& chunks() const { return chunks_; }

  static Bytes Rounded(Bytes bytes) { return bytes == 0 ? kGranule : (bytes + kGranule - 1) / kGranule * kGranule; }

 private:
  [[nodiscard]] const Chunk& ChunkAt(Address address) const;
  Chunk Forget(Address address);
  void TakeAt(Address address, Bytes room, Bytes bytes);
  void AddFree(Address address, Bytes bytes);
  void RemoveFree(std::map<Address, Bytes>::iterator free);

  std::map<Address, Chunk> chunks_;
  std::map<Address, Bytes> parts_;
  std::map<Address, Bytes> free_;                // neighbours in one chunk are joined
  std::set<std::pair<Bytes, Address>> by_size_;  // the same places
  Bytes held_ = 0, taken_ = 0;
  bool whole_;
};

}  // namespace amem
