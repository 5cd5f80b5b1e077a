#include "ncclpatch/runtime/wants.h"

#include <spdlog/fmt/fmt.h>

#include "journal/base/no_copies.h"
#include "ncclpatch/hook/hook.h"

namespace amem {

// A scope of this thread's until the end of the block.
class Wants::Taken : NoCopies {
 public:
  Taken(Wants& ledger, PoolId scope, std::optional<Deadline> until) : ledger_(ledger) {
    std::unique_lock lock(ledger.mutex_);
    Scope& mine = ledger.scopes_[scope];
    const auto is_free = [&] { return !mine.changing; };
    if (!until)
      ledger.changed_.wait(lock, is_free);
    else if (!ledger.changed_.wait_until(lock, *until, is_free))
      return;
    mine.changing = true;
    scope_ = &mine;
  }
  ~Taken() {
    if (scope_ == nullptr) return;
    const std::lock_guard lock(ledger_.mutex_);
    scope_->changing = false;
    ledger_.changed_.notify_all();
  }
  explicit operator bool() const { return scope_ != nullptr; }
  // What `use` makes of the scope's wants.
  auto With(const auto& use) const {
    const std::lock_guard lock(ledger_.mutex_);
    return use(scope_->wants);
  }
  // What named memory that is resident ended otherwise: a pause that was not waited for and failed, for example.
  void ForgetIfResident(const Memory& memory) const {
    if (memory.is_resident()) With([](auto& wants) { wants.clear(); });
  }

 private:
  Wants& ledger_;
  Scope* scope_ = nullptr;  // null: another thread had it until the deadline
};

static Status OfAnotherThread(const std::string& name) {
  return {Code::kTimeout,
          name + OrRaiseTheTimeout(": another thread's pause or resume of it has not ended; call again when it has")};
}

Wants& Wants::Get() { return Forever<Wants>(); }

Status Wants::Pause(PoolId scope, std::optional<WantId> want, Deadline until, const Memory& memory) {
  const Taken taken(*this, scope, until);
  if (!taken) return OfAnotherThread(memory.name);
  taken.ForgetIfResident(memory);
  std::set<WantId> named;  // made before, because what is paused has to be named also if there is no memory for it afterwards
  if (want) named.insert(*want);
  const Status status = memory.cycle();
  if (status.ok() && !memory.is_resident()) taken.With([&](auto& wants) { wants.merge(named); });
  return status;
}

Status Wants::Resume(PoolId scope, std::optional<WantId> want, std::optional<Deadline> until, const Memory& memory) {
  const Taken taken(*this, scope, until);
  if (!taken) {
    if (want) LetGo(scope, *want);  // whoever ended it does not come again with it
    return OfAnotherThread(memory.name);
  }
  taken.ForgetIfResident(memory);
  const std::size_t others = taken.With([&](auto& wants) {
    if (want) wants.erase(*want);
    return wants.size();
  });
  if (others == 0) return memory.cycle();
  if (want != kPlainWant) return {};
  return {
      Code::kRefused,
      fmt::format("{} stays paused, because {} of the program (a block of amem.paused, a rollout, an adapter) "
                  "still require{} the pause; it resumes when the last of these ends",
                  memory.name, others == 1 ? "another part" : fmt::format("{} other parts", others), others == 1 ? "s" : "")};
}

bool Wants::IsNamedBy(PoolId scope, WantId want) {
  const std::lock_guard lock(mutex_);
  const auto found = scopes_.find(scope);
  return found != scopes_.end() && found->second.wants.contains(want);
}

void Wants::LetGo(PoolId scope, WantId want) {
  const std::lock_guard lock(mutex_);
  if (const auto found = scopes_.find(scope); found != scopes_.end()) found->second.wants.erase(want);
}

}  // namespace amem
