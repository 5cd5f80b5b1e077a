#include "replay/session/slabs/cut_slab.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <utility>

namespace amem {

Status CutSlab::CanBeCut(const State& state, const Allocation& whole, const Slab& slab) {
  const bool held = !whole.own() || !whole.importers.empty() || WhyKept(whole) != KeepReason::kNone || !whole.resident ||
                    whole.multicast_bindings > 0 || whole.renewable > 0;
  const bool simple = std::ranges::all_of(slab.parts, [&](const auto& at) {
    const auto* const part = FindIn(state.allocations, at.second.front());
    return part != nullptr && part->importers.empty() && part->mappings <= 1 && part->reserved <= 1;
  });
  if (!held && simple && state.lifecycle == Lifecycle::kRunning) return {};
  return {Code::kUnsupported, "a peer or a network card uses its slab, which cannot be cut up; set AMEM_LAYOUT=direct",
          cuda::kNotSupported};
}

Status CutSlab::Prepare(const Slab& slab, PartCopies& copies, Ledger& ledger) {
  AMEM_ASSIGN(const Mapping* const whole, ledger.Known(ledger.state().mappings, home_.base));
  access_ = whole->access;
  for (const auto& [offset, parts] : slab.parts) {
    const AllocationId id = parts.front();
    AMEM_ASSIGN(const Allocation* const part, ledger.Known(id));
    AMEM_ASSIGN(const auto created, driver_.Create(part->bytes, part->properties, part->flags));
    const auto planned = parts_.emplace(id, Part{ledger.state().PlaceOf(*part), part->bytes, part->mappings > 0,
                                                 part->reserved > 0, OwnedHandle(driver_, created)});
    AMEM_TRY(copies.Copy(*part, planned.first->second.handle.get(), ledger));
  }
  return {};
}

Status CutSlab::MapApart(Ledger& ledger) {
  AMEM_TRY(driver_.Unmap(home_.base, home_.bytes));
  std::vector<MappedRegion> regions;
  for (const auto& [id, part] : parts_) {
    if (!part.mapped) continue;
    auto region = MappedRegion::MapAt(driver_, part.place, part.handle.get(), part.bytes, access_);
    if (region.ok()) {
      regions.push_back(*std::move(region));
      continue;
    }
    regions.clear();
    auto again = MappedRegion::MapAt(driver_, home_.base, ledger.HandleOf(home_.slab), home_.bytes, access_);
    if (again.ok()) {
      again->Detach();
    } else {
      ledger.Break(fmt::format("slab {} was to be cut up, and could neither be ({}) nor be mapped again: {}", home_.slab.value,
                               region.status().message(), again.status().message()));
    }
    return region.status();
  }
  for (MappedRegion& region : regions) region.Detach();
  return {};
}

void CutSlab::GiveBackWhole(const KeptRanges& kept, Ledger& ledger) {
  const auto note = [&](const Status& status) {
    ledger.AssertHeld();
    if (!status.ok()) ledger.Record(PassedThrough{"slab that was cut up", status.message(), status.driver_result()});
  };
  if (const DriverHandle handle = ledger.HandleOf(home_.slab)) note(driver_.Release(handle));
  ledger.ForgetHandle(home_.slab);
  ledger.Record(AllocationReleased{home_.slab});
  if (kept.AnyIn(home_.base)) return;
  note(driver_.FreeRange(home_.base, home_.bytes));
  ledger.Record(RangeFreed{home_.base, home_.bytes, {}});
}

void CutSlab::Record(KeptRanges& kept, Ledger& ledger) {
  for (auto& [id, part] : parts_) {
    if (part.mapped) {
      ledger.Record(AllocationRetained{id, part.place});
      ledger.Record(Unmapped{part.place, part.bytes, id});
    }
    if (part.reserved) {
      kept.Add(home_, part.place, part.bytes);
      ledger.Record(RangeFreed{part.place, part.bytes, id});
    }
    ledger.SetHandle(id, part.handle.get());
    ledger.Record(Backed{id, part.handle.Detach()});
  }
  ledger.Record(Unmapped{home_.base, home_.bytes, {}});
  GiveBackWhole(kept, ledger);
  for (const auto& [id, part] : parts_) {
    if (!part.mapped) continue;
    ledger.Record(Mapped{part.place, part.bytes, 0, id, 0});
    ledger.Record(AccessSet{part.place, part.bytes, access_, {}});
    ledger.Record(AllocationReleased{id});
  }
  ledger.Check(!ledger.state().slabs.contains(home_.slab), "a slab that was cut up is still there");
}

}  // namespace amem
