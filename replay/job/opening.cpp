#include "replay/job/opening.h"

#include <fmt/format.h>

#include <algorithm>

namespace amem {

Result<State> StateBefore(JournalReader& reader, const JournalInfo& info) {
  if (info.first.value <= 1) return State{};
  return reader.StateAt(SequenceNumber{info.first.value - 1})
      .Within(fmt::format("the journal begins with event {}, and the state before it cannot be read", info.first.value));
}

SessionOpened Completed(SessionOpened opened, const JournalInfo& info, std::uint64_t first_ns) {
  if (!opened.session) opened.session = info.session;
  if (opened.pid == 0) opened.pid = info.pid;
  if (opened.monotonic_ns == 0) opened.monotonic_ns = first_ns;
  if (info.set_clock.monotonic_ns != 0)
    opened.realtime_ns = static_cast<std::uint64_t>(WrappedSum(opened.monotonic_ns, info.set_clock.Offset()));
  return opened;
}

Result<std::optional<Event>> ReadEvent(JournalReader& reader, SequenceNumber seq) {
  std::optional<Event> found;
  const auto read = reader.Read(seq, seq, [&found](const Event& event) {
    found = event;
    return false;
  });
  return read ? Result(std::move(found)) : read.status();
}

static ReadyCommunicators ReadCommunicators(JournalReader& reader, const JournalInfo& info) {
  ReadyCommunicators ready;
  const SequenceNumber last{info.first.value + ReadyCommunicators::kEvents - 1};
  static_cast<void>(reader.Read(info.first, std::min(last, info.last), [&](const Event& event) {
    ready.Take(event);
    return true;
  }));
  return ready;
}

Result<Opening> ReadOpening(JournalReader& reader) {
  Opening opening;
  AMEM_ASSIGN(opening.info, reader.Info());
  AMEM_ASSIGN(opening.before, StateBefore(reader, opening.info));
  opening.who = opening.before.session;
  const auto look = [&](const Event& event) {
    if (const auto* opened = std::get_if<SessionOpened>(&event.body)) opening.who = *opened;
    if (opening.first_ns == 0) opening.first_ns = event.time_ns;
    opening.last_ns = event.time_ns;
    return false;
  };
  for (const SequenceNumber seq : {opening.info.first, opening.info.last}) {
    if (!seq) continue;
    if (const Result<ReadReport> read = reader.Read(seq, seq, look); !read) return read.status();
  }
  opening.who = Completed(std::move(opening.who), opening.info, opening.first_ns);
  return opening;
}

JobClock ClockOf(std::span<const OpenedJournal> journals) {
  std::vector<const SessionOpened*> opened;
  for (const OpenedJournal& one : journals) opened.push_back(&one.opening->who);
  const bool compare = JobClock::NeedsCommunicators(opened);
  std::vector<JobClock::Journal> times;
  for (const auto& [opening, reader] : journals) {
    times.push_back({&opening->who, opening->first_ns, {}, opening->info.set_clock.monotonic_ns});
    if (!compare) continue;
    const auto own = reader == nullptr ? JournalReader::Open(opening->info.directory) : Status{};
    if (reader != nullptr || own) times.back().communicators = ReadCommunicators(own ? **own : *reader, opening->info);
  }
  return JobClock(times);
}

}  // namespace amem
