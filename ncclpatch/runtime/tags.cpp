#include "ncclpatch/runtime/tags.h"

#include <spdlog/fmt/fmt.h>

#include <string_view>

#include "ncclpatch/runtime/log.h"

namespace amem::tags {
namespace {

struct Named {
  std::string name;
  PoolId pool;  // zero: "nccl"
};

Result<Named> Resolve(Session& session, const char* name) {
  if (name == nullptr || *name == '\0') return Status{Code::kInvalid, "a tag is null or empty"};
  const std::string_view tag(name);
  if (tag == "nccl") return Named{name, {}};
  if (tag == "user")
    return Status{Code::kInvalid,
                  "tag user is what ncclMemAlloc handed out; with AMEM_USER_MEMORY=release it is paused with tag nccl"};
  AMEM_ASSIGN(const auto pool, session.pools().Find(tag));
  return Named{name, pool};
}

Status CycleOf(Session& session, const Named& tag, const Asked& asked) {
  const bool pausing = asked.kind == CycleKind::kPause;
  if (!tag.pool)
    return Runtime::Get().RunCycle(asked.kind, asked.patient).Within(pausing ? "pause of tag nccl" : "resume of tag nccl");
  if (pausing) Runtime::Get().TellInWiderScope(session);
  if (pausing) return session.pools().Pause(tag.pool, {.wait = asked.wait, .after = asked.after});
  return session.pools().Resume(tag.pool, {.wait = asked.wait, .priority = asked.priority, .patient = asked.patient});
}

// Whether `asked` changes the tag, so that undoing it needs the opposite call: not if nothing was to be done, or an earlier
// call does it.
bool Changes(Session& session, const Named& tag, CycleKind kind) {
  const Lifecycle now = session.Inspect([&](const State& state) { return state.LifecycleOf(tag.pool); });
  if (kind == CycleKind::kPause) return now != Lifecycle::kPaused && now != Lifecycle::kPausing;
  return now != Lifecycle::kRunning && now != Lifecycle::kResuming;
}

Status Undone(Session& session, std::span<const Named> done, const Asked& asked, const Status& why) {
  Asked back = asked;
  back.patient = false;  // the others may have done what they were asked to
  back.kind = asked.kind == CycleKind::kPause ? CycleKind::kResume : CycleKind::kPause;
  std::string message = why.message();
  for (auto tag = done.rbegin(); tag != done.rend(); ++tag) {
    const Status undone = CycleOf(session, *tag, back);
    message += fmt::format("; tag {} {} {} again", tag->name, asked.wait || !tag->pool ? "was" : "is being",
                           back.kind == CycleKind::kPause ? "paused" : "resumed");
    if (!undone.ok()) message += ", which failed as well: " + undone.message();
  }
  return {why.code(), message, why.driver_result()};
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
  AMEM_ASSIGN(Session* const session, Runtime::Get().ForPools());
  if (session == nullptr) return {};
  AMEM_ASSIGN(const auto tags, Resolve(*session, names));
  std::vector<PoolId> scopes;
  for (const Named& tag : tags) scopes.push_back(tag.pool);
  return session->HasRoomFor(scopes);
}

Status Cycle(std::span<const char* const> names, const Asked& asked) {
  AMEM_ASSIGN(Session* const session, Runtime::Get().ForPools());
  if (session == nullptr) {
    log::Info("AMem is switched off (AMEM_ENABLE=0): tags are neither paused nor resumed");
    return {};
  }
  AMEM_ASSIGN(const auto tags, Resolve(*session, names));
  std::vector<Named> done;
  for (const Named& tag : tags) {
    const bool changes = Changes(*session, tag, asked.kind);
    if (const Status status = CycleOf(*session, tag, asked); !status.ok()) {
      const Status told = tag.pool ? Runtime::Get().Failed(*session, status) : status;
      return Undone(*session, done, asked, told);
    }
    if (changes) done.push_back(tag);
  }
  return {};
}

Status Wait(const char* name, std::optional<void*> stream) {
  AMEM_ASSIGN(Session* const session, Runtime::Get().ForPools());
  if (session == nullptr) return {};
  AMEM_ASSIGN(const auto tag, Resolve(*session, name));
  if (!tag.pool) return {};  // is always waited for
  const Status status = stream ? session->pools().WaitOn(tag.pool, *stream) : session->pools().Wait(tag.pool);
  return status.ok() || status.code() == Code::kRefused ? status : Runtime::Get().Failed(*session, status);
}

}  // namespace amem::tags
