// Which sessions reference whose memory: the graph of `amem top --by peer`.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <utility>

#include "replay/job/names.h"
#include "replay/tool/output.h"
#include "statemachine/state.h"

namespace amem::tool {

class References {
 public:
  void Add(SessionId self, const State& state);  // as a journal has it
  void PrintText(Output& out) const;
  void PrintDot(Output& out) const;  // for Graphviz
  [[nodiscard]] nlohmann::ordered_json ToJson() const;

 private:
  struct Edge {
    std::uint64_t allocations = 0;
    Bytes bytes = 0;
    bool at_owner = false, at_importer = false;  // whose journal has it
  };
  struct Node {
    Bytes own = 0, resident = 0;
    bool given = false;
  };
  using Pair = std::pair<SessionId, SessionId>;
  [[nodiscard]] const char* Doubt(const Edge& edge, const Pair& key) const;

  JobNames names_;
  std::map<SessionId, Node> nodes_;
  std::map<Pair, Edge> edges_;  // (owner, importer)
  std::set<Pair> lost_;         // (session, peer that it lost)
};

}  // namespace amem::tool
