// Which libnccls of this process are under AMem, and what follows from that: which of them the session knows, which cannot be
// attached, and for which the settings were not proved.
//
// The runtime's mutex guards it: its caller holds that over RecordNew and AttachNew.
#pragma once

#include <atomic>
#include <cstdint>
#include <set>
#include <string>

#include "journal/base/no_copies.h"
#include "ncclpatch/runtime/options.h"
#include "replay/session/session.h"
#include "statemachine/event.h"

namespace amem {

class AttachedLibraries : NoCopies {
 public:
  // In the thread that starts the session, before it does: if AMEM_NVLS and AMEM_NETWORK are those of a proof, and an NCCL is
  // attached that was not proved, both act as `keep`.
  void CheckBeforeSession(Options& options);
  // Records those that were attached since the last call. Returns why pauses must leave all memory in place from now on; empty:
  // they need not.
  std::string RecordNew(Session& session, const Options& options);
  // Attaches what was loaded since the last call, and warns of each that cannot be attached: its memory stays. Returns as
  // RecordNew. `session` may be null.
  std::string AttachNew(Session* session, const Options& options);
  // Whether an NCCL is here that AMEM_PROVED does not name. Any thread.
  [[nodiscard]] bool unproved() const { return unproved_.load(); }

 private:
  // Why the settings are not proved for it; empty: they are, or none was chosen by a proof.
  std::string NotProved(const LibraryAttached& library, const Options& options);

  std::atomic<bool> unproved_{false};
  std::uint64_t recorded_ = 0;            // hook::Library::number of the last one
  std::uint64_t surveyed_at_ = 0;         // hook::LoadCount
  std::set<std::string> not_under_amem_;  // reported already
};

}  // namespace amem
