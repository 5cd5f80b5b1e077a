// top: what holds the most memory, by call site, communicator, tag, peer, card, size or age.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/sessions.h"
#include "replay/job/story/job_cycles.h"
#include "replay/tool/answer.h"
#include "replay/tool/command.h"
#include "replay/tool/gpus.h"
#include "replay/tool/symbols.h"
#include "statemachine/account.h"

namespace amem::tool {
namespace {

struct TopOptions {
  Targets targets;
  std::string by = "tag";    // "site", "communicator", "tag", "peer", "card", "size", "age"
  std::vector<Position> at;  // empty: the last event
  std::size_t limit = 20;
  bool dot = false, json = false, gpu = false;
};

struct Sum {
  std::uint64_t count = 0;
  Bytes bytes = 0, resident = 0;
  Bytes of_ended = 0;        // resident as the journals of processes say that have ended
  std::uint64_t order = 0;   // of groups that have an order of their own
  SavedContents last_pause;  // of tags
  void Add(Bytes more, bool is_resident, bool has_ended = false) {
    ++count;
    bytes += more;
    (has_ended ? of_ended : resident) += is_resident ? more : 0;
  }
};
using Groups = std::map<std::string, Sum>;
using Sorted = std::vector<std::pair<std::string, Sum>>;

// Up to how many seconds.
constexpr std::pair<std::uint64_t, const char*> kAges[] = {{1, "under 1 s"},
                                                           {10, "1 to 10 s"},
                                                           {60, "10 s to 1 min"},
                                                           {600, "1 to 10 min"},
                                                           {3600, "10 min to 1 h"},
                                                           {86400, "1 h to 1 day"},
                                                           {~std::uint64_t{0}, "over a day"}};

class Grouper {
 public:
  // `story`: by age only. `has_ended`: the process.
  Grouper(const std::string& by, const State& state, const SessionStory* story, bool has_ended, Groups& groups)
      : by_(by), state_(state), story_(story), has_ended_(has_ended), symbols_(state.libraries), groups_(groups) {}

  void Run() {
    if (by_ == "card") return OfCards();
    std::set<AllocationId> backings;
    if (by_ == "tag")
      for (const auto& [id, pool] : state_.pools) groups_[pool.tag];
    for (const auto& [address, l] : state_.legacy) {
      const bool of_program = l.why == ToText(KeepReason::kUser);
      // By communicator it is counted by its own size, in place of the blocks that it lies in.
      if (by_ == "communicator") {
        backings.insert(l.backing);
        const auto backing = state_.allocations.find(l.backing);
        const bool there = backing == state_.allocations.end() || backing->second.resident;
        Add(CommunicatorName(l.communicator, of_program, l.site), 0, l.bytes, there);
      } else if (by_ == "tag" && !l.backing) {
        Add(of_program ? "user" : "nccl", 0, l.bytes, true);
      }
    }
    for (const auto& [id, a] : state_.allocations) {
      if (state_.slabs.contains(id) || backings.contains(id)) continue;  // a slab's parts are what NCCL asked for
      if (by_ == "peer") {
        if (a.remote) Add("imported from " + Peer(a.remote->owner), 1, a);
        for (const auto& [importer, count] : a.importers) Add("shared with " + Peer(importer.by), 2, a);
        if (a.own() && a.importers.empty()) Add("not shared", 3, a);
      } else if (a.own() && !(a.multicast && (by_ == "tag" || by_ == "communicator"))) {
        const auto [key, order] = Key(a);
        Add(key, order, a);
      }
    }
  }
  [[nodiscard]] const std::string& note() const { return symbols_.note(); }

 private:
  // As they were registered.
  void OfCards() {
    for (const auto& [name, card] : MeasureCards(state_)) {
      const std::string who = name.empty() ? "a card" : name;
      if (card.renewable.count != 0) AddRegions(who + ": a pause gives it up", card.renewable, card.renewable_now);
      for (const auto& [why, regions] : card.by_why) AddRegions(who + ", stays: " + why, regions, regions.bytes);
    }
  }
  void AddRegions(const std::string& key, const CardHoldings::Regions& regions, Bytes now) {
    Sum& sum = groups_[key];
    sum.count += regions.count;
    sum.bytes += regions.bytes;
    (has_ended_ ? sum.of_ended : sum.resident) += now;
  }
  // The same in all ranks of a communicator, so that the journals of a job add up.
  [[nodiscard]] std::string CommunicatorName(CommunicatorId id, bool of_program, const CallSite& site) const {
    if (of_program) return "none: the program's (ncclMemAlloc)";
    const auto it = state_.communicators.find(id);
    if (it == state_.communicators.end()) return "unknown: " + symbols_.Name(site);
    const std::string name = NameOf(it->first, it->second, state_.communicators);
    // Without a hash its number is of that process alone.
    return it->second.hash != 0 ? name : fmt::format("{} ({})", name, ShortNameOf(state_.session));
  }
  std::pair<std::string, std::uint64_t> Key(const Allocation& a) const {
    if (by_ == "tag") return {TagOf(state_, a), 0};
    if (by_ == "communicator" && a.pool) return {"none: tag " + TagOf(state_, a), 0};
    if (by_ == "communicator") return {CommunicatorName(a.communicator, a.tag != MemoryTag::kNccl, a.site), 0};
    if (by_ == "size") return {FormatBytes(a.bytes), a.bytes};
    if (by_ == "site" && a.pool) return {"amem_alloc", 0};
    if (by_ == "site") return {symbols_.Name(a.site), 0};
    const std::optional<std::uint64_t> created = story_->times.TimeOf(a.created);
    if (!created) return {"older than the journal goes back", ~std::uint64_t{0}};
    const std::uint64_t now = story_->last.time_ns, seconds = (now - std::min(now, *created)) / 1'000'000'000;
    const auto age = std::ranges::find_if(kAges, [seconds](const auto& one) { return seconds < one.first; });
    return {age->second, age->first};
  }
  [[nodiscard]] std::string Peer(SessionId session) const {
    const auto peer = state_.peers.find(session);
    if (peer == state_.peers.end()) return ShortNameOf({.session = session});
    return ShortNameOf({.session = session, .pid = peer->second.pid, .rank = peer->second.rank});
  }
  void Add(const std::string& key, std::uint64_t order, const Allocation& a) {
    const auto slab = state_.allocations.find(a.slab);  // a part is where its slab is
    Add(key, order, a.bytes, slab == state_.allocations.end() ? a.resident : slab->second.resident);
  }
  void Add(const std::string& key, std::uint64_t order, Bytes bytes, bool resident) {
    Sum& sum = groups_[key];
    sum.Add(bytes, resident, has_ended_);
    sum.order = order;
  }

  const std::string& by_;
  const State& state_;
  const SessionStory* const story_;
  const bool has_ended_;
  const Symbols symbols_;
  Groups& groups_;
};

// Which sessions reference whose memory.
class References {
 public:
  void Add(SessionId self, const State& state, bool has_ended) {
    Node& node = nodes_[self];
    const Holdings holdings = Measure(state);
    node = {holdings.own_device, holdings.own_device_resident, true, has_ended};
    names_.Add(state.session);
    names_.AddPeersOf(state);
    for (const auto& [session, peer] : state.peers)
      if (!peer.connected) lost_.emplace(self, session);
    std::map<Pair, Edge> here;
    for (const auto& [id, a] : state.allocations) {
      if (state.slabs.contains(id)) continue;  // its parts are what NCCL shares
      if (a.remote) {
        nodes_.try_emplace(a.remote->owner);
        here[{a.remote->owner, self}].at_importer.Add(a.bytes, a.resident);
      }
      for (const auto& [importer, times] : a.importers) {
        nodes_.try_emplace(importer.by);
        here[{self, importer.by}].at_owner.Add(a.bytes, a.resident);
      }
    }
    for (const auto& [key, edge] : here) {  // an earlier copy of this journal may have been read
      if (edge.at_importer.count != 0) edges_[key].at_importer = edge.at_importer;
      if (edge.at_owner.count != 0) edges_[key].at_owner = edge.at_owner;
    }
  }

  void PrintText(Output& out) const {
    std::vector<std::vector<std::string>> edges = {{"OWNER", "IMPORTER", "ALLOCATIONS", "BYTES"}},
                                          nodes = {{"PROCESS", "REQUESTED", "HELD NOW"}};
    for (const auto& [key, edge] : edges_)
      edges.push_back({names_.ShortName(key.first), names_.ShortName(key.second), Grouped(edge.told().count),
                       FormatBytes(edge.told().bytes), Doubt(edge, key)});
    for (const auto& [session, node] : nodes_)
      nodes.push_back({names_.ShortName(session), node.given ? FormatBytes(node.own) : "not given",
                       !node.given      ? ""
                       : node.has_ended ? "-"
                                        : FormatBytes(node.resident)});
    PrintTable(out, edges);
    out << "\n";
    PrintTable(out, nodes);
  }

  void PrintDot(Output& out) const {
    out << "// dot -Tsvg: who references whose memory; an arrow goes from the importer to the owner\n"
           "digraph references {\n  rankdir=LR;\n  node [shape=box, fontname=\"sans-serif\"];\n  edge "
           "[fontname=\"sans-serif\"];\n";
    for (const auto& [session, node] : nodes_) {
      out << "  \"" << SessionText(session) << "\" [label=\"" << names_.ShortName(session)
          << (node.given ? "\\n" + FormatBytes(node.own) : "") << "\"" << (node.given ? "" : ", style=dashed") << "];\n";
    }
    for (const auto& [key, edge] : edges_) {
      const bool doubt = *Doubt(edge, key) != '\0';
      out << "  \"" << SessionText(key.second) << "\" -> \"" << SessionText(key.first) << "\" [label=\"" << edge.told().count
          << ", " << FormatBytes(edge.told().bytes) << "\"" << (doubt ? ", color=red" : "") << "];\n";
    }
    out << "}\n";
  }

  template <class To>
  void WriteRows(To& to) const {
    to.Rows(
        "sessions", nodes_,
        [this](auto& row, SessionId session, const Node& node) {
          row("session", session);
          row("name", names_.ShortName(session));
          row("given", node.given);
          row("own_bytes", node.own);
          row("own_resident_bytes", node.has_ended ? 0 : node.resident);
        },
        "Of those that are not \"given\" only others know");
    to.Rows(
        "references", edges_,
        [](auto& row, const Pair& key, const Edge& edge) {
          row("owner", key.first);
          row("importer", key.second);
          row("allocations", edge.told().count);
          row("bytes", edge.told().bytes);
          row("known_to_owner", edge.at_owner.count != 0);
          row("known_to_importer", edge.at_importer.count != 0);
        },
        "What the importer holds of the owner's memory");
  }

 private:
  struct Edge {
    Sum at_owner, at_importer;  // as their journals have it; the importer's counts
    [[nodiscard]] const Sum& told() const { return at_importer.count != 0 ? at_importer : at_owner; }
  };
  struct Node {
    Bytes own = 0, resident = 0;
    bool given = false, has_ended = false;
  };
  using Pair = std::pair<SessionId, SessionId>;
  [[nodiscard]] const char* Doubt(const Edge& edge, const Pair& key) const {
    if (edge.at_owner.count == 0 && lost_.contains(key)) return "dropped by the owner, who saw the importer end";
    const auto given = [this](SessionId session) {
      const Node* const node = FindIn(nodes_, session);
      return node != nullptr && node->given;
    };
    if (edge.at_owner.count == 0 && given(key.first)) return "only the importer knows of it";
    if (edge.at_importer.count == 0 && given(key.second)) return "only the owner knows of it";
    return "";
  }

  JobNames names_;
  std::map<SessionId, Node> nodes_;
  std::map<Pair, Edge> edges_;  // (owner, importer)
  std::set<Pair> lost_;         // (session, peer that it lost)
};

// `held`: the heading of what is held.
void PrintText(Output& out, const std::string& by, const Sorted& sorted, std::size_t most, const char* held) {
  Bytes all = 0;
  for (const auto& [key, sum] : sorted) all += sum.bytes;
  std::string heading = by == "site" ? "call site, innermost first" : by == "card" ? "network card" : by;
  std::ranges::transform(heading, heading.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  std::vector<std::vector<std::string>> rows = {{"REQUESTED", "SHARE", "COUNT", held, heading}};
  if (std::ranges::any_of(sorted, [](const auto& group) { return static_cast<bool>(group.second.last_pause); }))
    rows[0].emplace_back("LAST PAUSE");
  for (std::size_t i = 0; i < std::min(most, sorted.size()); ++i) {
    const auto& [key, sum] = sorted[i];
    rows.push_back({FormatBytes(sum.bytes), std::to_string(all == 0 ? 0 : sum.bytes * 100 / all) + " %", Grouped(sum.count),
                    FormatBytes(sum.resident), key, sum.last_pause ? ToText(sum.last_pause) : ""});
  }
  PrintTable(out, rows);
  if (sorted.size() > most) out << "... and " << sorted.size() - most << " more (--limit)\n";
}

// Allocations are cut from slabs, which are held whole.
void PrintUnused(Output& out, const Sorted& groups, Bytes held) {
  Bytes used = 0;
  for (const auto& [key, sum] : groups) used += sum.resident;
  if (held > used)
    out << FormatBytes(held) << " held on devices in all, as `" << program_name << " ls` says: " << FormatBytes(held - used)
        << " of that are parts of slabs that nobody uses\n";
}

struct TopAnswer {
  static constexpr const char* kSchema = "top";
  static constexpr const char* kTitle = "An element of what amem top --json prints";
  static constexpr const char* kMeaning = "A group of allocations. Its name has the key that --by gives. Sizes are bytes.";
  std::string by{}, name{};
  Sum sum{};
};
template <class To>
void WriteFields(To& to, const TopAnswer& answer) {
  const auto name = [&](const char* by, const char* description = nullptr) {
    to.If(answer.by == by, by, answer.name, description);
  };
  name("tag");
  name("communicator");
  name("card", "A network card or plugin, and whether a pause gives it up, or why it stays");
  name("site");
  name("size");
  name("age");
  const Sum& sum = answer.sum;
  to("bytes", sum.bytes);
  to("count", sum.count);
  to("backed_bytes", sum.resident, "On the device now; of a card, what it holds now");
  to.If(answer.by == "tag", "last_pause", sum.last_pause ? std::optional(sum.last_pause) : std::nullopt,
        "What became of the contents that the last pause saved: copied, as in the copy of the pause before and not copied, or "
        "zero; null: not recorded");
}

struct ReferencesAnswer {
  static constexpr const char* kSchema = "refs";
  static constexpr const char* kTitle = "amem top --by peer --json";
  static constexpr const char* kMeaning = "Who references whose memory. Sizes are bytes.";
  References references{};
  Sorted peers{};
};
template <class To>
void WriteFields(To& to, const ReferencesAnswer& answer) {
  answer.references.WriteRows(to);
  to.Rows(
      "peers", answer.peers,
      [](auto& row, const std::string& peer, const Sum& sum) {
        row("peer", peer);
        row("bytes", sum.bytes);
        row("count", sum.count);
        row("backed_bytes", sum.resident);
      },
      "The same summed up for each peer: imported from it, shared with it, or not shared.");
}

// By peer there is also who references whose memory.
void PrintWithReferences(const TopOptions& options, const Sorted& sorted, const References& references, const char* held,
                         Output& out) {
  if (options.dot) return references.PrintDot(out);
  if (options.json) return PrintAnswer(out, ReferencesAnswer{references, sorted});
  references.PrintText(out);
  out << "\n";
  PrintText(out, "peer", sorted, options.limit, held);
}

// What the journals hold, group by group.
struct Measured {
  Sorted groups;
  References references;   // by peer
  std::string note;        // by site
  Bytes held = 0;          // on devices, as ls counts it
  std::size_t ended = 0;   // sessions whose processes have ended
  bool all_ended = false;  // then groups have what they held last, which is of more use than that they hold nothing
};

class Measurement {
 public:
  Measurement(std::string by, const std::vector<Position>& at) : by_(std::move(by)), at_(at) {}

  Status Add(JournalReader& reader, ReadReport& damage) {
    AMEM_ASSIGN(const auto until, EventAt(at_, reader));
    AMEM_ASSIGN(const auto state, reader.StateAt(until, &damage));
    AMEM_ASSIGN(const JournalInfo info, reader.Info());
    const bool has_ended = at_.empty() && HasEnded(info.status);
    ++sessions_;
    result_.ended += has_ended ? 1 : 0;
    const Holdings holdings = Measure(state);
    (has_ended ? held_by_ended_ : result_.held) += holdings.own_device_resident + holdings.pools_resident;
    const bool with_story = by_ == "tag" || by_ == "age";
    if (with_story) {
      AMEM_ASSIGN(stories_.emplace_back(), ReadAttempts(reader, kAttemptsKept, until.value_or(kToTheEnd)));
      stories_.back().findings.state = {};
    }
    Grouper grouper(by_, state, with_story ? &stories_.back() : nullptr, has_ended, groups_);
    grouper.Run();
    if (with_story) stories_.back().times = {};
    if (by_ == "site" && result_.note.empty()) result_.note = grouper.note();
    if (by_ == "peer") result_.references.Add(info.session, state, has_ended);
    return {};
  }

  // Once all journals are added.
  Measured Finish() {
    result_.all_ended = result_.ended != 0 && result_.ended == sessions_;
    if (result_.all_ended) {
      for (auto& [key, sum] : groups_) sum.resident = sum.of_ended;
      result_.held = held_by_ended_;
    }
    for (const PauseContents& last : LastContents(stories_))
      if (const auto group = groups_.find(last.tag.empty() ? "nccl" : last.tag); group != groups_.end())
        group->second.last_pause = last.contents;
    result_.groups.assign(groups_.begin(), groups_.end());
    std::ranges::stable_sort(result_.groups, [this](const auto& a, const auto& b) {
      return by_ == "age" ? a.second.order < b.second.order : a.second.bytes > b.second.bytes;
    });
    return std::move(result_);
  }

 private:
  const std::string by_;
  const std::vector<Position>& at_;
  Groups groups_;
  std::vector<SessionStory> stories_;
  Bytes held_by_ended_ = 0;
  std::size_t sessions_ = 0;
  Measured result_;
};

void Print(const TopOptions& options, const std::string& by, const Measured& found, Output& out) {
  const char* const held = found.all_ended ? "HELD AT THE END" : options.at.empty() ? "HELD NOW" : "HELD THEN";
  if (by == "peer") return PrintWithReferences(options, found.groups, found.references, held, out);
  if (options.json) {
    std::vector<TopAnswer> answers;
    for (const auto& [name, sum] : found.groups) answers.push_back({by, name, sum});
    return PrintAnswers(out, answers);
  }
  if (found.groups.empty()) return;
  PrintText(out, by, found.groups, options.limit, held);
  if (by != "card") PrintUnused(out, found.groups, found.held);
  if (found.ended != 0 && !found.all_ended)
    out << Plural(found.ended, "process has ended and holds", "processes have ended and hold") << " nothing any more\n";
  if (!found.note.empty()) out << "\n" << found.note << "\n";
}

int RunTop(const TopOptions& options, Output& out) {
  if (options.gpu) return PrintGpus(FindSessions(options.targets), out);
  const std::string by = options.dot ? "peer" : options.by;
  Measurement measurement(by, options.at);
  ForEachJournal(FindSessions(options.targets),
                 [&](JournalReader& reader, ReadReport& damage) { return measurement.Add(reader, damage); });
  const Measured found = measurement.Finish();
  if (AnyComplaint() && found.groups.empty()) return kCannotRead;
  Print(options, by, found, out);
  return ReadAll();
}

void AddOptions(Arguments& arguments, TopOptions& options) {
  arguments.Add("--by", "WHAT", options.by, "What to group by; the default is tag; site is the place in libnccl")
      .OneOf({"tag", "communicator", "peer", "card", "site", "size", "age"});
  AddPosition(arguments, "--at", options.at, "After this event (--at=#1200), or at this time; default: the last event");
  arguments.Add("--limit", "N", options.limit, "So many lines; 20 by default", 1);
  arguments.Flag("--dot", options.dot, "Who references whose memory, as a graph for Graphviz");
  arguments.Flag("--gpu", options.gpu, "Whose memory this machine's GPUs hold now: by tag, contexts, other processes, unknown");
  AddJson(arguments, options.json, "One JSON array; by peer an object");
}

}  // namespace

Json ReferencesSchema() { return SchemaOf<ReferencesAnswer>(); }
Json TopSchema() { return SchemaOf<TopAnswer>(); }

Command TopCommand() {
  return WithOptions<TopOptions>(
      {kMemoryGroup, "top", "What holds the most memory; --by peer: who references whose",
       "  amem top DIR                         NCCL's memory, and tensors under tags\n"
       "  amem top DIR --by communicator\n"
       "  amem top DIR --by site               by the place in libnccl that asked for it\n"
       "  amem top DIR --by peer --at=#1200    who references whose memory, with how much\n"
       "  amem top DIR --by card               what network cards hold, and what of it a pause gives up\n"
       "  amem top --gpu                       what is left on the GPUs, and whose it is\n"
       "  amem top DIR --dot | dot -Tsvg > references.svg\n"},
      AddOptions, RunTop);
}

}  // namespace amem::tool
