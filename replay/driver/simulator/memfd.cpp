#include "replay/driver/simulator/memfd.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>

namespace amem {
namespace {

constexpr std::string_view kPrefix = "/memfd:amem-sim";
constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW;

bool RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = limit.rlim_max;
  return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

int OpenMemfd(const char* name) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd >= 0 || errno != EMFILE || !RaiseDescriptorLimit()) return fd;
  return memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

// Visits what a name consists of, in its order.
void EachField(auto& tag, const auto& visit) {
  auto& p = tag.properties;
  const auto all = [&](auto&... fields) { (visit(fields), ...); };
  all(tag.world, tag.key.index, tag.key.id, p.type, p.handle_types, p.location.type, p.location.id, p.compression,
      p.gpu_direct_rdma, p.usage, p.reserved);
}

}  // namespace

Result<UniqueFd> MakeTaggedMemfd(const MemfdTag& tag, Bytes bytes) {
  std::string name = "amem-sim";
  EachField(tag, [&](const auto& field) { name += fmt::format(":{:x}", static_cast<std::uint64_t>(field)); });
  UniqueFd fd(OpenMemfd(name.c_str()));
  if (!fd || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 || fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return Status(Code::kIo, fmt::format("memfd of {} bytes for simulated memory: {}; raise the limit of open files "
                                         "(ulimit -n) if it says too many",
                                         bytes, std::strerror(errno)));
  }
  return fd;
}

std::optional<MemfdTag> ParseMemfdLink(std::string_view link) {
  if (!link.starts_with(kPrefix)) return std::nullopt;
  const char* at = link.data() + kPrefix.size();
  const char* const end = link.data() + link.size();
  bool whole = true;
  MemfdTag tag;
  EachField(tag, [&]<class Field>(Field& field) {
    whole = whole && at != end && *at++ == ':';
    if (!whole) return;
    std::uint64_t number = 0;
    const auto [next, error] = std::from_chars(at, end, number, 16);
    whole = error == std::errc{};
    field = static_cast<Field>(number);
    at = next;
  });
  if (!whole || (at != end && *at != ' ')) return std::nullopt;  // the kernel appends " (deleted)"
  return tag;
}

std::optional<TaggedMemfd> ReadTaggedMemfd(int fd) {
  std::error_code none;
  const auto tag = ParseMemfdLink(std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd), none).native());
  struct stat info {};
  // A memfd of that name without our seals could shrink under a mapping, so it is not ours.
  if (!tag || fcntl(fd, F_GET_SEALS) != kSeals || fstat(fd, &info) != 0) return std::nullopt;
  return TaggedMemfd{*tag, static_cast<Bytes>(info.st_size)};
}

}  // namespace amem
