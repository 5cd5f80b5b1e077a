"""The bugs that plant.py plants: slips that a programmer makes, each in a place where it would cost a job its memory or its results."""
from typing import NamedTuple


class Bug(NamedTuple):
    name: str          # what goes wrong, in words
    file: str          # from the top of the tree
    text: str          # stands there exactly once
    replacement: str
    programs: tuple    # test programs that should notice, the quickest first
    tests: str = "*"   # as for --gtest_filter
    limit_s: int = 300
    unnoticed: str = ""  # why no test notices it; empty: one must


STATE = ("statemachine_test",)
CYCLE = ("cycle_test", "backup_test", "world_test")
SESSION = ("session_test", "world_test")
PEERS = ("peers_test",)
JOURNAL = ("journal_test",)
INTERCEPT = ("intercept_test", "wrong_use_test")


def _in(file, programs, *bugs):
    return [Bug(name, file, text, replacement, programs) for name, text, replacement in bugs]


BUGS = [
    *_in("statemachine/apply_memory.cpp", STATE,
         ("a range that overlaps the one behind it is taken", "it->first.value - address.value < bytes) {\n    *where",
          "it->first.value - address.value < 1) {\n    *where"),
         ("a range that overlaps the one before it is taken", "return address.value - it->first.value < it->second.bytes;", "return false;"),
         ("an access right replaces all others", "list.insert(at, a);", "list = {a};"),
         ("access that is taken back stays", "if (found) list.erase(at);", "if (found) at->flags = 3;"),
         ("a slab's access counts for any right", "(has.flags & wanted.flags) == wanted.flags;", "(has.flags & wanted.flags) != 0;"),
         ("a part's range is freed under its mapping", "if (a.reserved <= a.mappings) return", "if (a.reserved < a.mappings) return"),
         ("a range is freed under a mapping", "if (Address where; Overlaps(s_.mappings, e.address, e.bytes, &where)) {\n    return Bad(doing + \": something",
          "if (Address where; false && Overlaps(s_.mappings, e.address, e.bytes, &where)) {\n    return Bad(doing + \": something"),
         ("a range of another size is freed", "if (it->second.bytes != e.bytes) {", "if (it->second.bytes < e.bytes) {"),
         ("an allocation that is not mapped is retained", "if (a->mappings == 0)\n    return Bad(\"retain", "if (false)\n    return Bad(\"retain"),
         ("one release too many is taken", "if (a->guest_references == 0) return Bad(\"release", "if (false) return Bad(\"release"),
         ("a part is mapped at an offset", "if (e.offset != 0) return Bad(doing + \": a part", "if (false) return Bad(doing + \": a part"),
         ("a part that is mapped is not touched", "    a->touched = true;\n    return {};\n  }\n  if (!a->resident)", "    return {};\n  }\n  if (!a->resident)"),
         ("memory that is released is mapped", "if (!a->resident) return Bad(doing + \": its memory is released\");", ""),
         ("a mapping ends behind its allocation", "e.bytes > a->bytes - e.offset) {", "e.bytes > a->bytes) {"),
         ("a mapping forgets its offset", "m.offset = e.offset;", "m.offset = 0;"),
         ("a slab with parts is unmapped", "if (slab != s_.slabs.end() && !slab->second.parts.empty())", "if (false)"),
         ("unmapping one of two forgets the allocation", "    --Find(id)->mappings;\n", "    Find(id)->mappings = 0;\n"),
         ("half a mapping is unmapped", "if (at != end || bytes == 0) return", "if (bytes == 0) return"),
         ("access is set where memory is released", "if (!it->second.present) return Bad(doing + \": its memory is released\");", "")),
    *_in("statemachine/apply_cycle.cpp", STATE,
         ("a pause begins while paused", "if (s_.lifecycle != (pause ? Lifecycle::kRunning : Lifecycle::kPaused) && !half)", "if (false)"),
         ("a cycle forgets that an undo before it failed", "s_.cycle = Cycle{e.kind, e.cycle, e.members, {}, {}, {}, half};",
          "s_.cycle = Cycle{e.kind, e.cycle, e.members, {}, {}, {}, false};"),
         ("a step begins before the last has ended", "if (s_.cycle.open_step)\n    return Bad(doing + \": the step before", "if (false)\n    return Bad(doing + \": the step before"),
         ("another step than the open one is done", "if (s_.cycle.open_step != e.step) return Bad(doing + \": that step was not begun\");\n  AMEM_TRY(DoStep",
          "AMEM_TRY(DoStep"),
         ("a step that failed stays open", "  s_.cycle.open_step.reset();\n  s_.cycle.failure = e.message;\n  return {};\n}\n\nStatus Fold::operator()(const PhaseBegun",
          "  s_.cycle.failure = e.message;\n  return {};\n}\n\nStatus Fold::operator()(const PhaseBegun"),
         ("a cycle is done with a step open", "if (s_.cycle.open_step) return Bad(doing + \": step", "if (false) return Bad(doing + \": step"),
         ("a resume keeps what was saved", "if (e.kind == CycleKind::kResume) ForgetSaved();", ""),
         ("a pause that was undone trusts old contents", "if (e.kind == CycleKind::kPause) ForgetSaved();", ""),
         ("a cycle that never began is counted", "Cycle{e.kind, std::min(e.cycle, s_.cycles), {}, {}, {}, e.message};", "Cycle{e.kind, e.cycle, {}, {}, {}, e.message};"),
         ("a failed undo is forgotten", "s_.cycle.after_failed_undo = false;", "s_.cycle.after_failed_undo = true;"),
         ("an unmap leaves access behind", "m.present = m.accessible = false;", "m.present = false;"),
         ("a mapping comes back before its memory", "if (!a->resident) return Bad(doing + \": \" + ToText(m.allocation) + \" has no memory yet\");", ""),
         ("imported contents are saved", "if (!a->own()) return Bad(doing + \": it is imported, and its owner saves it\");", ""),
         ("contents that wait to come back are saved", "if (!a->resident || a->awaiting_restore) return", "if (!a->resident) return"),
         ("contents that were not saved are restored", "if (!a->resident || !a->saved) return", "if (!a->resident) return"),
         ("own memory is released unsaved", "if (a->own() && !a->saved) return Bad(doing + \": its contents were not saved\");", ""),
         ("memory that must stay is released", "if (WhyKept(*a) != KeepReason::kNone) return Bad(doing + \": it must stay: \"", "if (false) return Bad(doing + \": it must stay: \""),
         ("anybody's memory is made anew", "!(step.kind == StepKind::kCreate && s_.Orphaned(*a)))", "step.kind != StepKind::kCreate)"),
         ("gaps of a slab that is made anew count as clean", "if (a->saved) AMEM_TRY(MarkGapsDirty(step.allocation, *a));", ""),
         ("memory made anew does not wait for its contents", "a->awaiting_restore = a->saved;", "a->awaiting_restore = false;"),
         ("a pause ends with memory left", "if (a.resident && !a.placed() && WhyKept(a) == KeepReason::kNone)", "if (false)"),
         ("a resume ends without all memory", "if (!a.resident) return Bad(doing + \": \" + ToText(id) + \" has no memory\");", ""),
         ("a resume ends without all contents", "if (a.awaiting_restore) return Bad(doing", "if (false) return Bad(doing"),
         ("a resume ends without access", "(!m.accessible && !m.access.empty()))", "false)")),
    *_in("statemachine/apply_slabs.cpp", STATE,
         ("clearing a piece cleans what lies before it", "if (from < part.offset) slab.dirty.emplace(from, part.offset - from);", ""),
         ("clearing a piece cleans what lies behind it", "if (end < to) slab.dirty.emplace(end, to - end);", ""),
         ("neighbouring dirt stays apart", "if (before->first + before->second == offset) {", "if (false) {"),
         ("a slab that is mapped in part is opened", "if (m->second.offset != 0 || m->second.bytes != whole->bytes) return", "if (m->second.offset != 0) return"),
         ("a part of a slab becomes a slab", "if (whole->placed()) return", "if (false) return"),
         ("an allocation in use moves", "if (!a->untouched()) return Bad(doing + \": it is in use where it is\");\n  if (e.offset", "if (e.offset"),
         ("a part ends behind its slab", "a->bytes > whole->bytes - e.offset) return", "a->bytes > whole->bytes) return"),
         ("a part lies in another session's slab", "(a->remote && a->remote->owner != whole->remote->owner))", "false)"),
         ("two parts lie in the same place", "if (a->own()) AMEM_TRY(IsFree(doing, slab->second, e.offset, a->bytes));", ""),
         ("a part that was used leaves no dirt", "if (a.own() && a.touched) MarkDirty", "if (false) MarkDirty"),
         ("an empty place stays noted", "if (at->second.empty()) slab->second.parts.erase(at);", ""),
         ("the gap behind the last part counts as clean", "if (at < whole.bytes) dirty.emplace(at, whole.bytes - at);", ""),
         ("a part that reaches into a place is not seen", "if (next->first + part->bytes > offset) return", "if (false) return"),
         ("dirty memory is given out", "if (!DirtyWithin(slab, offset, bytes).empty()) return", "if (false) return")),
    *_in("statemachine/apply_sharing.cpp", STATE,
         ("an export is not counted", "++a->exports;", ""),
         ("an import may name no owner", "if (!e.remote.owner || !e.remote.allocation) return", "if (false) return"),
         ("what was never exported is referenced", "if (a->exports == 0) return", "if (false) return"),
         ("an imported part is not touched", "  ++a->importers[Importer{e.by, e.as}];\n  a->touched = true;", "  ++a->importers[Importer{e.by, e.as}];"),
         ("one of two references drops both", "if (--it->second == 0) a->importers.erase(it);", "a->importers.erase(it);"),
         ("memory outlives its last reference", "if (--it->second == 0) a->importers.erase(it);\n  return EraseIfDead(e.allocation);",
          "if (--it->second == 0) a->importers.erase(it);\n  return {};"),
         ("a lost peer keeps its references", "std::erase_if(it->second.importers,", "if (false) std::erase_if(it->second.importers,")),
    *_in("statemachine/plan.cpp", STATE,
         ("contents are read through a mapping of a part", "if (m.offset != 0 || m.bytes != a.bytes) continue;", "if (m.offset != 0) continue;"),
         ("contents are read where there is no access now", "if (now && !(m.present && m.accessible)) continue;", ""),
         ("contents that are saved are saved again", "Leaves(state, a) && a.resident && !a.saved; }", "Leaves(state, a) && a.resident; }"),
         ("a mapping that is gone is unmapped again", "if (state.mappings.at(address).present) steps.push_back(On(StepKind::kUnmap", "steps.push_back(On(StepKind::kUnmap"),
         ("memory that is gone is released again", "if (a.resident) steps.push_back(On(release, id, a));", "steps.push_back(On(release, id, a));"),
         ("a mapping comes back without access", "if (!m.accessible && !m.access.empty()) steps.push_back(On(StepKind::kSetAccess", "if (false) steps.push_back(On(StepKind::kSetAccess"),
         ("memory that is there is counted as needed", "if (a.resident || !a.on_device()) continue;", "if (!a.on_device()) continue;"),
         ("what stands in is not counted as needed", "for (const auto& [device, bytes] : stand_ins) needed[device] += bytes;", ""),
         ("imports are trusted after a failed undo", "(state.cycle.after_failed_undo || *state.cycle.phase >= PhaseKind::kPauseSave)",
          "(*state.cycle.phase >= PhaseKind::kPauseSave)"),
         ("contents are restored twice", "if (!begun.contains(id)) late.push_back(restores.back());", "late.push_back(restores.back());"),
         ("copies back wait for the end of the phase", "if (bytes >= kRestoreAtOnce) begin();", "")),
    *_in("replay/cycle/backup.cpp", CYCLE,
         ("what is not zero between two runs is left out", "pieces_.push_back({offset + done, room->bytes, room->at, room->joined});",
          "pieces_.push_back({offset, room->bytes, room->at, room->joined});"),
         ("memory is released before its copy is done", "    AMEM_TRY(driver_.Await(it->second.device, it->second.mark));\n    it->second.done", "    it->second.done"),
         ("what was zero comes back as it lies", "AMEM_TRY(driver_.ClearAll(device, Joined(items)));", ""),
         ("contents whose copy failed are restored", "if (contents_ == Contents::kLost && (it == saved_.end() || !it->second.done))", "if (false)"),
         ("an allocation of another size gets the contents", "if (it->second.bytes != item.bytes) {", "if (false) {")),
    *_in("replay/cycle/coordinator.cpp", CYCLE,
         ("contents are forgotten while paused", "if (kind == CycleKind::kResume) backup_.ForgetAll();", "backup_.ForgetAll();"),
         ("a broken session pauses", "if (mine.ok() && kind == CycleKind::kPause) mine = JournalIntact();", ""),
         ("a failed phase is not undone", "const Status undone = Undo(kind, round);", "const Status undone;"),
         ("a member goes on while another cannot undo", "if (cannot && others.ok()) others = all.status;", "")),
    *_in("replay/session/slabs.cpp", SESSION,
         ("dirty parts are given out uncleared", "AMEM_TRY(Clear(*place, bytes, lock).Within", "if (false) AMEM_TRY(Clear(*place, bytes, lock).Within"),
         ("a slab goes back with parts in it", "if (!whole || !slab->second.parts.empty() || !a->importers.empty()) return {};", "if (!whole || !a->importers.empty()) return {};"),
         ("a slab goes back under its importers", "!slab->second.parts.empty() || !a->importers.empty()) return {};", "!slab->second.parts.empty()) return {};"),
         ("an imported part ends behind its slab", "shared.bytes > memory->bytes - shared.part->offset) {", "false) {"),
         ("another kind of memory shares a slab", "if (own.kind != kind || bytes >= own.refused", "if (bytes >= own.refused"),
         ("access is not asked for on the slab", "if (!there && wanted.flags != 0) missing.push_back(wanted);", "")),
    *_in("ncclpatch/intercept/pools.cpp", INTERCEPT,
         ("a pause leaves what NCCL's pools keep", "trim(pool, 0)", "trim(pool, before)"),
         ("a pool that was destroyed is trimmed", "if (result == CUDA_SUCCESS) pools_.erase(pool);", ""),
         ("a pool is forgotten though the driver kept it", "if (result == CUDA_SUCCESS) pools_.erase(pool);", "pools_.clear();")),
    *_in("ncclpatch/intercept/host_memory.cpp", INTERCEPT,
         ("pinned memory that the runtime asks for is not counted", "static constexpr int kSince = 2020;", "")),
    *_in("ncclpatch/intercept/logical_endpoint.cpp", INTERCEPT,
         ("memory of an endpoint that was destroyed is kept for ever", "if (result == CUDA_SUCCESS) Endpoints::Get().Destroyed(id);", ""),
         ("an endpoint that the driver kept loses its memory", "if (result == CUDA_SUCCESS) Endpoints::Get().Destroyed(id);",
          "Endpoints::Get().Destroyed(id);")),
]
