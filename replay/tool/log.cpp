// log: the events of a journal, one a line.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <memory>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/tool/command.h"
#include "replay/tool/printer.h"

namespace amem::tool {
namespace {

struct LogOptions {
  Directories directories;
  bool json = false;
  std::vector<std::string> kinds;  // empty: all
  std::optional<std::uint64_t> allocation;
  std::optional<std::uint64_t> from, to;  // sequence numbers, both included
  std::optional<double> since, until;     // seconds after the session's opening
  std::optional<std::uint64_t> last;      // only so many, after all other filters
};

constexpr std::uint64_t kEnd = std::numeric_limits<std::uint64_t>::max();

// Which events are about one allocation: those that name it, and those about an address while it is mapped there. Must see
// every event from where it starts.
class AllocationFollower {
 public:
  explicit AllocationFollower(AllocationId allocation) : wanted_(allocation) {}

  // For a journal whose beginning was dropped: where the allocation was then.
  void StartFrom(const State& state) {
    for (const auto& [address, mapping] : state.mappings) {
      if (mapping.allocation == wanted_) places_[address] = mapping.bytes;
    }
    for (const auto& [address, legacy] : state.legacy) {
      if (legacy.backing == wanted_) legacy_[address] = legacy.bytes;
    }
  }

  bool Concerns(const Event& event) {
    return std::visit([this](const auto& body) { return About(body); }, event.body);
  }

 private:
  bool Inside(Address address) const {
    auto after = places_.upper_bound(address);
    if (after == places_.begin()) return false;
    --after;
    return address.value - after->first.value < after->second;
  }

  bool About(const Mapped& e) {
    if (e.allocation == wanted_) places_[e.address] = e.bytes;
    return e.allocation == wanted_;
  }
  bool About(const Unmapped& e) { return places_.erase(e.address) != 0; }
  bool About(const AccessSet& e) {
    const auto next = places_.lower_bound(e.address);  // one call may cover several mappings
    return Inside(e.address) || (next != places_.end() && next->first.value - e.address.value < e.bytes);
  }
  bool About(const LegacyAllocated& e) {
    if (e.backing == wanted_) legacy_[e.address] = e.bytes;
    return e.backing == wanted_;
  }
  bool About(const LegacyFreed& e) { return legacy_.erase(e.address) != 0; }
  bool About(const LegacyExported& e) { return e.backing == wanted_; }
  bool About(const LegacyImported& e) { return e.allocation == wanted_; }
  bool About(const LegacyClosed& e) { return Inside(e.address); }
  bool About(const MulticastBound& e) { return e.multicast == wanted_ || e.allocation == wanted_ || Inside(e.address); }
  bool About(const MulticastUnbound& e) { return e.multicast == wanted_; }
  bool About(const Registered& e) { return Inside(e.address); }
  bool About(const Deregistered& e) { return Inside(e.address); }
  template <class Body>
  bool About(const Body& e) {
    if constexpr (requires { e.allocation; }) {
      return e.allocation == wanted_;
    } else if constexpr (requires { e.step.allocation; }) {
      return e.step.allocation == wanted_;
    } else if constexpr (requires { e.multicast; }) {
      return e.multicast == wanted_;
    } else {
      return false;
    }
  }

  AllocationId wanted_;
  std::map<Address, Bytes> places_;
  std::map<Address, Bytes> legacy_;
};

// The filters of the command line for one session.
class Filter {
 public:
  Filter(const LogOptions& options, const std::array<bool, kEventKinds>& kinds, std::uint64_t opened_ns)
      : kinds_(kinds), from_(options.from.value_or(1)) {
    if (options.allocation) follower_ = std::make_unique<AllocationFollower>(AllocationId{*options.allocation});
    if (options.since) since_ns_ = At(opened_ns, *options.since);
    if (options.until) until_ns_ = At(opened_ns, *options.until);
  }

  // An allocation can be followed only from the journal's beginning.
  [[nodiscard]] SequenceNumber ReadFrom() const { return SequenceNumber{follower_ ? 1 : from_}; }
  void StartFrom(const State& before) {
    if (follower_) follower_->StartFrom(before);
  }

  bool Wants(const Event& event) {
    if (follower_ && !follower_->Concerns(event)) return false;
    return event.seq.value >= from_ && event.time_ns >= since_ns_ && event.time_ns <= until_ns_ && kinds_[event.body.index()];
  }

 private:
  static std::uint64_t At(std::uint64_t opened_ns, double seconds) {
    const double ns = static_cast<double>(opened_ns) + seconds * 1e9;
    return ns <= 0 ? 0 : ns >= 1.8e19 ? kEnd : static_cast<std::uint64_t>(ns);
  }

  const std::array<bool, kEventKinds>& kinds_;
  std::unique_ptr<AllocationFollower> follower_;
  std::uint64_t from_;
  std::uint64_t since_ns_ = 0, until_ns_ = kEnd;
};

Status LogSession(JournalReader& reader, const LogOptions& options, const std::array<bool, kEventKinds>& kinds,
                  bool with_header, Output& out, ReadReport& report) {
  const Result<Opening> opening = ReadOpening(reader);
  if (!opening) return opening.status();
  const SessionOpened& who = opening->who;
  if (with_header && !options.json) out << "# session " << SessionText(who.session) << ", " << NameOf(who) << "\n";
  Filter filter(options, kinds, who.monotonic_ns);
  filter.StartFrom(opening->before);
  EventPrinter printer(out, options.json, who.session, who.monotonic_ns);
  std::deque<Event> last;
  const auto visit = [&](const Event& event) {
    if (!filter.Wants(event)) return true;
    if (!options.last) {
      printer.Print(event);
      return !out.ReaderGone();
    }
    last.push_back(event);
    if (last.size() > *options.last) last.pop_front();
    return true;
  };
  Result<ReadReport> read = reader.Read(filter.ReadFrom(), SequenceNumber{options.to.value_or(kEnd)}, visit);
  if (!read) return read.status();
  report = *std::move(read);
  for (const Event& event : last) printer.Print(event);
  return {};
}

// A kind as KindName writes it, blanks or hyphens between the words.
std::optional<std::size_t> KindFromWord(std::string word) {
  std::ranges::replace_if(
      word, [](char c) { return c == '-' || c == '_'; }, ' ');
  return KindOf(word);
}

int RunLog(const LogOptions& options, Output& out) {
  std::array<bool, kEventKinds> kinds;
  kinds.fill(options.kinds.empty());
  for (const std::string& word : options.kinds) {
    const std::optional<std::size_t> kind = KindFromWord(word);
    if (!kind) {
      std::vector<std::string> known;
      for (std::size_t k = 0; k < kEventKinds; ++k) known.push_back(KindWord(k));
      return Complain(
          fmt::format("--kind: there is no kind of event named \"{}\"; the kinds are {}", word, fmt::join(known, ", ")),
          kUsage);
    }
    kinds[*kind] = true;
  }

  bool failed = false;
  const std::vector<std::filesystem::path> sessions = FindSessions(options.directories, failed);
  ForEachJournal(sessions, failed, [&](const std::filesystem::path&, JournalReader& reader, ReadReport& damage) {
    return out.ReaderGone() ? Status{} : LogSession(reader, options, kinds, sessions.size() > 1, out, damage);
  });
  return failed ? kCannotRead : kFine;
}

void AddOptions(CLI::App& app, LogOptions& options) {
  AddDirectories(app, options.directories);
  AddJson(app, options.json, "One JSON object a line");
  app.add_option("--kind", options.kinds, "Only this kind of event, as in \"allocation-created\"; may be repeated")
      ->type_name("KIND")
      ->allow_extra_args(false)
      ->delimiter(',');
  app.add_option("--allocation", options.allocation, "Only what is about this allocation, or an address while it is there")
      ->type_name("ID");
  app.add_option("--from", options.from, "Only from this sequence number on")->type_name("SEQ");
  app.add_option("--to", options.to, "Only up to this sequence number")->type_name("SEQ");
  app.add_option("--since", options.since, "Only from so many seconds after the session's opening on")->type_name("SECONDS");
  app.add_option("--until", options.until, "Only up to so many seconds after the session's opening")->type_name("SECONDS");
  app.add_option("--last", options.last, "Only the last N of those, of each session")->type_name("N");
}

}  // namespace

Command LogCommand() {
  return {"log", "The events, one a line: number, seconds since the opening, thread, what happened",
          "  amem-replay log DIR --last 20\n"
          "  amem-replay log DIR --allocation 3           the life of one allocation\n"
          "  amem-replay log DIR --kind step-failed --kind cycle-failed\n"
          "  amem-replay log DIR --json --since 12.5 --until 13\n",
          [](CLI::App& app) { return SetUp<LogOptions>(app, AddOptions, RunLog); }};
}

}  // namespace amem::tool
