#include "replay/report/shortages.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "replay/job/clock.h"
#include "replay/job/opening.h"

namespace amem {
namespace {

constexpr std::size_t kShortages = 4;  // the latest; each costs reading a part of some journals

// The last event up to that time, by halving: events are in the order of their times but for neighbours.
std::optional<SequenceNumber> LastUpTo(JournalReader& reader, const JournalInfo& info, std::uint64_t time_ns) {
  std::uint64_t low = info.first.value, high = info.last.value;  // `low` is the answer, or there is none
  std::optional<SequenceNumber> last;
  while (low <= high && low != 0) {
    const std::uint64_t middle = low + (high - low) / 2;
    const auto event = ReadEvent(reader, SequenceNumber{middle});
    if (!event || !*event) return last;  // damaged there
    if ((*event)->time_ns <= time_ns) {
      last = SequenceNumber{middle};
      low = middle + 1;
    } else {
      high = middle - 1;
    }
  }
  return last;
}

std::string UuidOf(const SessionOpened& who, std::int32_t device) {
  const auto index = static_cast<std::size_t>(device);
  return device >= 0 && index < who.gpu_uuids.size() ? who.gpu_uuids[index] : std::string();
}

// The device of that session that is the given one; nothing: it does not see it.
std::optional<std::int32_t> SameDevice(const SessionOpened& who, const SessionOpened& failed, std::int32_t device) {
  if (who.host != failed.host) return std::nullopt;
  const std::string uuid = UuidOf(failed, device);
  if (uuid.empty() || who.gpu_uuids.empty()) return device;
  const auto at = std::ranges::find(who.gpu_uuids, uuid);
  if (at == who.gpu_uuids.end()) return std::nullopt;
  return static_cast<std::int32_t>(at - who.gpu_uuids.begin());
}

MemoryShortage::Holder HeldOn(const State& state, std::int32_t device, std::size_t session) {
  MemoryShortage::Holder holder{.session = session};
  for (const auto& [id, a] : state.allocations) {
    const bool counts = a.own() && a.on_device() && !a.placed() && !a.multicast && a.properties.location.id == device;
    if (counts) (a.resident ? holder.held : holder.released) += a.bytes;
  }
  for (const auto& [address, bytes] : state.async) holder.elsewhere += bytes;
  for (const auto& [address, legacy] : state.legacy) holder.elsewhere += legacy.backing ? 0 : legacy.bytes;
  return holder;
}

// The device that a step needed memory of.
std::optional<std::int32_t> DeviceOf(const Step& step, const State& state) {
  if (step.kind == StepKind::kCheckMemory) return step.device.value;
  if (step.kind != StepKind::kCreate) return std::nullopt;
  const auto it = state.allocations.find(step.allocation);
  if (it == state.allocations.end() || !it->second.on_device()) return std::nullopt;
  return it->second.properties.location.id;
}

class Search {
 public:
  Search(JobTimeline& job, const std::function<JournalReader*(std::size_t)>& reader_of) : job_(job), reader_of_(reader_of) {}

  void Add(std::size_t session, const Attempt::Failure& failure) {
    JournalReader* const reader = reader_of_(session);
    if (reader == nullptr) return;
    const Result<State> state = reader->StateAt(failure.at.seq);
    const auto device = state ? DeviceOf(failure.step, *state) : std::nullopt;
    if (!device) return;
    const SessionOpened& who = job_.sessions[session].who;
    MemoryShortage shortage{.session = session, .seq = failure.at.seq, .device = *device, .uuid = UuidOf(who, *device)};
    const std::int64_t at_ns = WrappedSum(failure.at.time_ns, job_.offsets_ns[session]);
    for (std::size_t s = 0; s < job_.sessions.size(); ++s) AddHolder(shortage, s, at_ns);
    job_.shortages.push_back(std::move(shortage));
  }

 private:
  void AddHolder(MemoryShortage& shortage, std::size_t session, std::int64_t at_ns) {
    const SessionTimeline& s = job_.sessions[session];
    const auto device = SameDevice(s.who, job_.sessions[shortage.session].who, shortage.device);
    JournalReader* const reader = device ? reader_of_(session) : nullptr;
    if (reader == nullptr) return;
    const auto time = static_cast<std::uint64_t>(WrappedDifference(at_ns, job_.offsets_ns[session]));
    // A process that has ended holds nothing any more.
    const bool over = s.info.status != SessionStatus::kLive && session != shortage.session && EndOf(session) < at_ns;
    const auto last = over ? std::nullopt : LastUpTo(*reader, s.info, time);
    if (!last) return;
    const Result<State> state = reader->StateAt(session == shortage.session ? shortage.seq : *last);
    if (!state) return;
    const MemoryShortage::Holder holder = HeldOn(*state, *device, session);
    if (holder.held + holder.released != 0) shortage.holders.push_back(holder);
  }
  // When its memory was gone: at its last event or, where that was noticed later, then.
  [[nodiscard]] std::int64_t EndOf(std::size_t session) const {
    const auto death = job_.deaths.find(session);
    if (death != job_.deaths.end()) return death->second.at_ns;
    return WrappedSum(job_.sessions[session].last_ns, job_.offsets_ns[session]);
  }

  JobTimeline& job_;
  const std::function<JournalReader*(std::size_t)>& reader_of_;
};

}  // namespace

void FindShortages(JobTimeline& job, const std::function<JournalReader*(std::size_t session)>& reader_of) {
  Search search(job, reader_of);
  for (auto cycle = job.cycles.rbegin(); cycle != job.cycles.rend(); ++cycle) {
    for (const auto& [session, index] : cycle->parts) {
      const auto& failure = job.sessions[session].cycles[index].failed_step;
      const bool memory = failure && failure->code == Code::kOutOfMemory;
      if (memory && job.shortages.size() < kShortages) search.Add(session, *failure);
    }
  }
}

}  // namespace amem
