#include "replay/tool/output.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace amem::tool {

Output& Output::Padded(std::uint64_t number, std::size_t width, char fill) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
  const auto length = static_cast<std::size_t>(end - digits);
  if (length < width) buffer_.append(width - length, fill);
  return *this << std::string_view(digits, length);
}

Output& Output::Left(std::string_view text, std::size_t width) {
  *this << text;
  if (text.size() < width) buffer_.append(width - text.size(), ' ');
  return *this;
}

void Output::Flush() {
  std::size_t done = 0;
  while (done < buffer_.size() && !gone_ && failure_.ok()) {
    const ssize_t written = ::write(descriptor_, buffer_.data() + done, buffer_.size() - done);
    if (written >= 0) {
      done += static_cast<std::size_t>(written);
    } else if (errno == EPIPE) {
      gone_ = true;
    } else if (errno != EINTR) {
      failure_ = Status(Code::kIo, std::string("write to standard output: ") + std::strerror(errno) +
                                       "; what was printed is incomplete, make room and run it again");
    }
  }
  buffer_.clear();
}

Status Output::Finish() {
  Flush();
  return failure_;
}

}  // namespace amem::tool
