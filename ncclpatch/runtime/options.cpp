#include "ncclpatch/runtime/options.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <vector>

#include "ncclpatch/runtime/log.h"
#include "replay/driver/host_memory.h"

namespace amem {
namespace {

constexpr std::array kKnown = {"AMEM_ENABLE",      "AMEM_GROUPID",        "AMEM_NCCL_OFFLOAD_FREE_TAG",
                               "AMEM_JOURNAL_DIR", "AMEM_JOURNAL_SYNC",   "AMEM_LAYOUT",
                               "AMEM_CONTENT",     "AMEM_TIMEOUT_MS",     "AMEM_LOG",
                               "AMEM_LIBRARY",     "AMEM_SLAB_MB",        "AMEM_PINNED_MB",
                               "AMEM_SOCKET_DIR",  "AMEM_JOURNAL_KEEP",   "AMEM_USER_MEMORY",
                               "AMEM_SUSPEND",     "AMEM_NVLS",           "AMEM_ON_FAILURE",
                               "AMEM_REPLAY",      "AMEM_POOL_PINNED_MB", "AMEM_METRICS"};
constexpr std::array kRankVariables = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"};

// What launchers say of a job, so that sessions of one job, and of one start of it, are known to belong together: Slurm,
// torchrun, Ray, PMIx and Open MPI, Kubernetes, LSF, PBS, Flux.
constexpr std::array kLauncherVariables = {"SLURM_JOB_ID",
                                           "SLURM_STEP_ID",
                                           "SLURM_RESTART_COUNT",
                                           "TORCHELASTIC_RUN_ID",
                                           "TORCHELASTIC_RESTART_COUNT",
                                           "RAY_JOB_ID",
                                           "PMIX_NAMESPACE",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_MCA_ess_base_jobid",
                                           "JOB_COMPLETION_INDEX",
                                           "LSB_JOBID",
                                           "PBS_JOBID",
                                           "FLUX_JOB_ID",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "WORLD_SIZE",
                                           "RANK",
                                           "LOCAL_RANK",
                                           "GROUP_RANK"};

using Lookup = std::function<const char*(const char*)>;

Status Unknown(std::string_view name, std::string_view value, std::string_view known) {
  return {Code::kInvalid, fmt::format("{}={} is not understood; known: {}", name, value, known)};
}

template <class T>
std::optional<T> ParseNumber(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

template <class T>
Status ParseNumberInto(const Lookup& get, const char* name, std::string_view known, T least, T& into) {
  const char* text = get(name);
  if (text == nullptr || *text == '\0') return Status::Ok();
  const auto value = ParseNumber<T>(text);
  if (!value || *value < least) return Unknown(name, text, known);
  into = *value;
  return Status::Ok();
}

// The index of the variable's value in `known`; the first is the default.
Result<std::size_t> ParseChoice(const Lookup& get, const char* name, std::initializer_list<std::string_view> known) {
  const char* text = get(name);
  if (text == nullptr || *text == '\0') return std::size_t{0};
  const auto* const found = std::find(known.begin(), known.end(), text);
  if (found != known.end()) return static_cast<std::size_t>(found - known.begin());
  return Unknown(name, text, fmt::format("{}", fmt::join(known, ", ")));
}

std::size_t Distance(std::string_view a, std::string_view b) {  // Levenshtein
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0U : 1U)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

Status ParseMemory(const Lookup& get, Options& options) {
  const auto layout = ParseChoice(get, "AMEM_LAYOUT", {"slab", "direct"});
  if (!layout) return layout.status();
  options.layout = *layout == 0 ? Layout::kSlab : Layout::kDirect;
  Bytes mib = options.slab_bytes >> 20;
  constexpr std::string_view kSizes = "a power of two of MiB, 2 to 4096";
  AMEM_TRY(ParseNumberInto<Bytes>(get, "AMEM_SLAB_MB", kSizes, 2, mib));
  if (mib > 4096 || (mib & (mib - 1)) != 0) return Unknown("AMEM_SLAB_MB", std::to_string(mib), kSizes);
  options.slab_bytes = mib << 20;
  const auto user = ParseChoice(get, "AMEM_USER_MEMORY", {"keep", "release"});
  if (!user) return user.status();
  options.user_memory = *user == 0 ? UserMemory::kKeep : UserMemory::kRelease;
  const auto nvls = ParseChoice(get, "AMEM_NVLS", {"keep", "release"});
  if (!nvls) return nvls.status();
  options.nvls = *nvls == 0 ? Nvls::kKeep : Nvls::kRelease;
  return Status::Ok();
}

Status ParseContent(const Lookup& get, Options& options) {
  const auto content = ParseChoice(get, "AMEM_CONTENT", {"preserve", "discard"});
  if (!content) return content.status();
  if (*content == 1)
    return {Code::kUnsupported, "AMEM_CONTENT=discard is not offered by this version; leave it unset, or set it to preserve"};
  std::uint32_t tag = 0;
  AMEM_TRY(ParseNumberInto<std::uint32_t>(get, "AMEM_NCCL_OFFLOAD_FREE_TAG", "0 (preserve), 7 (discard P2P payload)", 0, tag));
  if (tag != 0 && tag != 7)
    return Unknown("AMEM_NCCL_OFFLOAD_FREE_TAG", std::to_string(tag), "0 (preserve), 7 (discard P2P payload)");
  // Users of the original plugin have this set. Preserving includes what they asked for, so their jobs go on.
  if (tag == 7)
    log::Warn("AMEM_NCCL_OFFLOAD_FREE_TAG=7 asks to discard P2P payload; this version preserves all contents instead");
  options.content = Content::kPreserve;
  return Status::Ok();
}

// "SESSIONS", "SESSIONS,SIZE" or ",SIZE".
Status ParseKeep(const Lookup& get, JournalOptions& journal) {
  const char* text = get("AMEM_JOURNAL_KEEP");
  if (text == nullptr || *text == '\0') return Status::Ok();
  const Status unknown =
      Unknown("AMEM_JOURNAL_KEEP", text,
              "SESSIONS,SIZE as in 128,2G: how many ended sessions are kept, and in how many bytes with those "
              "of the living; K, M, G or T behind a size; either may be left out");
  const std::string_view all(text);
  const std::string_view sessions = all.substr(0, all.find(','));
  std::string_view size = sessions.size() < all.size() ? all.substr(sessions.size() + 1) : std::string_view();
  if (!sessions.empty()) {
    const auto number = ParseNumber<std::uint32_t>(sessions);
    if (!number) return unknown;
    journal.keep_sessions = *number;
  }
  if (size.empty()) return Status::Ok();
  constexpr std::string_view kUnits = "KMGT";
  const std::size_t unit = kUnits.find(size.back());
  if (unit != std::string_view::npos) size.remove_suffix(1);
  const auto number = ParseNumber<Bytes>(size);
  const unsigned shift = unit == std::string_view::npos ? 0 : static_cast<unsigned>(10 * (unit + 1));
  if (!number || *number > ~Bytes{0} >> shift) return unknown;
  journal.keep_bytes = *number << shift;
  return Status::Ok();
}

Result<std::filesystem::path> ParseDirectory(const Lookup& get, const char* name, const std::filesystem::path& otherwise) {
  const char* text = get(name);
  const std::filesystem::path path = text != nullptr && *text != '\0' ? std::filesystem::path(text) : otherwise;
  if (path.is_absolute()) return path;
  return Unknown(name, path.string(), "an absolute path (ranks may have different working directories)");
}

std::vector<std::string> ParseLauncher(const Lookup& get) {
  constexpr std::size_t kValueMost = 256;
  std::vector<std::string> set;
  for (const char* name : kLauncherVariables) {
    const char* value = get(name);
    if (value != nullptr && *value != '\0')
      set.push_back(fmt::format("{}={}", name, std::string_view(value).substr(0, kValueMost)));
  }
  return set;
}

// As far as the launcher tells.
std::uint32_t ParseRanksOfHost(const Lookup& get) {
  std::uint32_t ranks = 1;
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"}) {
    const char* text = get(name);
    const auto number = text == nullptr ? std::nullopt : ParseNumber<std::uint32_t>(text);
    if (number) ranks = std::max(ranks, *number);
  }
  return ranks;
}

Status ParsePinned(const Lookup& get, Options& options) {
  constexpr std::string_view kSizes = "MiB, 0 to 4294967295";
  std::uint32_t mib = static_cast<std::uint32_t>(options.pinned_bytes >> 20);
  AMEM_TRY(ParseNumberInto<std::uint32_t>(get, "AMEM_PINNED_MB", kSizes, 0, mib));
  options.pinned_bytes = Bytes{mib} << 20;
  options.ranks_of_host = ParseRanksOfHost(get);
  const char* for_pools = get("AMEM_POOL_PINNED_MB");
  options.shares_host = for_pools == nullptr || *for_pools == '\0';
  mib = static_cast<std::uint32_t>(options.pool_pinned_bytes >> 20);
  AMEM_TRY(ParseNumberInto<std::uint32_t>(get, "AMEM_POOL_PINNED_MB", kSizes, 0, mib));
  options.pool_pinned_bytes = Bytes{mib} << 20;
  return Status::Ok();
}

std::int32_t ParseRank(const Lookup& get) {
  for (const char* name : kRankVariables)
    if (const char* text = get(name)) return ParseNumber<std::int32_t>(text).value_or(-1);
  return -1;
}

}  // namespace

Bytes PinnedForPools(const Options& options) {
  const auto available = options.shares_host ? HostMemoryAvailable() : std::nullopt;
  return available ? available->bytes / 2 / std::max(options.ranks_of_host, 1U) : options.pool_pinned_bytes;
}

std::vector<std::string> UnknownVariables(const char* const* environment) {
  std::vector<std::string> warnings;
  for (; environment != nullptr && *environment != nullptr; ++environment) {
    const std::string_view entry(*environment);
    const std::string_view name = entry.substr(0, entry.find('='));
    // AMEM_SIM_ variables belong to the simulator of tests and demos.
    if (!name.starts_with("AMEM_") || name.starts_with("AMEM_SIM_") ||
        std::find(kKnown.begin(), kKnown.end(), name) != kKnown.end())
      continue;
    std::string_view nearest = kKnown[0];
    for (const std::string_view known : kKnown)
      if (Distance(name, known) < Distance(name, nearest)) nearest = known;
    warnings.push_back(fmt::format("{} is set, but AMem has no such variable{}", name,
                                   Distance(name, nearest) <= 4 ? fmt::format("; did you mean {}?", nearest) : ""));
  }
  return warnings;
}

Result<Options> ParseOptions(const Lookup& get) {
  Options options;
  options.rank = ParseRank(get);
  options.launcher = ParseLauncher(get);

  const auto enable = ParseChoice(get, "AMEM_ENABLE", {"1", "0"});
  if (!enable) return enable.status();
  options.enable = *enable == 0;
  if (!options.enable) return options;  // switched off: nothing else matters

  const auto log = ParseChoice(get, "AMEM_LOG", {"warn", "trace", "debug", "info", "error", "off"});
  if (!log) return log.status();
  if (const char* level = get("AMEM_LOG"); level != nullptr && *level != '\0') options.log_level = level;

  AMEM_TRY(ParseNumberInto<std::int64_t>(get, "AMEM_GROUPID", "a decimal number", std::numeric_limits<std::int64_t>::min(),
                                         options.group));
  auto timeout_ms = static_cast<std::uint32_t>(options.deadlines.call().count());
  AMEM_TRY(ParseNumberInto<std::uint32_t>(get, "AMEM_TIMEOUT_MS", "milliseconds, 1 to 4294967295", 1, timeout_ms));
  options.deadlines = Deadlines(std::chrono::milliseconds(timeout_ms));
  AMEM_TRY(ParseMemory(get, options));
  AMEM_TRY(ParsePinned(get, options));
  AMEM_TRY(ParseContent(get, options));
  const auto suspend = ParseChoice(get, "AMEM_SUSPEND", {"serve", "native"});
  if (!suspend) return suspend.status();
  options.suspend = *suspend == 0 ? Suspend::kServe : Suspend::kNative;

  const auto sync = ParseChoice(get, "AMEM_JOURNAL_SYNC", {"process", "full"});
  if (!sync) return sync.status();
  options.journal.sync = *sync == 1 ? SyncMode::kFull : SyncMode::kProcess;

  if (const char* command = get("AMEM_ON_FAILURE")) options.on_failure = command;
  if (const char* replay = get("AMEM_REPLAY")) options.replay = replay;
  const std::filesystem::path home = fmt::format("/tmp/amem-{}", getuid());
  const auto journal = ParseDirectory(get, "AMEM_JOURNAL_DIR", home / "journal");
  if (!journal) return journal.status();
  options.journal.directory = *journal;
  AMEM_TRY(ParseKeep(get, options.journal));
  const auto sockets = ParseDirectory(get, "AMEM_SOCKET_DIR", home / "sockets");
  if (!sockets) return sockets.status();
  options.socket_directory = *sockets;
  return options;
}

}  // namespace amem
