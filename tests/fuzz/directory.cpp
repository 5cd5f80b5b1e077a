// Directories of sessions: files, each a byte that names it, two that say how long it is, and its bytes. Whatever they hold,
// every command can do with them.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

#include "tests/fuzz/reading.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace amem;
  constexpr const char* kNames[] = {"data.mdb", "tail", "closed", "broken", "status", "lock.mdb"};
  const std::filesystem::path directory = test::FuzzDirectory() / "sessions";
  const std::filesystem::path sessions[] = {directory / "00000000000000aa", directory / "00000000000000bb"};
  for (const auto& session : sessions) std::filesystem::create_directories(session);
  for (std::size_t at = 0; at + 3 <= size;) {
    const std::size_t length = std::min<std::size_t>(data[at + 1] | data[at + 2] << 8, size - at - 3);
    const auto& session = sessions[data[at] / 8 % 2];
    std::ofstream(session / kNames[data[at] % 8 % std::size(kNames)], std::ios::binary | std::ios::app)
        .write(reinterpret_cast<const char*>(data + at + 3), static_cast<std::streamsize>(length));
    at += 3 + length;
  }
  const auto found = ListSessions(directory);
  if (found.ok()) test::ReadAsTheToolDoes(*found);
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
  return 0;
}
