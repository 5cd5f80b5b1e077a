// refs: who references whose memory, as a table, a graph for Graphviz, or JSON.
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "replay/job/event_json.h"
#include "replay/tool/command.h"

namespace amem::tool {
namespace {

using Json = nlohmann::ordered_json;

struct Edge {
  std::uint64_t allocations = 0;
  Bytes bytes = 0;
  bool at_owner = false, at_importer = false;  // who says so
};
struct Node {
  std::string name;
  Bytes own = 0, resident = 0;
  bool given = false;
};
struct Graph {
  std::map<SessionId, Node> nodes;
  std::map<std::pair<SessionId, SessionId>, Edge> edges;  // (owner, importer)
  std::set<std::pair<SessionId, SessionId>> lost;         // (who says so, whom it lost)
};

std::string ShortName(const SessionOpened& who) {
  return who.rank >= 0 ? "rank " + std::to_string(who.rank) : "pid " + std::to_string(who.pid);
}

void AddPeer(Graph& graph, SessionId session, const State& state) {
  Node& node = graph.nodes[session];
  const auto peer = state.peers.find(session);
  if (!node.name.empty() || peer == state.peers.end()) return;
  node.name = ShortName({.pid = peer->second.pid, .rank = peer->second.rank});
}

// An edge that both sides know is counted as its importer says; the owner's word stands where the importer's is missing.
void Add(Graph& graph, SessionId self, const State& state) {
  Node& node = graph.nodes[self];
  const Holdings holdings = Measure(state);
  node = {ShortName(state.session), holdings.own_device, holdings.own_device_resident, true};
  for (const auto& [session, peer] : state.peers) {
    if (!peer.connected) graph.lost.emplace(self, session);
  }
  std::map<std::pair<SessionId, SessionId>, Edge> imports, exports;
  for (const auto& [id, a] : state.allocations) {
    if (state.slabs.contains(id)) continue;  // its parts are what NCCL shares
    if (a.remote) {
      AddPeer(graph, a.remote->owner, state);
      Edge& edge = imports[{a.remote->owner, self}];
      ++edge.allocations;
      edge.bytes += a.bytes;
    }
    for (const auto& [importer, count] : a.importers) {
      AddPeer(graph, importer.by, state);
      Edge& edge = exports[{self, importer.by}];
      ++edge.allocations;
      edge.bytes += a.bytes;
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

std::string NameIn(const Graph& graph, SessionId session) {
  const std::string& name = graph.nodes.at(session).name;
  return name.empty() ? SessionText(session) : name;
}

const char* Doubt(const Edge& edge, const Graph& graph, const std::pair<SessionId, SessionId>& key) {
  if (!edge.at_owner && graph.lost.contains(key)) return "dropped by the owner, who saw the importer end";
  if (!edge.at_owner && graph.nodes.at(key.first).given) return "only the importer knows of it";
  if (!edge.at_importer && graph.nodes.at(key.second).given) return "only the owner knows of it";
  return "";
}

void PrintText(Output& out, const Graph& graph) {
  out << "OWNER             IMPORTER          ALLOCATIONS  BYTES         \n";
  for (const auto& [key, edge] : graph.edges) {
    out.Left(NameIn(graph, key.first), 18).Left(NameIn(graph, key.second), 18).Left(Grouped(edge.allocations), 13);
    out.Left(FormatBytes(edge.bytes), 14) << Doubt(edge, graph, key) << "\n";
  }
  out << "\nSESSION           OWN MEMORY     ON THE DEVICE NOW\n";
  for (const auto& [session, node] : graph.nodes) {
    out.Left(NameIn(graph, session), 18).Left(node.given ? FormatBytes(node.own) : "not given", 15)
        << (node.given ? FormatBytes(node.resident) : "") << "\n";
  }
}

void PrintDot(Output& out, const Graph& graph) {
  out << "// dot -Tsvg: who references whose memory; an arrow goes from the importer to the owner\n"
         "digraph references {\n  rankdir=LR;\n  node [shape=box, fontname=\"sans-serif\"];\n  edge "
         "[fontname=\"sans-serif\"];\n";
  for (const auto& [session, node] : graph.nodes) {
    out << "  \"" << SessionText(session) << "\" [label=\"" << NameIn(graph, session)
        << (node.given ? "\\n" + FormatBytes(node.own) : "") << "\"" << (node.given ? "" : ", style=dashed") << "];\n";
  }
  for (const auto& [key, edge] : graph.edges) {
    const bool doubt = *Doubt(edge, graph, key) != '\0';
    out << "  \"" << SessionText(key.second) << "\" -> \"" << SessionText(key.first) << "\" [label=\"" << edge.allocations
        << ", " << FormatBytes(edge.bytes) << "\"" << (doubt ? ", color=red" : "") << "];\n";
  }
  out << "}\n";
}

void PrintJson(Output& out, const Graph& graph) {
  Json nodes = Json::array(), edges = Json::array();
  for (const auto& [session, node] : graph.nodes) {
    nodes.push_back({{"session", SessionText(session)},
                     {"name", NameIn(graph, session)},
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
  out << Json{{"sessions", nodes}, {"references", edges}}.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

}  // namespace

int RunRefs(const RefsOptions& options, Output& out) {
  bool failed = false;
  Graph graph;
  for (const auto& session : FindSessions(options.directories, failed)) {
    auto reader = JournalReader::Open(session);
    ReadReport report;
    const auto info = reader ? (*reader)->Info() : Result<JournalInfo>(reader.status());
    const auto state = info ? (*reader)->StateAt(std::nullopt, &report) : Result<State>(info.status());
    if (!state) {
      Complain(state.status().message());
      failed = true;
      continue;
    }
    failed |= ComplainAboutDamage(session, report);
    Add(graph, info->session, *state);
  }
  if (!graph.nodes.empty()) options.dot ? PrintDot(out, graph) : options.json ? PrintJson(out, graph) : PrintText(out, graph);
  return failed ? kCannotRead : kFine;
}

}  // namespace amem::tool
