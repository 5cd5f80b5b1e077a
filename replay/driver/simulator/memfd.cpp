#include "replay/driver/simulator/memfd.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>

namespace amem {
namespace {

constexpr std::string_view kPrefix = "/memfd:amem-sim:";
constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW;
constexpr std::size_t kFields = 11;

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

std::optional<std::array<std::uint64_t, kFields>> HexFields(std::string_view text) {
  std::array<std::uint64_t, kFields> fields{};
  const char* at = text.data();
  const char* const end = at + text.size();
  for (std::size_t i = 0; i < kFields; ++i) {
    const auto [next, error] = std::from_chars(at, end, fields[i], 16);
    if (error != std::errc{}) return std::nullopt;
    at = next;
    if (i + 1 < kFields) {
      if (at == end || *at != ':') return std::nullopt;
      ++at;
    }
  }
  if (at != end && *at != ' ') return std::nullopt;  // the kernel appends " (deleted)"
  return fields;
}

}  // namespace

Result<UniqueFd> MakeTaggedMemfd(const MemfdTag& tag, Bytes bytes) {
  const AllocationProperties& p = tag.properties;
  const std::string name =
      fmt::format("amem-sim:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}", tag.world, tag.key.index, tag.key.id,
                  p.type, p.handle_types, static_cast<std::uint32_t>(p.location.type),
                  static_cast<std::uint32_t>(p.location.id), p.compression, p.gpu_direct_rdma, p.usage, p.reserved);
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
  const auto fields = HexFields(link.substr(kPrefix.size()));
  if (!fields) return std::nullopt;
  const auto& f = *fields;
  MemfdTag tag;
  tag.world = f[0];
  tag.key = {static_cast<std::uint32_t>(f[1]), f[2]};
  tag.properties.type = static_cast<std::uint32_t>(f[3]);
  tag.properties.handle_types = static_cast<std::uint32_t>(f[4]);
  tag.properties.location = {static_cast<LocationType>(f[5]), static_cast<std::int32_t>(static_cast<std::uint32_t>(f[6]))};
  tag.properties.compression = static_cast<std::uint8_t>(f[7]);
  tag.properties.gpu_direct_rdma = static_cast<std::uint8_t>(f[8]);
  tag.properties.usage = static_cast<std::uint16_t>(f[9]);
  tag.properties.reserved = static_cast<std::uint32_t>(f[10]);
  return tag;
}

std::optional<TaggedMemfd> ReadTaggedMemfd(int fd) {
  const std::string path = fmt::format("/proc/self/fd/{}", fd);
  std::array<char, 320> link{};
  const ssize_t length = readlink(path.c_str(), link.data(), link.size());
  if (length <= 0) return std::nullopt;
  const auto tag = ParseMemfdLink({link.data(), static_cast<std::size_t>(length)});
  struct stat info {};
  // A memfd of that name without our seals could shrink under a mapping, so it is not ours.
  if (!tag || fcntl(fd, F_GET_SEALS) != kSeals || fstat(fd, &info) != 0) return std::nullopt;
  return TaggedMemfd{*tag, static_cast<Bytes>(info.st_size)};
}

}  // namespace amem
