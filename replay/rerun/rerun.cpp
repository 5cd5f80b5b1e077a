#include "replay/rerun/rerun.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "replay/job/clock.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/rerun/session.h"

namespace amem {
namespace {

constexpr std::uint64_t kMeasureEvery = 512;  // events of one session

template <class... Kinds>
bool IsOneOf(const EventBody& body) {
  return (std::holds_alternative<Kinds>(body) || ...);
}

// Kinds that the driver has no call for.
bool HasNoCall(const EventBody& body) {
  return IsOneOf<HostAllocated, LegacyAllocated, AsyncAllocated, MulticastCreated, MulticastBound, Registered, PassedThrough>(
      body);
}

bool IsCheckpoint(const EventBody& body) { return IsOneOf<PhaseDecided, CycleDone, CycleFailed>(body); }

class Host {
 public:
  Host(std::span<const std::unique_ptr<JournalReader>> journals, const RerunOptions& options)
      : journals_(journals), options_(options) {}

  Result<RerunReport> Run() {
    AMEM_TRY(FindSessions());
    AMEM_TRY(Limit());
    AMEM_TRY(Build());
    AMEM_TRY(Replay());
    for (const auto& one : ranks_) {
      Measure(*one);
      const RerunSession::Counts counts = one->session->counts();
      report_.events += counts.events;
      report_.calls += counts.calls;
      report_.steps += counts.steps;
    }
    return std::move(report_);
  }

 private:
  struct Rank {
    JournalReader* reader = nullptr;
    Opening opening;
    std::uint64_t offset = 0;           // of its clock, to compare with others'
    std::vector<std::int32_t> devices;  // of the host, by its ordinals
    std::unique_ptr<EventStream> stream;
    std::unique_ptr<RerunSession> session;
    std::uint64_t events = 0;             // taken
    std::map<std::int32_t, Bytes> holds;  // by device of the host
  };

  // Finds the sessions and their devices. A UUID is one device for all sessions that name it.
  Status FindSessions() {
    for (const auto& reader : journals_) {
      auto one = std::make_unique<Rank>();
      AMEM_ASSIGN(one->opening, ReadOpening(*reader));
      one->reader = reader.get();
      one->stream =
          std::make_unique<EventStream>(*reader, SequenceNumber{one->opening.before.last.value + 1}, one->opening.info.last);
      AMEM_TRY(FindDevices(*reader, *one));
      ranks_.push_back(std::move(one));
    }
    report_.sessions = ranks_.size();
    return {};
  }

  // The ordinals that it uses, also those of peers' memory that it maps.
  Status FindDevices(JournalReader& reader, Rank& one) {
    std::int32_t highest = static_cast<std::int32_t>(one.opening.who.gpu_uuids.size()) - 1;
    std::set<std::int32_t> owns;
    const auto see = [&](const Location& location) {
      if (location.type == LocationType::kDevice) highest = std::max(highest, location.id);
    };
    const auto read = reader.Read(one.opening.info.first, one.opening.info.last, [&](const Event& event) {
      if (const auto* created = std::get_if<AllocationCreated>(&event.body)) {
        see(created->properties.location);
        owns.insert(created->properties.location.id);
      }
      if (const auto* imported = std::get_if<Imported>(&event.body)) see(imported->properties.location);
      if (const auto* access = std::get_if<AccessSet>(&event.body)) {
        for (const AccessDescriptor& a : access->access) see(a.location);
      }
      return true;
    });
    if (!read) return read.status();
    for (const auto& [id, a] : one.opening.before.allocations) {
      see(a.properties.location);
      if (a.own()) owns.insert(a.properties.location.id);
    }
    for (const auto& [address, m] : one.opening.before.mappings)
      for (const AccessDescriptor& a : m.access) see(a.location);
    if (highest >= SimulatorWorld::kMaxDevices)
      return {Code::kUnsupported, fmt::format("{} uses device {}, and the simulator has {}", ShortNameOf(one.opening.who),
                                              highest, SimulatorWorld::kMaxDevices)};
    for (std::int32_t ordinal = 0; ordinal <= highest; ++ordinal) {
      const auto index = static_cast<std::size_t>(ordinal);
      const std::string name = index < one.opening.who.gpu_uuids.size()
                                   ? one.opening.who.gpu_uuids[index]
                                   : one.opening.who.host + " device " + std::to_string(ordinal);
      auto at = std::ranges::find(report_.devices, name, &RerunDevice::name);
      if (at == report_.devices.end()) at = report_.devices.insert(at, RerunDevice{name, {}, 0, {}});
      if (owns.contains(ordinal)) at->used_by.push_back(ShortNameOf(one.opening.who));
      one.devices.push_back(static_cast<std::int32_t>(at - report_.devices.begin()));
    }
    return {};
  }

  Status Limit() {
    for (const auto& [which, bytes] : options_.memory) {
      RerunDevice* limited = nullptr;
      std::string known;
      for (std::size_t d = 0; d < report_.devices.size(); ++d) {
        RerunDevice& device = report_.devices[d];
        if (device.name == which || std::to_string(d) == which) limited = &device;
        known += fmt::format("{}{} ({})", d == 0 ? "" : ", ", d, device.name);
      }
      if (limited == nullptr)
        return {Code::kInvalid, "there is no device \"" + which + "\" in these journals; there are " + known};
      limited->limit = bytes;
    }
    return {};
  }

  Status Build() {
    const auto devices = std::max<std::int32_t>(1, static_cast<std::int32_t>(report_.devices.size()));
    if (devices >= SimulatorWorld::kMaxDevices)
      return {Code::kUnsupported, "the journals use " + std::to_string(devices) + " devices, and the simulator has " +
                                      std::to_string(SimulatorWorld::kMaxDevices - 1)};
    AMEM_TRY(OpenSessions(devices));
    std::vector<OpenedJournal> opened;
    for (const auto& one : ranks_) opened.push_back({&one->opening, &*one->reader});
    const JobClock clock = ClockOf(opened);
    for (const auto& one : ranks_) one->offset = static_cast<std::uint64_t>(clock.OffsetOf(one->opening.who));
    for (const auto& one : ranks_) AMEM_TRY(one->session->BuildOwn().Within(Beginning(*one)));
    for (const auto& one : ranks_) AMEM_TRY(one->session->BuildImports().Within(Beginning(*one)));
    return {};
  }

  static std::string Beginning(const Rank& one) {
    return ShortNameOf(one.opening.who) + (one.opening.info.first.value > 1 ? ", from its snapshot" : "");
  }

  [[nodiscard]] std::set<SessionId> Killed() const {
    std::set<SessionId> killed;
    for (const auto& one : ranks_)
      if (one->opening.info.status == SessionStatus::kCrashed) killed.insert(one->opening.info.session);
    return killed;
  }

  Status OpenSessions(std::int32_t devices) {
    // One more for absent owners: what they hold counts for nobody.
    AMEM_ASSIGN(const auto world, SimulatorWorld::InMemory(devices + 1, kPlenty));
    const auto open = [&](std::vector<std::int32_t> visible) {
      return Simulator::Open({.in_memory = world, .visible = std::move(visible), .granularity = 4096, .physical = false});
    };
    AMEM_ASSIGN(absent_owners_driver_, open({devices}));
    absent_owner_ = AbsentOwner(*absent_owners_driver_);
    for (const auto& one : ranks_) {
      AMEM_ASSIGN(auto driver, open(one->devices));
      auto session = std::make_unique<RerunSession>(
          std::move(driver), [this](const RemoteAllocation& remote, const Allocation& a) { return ExportRemote(remote, a); });
      if (one->opening.before.last) session->StartFrom(std::move(one->opening.before));
      session->SetKilled(Killed());
      by_id_[one->opening.info.session] = session.get();
      one->session = std::move(session);
    }
    return {};
  }

  Result<UniqueFd> ExportRemote(const RemoteAllocation& remote, const Allocation& as_imported) {
    if (RerunSession* const* owner = FindIn(by_id_, remote.owner)) return DescriptorOf((*owner)->Share(remote.allocation));
    return absent_owner_.Export(remote, as_imported);
  }

  static std::uint64_t TimeOfNext(const Rank& one) { return one.stream->Peek()->time_ns + one.offset; }

  Rank* Earliest() {
    Rank* first = nullptr;
    for (const auto& one : ranks_) {
      if (one->stream->Peek() == nullptr) continue;
      if (first == nullptr || TimeOfNext(*one) < TimeOfNext(*first)) first = one.get();
    }
    return first;
  }

  Status Replay() {
    bool go_on = true;
    while (Rank* one = go_on ? Earliest() : nullptr) AMEM_TRY(Replay(*one, go_on));
    return go_on ? CompareAtTheEnd() : Status{};
  }

  // Replays one event. `go_on` becomes false after the last.
  Status Replay(Rank& one, bool& go_on) {
    const Event event = *one.stream->Peek();
    one.stream->Pop();
    if (HasNoCall(event.body)) ++report_.not_replayed[KindWord(event.body.index())];
    const bool last = options_.until && event.seq == *options_.until &&
                      (one.opening.info.session == options_.until_session || ranks_.size() == 1);
    const RerunSession::Outcome outcome = one.session->Take(event);
    if (outcome.reproduced) {
      ++report_.failures_reproduced;
      if (report_.reproduced.empty()) report_.reproduced.push_back(ShortNameOf(one.opening.who) + ": " + ToText(event.body));
    }
    if (!outcome.mismatch.ok()) Differ(one, event, outcome.what, Recorded(event), outcome.mismatch.message());
    go_on = outcome.mismatch.ok();
    if (go_on && IsCheckpoint(event.body)) go_on = Compare(one, event, "after \"" + ToText(event.body) + "\"");
    if (!go_on) return {};
    AMEM_TRY(TakeMemoryAway(one, event));
    if (++one.events % kMeasureEvery == 0 || IsCheckpoint(event.body)) Measure(one);
    go_on = !last;
    return {};
  }

  bool Compare(const Rank& one, const Event& at, const std::string& when) {
    ++report_.comparisons;
    const Status same = one.session->Compare();
    if (!same.ok()) Differ(one, at, "state " + when, "digest " + Hex(Digest(one.session->recorded())), same.message());
    return same.ok();
  }

  Status CompareAtTheEnd() {
    for (const auto& one : ranks_) {
      if (!one->stream->status().ok()) return one->stream->status().Within(ShortNameOf(one->opening.who));
      if (one->session->recorded().cycle.open_step) continue;  // it died in this step, and the driver may be a step ahead
      if (!Compare(*one, Event{one->session->recorded().last, 0, 0, {}}, "at the end")) return {};
    }
    return {};
  }

  // Once a pause gave a device's memory back, takes away what is over its limit.
  Status TakeMemoryAway(const Rank& one, const Event& event) {
    const auto* done = std::get_if<CycleDone>(&event.body);
    if (done == nullptr || done->kind != CycleKind::kPause) return {};
    for (std::size_t ordinal = 0; ordinal < one.devices.size(); ++ordinal) {
      const std::int32_t device = one.devices[ordinal];
      const auto index = static_cast<std::size_t>(device);
      const auto limit = report_.devices[index].limit;
      const auto& users = report_.devices[index].used_by;
      if (!limit || taken_.contains(device) || std::ranges::find(users, ShortNameOf(one.opening.who)) == users.end()) continue;
      const Status taken = one.session->LeaveOnly(DeviceOrdinal{static_cast<std::int32_t>(ordinal)}, *limit);
      if (taken.ok()) taken_.insert(device);
      // Out of memory: other sessions still hold theirs, and this is tried again when they have paused.
      if (!taken.ok() && taken.code() != Code::kOutOfMemory)
        return taken.Within("--memory: taking the rest of device " + std::to_string(device));
    }
    return {};
  }

  // Adds up what the sessions hold by their states; the simulated host would have to look at every process.
  void Measure(Rank& one) {
    for (const auto& [device, bytes] : one.holds) holds_[device] -= bytes;
    one.holds.clear();
    for (const auto& [id, a] : one.session->recorded().allocations) {
      const auto ordinal = static_cast<std::size_t>(a.properties.location.id);
      if (!a.own() || !a.on_device() || !a.resident || a.placed() || ordinal >= one.devices.size()) continue;
      one.holds[one.devices[ordinal]] += a.bytes;
    }
    for (const auto& [device, bytes] : one.holds) {
      holds_[device] += bytes;
      Bytes& most = report_.devices[static_cast<std::size_t>(device)].most;
      most = std::max(most, holds_[device]);
    }
  }

  static std::string Recorded(const Event& event) {
    if (const auto* failed = std::get_if<StepFailed>(&event.body)) return failed->message;
    return std::holds_alternative<StepDone>(event.body) ? "ok" : ToText(event.body);
  }

  void Differ(const Rank& one, const Event& event, std::string what, std::string recorded, std::string replayed) {
    report_.difference =
        RerunDifference{one.opening.info.session, event.seq, std::move(what), std::move(recorded), std::move(replayed)};
    const auto* failed = std::get_if<StepFailed>(&event.body);
    if (failed == nullptr) return;
    if (failed->code != Code::kOutOfMemory) {
      report_.hint = "it failed for a reason that the simulator does not have: the driver, the device or a peer of that day";
      return;
    }
    if (failed->step.kind != StepKind::kCheckMemory) {
      report_.hint = "others took the memory between the check and this step, which less memory does not do again";
      return;
    }
    const auto ordinal = static_cast<std::size_t>(failed->step.device.value);
    if (ordinal >= one.devices.size()) return;
    const std::int32_t device = one.devices[ordinal];
    Bytes whole = 0;
    for (const auto& [id, a] : one.session->recorded().allocations)
      if (a.own() && a.on_device() && !a.placed() && a.properties.location.id == failed->step.device.value) whole += a.bytes;
    std::string memory = FormatBytes(whole - std::min<Bytes>(whole, Bytes{2} << 20));
    std::erase(memory, ' ');
    report_.hint =
        "the device was full when this was recorded, and had enough here; with a little less than this session needs "
        "it fails again";
    report_.try_options = fmt::format("--memory {}={}", device, memory);
  }

  std::span<const std::unique_ptr<JournalReader>> journals_;
  const RerunOptions& options_;
  RerunReport report_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::map<SessionId, RerunSession*> by_id_;
  std::unique_ptr<Simulator> absent_owners_driver_;
  AbsentOwner absent_owner_;
  std::set<std::int32_t> taken_;
  std::map<std::int32_t, Bytes> holds_;
};

}  // namespace

Result<RerunReport> Rerun(std::span<const std::unique_ptr<JournalReader>> journals, const RerunOptions& options) {
  if (journals.empty()) return Status{Code::kInvalid, "run: there is no journal to replay"};
  return Host(journals, options).Run();
}

}  // namespace amem
