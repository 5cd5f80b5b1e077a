// state --at A --to B: what is different between two points of a journal, or between two journals.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/tool/command.h"
#include "statemachine/apply.h"

namespace amem::tool {
namespace {

using Json = nlohmann::ordered_json;

struct Difference {
  char sign;  // + only in B, - only in A, ~ in both, and different
  std::string what, before, after;
};

class Comparison {
 public:
  Comparison(const State& a, const State& b) : a_(a), b_(b) {}

  std::vector<Difference> Run() {
    Value("lifecycle", std::string(ToText(a_.lifecycle)), std::string(ToText(b_.lifecycle)));
    Value("pauses begun", std::to_string(a_.cycles), std::to_string(b_.cycles));
    Value("broken", a_.broken, b_.broken);
    Value("last failure", a_.cycle.failure, b_.cycle.failure);
    const Holdings before = Measure(a_), after = Measure(b_);
    Value("own memory", FormatBytes(before.own_device), FormatBytes(after.own_device));
    Value("own memory on the device", FormatBytes(before.own_device_resident), FormatBytes(after.own_device_resident));
    Value("imported memory", FormatBytes(before.imported), FormatBytes(after.imported));
    Value("pinned host memory", FormatBytes(before.host), FormatBytes(after.host));
    Maps(
        a_.allocations, b_.allocations, [](const auto& entry) { return ToText(entry.first); },
        [](const Allocation& a) { return Words(a); });
    Maps(
        a_.mappings, b_.mappings, [](const auto& entry) { return "mapping " + Hex(entry.first.value); },
        [](const Mapping& m) {
          return fmt::format("{} of {}{}, for {}", FormatBytes(m.bytes), ToText(m.allocation),
                             !m.present      ? ", not there now"
                             : !m.accessible ? ", without access"
                                             : "",
                             Plural(m.access.size(), "device"));
        });
    Maps(
        a_.ranges, b_.ranges, [](const auto& entry) { return "range " + Hex(entry.first.value); },
        [](const Range& r) { return FormatBytes(r.bytes); });
    Maps(
        a_.legacy, b_.legacy, [](const auto& entry) { return "cuMemAlloc " + Hex(entry.first.value); },
        [](const LegacyAllocation& l) { return FormatBytes(l.bytes); });
    Maps(
        a_.pools, b_.pools, [](const auto& entry) { return ToText(entry.first); },
        [](const Pool& p) {
          return fmt::format("tag {} ({}), {}, {} begun, {} in use{}", p.tag, ToText(p.policy), ToText(p.lifecycle),
                             Plural(p.cycles, "pause"), Plural(p.parts.size(), "part"),
                             p.cycle.failure.empty() ? "" : ", failed: " + p.cycle.failure);
        });
    Maps(
        a_.peers, b_.peers, [](const auto& entry) { return "peer " + SessionText(entry.first); },
        [](const Peer& p) {
          return (p.rank >= 0 ? fmt::format("rank {}, ", p.rank) : "") + (p.connected ? "connected" : "lost: " + p.lost_reason);
        });
    return std::move(found_);
  }

 private:
  static std::string Words(const Allocation& a) {
    return fmt::format("{} on {}{}{}{}{}, {} held by NCCL, {} mapped{}", FormatBytes(a.bytes), ToText(a.properties.location),
                       a.remote ? ", of session " + SessionText(a.remote->owner) : ", own", a.resident ? "" : ", released",
                       a.saved ? ", saved" : "", a.awaiting_restore ? ", contents missing" : "", a.guest_references, a.mappings,
                       a.importers.empty() ? "" : ", " + Plural(a.importers.size(), "importer"));
  }
  void Value(const char* what, const std::string& before, const std::string& after) {
    if (before != after) found_.push_back({'~', what, before, after});
  }
  template <class Map, class Name, class Describe>
  void Maps(const Map& a, const Map& b, const Name& name, const Describe& describe) {
    auto in_a = a.begin();
    auto in_b = b.begin();
    while (in_a != a.end() || in_b != b.end()) {
      if (in_b == b.end() || (in_a != a.end() && in_a->first < in_b->first)) {
        found_.push_back({'-', name(*in_a), describe(in_a->second), ""});
        ++in_a;
      } else if (in_a == a.end() || in_b->first < in_a->first) {
        found_.push_back({'+', name(*in_b), "", describe(in_b->second)});
        ++in_b;
      } else {
        if (const std::string before = describe(in_a->second), after = describe(in_b->second); before != after)
          found_.push_back({'~', name(*in_a), before, after});
        ++in_a;
        ++in_b;
      }
    }
  }

  const State& a_;
  const State& b_;
  std::vector<Difference> found_;
};

Json ToJson(const Difference& d) {
  return {{"change", d.sign == '+'   ? "added"
                     : d.sign == '-' ? "removed"
                                     : "changed"},
          {"what", d.what},
          {"before", d.before.empty() ? Json(nullptr) : Json(d.before)},
          {"after", d.after.empty() ? Json(nullptr) : Json(d.after)}};
}

void PrintText(Output& out, const State& a, const State& b, const std::vector<Difference>& found) {
  out << "A: session " << SessionText(a.session.session) << " after event " << a.last.value << "\n";
  out << "B: session " << SessionText(b.session.session) << " after event " << b.last.value << "\n";
  for (const Difference& d : found) {
    out << std::string_view(&d.sign, 1) << " " << d.what << ": ";
    if (d.sign == '~') {
      out << (d.before.empty() ? "none" : d.before) << "  ->  " << (d.after.empty() ? "none" : d.after) << "\n";
    } else {
      out << (d.sign == '+' ? d.after : d.before) << "\n";
    }
  }
  out << (found.empty() ? "no difference" : Plural(found.size(), "difference")) << "\n";
}

}  // namespace

bool PrintDifference(const State& a, const State& b, bool json, Output& out) {
  const std::vector<Difference> found = Comparison(a, b).Run();
  if (json) {
    Json list = Json::array();
    for (const Difference& d : found) list.push_back(ToJson(d));
    PrintJson(out,
              {{"a", {{"seq", a.last.value}, {"digest", Hex(Digest(a))}}},
               {"b", {{"seq", b.last.value}, {"digest", Hex(Digest(b))}}},
               {"differences", list}},
              "diff");
  } else {
    PrintText(out, a, b, found);
  }
  return !found.empty();
}

}  // namespace amem::tool
