// Standard output of the tool, through one buffer that is used again and again: a log of a million events is a few hundred
// writes.
#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>

#include "journal/base/no_copies.h"
#include "statemachine/types.h"

namespace amem::tool {

// Whether it is printable ASCII, with lines and tabs; and any other text, made such that no part of it controls a terminal.
bool IsPlain(std::string_view text);
std::string Escaped(std::string_view text);

class Output : NoCopies {
 public:
  explicit Output(int descriptor) : descriptor_(descriptor) { buffer_.reserve(kFlushAt + kFlushAt / 4); }

  // Strings of a journal come from anywhere. What could control a terminal is printed as "\x1b"; lines and tabs stay.
  Output& operator<<(std::string_view text) { return Verbatim(IsPlain(text) ? text : std::string_view(Escaped(text))); }
  // For files and JSON, which have rules of their own.
  Output& Verbatim(std::string_view text) {
    buffer_.append(text);
    if (buffer_.size() >= kFlushAt) static_cast<void>(Finish());
    return *this;
  }
  Output& operator<<(std::integral auto number) { return Verbatim(std::to_string(number)); }

  // In colours only where they are wanted (terminal/terminal.h).
  enum class Style { kHeading, kBad, kGood };
  Output& Styled(Style style, std::string_view text);
  void set_color(bool color) { color_ = color; }
  [[nodiscard]] bool AnythingPrinted() const { return printed_ || !buffer_.empty(); }

  // The reader has gone (head, a closed pager): nothing more need be produced. Not an error.
  [[nodiscard]] bool ReaderGone() const { return gone_; }
  // Writes what is left. kIo: something could not be written (a full disk).
  Status Finish();

 private:
  static constexpr std::size_t kFlushAt = 1 << 16;

  int descriptor_;
  std::string buffer_;
  bool gone_ = false, color_ = false, printed_ = false;
  Status failure_;
};

}  // namespace amem::tool
