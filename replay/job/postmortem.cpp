#include "replay/job/postmortem.h"

#include <algorithm>
#include <utility>

#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "statemachine/apply.h"

namespace amem {
namespace {

// CheckInvariants walks the whole state; after each event of a large job that would be quadratic. A state of so many objects is
// checked after each event, one of twice as many after every second one, and so on, and in any case at the end.
constexpr std::size_t kObjectsPerEvent = 8;

// A message in flight when the receiver closed is not a disagreement.
constexpr std::uint64_t kInFlight_ns = 1'000'000'000;

// ---- one journal -----------------------------------------------------------------------------------------------------------

// Folds the events of one journal and collects who holds what.
class Fold {
 public:
  Fold(JournalFindings& found, const Observer& observe) : found_(found), observe_(observe) {}

  // A journal whose beginning was dropped goes on from the state of its snapshot.
  void StartFrom(State state) {
    found_.state = std::move(state);
    for (const auto& [id, a] : found_.state.allocations) {
      if (a.remote) {
        found_.imports[id] = {.remote = *a.remote, .bytes = a.bytes, .properties = a.properties};
      } else {
        found_.own[id] = {.bytes = a.bytes, .properties = a.properties, .multicast = a.multicast, .seq = a.created};
      }
      for (const auto& [importer, count] : a.importers) {
        found_.references[{id, importer.by, importer.as}].resize(count);
      }
    }
  }

  bool Take(const Event& event) {
    const SequenceNumber expected{found_.state.last.value + 1};
    if (event.seq != expected) {
      gap_ = Violation{found_.info.session, event.seq, GapText(expected, event.seq)};
      return false;
    }
    Collect(event);
    if (observe_) observe_(event, found_.state);
    const std::vector<AllocationId> touched = ReleasedBy(event);
    if (Status applied = Apply(found_.state, event); !applied) {
      Violate(event.seq, ToText(event.body) + ": " + applied.message());
      return false;
    }
    for (AllocationId id : touched) EndIfGone(id, event);
    ++found_.events;
    found_.last_ns = event.time_ns;
    ++unchecked_;
    const State& now = found_.state;
    const std::size_t objects = now.allocations.size() + now.ranges.size() + now.mappings.size();
    return unchecked_ * kObjectsPerEvent >= objects ? Check() : true;
  }

  bool Check() {
    unchecked_ = 0;
    const Status status = CheckInvariants(found_.state);
    if (!status) Violate(found_.state.last, "after this event: " + status.message());
    return status.ok();
  }

  // Records that could not be read leave a gap too; that is damage, which the report tells, not a wrong order.
  void Finish() {
    if (gap_ && found_.report.corrupt_records == 0) found_.violations.push_back(*gap_);
    found_.whole = !gap_ && found_.violations.empty() && Check();
  }

 private:
  void Violate(SequenceNumber seq, std::string text) {
    found_.violations.push_back({found_.info.session, seq, std::move(text)});
  }

  static std::string GapText(SequenceNumber expected, SequenceNumber got) {
    if (got.value < expected.value) {
      return "event " + std::to_string(got.value) + " comes where " + std::to_string(expected.value) + " was expected";
    }
    const std::string missing = got.value - expected.value == 1 ? "event " + std::to_string(expected.value) + " is"
                                                                : "events " + std::to_string(expected.value) + " to " +
                                                                      std::to_string(got.value - 1) + " are";
    return missing + " missing before this one; what follows was not checked";
  }

  void Collect(const Event& event) {
    if (const auto* e = std::get_if<AllocationCreated>(&event.body)) {
      found_.own[e->allocation] = {.bytes = e->bytes, .properties = e->properties, .seq = event.seq};
    } else if (const auto* m = std::get_if<MulticastCreated>(&event.body)) {
      found_.own[m->allocation] = {.bytes = m->bytes, .multicast = true, .seq = event.seq};
    } else if (const auto* i = std::get_if<Imported>(&event.body)) {
      found_.imports[i->allocation] = {
          .remote = i->remote, .bytes = i->bytes, .properties = i->properties, .seq = event.seq, .time_ns = event.time_ns};
    } else if (const auto* added = std::get_if<ReferenceAdded>(&event.body)) {
      found_.references[{added->allocation, added->by, added->as}].push_back({.seq = event.seq, .time_ns = event.time_ns});
    } else if (const auto* dropped = std::get_if<ReferenceDropped>(&event.body)) {
      const auto records = found_.references.find({dropped->allocation, dropped->by, dropped->as});
      if (records != found_.references.end()) DropFirstHeld(records->second, event, false);
    } else if (const auto* lost = std::get_if<PeerLost>(&event.body)) {
      for (auto& [key, records] : found_.references) {
        if (key.by == lost->peer) {
          while (DropFirstHeld(records, event, true)) continue;
        }
      }
    }
  }

  static bool DropFirstHeld(std::vector<ReferenceRecord>& records, const Event& event, bool by_peer_loss) {
    const auto held = std::find_if(records.begin(), records.end(), [](const ReferenceRecord& r) { return !r.dropped; });
    if (held == records.end()) return false;
    held->dropped = event.seq;
    held->dropped_ns = event.time_ns;
    held->by_peer_loss = by_peer_loss;
    return true;
  }

  // The allocations that `event` may be the end of; asked before the event is applied.
  [[nodiscard]] std::vector<AllocationId> ReleasedBy(const Event& event) const {
    std::vector<AllocationId> ids;
    if (const auto* released = std::get_if<AllocationReleased>(&event.body)) {
      ids.push_back(released->allocation);
    } else if (const auto* unmapped = std::get_if<Unmapped>(&event.body)) {
      if (unmapped->allocation) ids.push_back(unmapped->allocation);
      const auto end = found_.state.mappings.lower_bound(unmapped->address + unmapped->bytes);
      for (auto it = found_.state.mappings.lower_bound(unmapped->address); it != end; ++it)
        ids.push_back(it->second.allocation);
    }
    return ids;
  }

  void EndIfGone(AllocationId id, const Event& event) {
    const auto import = found_.imports.find(id);
    if (import == found_.imports.end() || import->second.dropped) return;
    // A part of a slab lives until its address range is freed, too; its owner is told before.
    const auto a = found_.state.allocations.find(id);
    if (a != found_.state.allocations.end() && (a->second.guest_references > 0 || a->second.mappings > 0)) return;
    import->second.dropped = event.seq;
    import->second.dropped_ns = event.time_ns;
  }

  JournalFindings& found_;
  const Observer& observe_;
  std::optional<Violation> gap_;
  std::uint64_t unchecked_ = 0;  // events since the invariants were checked
};

// ---- references between journals -------------------------------------------------------------------------------------------

class Job {
 public:
  explicit Job(std::span<const JournalFindings* const> journals) {
    for (const JournalFindings* journal : journals) by_session_[journal->info.session] = journal;
  }

  JobFindings Run() {
    for (const auto& [session, journal] : by_session_) {
      for (const auto& [id, import] : journal->imports) CheckImport(*journal, id, import);
      for (const auto& [key, records] : journal->references) CheckReference(*journal, key, records);
    }
    for (const auto& [absent, count] : absent_) {
      Note(absent.first, {},
           Plural(count, "reference") + " shared with session " + SessionText(absent.second) +
               " could not be compared: its journal was not given");
    }
    for (const auto& [pair, count] : crashed_holding_) {
      Note(pair.first, {},
           "crashed while holding " + Plural(count, "allocation") + " of " + NameOf(*by_session_.at(pair.second)) +
               ", which dropped the references by itself");
    }
    return std::move(found_);
  }

 private:
  using Journal = JournalFindings;

  void Violate(const Journal& journal, SequenceNumber seq, std::string text) {
    found_.violations.push_back({journal.info.session, seq, std::move(text)});
  }
  void Note(SessionId session, SequenceNumber seq, std::string text) {
    found_.notes.push_back({session, seq, std::move(text)});
  }

  const Journal* Find(SessionId session) const {
    const auto it = by_session_.find(session);
    return it == by_session_.end() ? nullptr : it->second;
  }

  // Times of two journals can be compared only on one boot of one host.
  static bool SameClock(const Journal& a, const Journal& b) {
    return !a.state.session.boot_id.empty() && a.state.session.boot_id == b.state.session.boot_id;
  }
  // `b` was not read up to `when`, a time of `a`: a live process went on, or folding stopped.
  static bool NotReadUpTo(const Journal& b, const Journal& a, std::uint64_t when) {
    return !b.whole || (b.info.status == SessionStatus::kLive && SameClock(a, b) && when > b.as_of_ns);
  }
  // `b` had ended, or was about to, when `a` sent it something.
  static bool EndedBefore(const Journal& b, const Journal& a, std::uint64_t when) {
    return b.info.status != SessionStatus::kLive && SameClock(a, b) && when + kInFlight_ns > b.last_ns;
  }
  static bool Crashed(const Journal& journal) { return journal.info.status == SessionStatus::kCrashed; }
  static bool Broken(const Journal& journal) {
    return journal.info.status == SessionStatus::kBroken || !journal.state.broken.empty();
  }
  static bool BeginningDropped(const Journal& journal) { return journal.info.first.value > 1; }

  static std::string Remote(const Journal& owner, AllocationId allocation) {
    return "allocation " + std::to_string(allocation.value) + " of " + NameOf(owner);
  }

  void CheckImport(const Journal& importer, AllocationId id, const ImportRecord& import) {
    const Journal* owner = Find(import.remote.owner);
    if (!owner) {
      ++absent_[{importer.info.session, import.remote.owner}];
      return;
    }
    const auto records = owner->references.find({import.remote.allocation, importer.info.session, id});
    if (records == owner->references.end()) {
      CheckImportWithoutReference(importer, id, import, *owner);
      return;
    }
    ++found_.references;
    CompareWithOwner(importer, id, import, *owner);
    CompareEnds(importer, id, import, *owner, records->second.back());
  }

  void CheckImportWithoutReference(const Journal& importer, AllocationId id, const ImportRecord& import, const Journal& owner) {
    const bool forgotten = BeginningDropped(owner) && import.dropped;  // both its events are before the owner's snapshot
    if (forgotten || Broken(owner) || NotReadUpTo(owner, importer, import.time_ns)) return;
    Violate(importer, import.seq,
            "allocation " + std::to_string(id.value) + " was imported from " + Remote(owner, import.remote.allocation) +
                ", whose journal has no reference added by this session as " + std::to_string(id.value));
  }

  void CompareWithOwner(const Journal& importer, AllocationId id, const ImportRecord& import, const Journal& owner) {
    const std::string what =
        "allocation " + std::to_string(id.value) + " was imported from " + Remote(owner, import.remote.allocation);
    const auto own = owner.own.find(import.remote.allocation);
    if (own == owner.own.end()) {
      if (!BeginningDropped(owner)) Violate(importer, import.seq, what + ", which never created it");
      return;
    }
    if (own->second.bytes != import.bytes) {
      Violate(importer, import.seq,
              what + " as " + std::to_string(import.bytes) + " bytes, but was created with " +
                  std::to_string(own->second.bytes) + " (event " + std::to_string(own->second.seq.value) + " there)");
    }
    if (!own->second.multicast && own->second.properties != import.properties) {
      Violate(
          importer, import.seq,
          what + " with other properties than it was created with (event " + std::to_string(own->second.seq.value) + " there)");
    }
  }

  // Both sides must agree on whether the reference is gone.
  void CompareEnds(const Journal& importer, AllocationId id, const ImportRecord& import, const Journal& owner,
                   const ReferenceRecord& reference) {
    if (import.dropped && !reference.dropped) {
      if (Crashed(owner) || Broken(owner) || EndedBefore(owner, importer, import.dropped_ns)) return;
      if (NotReadUpTo(owner, importer, import.dropped_ns + kInFlight_ns)) return;
      Violate(owner, reference.seq,
              "allocation " + std::to_string(import.remote.allocation.value) + " is still referenced by " + NameOf(importer) +
                  ", which let go of it (event " + std::to_string(import.dropped.value) + " there)");
    } else if (!import.dropped && reference.dropped) {
      CheckDroppedWhileHeld(importer, id, import, owner, reference);
    }
  }

  void CheckDroppedWhileHeld(const Journal& importer, AllocationId id, const ImportRecord& import, const Journal& owner,
                             const ReferenceRecord& reference) {
    if (reference.by_peer_loss && importer.info.status == SessionStatus::kClosed) return;  // ended with its process
    if (Crashed(importer)) {
      ++crashed_holding_[{importer.info.session, owner.info.session}];
      return;
    }
    if (Broken(importer) || NotReadUpTo(importer, owner, reference.dropped_ns)) return;
    Violate(importer, import.seq,
            "allocation " + std::to_string(id.value) + " is still held, but " + NameOf(owner) +
                " dropped its reference to allocation " + std::to_string(import.remote.allocation.value) +
                (reference.by_peer_loss ? " when it lost this peer" : "") + " (event " +
                std::to_string(reference.dropped.value) + " there)");
  }

  void CheckReference(const Journal& owner, const ReferenceKey& key, const std::vector<ReferenceRecord>& records) {
    const ReferenceRecord& reference = records.back();
    const Journal* importer = Find(key.by);
    if (!importer) {
      ++absent_[{owner.info.session, key.by}];
      return;
    }
    const auto import = importer->imports.find(key.as);
    const bool matches = import != importer->imports.end() &&
                         import->second.remote == RemoteAllocation{.owner = owner.info.session, .allocation = key.allocation};
    // The owner records first. An import that then failed at the driver is dropped again, and one that a crash cut short is
    // never recorded by the importer.
    if (matches || reference.dropped || Crashed(*importer) || Broken(*importer)) return;
    if (NotReadUpTo(*importer, owner, reference.time_ns)) return;
    Violate(owner, reference.seq,
            "allocation " + std::to_string(key.allocation.value) + " is referenced by " + NameOf(*importer) + " as " +
                std::to_string(key.as.value) + ", whose journal has no such import");
  }

  std::map<SessionId, const Journal*> by_session_;
  std::map<std::pair<SessionId, SessionId>, std::uint64_t> absent_;           // (who says so, whose journal is absent)
  std::map<std::pair<SessionId, SessionId>, std::uint64_t> crashed_holding_;  // (importer, owner)
  JobFindings found_;
};

}  // namespace

Result<JournalFindings> VerifyJournal(JournalReader& reader, const Observer& observe) {
  Result<JournalInfo> info = reader.Info();
  if (!info) return info.status();
  JournalFindings found;
  found.info = *std::move(info);

  Fold fold(found, observe);
  if (found.info.first.value > 1) {
    Result<State> start = reader.StateAt(SequenceNumber{found.info.first.value - 1});
    if (!start) {
      return start.status().Within("verify: the journal begins with event " + std::to_string(found.info.first.value) +
                                   ", and the state before it cannot be read");
    }
    fold.StartFrom(*std::move(start));
  }
  Result<ReadReport> report = reader.Read(SequenceNumber{found.state.last.value + 1}, kToTheEnd,
                                          [&fold](const Event& event) { return fold.Take(event); });
  if (!report) return report.status();
  found.report = *std::move(report);
  fold.Finish();
  found.as_of_ns = found.last_ns;
  if (found.info.status == SessionStatus::kCrashed) {
    found.notes.push_back({found.info.session, found.state.last,
                           std::string("crashed: the process is dead and the journal was not closed") +
                               (found.report.torn_tail ? "; its last append was cut short" : "")});
  }
  if (!found.state.broken.empty()) {
    found.notes.push_back({found.info.session, found.state.last, "broken: " + found.state.broken});
  }
  return found;
}

JobFindings VerifyJob(std::span<const JournalFindings> journals) {
  std::vector<const JournalFindings*> pointers;
  for (const JournalFindings& journal : journals) pointers.push_back(&journal);
  return VerifyJob(pointers);
}

JobFindings VerifyJob(std::span<const JournalFindings* const> journals) { return Job(journals).Run(); }

std::string NameOf(const JournalFindings& journal) { return NameOf(Completed(journal.state.session, journal.info, 0)); }

}  // namespace amem
