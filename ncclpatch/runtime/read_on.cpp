#include "ncclpatch/runtime/read_on.h"

#include <string_view>

namespace amem {

static bool IsPlain(std::string_view text) {
  return !text.empty() &&
         text.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._-+:@%,=") == text.npos;
}

static std::string Quoted(std::string_view text) {
  if (IsPlain(text)) return std::string(text);
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string WhereToReadOn(const std::filesystem::path& session_directory) {
  return "; journal " + session_directory.string() + "; to see why: amem-replay why " +
         Quoted(session_directory.parent_path().string());
}

}  // namespace amem
