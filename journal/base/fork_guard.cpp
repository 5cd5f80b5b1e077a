#include "journal/base/fork_guard.h"

#include <sys/mman.h>
#include <unistd.h>

namespace amem {
namespace {

std::size_t PageBytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

ForkGuard::ForkGuard() : process_(getpid()) {
  void* page = mmap(nullptr, PageBytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  if (madvise(page, PageBytes(), MADV_WIPEONFORK) != 0) {
    munmap(page, PageBytes());
    return;
  }
  page_ = static_cast<volatile std::uint64_t*>(page);
  *page_ = 1;
}

ForkGuard::~ForkGuard() {
  if (page_ != nullptr) munmap(const_cast<std::uint64_t*>(page_), PageBytes());
}

bool ForkGuard::IsOtherProcess() const { return getpid() != process_; }

}  // namespace amem
