// Prints each name for which NCCL gets a function of AMem's, for the tests of stock NCCLs: "NAME EXPORTED SINCE BEFORE", where
// the last two are CUDA versions.
#include <cstdio>

#include "ncclpatch/intercept/intercept.h"

int main() {
  for (const auto& table : amem::intercept::Tables())
    for (const auto& replacement : table)
      std::printf("%s %s %d %d\n", replacement.name, replacement.exported, replacement.since, replacement.before);
  return 0;
}
