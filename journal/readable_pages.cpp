#include "journal/readable_pages.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace amem {

Status CheckWhole(const File& file, Bytes least) {
  struct stat st {};
  if (fstat(file.fd(), &st) != 0) return {Code::kIo, "they cannot be reached: " + ErrnoText(errno)};
  if (st.st_nlink == 0) return {Code::kIo, "they were removed"};
  const auto has = static_cast<Bytes>(st.st_size);
  if (has >= least) return {};
  return {Code::kIo, "one was cut short, from " + std::to_string(least) + " to " + std::to_string(has) + " bytes"};
}

Status CheckReadable(const File& file, Bytes bytes) {
  constexpr Bytes kAtOnce = Bytes{32} << 20;
  const auto page = static_cast<Bytes>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> in_memory(std::min(bytes, kAtOnce) / page + 1);
  std::vector<std::byte> read(page);
  for (Bytes from = 0; from < bytes; from += kAtOnce) {
    const Bytes here = std::min(bytes - from, kAtOnce);
    // Nobody reads through this map: it is how the kernel is asked.
    void* const map = mmap(nullptr, here, PROT_READ, MAP_SHARED, file.fd(), static_cast<off_t>(from));
    if (map == MAP_FAILED) return {};
    const bool known = mincore(map, here, in_memory.data()) == 0;
    munmap(map, here);
    for (Bytes at = 0; known && at < here; at += page) {
      if ((in_memory[at / page] & 1U) != 0) continue;
      const Bytes wanted = std::min(here - at, page);
      AMEM_ASSIGN(const auto got, file.ReadAt(from + at, std::span(read).first(wanted)));
      if (got < wanted) return {Code::kIo, "one was cut short, to less than " + std::to_string(from + at + wanted) + " bytes"};
    }
  }
  return {};
}

}  // namespace amem
