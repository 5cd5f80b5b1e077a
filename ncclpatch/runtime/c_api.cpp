// The C interface (amem.h): results become numbers, reasons become amem_last_error().
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "ncclpatch/amem.h"
#include "ncclpatch/hook/hook.h"
#include "ncclpatch/runtime/border.h"
#include "ncclpatch/runtime/runtime.h"

namespace amem {
namespace {

// Every NCCL of this process, under AMem or not; `idle` as WhyIdle.
nlohmann::json NcclLibraries(const char* idle) {
  nlohmann::json all = nlohmann::json::array();
  for (const hook::Presence& nccl : hook::Survey())
    all.push_back({{"path", nccl.path},
                   {"version", nccl.version},
                   {"under_amem", !nccl.way.empty()},
                   {"way", nccl.way},
                   {"why_not", nccl.way.empty() && idle != nullptr ? idle : nccl.why}});
  return all;
}

// Takes NCCL under AMem if that is still possible; where it is not, the libraries say why.
Status Statistics(std::string& json) {
  const Status attached = Runtime::Get().ToPause().status();
  AMEM_ASSIGN(Session* const session, Runtime::Get().IfStarted());
  const char* const idle = session == nullptr ? Runtime::Get().WhyIdle() : nullptr;
  const std::string reason = idle != nullptr ? idle : attached.ok() ? "NCCL has made no memory call yet" : attached.message();
  nlohmann::json all =
      nlohmann::json::parse(session ? session->statistics().Json() : SessionStatistics::JsonWithoutSession(reason));
  all["nccl_libraries"] = NcclLibraries(idle);
  json = all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return Status::Ok();
}

// What no session knows: NCCL's memory is not what the row of tag nccl says, because AMem does not see it.
std::string WithNcclNotUnderAmem(const std::string& memory) {
  const std::vector<hook::Presence> found = hook::Survey();
  if (found.empty()) return memory;
  nlohmann::json all = nlohmann::json::parse(memory);
  for (nlohmann::json& row : all["tags"])
    if (row["tag"] == "nccl") {
      row["state"] = "not under AMem";
      row["failure"] = found.front().why;
    }
  return all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// What a session says, or that there is none. Asking starts nothing: a process that holds no memory of AMem's has no session,
// and needs none to say so.
template <class Text>
Status OfSession(const char* rows, std::string& json, const Text& text) {
  AMEM_ASSIGN(Session* const session, Runtime::Get().IfStarted());
  if (session == nullptr) {
    const char* const idle = Runtime::Get().WhyIdle();
    json = nlohmann::json{{"schema", 1},
                          {rows, nlohmann::json::array()},
                          {"reason", idle != nullptr ? idle : "no memory has been asked for yet"}}
               .dump();
    return {};
  }
  Runtime::Get().RecordOthersInWiderScope(*session);
  json = text(*session);
  return {};
}

Status MemoryJson(std::string& json) {
  return OfSession("tags", json, [](Session& session) {
    return hook::Libraries().empty() ? WithNcclNotUnderAmem(session.statistics().MemoryJson())
                                     : session.statistics().MemoryJson();
  });
}

Status AccountJson(std::string& json) {
  return OfSession("devices", json, [](Session& session) { return session.statistics().AccountJson(); });
}

Status ProcessesJson(std::string& json) {
  return OfSession("devices", json, [](Session& session) { return session.statistics().ProcessesJson(); });
}

std::string LibrariesText() {
  std::string text;
  for (const hook::Presence& nccl : hook::Survey())
    text += fmt::format("  {} {}: {}\n", nccl.path, nccl.version,
                        nccl.way.empty() ? "not under AMem, because " + nccl.why : "under AMem (" + nccl.way + ")");
  return text;
}

}  // namespace
}  // namespace amem

using amem::AtBorder;
using amem::Runtime;
using amem::Status;

int ncclPause(ncclComm** /*comm*/) {
  return AtBorder("ncclPause", [] { return Runtime::Get().RunCycle(amem::CycleKind::kPause); });
}

int ncclResume(ncclComm** /*comm*/) {
  return AtBorder("ncclResume", [] { return Runtime::Get().RunCycle(amem::CycleKind::kResume, true); });
}

int ncclMemStats() {
  return AtBorder("ncclMemStats", [] {
    AMEM_ASSIGN(amem::Session* const session, Runtime::Get().ToPause());
    const std::string text =
        (session == nullptr ? std::string("AMem: NCCL holds no memory yet\n") : session->statistics().Text()) +
        amem::LibrariesText();
    std::fputs(text.c_str(), stderr);
    return Status::Ok();
  });
}

int amem_trim_pinned(size_t keep_bytes) {
  return AtBorder("amem_trim_pinned", [&] {
    const auto session = Runtime::Get().IfStarted();
    if (session && *session != nullptr) (*session)->devices().TrimPinned(keep_bytes);
    return session.status();
  });
}

int ncclSetGroupID(int group) {
  return AtBorder("ncclSetGroupID", [&] { return Runtime::Get().SetGroup(group); });
}

int ncclGetGroupID(int* group) {
  if (group == nullptr) return amem::Fail(amem::kInvalidArgument, "ncclGetGroupID: the pointer for the answer is null");
  return AtBorder("ncclGetGroupID", [&] {
    Runtime::Get().WhyIdle();
    const auto known = Runtime::Get().Group();
    if (known) *group = static_cast<int>(*known);
    return known.status();
  });
}

int amem_attach() {
  return AtBorder("amem_attach", [] { return Runtime::Get().Attach(); });
}

int amem_json(const char* what, char* buffer, size_t* length) {
  constexpr std::pair<std::string_view, Status (*)(std::string&)> kKnown[] = {{AMEM_STATS, &amem::Statistics},
                                                                              {AMEM_MEMORY, &amem::MemoryJson},
                                                                              {AMEM_ACCOUNT, &amem::AccountJson},
                                                                              {AMEM_PROCESSES, &amem::ProcessesJson}};
  const std::string_view wanted = what == nullptr ? "" : what;
  const auto* const known = std::ranges::find(kKnown, wanted, [](const auto& one) { return one.first; });
  if (known == std::end(kKnown))
    return amem::Fail(amem::kInvalidArgument,
                      fmt::format("amem_json: \"{}\" is not known; known: stats, memory, account, processes", wanted));
  std::string json;
  const int result = AtBorder("amem_json", [&] { return known->second(json); });
  return result != amem::kOk ? result : amem::CopyOut("amem_json", json, buffer, length);
}

const char* amem_last_error() { return amem::LastError().c_str(); }

const char* amem_version() { return AMEM_VERSION; }
