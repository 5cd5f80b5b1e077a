#include "replay/driver/cuda/nonzero_runs.h"

#include <algorithm>
#include <bit>

#include "replay/driver/cuda/nonzero_kernels.h"

namespace amem {
namespace {

using sparse::kPageBytes;
using sparse::kUnitPages;

// The first page from `page` on whose bit is `set`; `pages` if there is none.
Bytes Next(std::span<const std::uint32_t> words, Bytes page, Bytes pages, bool set) {
  while (page < pages) {
    const std::uint32_t word = set ? words[page / kUnitPages] : ~words[page / kUnitPages];
    const std::uint32_t rest = word >> (page % kUnitPages);
    if (rest != 0) return std::min(pages, page + static_cast<Bytes>(std::countr_zero(rest)));
    page = (page / kUnitPages + 1) * kUnitPages;
  }
  return pages;
}

}  // namespace

void AppendRuns(const Extent& extent, std::span<const std::uint32_t> words, Bytes block, NonZero& to) {
  const Bytes pages = extent.bytes / kPageBytes;
  const Bytes mask = block / kPageBytes - 1;  // of a page's place in its block
  const std::size_t before = to.runs.size();
  Bytes set = Next(words, 0, pages, true);
  while (set < pages) {
    const Bytes first = set & ~mask;
    Bytes end = 0;
    do {  // as long as the next page that is not zero lies in the block that follows
      end = std::min(pages, (Next(words, set, pages, false) + mask) & ~mask);
      set = Next(words, end, pages, true);
    } while (set < pages && (set & ~mask) == end);
    to.runs.push_back({extent.address + first * kPageBytes, (end - first) * kPageBytes});
  }
  to.counts.push_back(to.runs.size() - before);
}

}  // namespace amem
