// Which sessions reference whose memory: the graph of `amem top --by peer`.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "replay/tool/output.h"
#include "statemachine/state.h"

namespace amem::tool {

class References {
 public:
  References();
  ~References();
  void Add(SessionId self, const State& state);  // as a journal has it
  void PrintText(Output& out) const;
  void PrintDot(Output& out) const;  // for Graphviz
  [[nodiscard]] nlohmann::ordered_json ToJson() const;

 private:
  std::unique_ptr<struct Graph> graph_;
};

}  // namespace amem::tool
