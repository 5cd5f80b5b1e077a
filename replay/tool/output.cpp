#include "replay/tool/output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "replay/tool/terminal/terminal.h"

namespace amem::tool {

namespace {

bool IsPlainCharacter(char c) { return (c >= 0x20 && c < 0x7f) || c == '\n' || c == '\t'; }

// Eight characters at once: no high bit, none below 0x20, which would borrow one, and no 0x7f, which would carry into one.
bool ArePrintable(const char* text) {
  constexpr std::uint64_t kOnes = 0x0101010101010101;
  std::uint64_t eight = 0;
  std::memcpy(&eight, text, sizeof eight);
  return ((eight | (eight - 0x20 * kOnes) | (eight + kOnes)) & (0x80 * kOnes)) == 0;
}

// How many bytes of `text` are a character of UTF-8 that a terminal shows; 0: none.
std::size_t Shown(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = at(0);
  if (first < 0x80) return IsPlainCharacter(text[0]) ? 1 : 0;
  const std::size_t bytes = first >= 0xf0 && first < 0xf5 ? 4 : first >= 0xe0 && first < 0xf0 ? 3 : first >= 0xc2 ? 2 : 0;
  if (bytes == 0 || first >= 0xf5 || text.size() < bytes) return 0;
  for (std::size_t i = 1; i < bytes; ++i)
    if ((at(i) & 0xc0) != 0x80) return 0;
  return first == 0xc2 && at(1) < 0xa0 ? 0 : bytes;  // U+0080 to U+009F are control characters, too
}

}  // namespace

bool IsPlain(std::string_view text) {
  while (text.size() >= 8) {
    if (!ArePrintable(text.data()) && !std::ranges::all_of(text.substr(0, 8), IsPlainCharacter)) return false;
    text.remove_prefix(8);
  }
  return std::ranges::all_of(text, IsPlainCharacter);
}

std::string Escaped(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const std::size_t bytes = Shown(text);
    shown += bytes != 0 ? text.substr(0, bytes) : fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    text.remove_prefix(std::max<std::size_t>(bytes, 1));
  }
  return shown;
}

Output& Output::Styled(Style style, std::string_view text) {
  if (!color_) return *this << text;
  const char* code = style == Style::kHeading ? "1" : style == Style::kBad ? "1;31" : "32";
  return Verbatim(fmt::format("\x1b[{}m", code)) << text, Verbatim("\x1b[0m");
}

Status Output::Finish() {
  if (!buffer_.empty()) {
    printed_ = true;
    Progress::End();
  }
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
  return failure_;
}

}  // namespace amem::tool
