// Names for call sites, of functions of this program.
#include "replay/tool/symbols.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <string_view>

namespace amem::tool {
namespace {

extern "C" __attribute__((used)) int amem_symbols_test_function() { return 1; }

// As its note says, in hex. Empty: the linker wrote none.
std::string BuildIdOf(const char* path) {
  constexpr std::string_view kNote("\x03\0\0\0GNU\0", 8);  // the kind of the note, and whose it is
  std::string bytes(std::size_t{64} << 10, '\0');          // notes come first
  std::ifstream(path, std::ios::binary).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  const std::size_t note = bytes.find(kNote);
  if (note == std::string::npos) return "";
  std::string id;
  for (const unsigned char byte : bytes.substr(note + kNote.size(), static_cast<unsigned char>(bytes[note - 4])))
    for (const unsigned digit : {byte / 16U, byte % 16U}) id += "0123456789abcdef"[digit];
  return id;
}

TEST(Symbols, of_the_build_that_a_journal_names_have_names_and_of_another_none) {
  constexpr const char* kPath = "/proc/self/exe";
  const std::string build = BuildIdOf(kPath);
  Dl_info program{};
  ASSERT_NE(dladdr(reinterpret_cast<const void*>(&amem_symbols_test_function), &program), 0);
  const auto offset =
      reinterpret_cast<std::uint64_t>(&amem_symbols_test_function) - reinterpret_cast<std::uint64_t>(program.dli_fbase);
  const CallSite site{{offset + 2, 0x1}};
  const Symbols same({{.path = kPath, .build_id = build}});
  EXPECT_EQ(same.note(), "");
  EXPECT_EQ(same.Name(site), "amem_symbols_test_function+0x2 < +1");
  EXPECT_EQ(same.Name({}), "unknown");

  const Symbols other({{.path = kPath, .build_id = "00" + build}});
  EXPECT_TRUE(other.note().starts_with("exe, build 00" + build + ": no symbols for its call sites here")) << other.note();
  EXPECT_EQ(other.note().ends_with(" (the library at that path is another build)"), !build.empty()) << other.note();
  EXPECT_TRUE(other.Name(site).starts_with("libnccl+")) << other.Name(site);
  EXPECT_NE(Symbols({{.path = "/nowhere/libnccl.so.2", .build_id = build}}).note(), "");
}

}  // namespace
}  // namespace amem::tool
