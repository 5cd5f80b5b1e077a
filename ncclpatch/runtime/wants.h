// The ledger of who wants what paused. A scope, which is a tag's pool or NCCL's memory (zero), is paused while any want names
// it; whoever ends the last want of a scope resumes it.
//
// One thread at a time changes a scope, from reading the ledger until its memory has changed, so that nobody takes memory
// for paused that is on its way back. Scopes do not wait for each other. Any thread may call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "journal/base/deadline.h"
#include "statemachine/types.h"

namespace amem {

using WantId = Id<struct WantTag>;
// The want of the program's plain calls: amem_pause, amem_resume, ncclPause, ncclResume, ncclCommSuspend and ncclCommResume.
inline constexpr WantId kPlainWant{};

class Wants {
 public:
  static Wants& Get();  // never destroyed

  // Costs nothing until it names a scope, so there is nothing to give back.
  WantId New() { return WantId{last_.fetch_add(1) + 1}; }

  // What is done to a scope's memory. `is_resident`: it is not paused, and no pause was asked for.
  struct Memory {
    std::string name;  // "tag weights", for messages
    std::function<bool()> is_resident;
    std::function<Status()> cycle;  // pauses or resumes it; success if there is nothing to do
  };

  // Pauses a scope; after success `want` names it, if it is paused. No want: a request from outside, which the ledger does not
  // hold. kTimeout: another thread was at it until `until`.
  Status Pause(PoolId scope, std::optional<WantId> want, Deadline until, const Memory& memory);

  // In every case `want` names the scope no more. Resumes the scope, unless another want names it; that is success, too, but
  // kRefused for the plain want, because its caller expects the memory. kTimeout: as Pause. No `until`: waits as long as
  // another thread takes.
  Status Resume(PoolId scope, std::optional<WantId> want, std::optional<Deadline> until, const Memory& memory);

  // `want` names the scope no more, and its memory stays as it is.
  void LetGo(PoolId scope, WantId want);
  [[nodiscard]] bool IsNamedBy(PoolId scope, WantId want);

 private:
  struct Scope {
    std::set<WantId> wants;
    bool changing = false;  // a thread has taken it
  };
  class Taken;

  std::atomic<std::uint64_t> last_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<PoolId, Scope> scopes_;  // an entry stays once it is there
};

}  // namespace amem
