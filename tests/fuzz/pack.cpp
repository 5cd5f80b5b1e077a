// Packs: any file is unpacked as far as it goes, or is an error, and every command can do with what comes out. The first byte
// says whether the rest is the file, or the blocks in it before they are compressed, which a fuzzer would never guess.
#include "replay/job/pack.h"

#include <zstd.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "tests/fuzz/reading.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace amem;
  if (size == 0 || size > 100'000) return 0;
  const std::filesystem::path file = test::FuzzDirectory() / "job.amem", directory = test::FuzzDirectory() / "unpacked";
  std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  if (data[0] % 2 == 0) {
    std::string packed(ZSTD_compressBound(bytes.size()), '\0');
    packed.resize(ZSTD_compress(packed.data(), packed.size(), bytes.data(), bytes.size(), 1));
    bytes = std::string("AMEMPACK\1\0\0\0", 12) + packed;
  }
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
  const auto unpacked = Unpack(file, directory);
  if (unpacked.ok()) test::ReadAsTheToolDoes(unpacked->sessions);
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
  return 0;
}
