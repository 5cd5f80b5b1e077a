// Tags, and the C interface (amem.h) of memory under them.
#include "ncclpatch/runtime/tags.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "journal/base/no_memory.h"
#include "ncclpatch/amem.h"
#include "ncclpatch/hook/replacements.h"
#include "ncclpatch/runtime/border.h"
#include "ncclpatch/runtime/log.h"

namespace amem {
namespace {

// What was said last of each scope's remainder, by whose it is.
struct SaidOfRemainders {
  std::mutex mutex;
  std::map<PoolId, std::map<std::string, Bytes>> by_scope;
};

PoolHoldings HoldingsOf(const State& state, PoolId scope) {
  if (scope) return MeasurePools(state)[scope];
  PoolHoldings nccl = MeasureTag(state, false);
  for (const auto& [library, bytes] : MeasureTag(state, true).held_by) nccl.held_by[library] += bytes;
  return nccl;
}

void SayRemainder(Session& session, PoolId scope, const std::string& tag) {
  constexpr Bytes kPart = 10;  // what is no library's is worth a line if it is more than a tenth
  const PoolHoldings now = session.Inspect([&](const State& state) { return HoldingsOf(state, scope); });
  std::map<std::string, Bytes> left;
  Bytes sum = 0;
  for (const auto& [reason, bytes] : now.kept) {
    sum += bytes;
    if (reason != KeepReason::kHeld) left[std::string(ToText(reason))] = bytes;
  }
  if (sum <= now.own / kPart) left.clear();
  std::map<std::string, Bytes> said = left;
  for (const auto& [library, bytes] : now.held_by) said["held by " + library] = bytes;
  {
    SaidOfRemainders& before = Forever<SaidOfRemainders>();
    const std::lock_guard lock(before.mutex);
    if (std::exchange(before.by_scope[scope], said) == said) return;
  }
  for (const auto& [library, bytes] : now.held_by)
    log::Warn(fmt::format("a pause of tag {} leaves {} where it is, because {} has retained, exported, registered or bound it",
                          tag, FormatBytes(bytes), library));
  if (left.empty()) return;
  std::string reasons;
  for (const auto& [reason, bytes] : left)
    reasons += fmt::format("{}{} {}", reasons.empty() ? "" : ", ", FormatBytes(bytes), reason);
  log::Warn(
      fmt::format("a pause of tag {} leaves {} of {} where it is: {}", tag, FormatBytes(sum), FormatBytes(now.own), reasons));
}

}  // namespace

// The pause has succeeded, and its caller is to be told so, also where there is no memory for the words.
void WarnOfRemainder(Session& session, PoolId scope, const std::string& tag) {
  static_cast<void>(OrNoMemory([&] { return SayRemainder(session, scope, tag), Status{}; }));
}

namespace tags {
namespace {

constexpr std::string_view kNccl = "nccl";

struct Named {
  std::string name;
  PoolId pool;  // zero: "nccl"
  // It is paused with contents that its policy would discard: if a resume is undone, they are saved again.
  bool kept = false;
  // Undoing the call needs the opposite one. If not, an earlier call or another want had done it already.
  bool changed = false;
};

Result<Named> Resolve(Session& session, const char* name) {
  if (name == nullptr || *name == '\0') return Status{Code::kInvalid, "a tag is null or empty"};
  const std::string_view tag(name);
  if (tag == kNccl) return Named{name, {}};
  if (tag == "user")
    return Status{Code::kInvalid,
                  "tag user is what ncclMemAlloc handed out; with AMEM_USER_MEMORY=release it is paused with tag nccl"};
  AMEM_ASSIGN(const auto pool, session.pools().Find(tag));
  return Named{name, pool};
}

Status CycleOfNccl(const Request& request) {
  return Runtime::Get()
      .RunCycle(request.kind(), request.is_patient(), request.want, request.idle)
      .Within(request.kind() == CycleKind::kPause ? "pause of tag nccl" : "resume of tag nccl");
}

Status CycleOfPool(Session& session, const Named& tag, const Request& request) {
  const HowToPause* const pause = request.pause();
  if (pause == nullptr) return session.pools().Resume(tag.pool, *request.resume());
  HowToPause how = *pause;
  how.keeps = how.keeps || tag.kept;
  const Status status = session.pools().Pause(tag.pool, how);
  if (status) WarnOfRemainder(session, tag.pool, tag.name);
  return status;
}

Status CycleOf(Session& session, const Named& tag, const Request& request, bool undoes = false) {
  if (!tag.pool) return CycleOfNccl(request);
  const bool pausing = request.pause() != nullptr;
  if (pausing) Runtime::Get().RecordOthers(session);
  const auto cycle = [&] {
    const Status status = CycleOfPool(session, tag, request);
    return status.ok() || undoes ? status : Runtime::Failed(session, status);
  };
  const Wants::Memory memory{"tag " + tag.name, [&] { return session.pools().IsResident(tag.pool); }, cycle};
  if (pausing) return Wants::Get().Pause(tag.pool, request.want, Runtime::Get().UntilCallEnds(), memory);
  const auto until = request.is_patient() ? std::nullopt : std::optional(Runtime::Get().UntilCallEnds());
  return Wants::Get().Resume(tag.pool, request.want, until, memory);
}

// A request of others counts although no worker has begun it, so that the undo of this one leaves theirs alone.
bool Changes(Session& session, const Named& tag, CycleKind kind) {
  if (tag.pool) return session.pools().IsResident(tag.pool) == (kind == CycleKind::kPause);
  const Lifecycle now = session.Inspect([&](const State& state) { return state.LifecycleOf(tag.pool); });
  if (kind == CycleKind::kPause) return now != Lifecycle::kPaused && now != Lifecycle::kPausing;
  return now != Lifecycle::kRunning && now != Lifecycle::kResuming;
}

// The opposite request. It is not patient, because the others may have done what they were asked to.
Request Opposite(const Request& request) {
  Request back = request;
  if (const HowToPause* const pause = request.pause()) {
    back.how = HowToResume{.wait = pause->wait, .patient = false};
  } else {
    back.how = HowToPause{.wait = request.waits()};
    back.want = {};  // the want has ended, whatever became of the memory
  }
  return back;
}

// The words for it may find no memory. All is undone nevertheless.
Status Undone(Session& session, std::span<const Named> done, const Request& request, const Status& why) {
  const Request back = Opposite(request);
  std::string words;
  for (auto tag = done.rbegin(); tag != done.rend(); ++tag) {
    if (!tag->changed) {
      if (request.want && request.pause() != nullptr) Wants::Get().LetGo(tag->pool, *request.want);
      continue;
    }
    const Status undone = OrNoMemory([&] { return CycleOf(session, *tag, back, true); });
    // What stays paused nevertheless is nobody's, so that whoever resumes it next may.
    if (!undone.ok() && request.want && request.pause() != nullptr) Wants::Get().LetGo(tag->pool, *request.want);
    static_cast<void>(OrNoMemory([&] {
      words += fmt::format("; tag {} {} {} again", tag->name, request.waits() || !tag->pool ? "was" : "is being",
                           back.pause() != nullptr ? "paused" : "resumed");
      if (!undone.ok()) words += ", which failed as well: " + undone.message();
      return Status{};
    }));
  }
  return {why.code(), why.message() + words, why.driver_result()};
}

Result<std::vector<Named>> Resolve(Session& session, std::span<const char* const> names) {
  std::vector<Named> tags;
  for (const char* name : names) {
    AMEM_ASSIGN(tags.emplace_back(), Resolve(session, name));
  }
  return tags;
}

}  // namespace

Status HasRoomFor(std::span<const char* const> names) {
  Session* const session = Runtime::Get().started();
  if (session == nullptr) return {};             // nothing is paused, and a question starts no session
  AMEM_TRY(Runtime::Get().ForPools().status());  // which a forked child has not
  AMEM_ASSIGN(const auto tags, Resolve(*session, names));
  std::vector<PoolId> scopes;
  for (const Named& tag : tags) scopes.push_back(tag.pool);
  return session->devices().HasRoomFor(scopes);
}

Status Cycle(std::span<const char* const> names, const Request& request) {
  const auto is_nccl = [](const char* name) { return name != nullptr && kNccl == name; };
  if (!names.empty() && std::ranges::all_of(names, is_nccl)) return CycleOfNccl(request);  // which needs no session
  AMEM_ASSIGN(Session* const session, Runtime::Get().ForPools());
  if (session == nullptr) return {};
  AMEM_ASSIGN(auto tags, Resolve(*session, names));
  if (std::ranges::any_of(names, is_nccl)) AMEM_TRY(Runtime::Get().ToPause().status());  // before anything is changed
  std::vector<Named> done;
  done.reserve(tags.size());  // before anything is changed, too
  for (Named& tag : tags) {
    bool named = false;
    const Status status = OrNoMemory([&] {
      tag.kept = session->Inspect([&](const State& state) {
        const auto* const pool = FindIn(state.pools, tag.pool);
        return pool != nullptr && pool->keeps;
      });
      tag.changed = Changes(*session, tag, request.kind());
      named = request.want && Wants::Get().IsNamedBy(tag.pool, *request.want);
      return CycleOf(*session, tag, request);
    });
    if (!status.ok()) return Undone(*session, done, request, status);
    if (tag.changed || !named) done.push_back(std::move(tag));
  }
  return {};
}

Status LetGo(std::span<const char* const> names, WantId want) {
  Session* const session = Runtime::Get().started();
  if (session == nullptr) return {};
  AMEM_TRY(Runtime::Get().ForPools().status());  // which a forked child has not
  Status wrong;
  for (const char* name : names) {
    if (const auto tag = Resolve(*session, name); tag.ok())
      Wants::Get().LetGo(tag->pool, want);
    else if (wrong.ok())
      wrong = tag.status();
  }
  return wrong;
}

Status Wait(const char* name, std::optional<void*> stream) {
  AMEM_ASSIGN(Session* const session, Runtime::Get().ForPools());
  if (session == nullptr) return {};
  AMEM_ASSIGN(const auto tag, Resolve(*session, name));
  if (!tag.pool) return {};  // is always waited for
  const Status status = stream ? session->pools().WaitOn(tag.pool, *stream) : session->pools().Wait(tag.pool);
  return status.ok() || status.code() == Code::kRefused ? status : Runtime::Failed(*session, status);
}

}  // namespace tags

namespace {

constexpr const char* kDefaultTag = "default";
constexpr unsigned kKnownFlags = AMEM_NO_WAIT | AMEM_ON_STREAM | AMEM_HOSTS_IDLE;

// The tags that a thread has entered, innermost last; left when the thread ends. Zero: AMem was off.
class Entered : NoCopies {
 public:
  Entered() = default;
  ~Entered() {
    while (!pools_.empty()) Leave();
  }
  [[nodiscard]] bool any() const { return !pools_.empty(); }
  [[nodiscard]] PoolId innermost() const { return pools_.empty() ? PoolId{} : pools_.back(); }
  void Enter(PoolId pool) { pools_.push_back(pool); }
  void Leave() {
    Session* const session = pools_.back() ? Runtime::Get().started() : nullptr;
    if (session != nullptr && !replacements::inert.load()) session->pools().Leave(pools_.back());
    pools_.pop_back();
  }

 private:
  std::vector<PoolId> pools_;
};
thread_local Entered t_entered;

// AtBorder, but a wrong name is a wrong argument.
template <class Body>
int AtTagBorder(const char* call, const Body& body) noexcept {
  Status status;
  const int result = AtBorder(call, [&] { return status = body(); });
  const bool wrong_argument = status.code() == Code::kNotFound || status.code() == Code::kInvalid;
  return result != kOk && wrong_argument ? kInvalidArgument : result;
}

Status OpenPool(const char* tag, int policy) {
  if (tag == nullptr) return {Code::kInvalid, "the tag is null"};
  if (policy != AMEM_PRESERVE && policy != AMEM_DISCARD)
    return {Code::kInvalid,
            fmt::format("policy {} of tag {} is not known; known: 0 (AMEM_PRESERVE), 1 (AMEM_DISCARD)", policy, tag)};
  AMEM_ASSIGN(Session* const session, Runtime::Get().ForPools());
  if (session == nullptr) return {};
  return session->pools().Open(tag, policy == AMEM_DISCARD ? PoolPolicy::kDiscard : PoolPolicy::kPreserve).status();
}

Status EnterPool(const char* tag) {
  if (tag == nullptr) return {Code::kInvalid, "the tag is null"};
  AMEM_ASSIGN(const auto session, Runtime::Get().ForPools());
  AMEM_ASSIGN(const auto pool, session == nullptr ? Result<PoolId>(PoolId{}) : session->pools().Find(tag));
  if (pool) AMEM_TRY(session->pools().Enter(pool));
  t_entered.Enter(pool);
  return {};
}

Status LeavePool() {
  if (!t_entered.any()) return {Code::kRefused, "this thread has entered no pool"};
  t_entered.Leave();
  return {};
}

// The answer of an allocation that failed: null, with the reason as this thread's last error.
void* NoMemoryBecause(const Status& failure) {
  static std::atomic<bool> said = false;
  if (failure.code() != Code::kOutOfMemory && !said.exchange(true)) log::Warn("amem_alloc: " + failure.message());
  Fail(AnswersFor(failure.code()).nccl, "amem_alloc: " + failure.message());
  return nullptr;
}

// Plain driver memory, which amem_alloc hands out if AMem is switched off or cannot start.
namespace plain_memory {

struct Plain {  // tensors are freed at exit, too
  std::mutex mutex;
  std::map<void*, CUcontext> taken;
};

CUresult RetainPrimaryContext(int device, CUcontext& context) {  // for ever
  CUdevice handle = 0;
  CUresult result = AMEM_DRIVER(cuInit)(0);
  if (result == CUDA_SUCCESS) result = AMEM_DRIVER(cuDeviceGet)(&handle, device);
  return result == CUDA_SUCCESS ? AMEM_DRIVER(cuDevicePrimaryCtxRetain)(&context, handle) : result;
}

// The thread's current context does not change.
void* Allocate(Bytes bytes, DeviceOrdinal device) {
  if (AMEM_DRIVER(cuInit) == nullptr)
    return NoMemoryBecause({Code::kUnsupported, "allocate memory: libcuda.so.1 is not there; this host may have no GPU"});
  CUcontext context = nullptr;
  CUdeviceptr address = 0;
  CUresult result = RetainPrimaryContext(device.value, context);
  if (result == CUDA_SUCCESS)
    result = InContext(context, [&] { return AMEM_DRIVER(cuMemAlloc)(&address, std::max<Bytes>(bytes, 1)); });
  if (result != CUDA_SUCCESS)
    return NoMemoryBecause(
        {result == CUDA_ERROR_OUT_OF_MEMORY ? Code::kOutOfMemory : Code::kDriver,
         fmt::format("cuMemAlloc {} bytes on device {}: the driver answered {}", bytes, device.value, static_cast<int>(result)),
         static_cast<int>(result)});
  void* const memory = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  Plain& plain = Forever<Plain>();
  const std::lock_guard lock(plain.mutex);
  plain.taken[memory] = context;
  return memory;
}

bool Free(void* address) {  // false: it was not allocated here
  Plain& plain = Forever<Plain>();
  std::unique_lock lock(plain.mutex);
  const auto freed = plain.taken.extract(address);
  lock.unlock();
  if (freed.empty()) return false;
  InContext(freed.mapped(), [&] { return AMEM_DRIVER(cuMemFree)(reinterpret_cast<CUdeviceptr>(address)); });
  return true;
}

}  // namespace plain_memory

void* Allocate(ssize_t size, DeviceOrdinal device) {
  if (size < 0) return NoMemoryBecause({Code::kInvalid, fmt::format("a size cannot be {} bytes", size)});
  const auto bytes = static_cast<Bytes>(size);
  const auto session = Runtime::Get().ForPools();
  if (!session.ok()) {
    static std::atomic<bool> said = false;
    if (!said.exchange(true)) log::Warn("amem_alloc hands out memory that cannot be paused: " + session.status().message());
    return plain_memory::Allocate(bytes, device);
  }
  if (*session == nullptr) return plain_memory::Allocate(bytes, device);
  Pools& pools = (*session)->pools();
  PoolId pool = t_entered.innermost();
  if (!pool) {
    const auto opened = pools.Find(kDefaultTag);
    const auto by_default = opened.ok() ? opened : pools.Open(kDefaultTag, PoolPolicy::kPreserve);
    if (!by_default.ok()) return NoMemoryBecause(by_default.status());
    pool = *by_default;
  }
  const auto address = pools.Allocate(pool, bytes, device);
  if (!address.ok()) return NoMemoryBecause(address.status());
  return reinterpret_cast<void*>(address->value);  // NOLINT(performance-no-int-to-ptr)
}

void Free(void* memory, void* stream) {
  if (memory == nullptr || replacements::inert.load() || plain_memory::Free(memory)) return;
  Session* const session = Runtime::Get().started();
  const Address address{reinterpret_cast<std::uint64_t>(memory)};
  const Status freed = session == nullptr
                           ? Status{Code::kNotFound, fmt::format("amem_free {}: nothing was allocated yet", memory)}
                           : session->pools().Free(address, stream);
  static std::atomic<std::uint64_t> wrong = 0;
  if (!freed.ok() && wrong.fetch_add(1) == 0) log::Warn(freed.message() + "; it is left alone");
}

Status CycleTags(const char* const* names, size_t count, unsigned flags, unsigned known, const tags::Request& request) {
  if (names == nullptr && count > 0) return {Code::kInvalid, "the list of tags is null"};
  if ((flags & ~known) != 0) return {Code::kInvalid, fmt::format("flags {:#x} are not known; known: {:#x}", flags, known)};
  return tags::Cycle({names, count}, request);
}

int PauseFor(WantId want, const char* const* names, size_t count, unsigned flags, void* stream) {
  return AtTagBorder("amem_pause", [&] {
    HowToPause how{.wait = (flags & AMEM_NO_WAIT) == 0};
    if ((flags & AMEM_ON_STREAM) != 0) how.after = stream;
    const IdleNow idle = (flags & AMEM_HOSTS_IDLE) != 0 ? IdleNow::kHosts : IdleNow::kNothing;
    return CycleTags(names, count, flags, kKnownFlags, {.want = want, .how = how, .idle = idle});
  });
}

int AwaitIdle() {
  return AtBorder("amem_pause", [] {
    Session* const session = Runtime::Get().started();
    return session == nullptr ? Status{} : session->devices().AwaitIdle();
  });
}

int ResumeFor(WantId want, const char* const* names, size_t count, unsigned flags, int priority) {
  return AtTagBorder("amem_resume", [&] {
    const HowToResume how{.wait = (flags & AMEM_NO_WAIT) == 0, .priority = priority, .patient = (flags & AMEM_IN_TIME) == 0};
    const Status status =
        OrNoMemory([&] { return CycleTags(names, count, flags, AMEM_NO_WAIT | AMEM_IN_TIME, {.want = want, .how = how}); });
    // Whoever ends a want does not come again with it, so it ends for the tags that were not reached, too.
    if (!status.ok() && names != nullptr) static_cast<void>(tags::LetGo({names, count}, want));
    return status;
  });
}

// Too little memory is an answer, which is not logged.
int AskForRoom(std::span<const char* const> tags) {
  Status room;
  const int failed = AtTagBorder("amem_resume", [&] {
    room = tags::HasRoomFor(tags);
    return room.code() == Code::kOutOfMemory ? Status{} : room;
  });
  return failed != kOk || room.ok() ? failed : Fail(AnswersFor(room.code()).nccl, room.message());
}

}  // namespace
}  // namespace amem

int amem_pool(const char* tag, int policy) {
  return amem::AtTagBorder("amem_pool", [&] { return amem::OpenPool(tag, policy); });
}

int amem_pool_enter(const char* tag) {
  return amem::AtTagBorder("amem_pool_enter", [&] { return amem::EnterPool(tag); });
}

int amem_pool_leave() {
  return amem::AtTagBorder("amem_pool_leave", [] { return amem::LeavePool(); });
}

void* amem_alloc(ssize_t size, int device, void* /*stream*/) {
  try {
    return amem::Allocate(size, amem::DeviceOrdinal{device});
  } catch (const std::exception& error) {
    amem::ThrownAtBorder("amem_alloc", error.what());
    return nullptr;
  }
}

void amem_free(void* ptr, ssize_t /*size*/, int /*device*/, void* stream) {
  static_cast<void>(amem::AtBorder("amem_free", [&] { return amem::Free(ptr, stream), amem::Status{}; }));
}

int amem_pause(const char* const* tags, size_t count, unsigned flags, void* stream) {
  if (flags == AMEM_ONLY_ASK) return amem::AwaitIdle();
  return amem::PauseFor(amem::kPlainWant, tags, count, flags, stream);
}

int amem_resume(const char* const* tags, size_t count, unsigned flags, int priority) {
  if (flags == AMEM_ONLY_ASK && tags != nullptr) return amem::AskForRoom({tags, count});
  return amem::ResumeFor(amem::kPlainWant, tags, count, flags, priority);
}

amem_want_id amem_want() { return amem::Wants::Get().New().value; }

int amem_want_pause(amem_want_id want, const char* const* tags, size_t count, unsigned flags, void* stream) {
  return amem::PauseFor(amem::WantId{want}, tags, count, flags, stream);
}

int amem_want_resume(amem_want_id want, const char* const* tags, size_t count, unsigned flags, int priority) {
  if (flags == AMEM_LET_GO && tags != nullptr)
    return amem::AtTagBorder("amem_resume", [&] { return amem::tags::LetGo({tags, count}, amem::WantId{want}); });
  return amem::ResumeFor(amem::WantId{want}, tags, count, flags, priority);
}

int amem_wait(const char* tag, unsigned flags, void* stream) {
  return amem::AtTagBorder("amem_wait", [&]() -> amem::Status {
    if ((flags & ~AMEM_ON_STREAM) != 0) return {amem::Code::kInvalid, fmt::format("flags {:#x} are not known", flags)};
    return amem::tags::Wait(tag, flags != 0 ? std::optional(stream) : std::nullopt);
  });
}
