#include "replay/ledger/ledger.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "journal/base/clock.h"

namespace amem {
namespace {

std::uint32_t ThreadId() {
  thread_local const auto id = static_cast<std::uint32_t>(::syscall(SYS_gettid));
  return id;
}

}  // namespace

void Ledger::Record(EventBody body) {
  Event event{SequenceNumber{state_.last.value + 1}, MonotonicNs(), ThreadId(), std::move(body)};
  Status applied = Apply(state_, event);
  if (!applied.ok()) {
    // The fact happened and cannot be folded: its text goes into the journal as the reason why the session is broken.
    Break("the state machine refused an event that happened (" + ToText(event.body) + "): " + applied.message());
    return;
  }
  if (journal_ == nullptr || !state_.broken.empty()) return;
  if (const Status appended = journal_->Append(event); !appended.ok()) Break(appended.message());
}

void Ledger::Break(const std::string& reason) {
  if (!state_.broken.empty()) return;
  const Event event{SequenceNumber{state_.last.value + 1}, MonotonicNs(), ThreadId(), SessionBroken{reason}};
  // Applying cannot fail; the journal may be what broke, and then says so itself.
  if (Apply(state_, event).ok() && journal_ != nullptr) static_cast<void>(journal_->Append(event));
}

void Ledger::SnapshotIfDue() {
  if (journal_ == nullptr || !state_.broken.empty() || state_.lifecycle != Lifecycle::kRunning || !journal_->SnapshotDue())
    return;
  static_cast<void>(journal_->Snapshot(state_));  // without one, the events stay: nothing is lost
}

DriverHandle Ledger::HandleOf(AllocationId allocation) const {
  const auto it = backing_.find(allocation.value);
  return it == backing_.end() ? DriverHandle{} : it->second.handle;
}
void Ledger::SetHandle(AllocationId allocation, DriverHandle handle) { backing_[allocation.value] = {handle, {}}; }
void Ledger::ForgetHandle(AllocationId allocation) { backing_.erase(allocation.value); }

UniqueFd Ledger::CopyOfDescriptor(AllocationId allocation) const {
  const auto it = backing_.find(allocation.value);
  if (it == backing_.end() || !it->second.descriptor) return {};
  return UniqueFd(::fcntl(it->second.descriptor.get(), F_DUPFD_CLOEXEC, 3));
}
void Ledger::KeepDescriptor(AllocationId allocation, const UniqueFd& descriptor) {
  const auto it = backing_.find(allocation.value);
  if (it != backing_.end()) it->second.descriptor = UniqueFd(::fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 3));
}

Result<UniqueFd> Ledger::Export(AllocationId allocation, Driver& driver, bool keep) {
  const std::lock_guard one(export_mutex_);
  DriverHandle handle;
  {
    const auto lock = Lock();
    if (UniqueFd copy = CopyOfDescriptor(allocation)) return copy;
    handle = HandleOf(allocation);
  }
  if (!handle) return Status{Code::kNotFound, ToText(allocation) + " has no memory now"};
  auto descriptor = driver.Export(handle);
  if (!descriptor.ok() || !keep) return descriptor;
  const auto lock = Lock();
  KeepDescriptor(allocation, *descriptor);
  return descriptor;
}

}  // namespace amem
