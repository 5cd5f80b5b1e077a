// The journals of other hosts, each over ssh.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace amem::tool {

struct RemoteOptions {
  std::string ssh = "ssh";           // may have options
  std::string tool = "amem-replay";  // there
  std::uint64_t limit_s = 300;       // for each host
  bool tar = false;                  // also where the tool is
};

// What came from one host.
struct Fetched {
  std::filesystem::path place;  // a pack, or a directory that was unpacked; empty: nothing
  std::string problem;          // empty: none
};
// In the order of `hosts`, each HOST:DIR, or HOST: for what is in AMEM_JOURNAL_DIR of the login there, else in
// /tmp/amem-UID/journal. Many at once, into `scratch`.
std::vector<Fetched> FetchAll(const std::vector<std::string>& hosts, const RemoteOptions& options,
                              const std::filesystem::path& scratch);

}  // namespace amem::tool
