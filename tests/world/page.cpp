#include "tests/world/page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "journal/base/unique_fd.h"

namespace amem::world {
namespace {

void Prepare(Page& page) {
  pthread_mutexattr_t robust;
  pthread_mutexattr_init(&robust);
  pthread_mutexattr_setpshared(&robust, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&page.mutex, &robust);
  pthread_mutexattr_destroy(&robust);
}

}  // namespace

std::uint64_t Count(const OfRanks& ranks) {
  return static_cast<std::uint64_t>(std::ranges::count_if(ranks, [](const auto& one) { return one.load(); }));
}
std::uint64_t Deaths(const Page& page) { return Count(page.dead); }

std::shared_ptr<Page> OpenPage(const std::filesystem::path& file) {
  UniqueFd fd;
  bool made = true;
  if (!file.empty()) {
    fd.Reset(::open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    made = static_cast<bool>(fd);
    if (!made) fd.Reset(::open(file.c_str(), O_RDWR | O_CLOEXEC));
    if (!fd || (made && ::ftruncate(fd.get(), sizeof(Page)) != 0)) std::abort();
  }
  const int flags = fd ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS;
  void* at = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, flags, fd ? fd.get() : -1, 0);
  if (at == MAP_FAILED) std::abort();
  auto* page = static_cast<Page*>(at);  // all zero is what each member begins with
  if (made) Prepare(*page);
  return {page, [](Page* mapped) { ::munmap(mapped, sizeof(Page)); }};
}

OffersLock::OffersLock(Page& page) : page_(page) {
  if (pthread_mutex_lock(&page_.mutex) == EOWNERDEAD) pthread_mutex_consistent(&page_.mutex);
}
OffersLock::~OffersLock() { pthread_mutex_unlock(&page_.mutex); }

}  // namespace amem::world
