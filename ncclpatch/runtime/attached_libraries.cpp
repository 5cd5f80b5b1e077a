#include "ncclpatch/runtime/attached_libraries.h"

#include <spdlog/fmt/fmt.h>

#include <utility>

#include "ncclpatch/hook/hook.h"
#include "ncclpatch/runtime/log.h"

namespace amem {

// What was proved is one NCCL. With another one the settings are what they are without a proof. What a session began with
// cannot be taken back.
std::string AttachedLibraries::NotProved(const LibraryAttached& library, const Options& options) {
  const bool frees_more = options.nvls != Nvls::kKeep || options.renews;
  if (!frees_more || options.proved_for.empty() || library.nccl_version == options.proved_for) return {};
  unproved_.store(true);
  return fmt::format("AMEM_NVLS and AMEM_NETWORK were proved for NCCL {}, and {} is NCCL {}", options.proved_for, library.path,
                     library.nccl_version.empty() ? "of unknown version" : library.nccl_version);
}

void AttachedLibraries::CheckBeforeSession(Options& options) {
  for (const hook::Library& library : hook::Libraries()) {
    const std::string why = NotProved(hook::Describe(library), options);
    if (why.empty()) continue;
    log::Warn(why + ": both are keep in this process");
    options.nvls = Nvls::kKeep;
  }
}

std::string AttachedLibraries::RecordNew(Session& session, const Options& options) {
  std::string unproved;
  for (const hook::Library& library : hook::Libraries()) {
    if (library.number <= recorded_) continue;
    recorded_ = library.number;
    LibraryAttached event = hook::Describe(library);
    if (std::string why = NotProved(event, options); !why.empty() && options.nvls != Nvls::kKeep)
      unproved = std::move(why);
    else if (!why.empty())
      log::Warn(why + ": registered memory stays from now on");
    log::Info(fmt::format("on, by {}: NCCL {} at {}", event.way, event.nccl_version, event.path));
    session.records().Note(std::move(event));
  }
  return unproved;
}

std::string AttachedLibraries::AttachNew(Session* session, const Options& options) {
  std::string unproved;
  const std::uint64_t loaded = hook::LoadCount();
  if (std::exchange(surveyed_at_, loaded) == loaded) return unproved;
  hook::PatchAtLoad();
  if (session != nullptr) unproved = RecordNew(*session, options);
  for (const hook::Presence& nccl : hook::Survey())
    if (nccl.way.empty() && not_under_amem_.insert(nccl.path).second)
      log::Warn(fmt::format("{}{}{} is not under AMem, and a pause leaves its memory where it is: {}", nccl.path,
                            nccl.version.empty() ? "" : ", NCCL ", nccl.version, nccl.why));
  return unproved;
}

}  // namespace amem
