#include "replay/job/postmortem.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "journal/session_dir.h"
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

// A process with much GPU memory is gone so long after it was killed.
constexpr std::uint64_t kTakenDown_ns = 30'000'000'000;

// ---- one journal -----------------------------------------------------------------------------------------------------------

// Collects what the session made and holds, and checks the state while it is folded.
class JournalCheck final : public FoldObserver {
 public:
  explicit JournalCheck(JournalFindings& found) : found_(found) {}

  void Begin(const State& before) override {
    for (const auto& [id, a] : before.allocations) {
      if (a.remote) {
        found_.imports[id] = {.remote = *a.remote, .bytes = a.bytes, .properties = a.properties};
      } else {
        found_.own[id] = {.bytes = a.bytes, .properties = a.properties, .multicast = a.multicast, .seq = a.created};
      }
      for (const auto& [importer, count] : a.importers) found_.references[{id, importer.by, importer.as}].resize(count);
    }
  }

  void Before(const Event& event, const State& before) override {
    if (first_ns_ == 0) first_ns_ = event.time_ns;
    Collect(event);
    released_ = ReleasedBy(event, before);
  }

  Status After(const Event& event, const State& after) override {
    for (AllocationId id : released_) EndIfGone(id, event, after);
    ++unchecked_;
    const std::size_t objects = after.allocations.size() + after.ranges.size() + after.mappings.size();
    if (unchecked_ * kObjectsPerEvent < objects) return {};
    unchecked_ = 0;
    return CheckInvariants(after);
  }

  // Records that could not be read leave a gap too; that is damage, which the report tells, not a wrong order.
  void Finish(Folded folded) {
    using Kind = Folded::Break::Kind;
    found_.info = std::move(folded.info);
    found_.report = std::move(folded.damage);
    found_.events = folded.events;
    found_.last_ns = found_.as_of_ns = folded.last_ns;
    found_.state = std::move(folded.state);
    found_.who = Completed(found_.state.session, found_.info, first_ns_);
    found_.whole = !folded.broken;
    if (!folded.broken) {
      const Status sound = CheckInvariants(found_.state);
      found_.whole = sound.ok();
      if (!sound) ViolateState(found_.state.last, sound);
    } else if (folded.broken->kind == Kind::kState) {
      ViolateState(folded.broken->at, folded.broken->why);
    } else if (folded.broken->kind == Kind::kOrder) {
      Violate(folded.broken->at, folded.broken->why.message());
    } else if (found_.report.whole()) {
      Violate(folded.broken->at, folded.broken->why.message() + "; what follows was not checked");
    }
  }

 private:
  void Violate(SequenceNumber seq, std::string text) {
    found_.violations.push_back({found_.info.session, seq, std::move(text)});
  }
  void ViolateState(SequenceNumber seq, const Status& sound) { Violate(seq, "after this event: " + sound.message()); }

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
      if (auto* records = FindIn(found_.references, {dropped->allocation, dropped->by, dropped->as}))
        DropFirstHeld(*records, event, false);
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
  static std::vector<AllocationId> ReleasedBy(const Event& event, const State& before) {
    std::vector<AllocationId> ids;
    if (const auto* released = std::get_if<AllocationReleased>(&event.body)) {
      ids.push_back(released->allocation);
    } else if (const auto* unmapped = std::get_if<Unmapped>(&event.body)) {
      if (unmapped->allocation) ids.push_back(unmapped->allocation);
      for (const auto& [address, m] : Touching(before.mappings, unmapped->address, unmapped->bytes))
        ids.push_back(m.allocation);
    }
    return ids;
  }

  void EndIfGone(AllocationId id, const Event& event, const State& after) {
    ImportRecord* import = FindIn(found_.imports, id);
    if (import == nullptr || import->dropped) return;
    // A part of a slab lives until its address range is freed, too; its owner is told before.
    const Allocation* a = FindIn(after.allocations, id);
    if (a != nullptr && (a->guest_references > 0 || a->mappings > 0)) return;
    import->dropped = event.seq;
    import->dropped_ns = event.time_ns;
  }

  JournalFindings& found_;
  std::vector<AllocationId> released_;
  std::uint64_t first_ns_ = 0;
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
      Note(absent.first, fmt::format("{} shared with session {} could not be compared: its journal was not given",
                                     Plural(count, "reference"), SessionText(absent.second)));
    }
    for (const auto& [pair, count] : crashed_holding_) {
      const JournalFindings* const* const owner = FindIn(by_session_, pair.second);
      if (owner == nullptr) continue;  // never: only a reference that both journals have is counted
      Note(pair.first, fmt::format("crashed while holding {} of {}, which dropped the references by itself",
                                   Plural(count, "allocation"), NameOf((*owner)->who)));
    }
    return std::move(found_);
  }

 private:
  using Journal = JournalFindings;

  void Violate(const Journal& journal, SequenceNumber seq, std::string text) {
    found_.violations.push_back({journal.info.session, seq, std::move(text)});
  }
  void Note(SessionId session, std::string text) { found_.notes.push_back({session, {}, std::move(text)}); }

  const Journal* Find(SessionId session) const {
    const auto it = by_session_.find(session);
    return it == by_session_.end() ? nullptr : it->second;
  }

  // Times of two journals can be compared only on one boot of one host.
  static bool SameClock(const Journal& a, const Journal& b) { return SameBoot(a.who, b.who); }
  // `b` was not read up to `when`, a time of `a`: a live process went on, or folding stopped.
  static bool NotReadUpTo(const Journal& b, const Journal& a, std::uint64_t when) {
    return !b.whole || (b.info.status == SessionStatus::kLive && SameClock(a, b) && when > b.as_of_ns);
  }
  // `b` had ended, or was about to, when `a` sent it something.
  static bool EndedBefore(const Journal& b, const Journal& a, std::uint64_t when) {
    return b.info.status != SessionStatus::kLive && SameClock(a, b) && when + kInFlight_ns > b.last_ns;
  }
  static bool Crashed(const Journal& journal) {
    return journal.info.status == SessionStatus::kCrashed || journal.info.status == SessionStatus::kCopied;
  }
  // It did nothing more after `owner` had lost it: a process that is killed lives on while the driver takes down its memory.
  static bool DiedBefore(const Journal& importer, const Journal& owner, const ReferenceRecord& reference) {
    return reference.by_peer_loss && SameClock(importer, owner) && importer.last_ns <= reference.dropped_ns &&
           importer.as_of_ns <= reference.dropped_ns + kTakenDown_ns;
  }
  static bool Broken(const Journal& journal) {
    return journal.info.status == SessionStatus::kBroken || !journal.state.broken.empty();
  }
  static bool BeginningDropped(const Journal& journal) { return journal.info.first.value > 1; }

  static std::string Remote(const Journal& owner, AllocationId allocation) {
    return fmt::format("allocation {} of {}", allocation.value, NameOf(owner.who));
  }

  void CheckImport(const Journal& importer, AllocationId id, const ImportRecord& import) {
    const Journal* owner = Find(import.remote.owner);
    if (!owner) {
      ++absent_[{importer.info.session, import.remote.owner}];
      return;
    }
    const auto records = owner->references.find({import.remote.allocation, importer.info.session, id});
    if (records == owner->references.end()) {
      if (!import.dropped) found_.unknown_to_owner.emplace(importer.info.session, id);
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
            fmt::format("allocation {} was imported from {}, whose journal has no reference added by this session as {}",
                        id.value, Remote(owner, import.remote.allocation), id.value));
  }

  void CompareWithOwner(const Journal& importer, AllocationId id, const ImportRecord& import, const Journal& owner) {
    const std::string what =
        fmt::format("allocation {} was imported from {}", id.value, Remote(owner, import.remote.allocation));
    const auto own = owner.own.find(import.remote.allocation);
    if (own == owner.own.end()) {
      if (!BeginningDropped(owner)) Violate(importer, import.seq, what + ", which never created it");
      return;
    }
    if (own->second.bytes != import.bytes) {
      Violate(importer, import.seq,
              fmt::format("{} as {} bytes, but was created with {} (event {} there)", what, import.bytes, own->second.bytes,
                          own->second.seq.value));
    }
    if (!own->second.multicast && own->second.properties != import.properties) {
      Violate(importer, import.seq,
              fmt::format("{} with other properties than it was created with (event {} there)", what, own->second.seq.value));
    }
  }

  // Both sides must agree on whether the reference is gone.
  void CompareEnds(const Journal& importer, AllocationId id, const ImportRecord& import, const Journal& owner,
                   const ReferenceRecord& reference) {
    if (import.dropped && !reference.dropped) {
      if (Crashed(owner) || Broken(owner) || EndedBefore(owner, importer, import.dropped_ns)) return;
      if (NotReadUpTo(owner, importer, import.dropped_ns + kInFlight_ns)) return;
      Violate(owner, reference.seq,
              fmt::format("allocation {} is still referenced by {}, which let go of it (event {} there)",
                          import.remote.allocation.value, NameOf(importer.who), import.dropped.value));
    } else if (!import.dropped && reference.dropped) {
      CheckDroppedWhileHeld(importer, id, import, owner, reference);
    }
  }

  void CheckDroppedWhileHeld(const Journal& importer, AllocationId id, const ImportRecord& import, const Journal& owner,
                             const ReferenceRecord& reference) {
    if (reference.by_peer_loss && importer.info.status == SessionStatus::kClosed) return;  // ended with its process
    if (Crashed(importer) || DiedBefore(importer, owner, reference)) {
      ++crashed_holding_[{importer.info.session, owner.info.session}];
      return;
    }
    if (Broken(importer) || NotReadUpTo(importer, owner, reference.dropped_ns)) return;
    Violate(importer, import.seq,
            fmt::format("allocation {} is still held, but {} dropped its reference to allocation {}{} (event {} there)",
                        id.value, NameOf(owner.who), import.remote.allocation.value,
                        reference.by_peer_loss ? " when it lost this peer" : "", reference.dropped.value));
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
            fmt::format("allocation {} is referenced by {} as {}, whose journal has no such import", key.allocation.value,
                        NameOf(importer->who), key.as.value));
  }

  std::map<SessionId, const Journal*> by_session_;
  std::map<std::pair<SessionId, SessionId>, std::uint64_t> absent_;           // (session with the journal, session without)
  std::map<std::pair<SessionId, SessionId>, std::uint64_t> crashed_holding_;  // (importer, owner)
  JobFindings found_;
};

}  // namespace

Result<JournalFindings> VerifyJournal(JournalReader& reader, std::span<FoldObserver* const> others) {
  const ThisHost began = ThisHost::Now();
  JournalFindings found;
  JournalCheck check(found);
  std::vector<FoldObserver*> observers = {&check};
  observers.insert(observers.end(), others.begin(), others.end());
  AMEM_ASSIGN(auto folded, FoldJournal(reader, observers));
  if (folded.broken && folded.broken->kind == Folded::Break::Kind::kBeginning) return folded.broken->why.Within("verify");
  check.Finish(std::move(folded));
  found.as_of_ns = std::max(found.as_of_ns, PresentOf(found.info, found.who, began));
  const auto note = [&](std::string text) { found.notes.push_back({found.info.session, found.state.last, std::move(text)}); };
  if (found.info.status == SessionStatus::kCrashed)
    note(fmt::format("crashed: the process is dead and the journal was not closed{}",
                     found.report.torn_tail ? "; its last append was cut short" : ""));
  if (found.info.status == SessionStatus::kCopied)
    note("a copy of a journal that was not closed: whether its process lives is not known here");
  if (found.info.status == SessionStatus::kUnknown) note("not closed: whether its process lives cannot be seen from here");
  if (!found.state.broken.empty()) note("broken: " + found.state.broken);
  return found;
}

std::uint64_t PresentOf(const JournalInfo& info, const SessionOpened& who, const ThisHost& began) {
  if (info.status != SessionStatus::kLive) return 0;
  if (const std::uint64_t packed_ns = PackedAt(info.directory)) return packed_ns;
  return began.Wrote(who) ? began.now_ns : 0;
}

JobFindings VerifyJob(std::span<const JournalFindings> journals) {
  std::vector<const JournalFindings*> pointers;
  for (const JournalFindings& journal : journals) pointers.push_back(&journal);
  return VerifyJob(pointers);
}

JobFindings VerifyJob(std::span<const JournalFindings* const> journals) { return Job(journals).Run(); }

}  // namespace amem
