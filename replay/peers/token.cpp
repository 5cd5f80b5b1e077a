#include "replay/peers/token.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>

#include "journal/base/file.h"
#include "statemachine/fnv1a.h"

namespace amem {
namespace {

constexpr std::string_view kTokenMagic = "AMEMTOK1";
constexpr std::size_t kFamilyLength = 7;  // the magic without its version digit
constexpr int kTokenSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

struct Layout {
  std::array<char, 8> magic{};
  std::uint64_t session = 0, allocation = 0;
  Secret secret{};
  std::uint64_t offset = 0;
  std::uint32_t pid = 0, beyond = 0;
  std::uint64_t checksum = 0;
};
static_assert(sizeof(Layout) == kTokenBytes && std::endian::native == std::endian::little);

std::uint64_t Checksum(const Layout& token) {
  Fnv1a hash;
  hash.Add(std::as_bytes(std::span(&token, 1)).first(offsetof(Layout, checksum)));
  return hash.value();
}

bool StartsWith(std::span<const std::byte> bytes, std::string_view text) {
  return bytes.size() >= text.size() && std::memcmp(bytes.data(), text.data(), text.size()) == 0;
}

std::string SystemError() { return ErrnoText(errno); }

std::string Describe(const struct stat& info, const std::string& link) {
  if (S_ISFIFO(info.st_mode)) return "a pipe";
  if (S_ISSOCK(info.st_mode)) return "a socket";
  if (S_ISDIR(info.st_mode)) return "the directory " + link;
  if (S_ISCHR(info.st_mode)) return "the device " + link;
  return link.empty() ? "of an unknown kind" : link;
}

Status NotAToken(int fd, const std::string& what) {
  return {
      Code::kInvalid,
      fmt::format("import of descriptor {}: it is {}, neither a token of AMem nor memory of the driver; most likely the NCCL "
                  "of the peer that sent it is not under AMem: load AMem in every process of the job",
                  fd, what)};
}

}  // namespace

std::array<std::byte, kTokenBytes> Encode(const Token& token) {
  Layout all{{},           token.session.value, token.allocation.value,
             token.secret, token.offset,        static_cast<std::uint32_t>(token.pid),
             token.beyond};
  std::ranges::copy(kTokenMagic, all.magic.begin());
  all.checksum = Checksum(all);
  return std::bit_cast<std::array<std::byte, kTokenBytes>>(all);
}

Result<Token> Decode(std::span<const std::byte> bytes) {
  if (!StartsWith(bytes, kTokenMagic.substr(0, kFamilyLength)))
    return Status{Code::kNotFound, "these bytes are not a token of AMem"};
  if (bytes.size() != kTokenBytes)
    return Status{Code::kCorrupt, fmt::format("a token of AMem has {} bytes, this one has {}", kTokenBytes, bytes.size())};
  if (!StartsWith(bytes, kTokenMagic)) {
    return Status{Code::kCorrupt, fmt::format("a token of another version of AMem ('{}', this build reads '1'), or a damaged "
                                              "one: use one version of AMem in the whole job",
                                              static_cast<char>(bytes[kFamilyLength]))};
  }
  Layout all;
  std::memcpy(&all, bytes.data(), sizeof all);
  if (all.checksum != Checksum(all))
    return Status{Code::kCorrupt, "a token of AMem whose checksum does not match: it was damaged on the way"};
  const Token token{SessionId{all.session},
                    AllocationId{all.allocation},
                    all.secret,
                    all.offset,
                    static_cast<std::int32_t>(all.pid),
                    all.beyond};
  if (!token.session || !token.allocation)
    return Status{Code::kCorrupt, "a token of AMem that names no session or no allocation"};
  return token;
}

Result<UniqueFd> MakeTokenDescriptor(const Token& token) {
  UniqueFd fd(::memfd_create(kTokenDescriptorName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return Status{CodeOfErrno(errno), "export: memfd_create for a token: " + SystemError()};
  const auto bytes = Encode(token);
  if (::pwrite(fd.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    return Status{Code::kIo, "export: write of a token: " + SystemError()};
  if (::fcntl(fd.get(), F_ADD_SEALS, kTokenSeals) != 0) return Status{Code::kIo, "export: sealing a token: " + SystemError()};
  return fd;
}

// A lock of flock belongs to what was opened: it goes with the last copy of that descriptor.
Result<UniqueFd> OpenCounted(int token) {
  UniqueFd fd(::open(fmt::format("/proc/self/fd/{}", token).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd || ::flock(fd.get(), LOCK_SH | LOCK_NB) != 0)
    return Status{CodeOfErrno(errno), "export: opening a token again: " + SystemError()};
  return fd;
}

bool AnyOpen(int token) {
  if (::flock(token, LOCK_EX | LOCK_NB) != 0) return true;
  ::flock(token, LOCK_UN);
  return false;
}

Result<Token> ReadTokenDescriptor(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return Status{Code::kInvalid, fmt::format("import of descriptor {}: {}", fd, SystemError())};
  const std::string link = PathOf(fd);
  if (link.starts_with("/dev/nvidia")) return Status{Code::kNotFound, "a descriptor of the driver (" + link + ")"};
  if (link.starts_with("/memfd:amem-sim")) return Status{Code::kNotFound, "a descriptor of the simulator (" + link + ")"};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || !link.starts_with("/memfd:amem-token")) return NotAToken(fd, Describe(info, link));
  if (info.st_size != static_cast<off_t>(kTokenBytes) || (seals & kTokenSeals) != kTokenSeals) {
    return Status{Code::kCorrupt,
                  fmt::format("import of descriptor {}: {} has {} bytes and seals {}; a token has {} and {}", fd, link,
                              info.st_size, Hex(static_cast<std::uint64_t>(seals)), kTokenBytes, Hex(kTokenSeals))};
  }
  std::array<std::byte, kTokenBytes> bytes{};
  if (::pread(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    return Status{Code::kIo, fmt::format("import of descriptor {}: reading the token: {}", fd, SystemError())};
  auto token = Decode(bytes);
  // The name says that it is a token, so other bytes are damage and not another program's memfd.
  if (!token && token.status().code() == Code::kNotFound) return Status{Code::kCorrupt, link + " does not hold a token"};
  return token;
}

Result<Secret> RandomSecret() {
  Secret secret{};
  if (::getentropy(secret.data(), secret.size()) != 0) return Status{Code::kIo, "getrandom for a secret: " + SystemError()};
  return secret;
}

bool SameSecret(const Secret& a, const Secret& b) {
  volatile std::uint8_t difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference = static_cast<std::uint8_t>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

}  // namespace amem
