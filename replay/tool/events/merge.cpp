#include "replay/tool/events/merge.h"

#include <deque>

#include "journal/journal.h"
#include "replay/job/clock.h"
#include "replay/job/fold.h"
#include "replay/job/opening.h"

namespace amem::tool {
namespace {

constexpr std::size_t kEventsAhead = 512;  // of each journal

}  // namespace

struct EventMerge::Source {
  std::filesystem::path directory;
  std::unique_ptr<JournalReader> reader;
  std::int64_t offset_ns = 0;
  EventFilter filter;
  SequenceNumber next, last;
  std::deque<Event> ahead;
  bool ended = false, told = false;  // told: its damage is among the problems

  [[nodiscard]] std::int64_t Time() const { return WrappedSum(ahead.front().time_ns, offset_ns); }
};

EventMerge::EventMerge() = default;
EventMerge::~EventMerge() = default;

Status EventMerge::Add(const std::filesystem::path& session, std::unique_ptr<JournalReader> reader, std::int64_t offset_ns,
                       EventFilter filter, const EventWishes& wishes) {
  if (wishes.allocation) {
    const Result<JournalInfo> info = reader->Info();
    const Result<State> before = info ? StateBefore(*reader, *info) : info.status();
    if (!before) return before.status();
    filter.StartFrom(*before);
  }
  const SequenceNumber from = filter.ReadFrom();
  sources_.push_back(std::unique_ptr<Source>(
      new Source{session, std::move(reader), offset_ns, std::move(filter), from, SequenceNumber{wishes.to}, {}}));
  Fill(sources_.size() - 1);
  return {};
}

void EventMerge::Fill(std::size_t number) {
  Source& source = *sources_[number];
  const auto read = source.reader->Read(source.next, source.last, [&](const Event& event) {
    source.next = SequenceNumber{event.seq.value + 1};
    if (source.filter.Wants(event)) source.ahead.push_back(event);
    return source.ahead.size() < kEventsAhead;
  });
  source.ended = !read || source.ahead.size() < kEventsAhead;
  if (!read) problems_.push_back(read.status().message());
  if (read && read->corrupt_records != 0 && !source.told) {
    problems_.push_back(source.directory.string() + ": " + DamageText(*read));
    source.told = true;
  }
  if (!source.ahead.empty()) queue_.emplace(source.Time(), number);
}

std::optional<EventMerge::Next> EventMerge::Take() {
  if (queue_.empty()) return std::nullopt;
  const std::size_t number = queue_.top().second;
  queue_.pop();
  Source& source = *sources_[number];
  Next next{number, std::move(source.ahead.front())};
  source.ahead.pop_front();
  if (!source.ahead.empty()) {
    queue_.emplace(source.Time(), number);
  } else if (!source.ended) {
    Fill(number);
  }
  return next;
}

bool EventMerge::ReadOn() {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i]->ahead.empty()) Fill(i);
  }
  return !queue_.empty();
}

Result<JournalInfo> EventMerge::InfoOf(std::size_t source) { return sources_[source]->reader->Info(); }

}  // namespace amem::tool
