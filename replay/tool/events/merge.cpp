#include "replay/tool/events/merge.h"

#include <algorithm>
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
  Fill(*sources_.back());
  heap_.clear();  // made when the first event is taken
  return {};
}

void EventMerge::Fill(Source& source) {
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
}

std::optional<EventMerge::Next> EventMerge::Take() {
  // Equal times go by the order in which the journals were given, so that the outcome is always the same.
  const auto later = [this](std::size_t a, std::size_t b) {
    return std::pair(sources_[a]->Time(), a) > std::pair(sources_[b]->Time(), b);
  };
  if (heap_.empty()) {
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      if (!sources_[i]->ahead.empty()) heap_.push_back(i);
    }
    std::ranges::make_heap(heap_, later);
  }
  if (heap_.empty()) return std::nullopt;
  std::ranges::pop_heap(heap_, later);
  const std::size_t number = heap_.back();
  Source& source = *sources_[number];
  Next next{number, std::move(source.ahead.front())};
  source.ahead.pop_front();
  if (source.ahead.empty() && !source.ended) Fill(source);
  if (source.ahead.empty()) {
    heap_.pop_back();
  } else {
    std::ranges::push_heap(heap_, later);
  }
  return next;
}

}  // namespace amem::tool
