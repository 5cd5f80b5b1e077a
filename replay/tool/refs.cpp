// top --by peer: which sessions reference whose memory, as a table, a graph for Graphviz, or JSON.
#include "replay/tool/refs.h"

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

using Json = nlohmann::ordered_json;

}  // namespace

struct Edge {
  std::uint64_t allocations = 0;
  Bytes bytes = 0;
  bool at_owner = false, at_importer = false;  // whose journal has it
};
struct Node {
  Bytes own = 0, resident = 0;
  bool given = false;
};
struct Graph {
  JobNames names;
  std::map<SessionId, Node> nodes;
  std::map<std::pair<SessionId, SessionId>, Edge> edges;  // (owner, importer)
  std::set<std::pair<SessionId, SessionId>> lost;         // (session, peer that it lost)
};

namespace {

// An edge that both journals have is counted as the importer's says, and as the owner's where the importer's is missing.
void Add(Graph& graph, SessionId self, const State& state) {
  Node& node = graph.nodes[self];
  const Holdings holdings = Measure(state);
  node = {holdings.own_device, holdings.own_device_resident, true};
  graph.names.Add(state.session);
  graph.names.AddPeersOf(state);
  for (const auto& [session, peer] : state.peers) {
    if (!peer.connected) graph.lost.emplace(self, session);
  }
  std::map<std::pair<SessionId, SessionId>, Edge> imports, exports;
  const auto count = [](Edge& edge, Bytes bytes) {
    ++edge.allocations;
    edge.bytes += bytes;
  };
  for (const auto& [id, a] : state.allocations) {
    if (state.slabs.contains(id)) continue;  // its parts are what NCCL shares
    if (a.remote) {
      graph.nodes.try_emplace(a.remote->owner);
      count(imports[{a.remote->owner, self}], a.bytes);
    }
    for (const auto& [importer, times] : a.importers) {
      graph.nodes.try_emplace(importer.by);
      count(exports[{self, importer.by}], a.bytes);
    }
  }
  for (const auto& [key, edge] : imports) {
    Edge& known = graph.edges[key];
    known = {edge.allocations, edge.bytes, known.at_owner, true};
  }
  for (const auto& [key, edge] : exports) {
    Edge& known = graph.edges[key];
    if (!known.at_importer) known = edge;
    known.at_owner = true;
  }
}

const char* Doubt(const Edge& edge, const Graph& graph, const std::pair<SessionId, SessionId>& key) {
  if (!edge.at_owner && graph.lost.contains(key)) return "dropped by the owner, who saw the importer end";
  if (!edge.at_owner && graph.nodes.at(key.first).given) return "only the importer knows of it";
  if (!edge.at_importer && graph.nodes.at(key.second).given) return "only the owner knows of it";
  return "";
}

void PrintText(Output& out, const Graph& graph) {
  std::vector<std::vector<std::string>> edges = {{"OWNER", "IMPORTER", "ALLOCATIONS", "BYTES"}},
                                        nodes = {{"PROCESS", "REQUESTED", "HELD NOW"}};
  for (const auto& [key, edge] : graph.edges)
    edges.push_back({graph.names.ShortName(key.first), graph.names.ShortName(key.second), Grouped(edge.allocations),
                     FormatBytes(edge.bytes), Doubt(edge, graph, key)});
  for (const auto& [session, node] : graph.nodes)
    nodes.push_back({graph.names.ShortName(session), node.given ? FormatBytes(node.own) : "not given",
                     node.given ? FormatBytes(node.resident) : ""});
  PrintTable(out, edges);
  out << "\n";
  PrintTable(out, nodes);
}

void PrintDot(Output& out, const Graph& graph) {
  out << "// dot -Tsvg: who references whose memory; an arrow goes from the importer to the owner\n"
         "digraph references {\n  rankdir=LR;\n  node [shape=box, fontname=\"sans-serif\"];\n  edge "
         "[fontname=\"sans-serif\"];\n";
  for (const auto& [session, node] : graph.nodes) {
    out << "  \"" << SessionText(session) << "\" [label=\"" << graph.names.ShortName(session)
        << (node.given ? "\\n" + FormatBytes(node.own) : "") << "\"" << (node.given ? "" : ", style=dashed") << "];\n";
  }
  for (const auto& [key, edge] : graph.edges) {
    const bool doubt = *Doubt(edge, graph, key) != '\0';
    out << "  \"" << SessionText(key.second) << "\" -> \"" << SessionText(key.first) << "\" [label=\"" << edge.allocations
        << ", " << FormatBytes(edge.bytes) << "\"" << (doubt ? ", color=red" : "") << "];\n";
  }
  out << "}\n";
}

Json ToJson(const Graph& graph) {
  Json nodes = Json::array(), edges = Json::array();
  for (const auto& [session, node] : graph.nodes) {
    nodes.push_back({{"session", SessionText(session)},
                     {"name", graph.names.ShortName(session)},
                     {"given", node.given},
                     {"own_bytes", node.own},
                     {"own_resident_bytes", node.resident}});
  }
  for (const auto& [key, edge] : graph.edges) {
    edges.push_back({{"owner", SessionText(key.first)},
                     {"importer", SessionText(key.second)},
                     {"allocations", edge.allocations},
                     {"bytes", edge.bytes},
                     {"known_to_owner", edge.at_owner},
                     {"known_to_importer", edge.at_importer}});
  }
  return {{"sessions", nodes}, {"references", edges}};
}

}  // namespace

References::References() : graph_(std::make_unique<Graph>()) {}
References::~References() = default;
void References::Add(SessionId self, const State& state) { tool::Add(*graph_, self, state); }
void References::PrintText(Output& out) const { tool::PrintText(out, *graph_); }
void References::PrintDot(Output& out) const { tool::PrintDot(out, *graph_); }
Json References::ToJson() const { return tool::ToJson(*graph_); }

}  // namespace amem::tool
