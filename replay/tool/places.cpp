#include "replay/tool/places.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "journal/base/unique_fd.h"
#include "replay/job/pack.h"

namespace amem::tool {
namespace {

// Copies until the end. False: errno says why not.
bool CopyAll(int from, int to) {
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = ::read(from, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got == 0;
    for (ssize_t done = 0; done < got;) {
      const ssize_t written = ::write(to, buffer + done, static_cast<std::size_t>(got - done));
      if (written < 0 && errno != EINTR) return false;
      done += std::max<ssize_t>(written, 0);
    }
  }
}

}  // namespace

Result<std::filesystem::path> PackFromStandardInput(ScratchDirectory& scratch) {
  if (::isatty(STDIN_FILENO) != 0)
    return Status{Code::kInvalid,
                  "- is a pack on standard input, and that is a terminal: pipe one in, as in `ssh HOST amem-replay "
                  "pack -o - | amem-replay why -`"};
  const Result<std::filesystem::path> file = scratch.New();
  if (!file) return file;
  const UniqueFd to(::open(file->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!to || !CopyAll(STDIN_FILENO, to.get()))
    return Status{Code::kIo,
                  "read a pack from standard input: " + std::string(std::strerror(errno)) + "; TMPDIR names where it goes"};
  if (!IsPack(*file)) return Status{Code::kInvalid, "what is on standard input is not what `amem-replay pack` writes"};
  return file;
}

Bytes BytesOf(std::span<const std::filesystem::path> sessions) {
  Bytes total = 0;
  for (const auto& session : sessions) {
    struct stat data {};
    if (::stat((session / "data.mdb").c_str(), &data) == 0) total += static_cast<Bytes>(data.st_blocks) * 512;
  }
  return total;
}

}  // namespace amem::tool
