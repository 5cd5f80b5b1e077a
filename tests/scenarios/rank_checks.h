// What tests of RankProcesses expect of all ranks, or of a device.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "tests/scenarios/rank_process.h"

namespace amem::test {

// All living ranks do it and succeed. A rank that dies meanwhile is no failure.
inline void AllOk(RankProcesses& job, const Command& command, const std::string& what) {
  const auto replies = job.All(command);
  for (int rank = 0; rank < job.ranks(); ++rank) {
    const auto& reply = replies[static_cast<std::size_t>(rank)];
    if (reply) {
      EXPECT_TRUE(reply->ok()) << "rank " << rank << ", " << what << ": " << reply->text.data();
    }
  }
}

// At last: an owner learns a moment later that an importer dropped its reference, and the kernel drops those of a
// process that died.
inline void ExpectInUse(const RankProcesses& job, int device, Bytes expected, const std::string& where) {
  for (int i = 0; i < kPatienceMs && job.InUse(device) != expected; ++i) ::usleep(1000);
  EXPECT_EQ(job.InUse(device), expected) << "device " << device << ", " << where;
}

}  // namespace amem::test
