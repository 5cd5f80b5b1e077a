// How the stand-in card reaches GPU memory: by the pages that were there when a region was registered, and not by the address.
//
// A real card holds the pages of a registration. So each mapping under a region is mapped a second time, at an address that
// only the card knows; what is mapped at the region's own address later makes no difference to a transfer, and is noticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace amem::card {

// The pages of one registered range. Any thread; transfers are the caller's to serialise.
class Pages {
 public:
  // Nothing: the range is host memory. An error in words if it is GPU memory of which the driver refuses a second mapping, or
  // `dma_buf` (-1: none) is one of other memory.
  static std::optional<std::string> Open(std::uint64_t address, std::uint64_t bytes, int dma_buf,
                                         std::unique_ptr<Pages>& pages);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  // Copies `bytes` at `offset` of the region; false: the driver refused.
  bool Read(std::uint64_t offset, void* to, std::size_t bytes) { return Copy(offset, to, bytes, false); }
  bool Write(std::uint64_t offset, const void* from, std::size_t bytes) {
    return Copy(offset, const_cast<void*>(from), bytes, true);
  }
  // Whether the same allocations are mapped at the region's address as at its registration. Memory that cannot be mapped twice
  // (cudaMalloc) is always said to be the same.
  [[nodiscard]] bool StillMapped() const;

 private:
  struct Piece {                                         // of one mapping
    std::uint64_t address = 0, bytes = 0;                // of the region
    std::uint64_t second = 0;                            // where the card reaches it
    std::uint64_t reserved = 0, mapped = 0, handle = 0;  // 0: it is reached by its address
  };
  Pages() = default;
  std::string Map(Piece& piece, std::uint64_t base, std::uint64_t size, std::uint64_t handle);
  bool Copy(std::uint64_t offset, void* host, std::size_t bytes, bool to_gpu);

  int device_ = 0;
  std::vector<Piece> pieces_;
};

}  // namespace amem::card
