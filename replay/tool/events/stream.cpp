#include "replay/tool/events/stream.h"

#include <fmt/format.h>

#include <iterator>
#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/tool/answer.h"
#include "replay/tool/command.h"

namespace amem::tool {

constexpr std::size_t kEventsAhead = 512;  // of each journal

void EventStream::Add(const std::filesystem::path& session, std::unique_ptr<JournalReader> reader, EventFilter filter,
                      EventPrinter printer) {
  sources_.push_back({session, std::move(reader), std::move(filter), std::move(printer)});
  Fill(sources_.size() - 1);
}

void EventStream::Fill(std::size_t number) {
  Source& source = sources_[number];
  const auto read = source.reader->Read(source.next, source.filter.ReadTo(), [&](const Event& event) {
    source.next = SequenceNumber{event.seq.value + 1};
    if (source.filter.Wants(event)) source.ahead.push_back(event);
    return source.ahead.size() < kEventsAhead;
  });
  source.ended = !read || source.ahead.size() < kEventsAhead;
  if (!source.told && (!read || !read->whole())) {
    source.told = true;
    if (Went(read.status())) ComplainAboutDamage(source.directory, *read);
  }
  if (!source.ahead.empty()) queue_.emplace(source.Time(), number);
}

void EventStream::Print(std::optional<std::uint64_t> last, const Output& out) {
  std::deque<std::pair<Source*, Event>> kept;
  for (; !queue_.empty() && !out.ReaderGone(); ++wanted_) {
    const std::size_t number = queue_.top().second;
    queue_.pop();
    Source& source = sources_[number];
    if (last) {
      kept.emplace_back(&source, std::move(source.ahead.front()));
      if (kept.size() > *last) kept.pop_front();
    } else {
      source.printer.Print(source.ahead.front());
    }
    source.ahead.pop_front();
    if (!source.ahead.empty()) queue_.emplace(source.Time(), number);
    if (source.ahead.empty() && !source.ended) Fill(number);
  }
  for (auto& [source, event] : kept) source->printer.Print(event);
}

bool EventStream::ReadOn() {
  for (std::size_t i = 0; i < sources_.size(); ++i)
    if (sources_[i].ahead.empty()) Fill(i);
  return !queue_.empty();
}

// ---- an event in a line ----------------------------------------------------------------------------------------------------

EventPrinter::EventPrinter(Output& out, const SessionOpened& who, PrinterOptions options)
    : out_(out), options_(std::move(options)), session_(who.session), rank_(who.rank) {}

bool EventPrinter::TakesBack(const EventBody& body) {
  const auto is_undo = [this](PoolId pool, PhaseKind phase) {
    const auto cycle = cycles_.find(pool);
    return cycle != cycles_.end() && IsUndo(phase, cycle->second);
  };
  if (const auto* begun = std::get_if<CycleBegun>(&body)) cycles_[begun->pool] = begun->kind;
  if (const auto* phase = std::get_if<PhaseBegun>(&body)) return is_undo(phase->pool, phase->phase);
  if (const auto* phase = std::get_if<PhaseDecided>(&body)) return is_undo(phase->pool, phase->phase);
  if (const auto* done = std::get_if<CycleDone>(&body)) cycles_.erase(done->pool);
  if (const auto* failed = std::get_if<CycleFailed>(&body)) cycles_.erase(failed->pool);
  return false;
}

void EventPrinter::PrintText(const Event& event) {
  head_.clear();  // put together in one piece, because a log has a million such lines
  const auto head = std::back_inserter(head_);
  if (!options_.name.empty()) fmt::format_to(head, "{:<8} ", options_.name);
  fmt::format_to(head, "{:6}", event.seq.value);
  if (options_.wall) {
    fmt::format_to(head, " {}", PreciseText(static_cast<std::uint64_t>(Wall(event))));
  } else {
    const bool before = event.time_ns < options_.origin_ns;
    const std::uint64_t us = (before ? options_.origin_ns - event.time_ns : event.time_ns - options_.origin_ns) / 1000;
    fmt::format_to(head, " {}{}.{:06}s", before ? '-' : '+', us / 1'000'000, us % 1'000'000);
  }
  fmt::format_to(head, " t{}  ", event.thread);
  (out_ << head_ << (TakesBack(event.body) ? "undo, " : "") << ToText(event.body)).Verbatim("\n");
}

// The fields that a line has before its event's own.
struct EventLine {
  SessionId session{};
  std::int32_t rank = -1;
  bool named = false;  // with its rank
  std::optional<std::int64_t> wall_ns{};
};
template <class To>
void WriteFields(To& to, const EventLine& line) {
  to("journal", line.session, "Of the session that wrote it");
  to.If(line.named, "journal_rank", RankShown(line.rank), "Its rank, with --merge, and of several that log -f follows");
  to.If(line.wall_ns.has_value(), "wall_ns", line.wall_ns.value_or(0), "Nanoseconds since 1970, with --wall");
  to("session", line.session, "Of an event about another session that one, else as journal");
}

void EventPrinter::PrintJson(const Event& event) {
  Json line =
      Object(EventLine{session_, rank_, !options_.name.empty(), options_.wall ? std::optional(Wall(event)) : std::nullopt});
  line.update(ToJson(event));
  tool::PrintJson(out_, std::move(line), "event", -1);
}

Json EventSchema() {
  Json form = amem::FormOf(EventLine{}), event = EventForm();
  for (const Json& field : event["required"]) form["required"].push_back(field);
  form["properties"].update(event["properties"]);
  form["allOf"] = std::move(event["allOf"]);
  return CompleteSchema(
      std::move(form), "event", "A line of what amem log --json prints",
      "An event of a journal. Sizes are bytes, addresses, handles and call sites strings like \"0x7f00\". Other "
      "kinds may be added.");
}

}  // namespace amem::tool
