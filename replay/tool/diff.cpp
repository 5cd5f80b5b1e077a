// diff: what is different between two points of a journal, or between two journals.
#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/tool/command.h"
#include "statemachine/apply.h"

namespace amem::tool {
namespace {

using Json = nlohmann::ordered_json;

struct DiffOptions {
  std::string a, b;  // "DIR", "DIR@SEQ"; the second also "@SEQ"
  bool json = false;
};

struct Point {
  std::filesystem::path directory;
  std::optional<SequenceNumber> at;
};

// "DIR", "DIR@SEQ", or "@SEQ" of the journal that was named before.
std::optional<Point> Parse(const std::string& text, const std::filesystem::path& before) {
  const std::size_t mark = text.rfind('@');
  Point point{text.substr(0, mark), {}};
  if (mark != std::string::npos) {
    std::uint64_t seq = 0;
    const char* end = text.data() + text.size();
    if (const auto parsed = std::from_chars(text.data() + mark + 1, end, seq); parsed.ec != std::errc() || parsed.ptr != end)
      return std::nullopt;
    point.at = SequenceNumber{seq};
  }
  if (point.directory.empty()) point.directory = before;
  return point;
}

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

Result<State> Load(const Point& point, bool& failed) {
  const std::vector<std::filesystem::path> sessions = FindSessions({point.directory}, failed);
  if (sessions.size() != 1)
    return Status{Code::kInvalid, fmt::format("diff: {} holds {}: give the directory of one", point.directory.string(),
                                              sessions.empty() ? "no session" : "several sessions")};
  auto reader = JournalReader::Open(sessions.front());
  if (!reader) return reader.status();
  ReadReport report;
  auto state = (*reader)->StateAt(point.at, &report);
  failed |= ComplainAboutDamage(sessions.front(), report);
  return state;
}

int RunDiff(const DiffOptions& options, Output& out) {
  const auto a = Parse(options.a, DefaultJournalDirectory());
  const auto b = a ? Parse(options.b, a->directory) : std::nullopt;
  if (!a || !b || a->directory.empty())
    return Complain(
        "diff: a point is DIR, DIR@SEQ, or for the second @SEQ of the same journal, as in `amem-replay diff DIR@100 @200`",
        kUsage);
  bool failed = false;
  const Result<State> before = Load(*a, failed), after = Load(*b, failed);
  if (!before || !after) return Complain((before ? after : before).status().message());
  const std::vector<Difference> found = Comparison(*before, *after).Run();
  if (options.json) {
    Json list = Json::array();
    for (const Difference& d : found)
      list.push_back({{"change", d.sign == '+'   ? "added"
                                 : d.sign == '-' ? "removed"
                                                 : "changed"},
                      {"what", d.what},
                      {"before", d.before.empty() ? Json(nullptr) : Json(d.before)},
                      {"after", d.after.empty() ? Json(nullptr) : Json(d.after)}});
    const Json all = {{"a", {{"seq", before->last.value}, {"digest", Hex(Digest(*before))}}},
                      {"b", {{"seq", after->last.value}, {"digest", Hex(Digest(*after))}}},
                      {"differences", list}};
    PrintJson(out, all);
  } else {
    out << "A: session " << SessionText(before->session.session) << " after event " << before->last.value << "\n";
    out << "B: session " << SessionText(after->session.session) << " after event " << after->last.value << "\n";
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
  return failed ? kCannotRead : found.empty() ? kFine : kViolationFound;
}

void AddOptions(Arguments& arguments, DiffOptions& options) {
  arguments.Add("A", "A", options.a, "DIR or DIR@SEQ: the state at the end, or after that event; @SEQ of the default directory")
      .Required()
      .Offers(Completes::kFiles);
  arguments.Add("B", "B", options.b, "DIR, DIR@SEQ, or @SEQ of the same journal").Required().Offers(Completes::kFiles);
  AddForce(arguments);
  AddJson(arguments, options.json);
}

}  // namespace

Command DiffCommand() {
  return {"diff", "What changed between two points of a journal, or is different between two journals",
          "  amem-replay diff DIR@100 @200\n"
          "  amem-replay diff DIR_A DIR_B@1200 --json\n",
          [](Arguments& arguments) { return SetUp<DiffOptions>(arguments, AddOptions, RunDiff); }};
}

}  // namespace amem::tool
