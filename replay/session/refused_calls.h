// Calls that were refused because memory is paused. In each pause it records the first of a kind of call at once, then the
// 10th, the 100th and so on, and at the end of the pause how many more there were. The ledger's lock guards it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "replay/ledger/ledger.h"

namespace amem {

class RefusedCalls {
 public:
  // `call` must outlive the session.
  void Add(const char* call, Ledger& ledger) REQUIRES(ledger) {
    Count& count = calls_[call];
    ++count.unrecorded;
    std::uint64_t round = ++count.all;
    while (round % 10 == 0) round /= 10;
    if (round == 1) ledger.Record(LaunchRefused{call, std::exchange(count.unrecorded, 0)});
  }
  void EndPause(Ledger& ledger) REQUIRES(ledger) {
    for (const auto& [call, count] : calls_)
      if (count.unrecorded != 0) ledger.Record(LaunchRefused{std::string(call), count.unrecorded});
    calls_.clear();
  }

 private:
  struct Count {
    std::uint64_t all = 0, unrecorded = 0;
  };
  std::map<std::string_view, Count> calls_;
};

}  // namespace amem
