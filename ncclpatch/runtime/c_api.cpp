// The C interface (amem.h): results become numbers, reasons become amem_last_error().
#include <spdlog/fmt/fmt.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "ncclpatch/amem.h"
#include "ncclpatch/hook/hook.h"
#include "ncclpatch/runtime/border.h"
#include "ncclpatch/runtime/runtime.h"

namespace amem {
namespace {

// Every NCCL of this process, under AMem or not.
nlohmann::json NcclLibraries() {
  nlohmann::json all = nlohmann::json::array();
  for (const hook::Presence& nccl : hook::Survey())
    all.push_back({{"path", nccl.path},
                   {"version", nccl.version},
                   {"under_amem", !nccl.way.empty()},
                   {"way", nccl.way},
                   {"why_not", nccl.why}});
  return all;
}

Status Statistics(std::string& json) {
  AMEM_ASSIGN(Session* const session, Runtime::Get().ToPause());
  nlohmann::json all = nlohmann::json::parse(session ? session->StatisticsJson()
                                                     : StatisticsJsonWithoutSession("NCCL has made no memory call yet"));
  all["nccl_libraries"] = NcclLibraries();
  json = all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return Status::Ok();
}

// Asking starts nothing: a process that holds no memory of AMem's has no session, and needs none to say so.
Status MemoryJson(std::string& json) {
  const bool off = Runtime::Get().SwitchedOff();
  AMEM_ASSIGN(Session* const session, off ? Result<Session*>(nullptr) : Runtime::Get().IfStarted());
  const nlohmann::json none{{"schema", 1},
                            {"tags", nlohmann::json::array()},
                            {"reason", off ? "AMem is switched off (AMEM_ENABLE=0)" : "no memory has been asked for yet"}};
  if (session != nullptr) Runtime::Get().TellInWiderScope(*session);
  json = session == nullptr ? none.dump() : session->MemoryJson();
  return {};
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
        (session == nullptr ? std::string("AMem: NCCL holds no memory yet\n") : session->StatisticsText()) +
        amem::LibrariesText();
    std::fputs(text.c_str(), stderr);
    return Status::Ok();
  });
}

int amem_trim_pinned(size_t keep_bytes) {
  return AtBorder("amem_trim_pinned", [&] {
    const auto session = Runtime::Get().ToPause();
    if (session && *session != nullptr) (*session)->TrimPinned(keep_bytes);
    return session.status();
  });
}

int ncclSetGroupID(int group) {
  return AtBorder("ncclSetGroupID", [&] { return Runtime::Get().SetGroup(group); });
}

int ncclGetGroupID(int* group) {
  if (group == nullptr) return amem::Fail(amem::kInvalidArgument, "ncclGetGroupID: the pointer for the answer is null");
  return AtBorder("ncclGetGroupID", [&] {
    const auto known = Runtime::Get().Group();
    if (known) *group = static_cast<int>(*known);
    return known.status();
  });
}

int amem_attach() {
  return AtBorder("amem_attach", [] { return Runtime::Get().Attach(); });
}

int amem_json(const char* what, char* buffer, size_t* length) {
  const std::string_view wanted = what == nullptr ? "" : what;
  if (wanted != AMEM_STATS && wanted != AMEM_MEMORY)
    return amem::Fail(amem::kInvalidArgument, fmt::format("amem_json: \"{}\" is not known; known: stats, memory", wanted));
  std::string json;
  const int result =
      AtBorder("amem_json", [&] { return wanted == AMEM_STATS ? amem::Statistics(json) : amem::MemoryJson(json); });
  return result != amem::kOk ? result : amem::CopyOut("amem_json", json, buffer, length);
}

const char* amem_last_error() { return amem::LastError().c_str(); }

const char* amem_version() { return AMEM_VERSION; }
