// The journal's reader on damaged files: the first byte says which file the rest is, the tail or LMDB's. Whatever it holds is
// read as far as it goes, or an error.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <limits>

#include "journal/base/unique_fd.h"
#include "journal/journal.h"
#include "journal/record_source.h"

namespace {

const std::string& Directory() {
  static const std::string path = [] {
    for (std::string name : {"/dev/shm/amem-fuzz-XXXXXX", "/tmp/amem-fuzz-XXXXXX"}) {
      if (::mkdtemp(name.data()) != nullptr) return name;
    }
    std::abort();
  }();
  static const bool at_exit = std::atexit([] {
                                std::error_code ignored;
                                std::filesystem::remove_all(Directory(), ignored);
                              }) == 0;
  static_cast<void>(at_exit);
  return path;
}

void Write(const std::string& path, const std::uint8_t* data, std::size_t size) {
  const amem::UniqueFd file(::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600));
  (void)!::write(file.get(), data, size);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace amem;
  if (size == 0) return 0;
  const std::string directory = Directory() + "/00000000000000aa";
  std::filesystem::create_directory(directory);
  const bool tail = data[0] % 2 == 0;
  Write(directory + (tail ? "/tail" : "/data.mdb"), data + 1, size - 1);
  std::filesystem::remove(directory + (tail ? "/data.mdb" : "/tail"));
  auto reader = JournalReader::Open(directory);
  if (!reader.ok()) return 0;
  static_cast<void>((*reader)->Info());
  static_cast<void>((*reader)->Read(SequenceNumber{1}, kToTheEnd, [](const Event&) { return true; }));
  static_cast<void>((*reader)->StateAt(std::nullopt));
  return 0;
}
