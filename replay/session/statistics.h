// What a session has done and holds, for people and as JSON. Reads the parts of a session and changes none; each function takes
// the ledger's lock for a copy of the state or for a sum over it, and calls nothing that takes a lock above it.
#pragma once

#include <string>
#include <string_view>

#include "replay/cycle/coordinator.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/session/pools/pools.h"
#include "replay/session/session_options.h"
#include "replay/session/slabs/slabs.h"

namespace amem {

class SessionStatistics {
 public:
  // All of them must outlive it.
  SessionStatistics(const SessionOptions& options, Driver& driver, Ledger& ledger, const Slabs& slabs,
                    const Coordinator& coordinator, Pools& pools)
      : options_(options), driver_(driver), ledger_(ledger), slabs_(slabs), coordinator_(coordinator), pools_(pools) {}

  [[nodiscard]] std::string Json() const;
  [[nodiscard]] std::string MemoryJson() const;     // by tag, with "nccl" and "user" (amem_json in ncclpatch/amem.h)
  [[nodiscard]] std::string AccountJson() const;    // of the GPUs that have memory of AMem's (likewise)
  [[nodiscard]] std::string ProcessesJson() const;  // that have memory on these (likewise); takes milliseconds
  [[nodiscard]] std::string Text() const;           // some lines for people
  // Json() of a process that has no session, and why not.
  [[nodiscard]] static std::string JsonWithoutSession(std::string_view reason);

 private:
  [[nodiscard]] State CopyState() const;

  const SessionOptions& options_;
  Driver& driver_;
  Ledger& ledger_;
  const Slabs& slabs_;
  const Coordinator& coordinator_;
  Pools& pools_;
};

}  // namespace amem
