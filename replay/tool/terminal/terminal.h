// What the tool does only where a person looks on: width, colours, a pager, and progress on stderr.
#pragma once

#include <sys/ioctl.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "journal/base/no_copies.h"
#include "replay/tool/output.h"

namespace amem::tool {

class Arguments;

struct TerminalOptions {
  std::string color = "auto";  // "always", "never"; "auto": on a terminal, unless NO_COLOR is set or TERM is "dumb"
  bool no_pager = false;
};
// Every command has these options.
void AddTerminalOptions(Arguments& arguments, TerminalOptions& options);

winsize TerminalSize();  // of standard output; zeroes: it is none

// How many columns text for people has: the terminal's, between 40 and 120; elsewhere 100, so that what is piped or mailed is
// the same everywhere.
std::size_t TextWidth();

// Text broken into lines of at most `width` columns; never within a number, or between it and its unit.
std::vector<std::string> BrokenIntoLines(std::string_view text, std::size_t width);

// Standard output as the options want it: in colours, through PAGER, else less, which gets LESS=FRX unless it
// is set. Only a terminal is paged. The destructor waits until the reader has closed the pager.
class Pager : NoCopies {
 public:
  Pager(const TerminalOptions& options, bool paged, Output& out);
  ~Pager();

 private:
  Output& out_;
  std::FILE* pipe_ = nullptr;
};

// One line on stderr that says how far the tool is, from a second on and only on a terminal: "12 of 64 journals, 3 s". It goes
// when the first of the output or a complaint is printed.
class Progress {
 public:
  static void Begin(std::uint64_t journals, Bytes bytes);  // what is read now
  static void OneDone();
  static void End();  // harmless when there is none
};

}  // namespace amem::tool
