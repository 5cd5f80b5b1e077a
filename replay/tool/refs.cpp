// top --by peer: which sessions reference whose memory, as a table, a graph for Graphviz, or JSON.
#include "replay/tool/refs.h"

#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/tool/command.h"

namespace amem::tool {

// An edge that both journals have is counted as the importer's says, and as the owner's where the importer's is missing.
void References::Add(SessionId self, const State& state) {
  Node& node = nodes_[self];
  const Holdings holdings = Measure(state);
  node = {holdings.own_device, holdings.own_device_resident, true};
  names_.Add(state.session);
  names_.AddPeersOf(state);
  for (const auto& [session, peer] : state.peers) {
    if (!peer.connected) lost_.emplace(self, session);
  }
  std::map<Pair, Edge> imports, exports;
  const auto count = [](Edge& edge, Bytes bytes) {
    ++edge.allocations;
    edge.bytes += bytes;
  };
  for (const auto& [id, a] : state.allocations) {
    if (state.slabs.contains(id)) continue;  // its parts are what NCCL shares
    if (a.remote) {
      nodes_.try_emplace(a.remote->owner);
      count(imports[{a.remote->owner, self}], a.bytes);
    }
    for (const auto& [importer, times] : a.importers) {
      nodes_.try_emplace(importer.by);
      count(exports[{self, importer.by}], a.bytes);
    }
  }
  for (const auto& [key, edge] : imports) {
    Edge& known = edges_[key];
    known = {edge.allocations, edge.bytes, known.at_owner, true};
  }
  for (const auto& [key, edge] : exports) {
    Edge& known = edges_[key];
    if (!known.at_importer) known = edge;
    known.at_owner = true;
  }
}

const char* References::Doubt(const Edge& edge, const Pair& key) const {
  if (!edge.at_owner && lost_.contains(key)) return "dropped by the owner, who saw the importer end";
  if (!edge.at_owner && nodes_.at(key.first).given) return "only the importer knows of it";
  if (!edge.at_importer && nodes_.at(key.second).given) return "only the owner knows of it";
  return "";
}

void References::PrintText(Output& out) const {
  std::vector<std::vector<std::string>> edges = {{"OWNER", "IMPORTER", "ALLOCATIONS", "BYTES"}},
                                        nodes = {{"PROCESS", "REQUESTED", "HELD NOW"}};
  for (const auto& [key, edge] : edges_)
    edges.push_back({names_.ShortName(key.first), names_.ShortName(key.second), Grouped(edge.allocations),
                     FormatBytes(edge.bytes), Doubt(edge, key)});
  for (const auto& [session, node] : nodes_)
    nodes.push_back({names_.ShortName(session), node.given ? FormatBytes(node.own) : "not given",
                     node.given ? FormatBytes(node.resident) : ""});
  PrintTable(out, edges);
  out << "\n";
  PrintTable(out, nodes);
}

void References::PrintDot(Output& out) const {
  out << "// dot -Tsvg: who references whose memory; an arrow goes from the importer to the owner\n"
         "digraph references {\n  rankdir=LR;\n  node [shape=box, fontname=\"sans-serif\"];\n  edge "
         "[fontname=\"sans-serif\"];\n";
  for (const auto& [session, node] : nodes_) {
    out << "  \"" << SessionText(session) << "\" [label=\"" << names_.ShortName(session)
        << (node.given ? "\\n" + FormatBytes(node.own) : "") << "\"" << (node.given ? "" : ", style=dashed") << "];\n";
  }
  for (const auto& [key, edge] : edges_) {
    const bool doubt = *Doubt(edge, key) != '\0';
    out << "  \"" << SessionText(key.second) << "\" -> \"" << SessionText(key.first) << "\" [label=\"" << edge.allocations
        << ", " << FormatBytes(edge.bytes) << "\"" << (doubt ? ", color=red" : "") << "];\n";
  }
  out << "}\n";
}

nlohmann::ordered_json References::ToJson() const {
  using Json = nlohmann::ordered_json;
  Json nodes = Json::array(), edges = Json::array();
  for (const auto& [session, node] : nodes_) {
    nodes.push_back({{"session", SessionText(session)},
                     {"name", names_.ShortName(session)},
                     {"given", node.given},
                     {"own_bytes", node.own},
                     {"own_resident_bytes", node.resident}});
  }
  for (const auto& [key, edge] : edges_) {
    edges.push_back({{"owner", SessionText(key.first)},
                     {"importer", SessionText(key.second)},
                     {"allocations", edge.allocations},
                     {"bytes", edge.bytes},
                     {"known_to_owner", edge.at_owner},
                     {"known_to_importer", edge.at_importer}});
  }
  return {{"sessions", nodes}, {"references", edges}};
}

}  // namespace amem::tool
