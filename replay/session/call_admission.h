// How calls pass the gates of what they touch: NCCL's memory, and that of each tag. A pause or resume closes the gate of its
// scope, which waits for the calls that are inside.
//
// A call takes NCCL's gate first, then those of tags, and the ledger's lock only for a moment inside; no method calls anything
// that takes a gate. Any thread may call any method; the ledger's lock is needed where a method takes the ledger.
#pragma once

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string_view>
#include <vector>

#include "journal/base/no_copies.h"
#include "replay/cycle/call_gate.h"
#include "replay/driver/driver.h"
#include "replay/ledger/ledger.h"
#include "replay/session/refused_calls.h"
#include "statemachine/types.h"

namespace amem {

// Hold it over a call that touches memory of tags, so that no cycle of theirs begins meanwhile. `paused`: one of the tags is
// paused; `away`: some of that memory is released.
struct InTags {
  std::vector<std::shared_lock<CallGate>> gates;
  bool paused = false, away = false;
};

class CallAdmission : NoCopies {
 public:
  CallAdmission(Driver& driver, Ledger& ledger) : driver_(driver), ledger_(ledger) {}

  // ---- NCCL's memory
  // Held over a call of NCCL that AMem carries out or records. Waits for a pause or resume that is under way.
  [[nodiscard]] std::shared_lock<CallGate> EnterCall() { return std::shared_lock(gates_.Of({})); }
  // Held over a launch, copy or fill by NCCL, so that no pause begins meanwhile. Waits for a pause or resume that is under way.
  // If the returned lock owns nothing, memory is paused: refuse the call. `call` and `stream` are for the message of a pause
  // that waits for this call in vain.
  [[nodiscard]] std::shared_lock<CallGate> EnterLaunch(const char* call = "a launch", void* stream = nullptr);
  // While NCCL's memory is paused, from when its calls are kept out until they are let in again.
  [[nodiscard]] bool paused() const { return paused_.load(std::memory_order_acquire); }
  void SetPaused(bool paused) { paused_.store(paused, std::memory_order_release); }
  [[nodiscard]] Status RefuseWhilePaused(std::string_view call, Address at = {}) const;

  // ---- tags
  // Waits for a cycle of theirs that is under way, and for the ledger's lock only if one of these tags is paused: a copy of
  // NCCL's may be what a kernel waits for that an unmap under that lock waits for.
  [[nodiscard]] InTags EnterTags(std::span<const Extent> touched, const char* call);
  [[nodiscard]] InTags EnterTags(const Extent& touched, const char* call) { return EnterTags(std::span(&touched, 1), call); }
  // Those of the allocations that are tags'.
  [[nodiscard]] InTags EnterTagsOf(std::span<const AllocationId> allocations, const char* call = "a memory call");
  [[nodiscard]] InTags EnterTagOf(AllocationId allocation) { return EnterTagsOf(std::span(&allocation, 1)); }
  void EnterTag(PoolId tag, InTags& in, const char* call = "a memory call");
  [[nodiscard]] static Status RefuseInTag(std::string_view call, Address at);  // because the tag is paused
  // Whether a tag was ever opened. If not, EnterTags does nothing.
  [[nodiscard]] bool HasTags() const { return has_tags_.load(std::memory_order_acquire); }
  void TagOpened() { has_tags_.store(true, std::memory_order_release); }

  // ---- both
  [[nodiscard]] CallGate& GateOf(PoolId scope) { return gates_.Of(scope); }  // zero: NCCL's memory
  // Whether [address, address + bytes) touches memory that a pause took away, or NCCL's memory that a pause is taking now.
  [[nodiscard]] bool TouchesPaused(Address address, Bytes bytes);
  // Records a call that was refused because memory is paused (RefusedCalls). `call` must outlive the session.
  void NoteRefused(const char* call);
  void EndRefusals(Ledger& ledger) REQUIRES(ledger) {  // a pause has ended
    ledger_.AssertHeld();
    refused_.EndPause(ledger);
  }

 private:
  Driver& driver_;
  Ledger& ledger_;
  ScopeGates gates_;
  std::atomic<bool> paused_{false}, has_tags_{false};
  RefusedCalls refused_ GUARDED_BY(ledger_);
};

}  // namespace amem
