// replay: does again what journals say, and compares.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/rerun/rerun.h"
#include "replay/tool/answer.h"
#include "replay/tool/command.h"
#include "statemachine/event.h"

namespace amem::tool {
namespace {

struct ReplayOptions {
  Targets targets;
  std::vector<Position> to;  // empty: the last event
  RerunOptions how;
  bool json = false;
};
using Journals = std::vector<std::unique_ptr<JournalReader>>;

// "34G", "512MiB", "1000000B": bytes with a unit, which counts in powers of 1 024. A number without one could be meant as GiB.
std::optional<Bytes> ParseBytes(const std::string& text) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::optional<std::uint64_t> number = WholeNumber(text.substr(0, digits));
  std::string unit = text.substr(digits);
  if (unit.size() > 2 && unit.ends_with("iB")) unit.resize(unit.size() - 2);
  if (unit.size() > 1 && unit.ends_with("B")) unit.resize(unit.size() - 1);
  const int shift = unit == "B" ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : unit == "T" ? 40 : -1;
  if (!number || shift < 0 || *number > std::numeric_limits<Bytes>::max() >> shift) return std::nullopt;
  return *number << shift;
}

// Up to which event of which session, in the order of the job's common clock. A time is that of the last event before it.
Status StopAt(const Position& position, const Journals& all, RerunOptions& options) {
  std::vector<JournalReader*> journals;
  for (const auto& reader : all) journals.push_back(reader.get());
  if (position.seq) {
    AMEM_ASSIGN(const auto one, JournalOf(position, all));
    journals = {one};
  }
  std::uint64_t latest_ns = 0;
  Status nothing;
  for (JournalReader* reader : journals) {
    const Result<SequenceNumber> seq = EventAt(position, *reader);
    const Result<std::uint64_t> wall_ns = seq ? WallTimeOf(*seq, *reader) : seq.status();
    const Result<JournalInfo> info = reader->Info();
    if (!wall_ns || !info) nothing = wall_ns ? info.status() : wall_ns.status();
    if (!wall_ns || !info || *wall_ns < latest_ns) continue;
    latest_ns = *wall_ns;
    options.until = *seq;
    options.until_session = info->session;
  }
  return options.until ? Status{} : nothing;
}

void PrintText(Output& out, const RerunReport& report, const std::string& whose, const std::string& again) {
  out << fmt::format("replayed {}, {} events, {} driver calls, {} steps on the simulator; {} times the states were compared\n",
                     Plural(report.sessions, "session"), Grouped(report.events), Grouped(report.calls), Grouped(report.steps),
                     Grouped(report.comparisons));
  for (std::size_t d = 0; d < report.devices.size(); ++d) {
    const RerunDevice& device = report.devices[d];
    out << fmt::format("device {}  {:<20} held {} at most", d, device.name, RoundedBytes(device.most));
    if (device.limit) out << ", limited to " << RoundedBytes(*device.limit) << " once it was paused";
    for (std::size_t i = 0; i < device.used_by.size(); ++i) out << (i == 0 ? ", own memory of " : ", ") << device.used_by[i];
    out << "\n";
  }
  for (const auto& [kind, count] : report.not_replayed) out << "not replayed: " << Grouped(count) << " of " << kind << "\n";
  for (const std::string& failure : report.reproduced) out << "reproduced: " << failure << "\n";
  if (!report.difference) {
    out << "no difference: every result is as recorded" << (report.failures_reproduced != 0 ? ", the failure included" : "")
        << "\n";
    return;
  }
  const RerunDifference& d = *report.difference;
  out << "\nfirst difference: " << whose << ", event " << d.seq.value << ": " << d.what << "\n";
  out << "  recorded  " << d.recorded << "\n  replayed  " << d.replayed << "\n";
  if (!report.hint.empty()) PrintParagraph(out, "Hint: " + report.hint + (again.empty() ? "." : ":"), "  ");
  if (!again.empty()) out << "  " << again << "\n";
}

// Where the replay first had another result, with a command that tries what the hint says.
struct ReplayDifference {
  RerunDifference is;
  std::string hint;
};
template <class To>
void WriteFields(To& to, const ReplayDifference& difference) {
  to("session", difference.is.session);
  to("seq", difference.is.seq);
  to("what", difference.is.what);
  to("recorded", difference.is.recorded);
  to("replayed", difference.is.replayed);
  to("hint", difference.hint);
}
struct ReplayDevice {
  RerunDevice is;
};
template <class To>
void WriteFields(To& to, const ReplayDevice& device) {
  to("name", device.is.name);
  to("used_by", device.is.used_by);
  to("most_bytes", device.is.most);
  to("limit_bytes", device.is.limit);
}
struct ReplayAnswer {
  static constexpr const char* kSchema = "run";
  static constexpr const char* kTitle = "amem replay --json";
  static constexpr const char* kMeaning = "A job done again, and the first result that was another one.";
  RerunReport report{};
  std::string again{};
};
template <class To>
void WriteFields(To& to, const ReplayAnswer& answer) {
  const RerunReport& report = answer.report;
  std::vector<ReplayDevice> devices;
  for (const RerunDevice& device : report.devices) devices.push_back({device});
  std::optional<ReplayDifference> difference;
  if (report.difference)
    difference = ReplayDifference{*report.difference, report.hint + (answer.again.empty() ? "" : ": " + answer.again)};
  to("same", !report.difference.has_value(), "Every result is as recorded");
  to("sessions", report.sessions);
  to("events", report.events);
  to("calls", report.calls);
  to("steps", report.steps);
  to("comparisons", report.comparisons);
  to("failures_reproduced", report.failures_reproduced);
  to("devices", devices);
  to("not_replayed", report.not_replayed);
  to("difference", difference, "null: there is none");
}

int RunReplay(const ReplayOptions& options, Output& out) {
  const Journals journals = OpenJournals(options.targets);
  if (journals.empty()) return kCannotRead;
  RerunOptions how = options.how;
  const Status stop = options.to.empty() ? Status() : StopAt(options.to.front(), journals, how);
  if (!stop.ok()) return Complain(stop.message(), kUsage);
  const Result<RerunReport> report = Rerun(journals, how);
  if (!report) return Complain(report.status().message(), report.status().code() == Code::kInvalid ? kUsage : kCannotRead);
  std::string whose;
  for (const auto& reader : journals) {
    const Result<Opening> opening = ReadOpening(*reader);
    if (report->difference && opening && opening->info.session == report->difference->session) whose = NameOf(opening->who);
  }
  const std::string again = report->try_options.empty() ? "" : CommandOn("replay", options.targets, report->try_options);
  if (options.json) {
    PrintAnswer(out, ReplayAnswer{*report, again});
  } else {
    PrintText(out, *report, whose, again);
  }
  return report->difference ? kViolationFound : ReadAll();
}

void AddOptions(Arguments& arguments, ReplayOptions& options) {
  AddPosition(arguments, "--to", options.to,
              "Stop after this event (#115 of the one journal, 2#115 of rank 2), or at this time");
  const auto take_memory = [&memory = options.how.memory](const std::vector<std::string>& given) -> std::string {
    for (const std::string& limit : given) {
      const std::size_t equals = limit.rfind('=');
      const auto bytes = equals == std::string::npos ? std::nullopt : ParseBytes(limit.substr(equals + 1));
      if (!bytes)
        return fmt::format("--memory {}: give DEVICE=BYTES with a unit (B, KiB, MiB, GiB, TiB), as in --memory 2=34GiB", limit);
      memory[limit.substr(0, equals)] = *bytes;
    }
    return {};
  };
  arguments
      .Take("--memory", "DEVICE=BYTES",
            "Limit a device's memory after the pause, with a unit: 2=34GiB; DEVICE is a number or UUID", take_memory)
      .several = true;
  AddJson(arguments, options.json);
}

}  // namespace

Json ReplaySchema() { return SchemaOf<ReplayAnswer>(); }

Command ReplayCommand() {
  return WithOptions<ReplayOptions>(
      {kExpertGroup, "replay", "Replays journals on the simulator, and compares the results",
       "  amem replay DIR                            all ranks of a job, up to the end\n"
       "  amem replay DIR --to 2#115                 up to event 115 of rank 2\n"
       "  amem replay job.amem --memory 2=34GiB      others took the rest of device 2 while it was paused\n"
       "It needs no GPU. A resume that failed for lack of memory fails again with the limit that it met, and succeeds with "
       "one that is high enough.\n"},
      AddOptions, RunReplay);
}

}  // namespace amem::tool
