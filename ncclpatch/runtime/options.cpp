#include "ncclpatch/runtime/options.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <utility>

#include "replay/driver/host_memory.h"

namespace amem {
namespace {

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

// Variables that AMem had, where a job that still sets one would miss something.
struct Gone {
  std::string_view name, instead;
};
constexpr Gone kGone[] = {{"AMEM_ON_FAILURE",
                           "no command runs after a failure; put it behind the command that starts the job, as in `amem run -- "
                           "torchrun train.py || amem pack -o job.amem`"}};

using Lookup = std::function<const char*(const char*)>;

std::string_view Text(const Lookup& get, const char* name) {  // empty: unset, or set to nothing
  const char* const text = get(name);
  return text == nullptr ? std::string_view() : text;
}

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
  const std::string_view text = Text(get, name);
  if (text.empty()) return {};
  const auto value = ParseNumber<T>(text);
  if (!value || *value < least) return Unknown(name, text, known);
  into = *value;
  return Status::Ok();
}

// The value that the variable's text stands for; unset or empty: `into` stays as it is.
template <class T>
Status ParseChoiceInto(const Lookup& get, const char* name, std::initializer_list<std::pair<std::string_view, T>> known,
                       T& into) {
  const std::string_view text = Text(get, name);
  if (text.empty()) return {};
  std::string names;
  for (const auto& [value, meaning] : known) {
    if (value == text) return into = meaning, Status::Ok();
    names.append(names.empty() ? "" : ", ").append(value);
  }
  return Unknown(name, text, names);
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

// "slab", "slab,64M" or "direct".
Status ParseLayout(const Lookup& get, Options& options) {
  const std::string_view text = Text(get, "AMEM_LAYOUT");
  if (text == "direct") options.layout = Layout::kDirect;
  if (text.empty() || text == "slab" || text == "direct") return Status::Ok();
  const auto mib =
      text.starts_with("slab,") && text.ends_with("M") ? ParseNumber<Bytes>(text.substr(5, text.size() - 6)) : std::nullopt;
  if (!mib || *mib < 2 || *mib > 4096 || (*mib & (*mib - 1)) != 0)
    return Unknown("AMEM_LAYOUT", text, "slab, direct, or slab,64M: the largest slab, a power of two from 2M to 4096M");
  options.slab_bytes = *mib << 20;
  return Status::Ok();
}

// "SESSIONS", "SESSIONS,SIZE" or ",SIZE".
Status ParseJournalLimits(const Lookup& get, JournalOptions& journal) {
  const std::string_view all = Text(get, "AMEM_JOURNAL_KEEP");
  if (all.empty()) return {};
  const Status unknown =
      Unknown("AMEM_JOURNAL_KEEP", all,
              "SESSIONS,SIZE as in 128,2G: how many ended sessions are kept, and in how many bytes with those "
              "of the living; K, M, G or T behind a size; either may be left out");
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
  const std::string_view text = Text(get, name);
  const std::filesystem::path path = text.empty() ? otherwise : std::filesystem::path(text);
  if (path.is_absolute()) return path;
  return Unknown(name, path.string(), "an absolute path (ranks may have different working directories)");
}

std::vector<std::string> ParseLauncher(const Lookup& get) {
  constexpr std::size_t kValueMost = 256;
  std::vector<std::string> set;
  for (const char* name : kLauncherVariables) {
    const std::string_view value = Text(get, name);
    if (!value.empty()) set.push_back(fmt::format("{}={}", name, value.substr(0, kValueMost)));
  }
  return set;
}

// As far as the launcher tells.
std::uint32_t ParseRanksOfHost(const Lookup& get) {
  std::uint32_t ranks = 1;
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"})
    ranks = std::max(ranks, ParseNumber<std::uint32_t>(Text(get, name)).value_or(0));
  return ranks;
}

std::int32_t ParseRank(const Lookup& get) {
  for (const char* name : {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})
    if (const char* text = get(name)) return ParseNumber<std::int32_t>(text).value_or(-1);
  return -1;
}

}  // namespace

Bytes PinnedForPools(const Options& options) {
  const auto available = HostMemoryAvailable();
  return available ? available->bytes / 2 / std::max(options.ranks_of_host, 1U) : options.pool_pinned_bytes;
}

Result<Options> ParseOptions(const Lookup& get) {
  Options options;
  options.rank = ParseRank(get);
  options.launcher = ParseLauncher(get);

  AMEM_TRY(ParseChoiceInto(get, "AMEM_ENABLE", {{"1", true}, {"0", false}}, options.enable));
  if (!options.enable) return options;  // switched off: nothing else matters

  AMEM_TRY(ParseChoiceInto<std::string>(
      get, "AMEM_LOG",
      {{"warn", "warn"}, {"trace", "trace"}, {"debug", "debug"}, {"info", "info"}, {"error", "error"}, {"off", "off"}},
      options.log_level));
  AMEM_TRY(ParseNumberInto<std::int64_t>(get, "AMEM_GROUPID", "a decimal number", std::numeric_limits<std::int64_t>::min(),
                                         options.group));
  auto timeout_ms = static_cast<std::uint32_t>(options.deadlines.call().count());
  AMEM_TRY(ParseNumberInto<std::uint32_t>(get, "AMEM_TIMEOUT_MS", "milliseconds, 1 to 4294967295", 1, timeout_ms));
  options.deadlines = Deadlines(std::chrono::milliseconds(timeout_ms));
  AMEM_TRY(ParseLayout(get, options));
  AMEM_TRY(ParseChoiceInto(get, "AMEM_USER_MEMORY", {{"keep", UserMemory::kKeep}, {"release", UserMemory::kRelease}},
                           options.user_memory));
  AMEM_TRY(ParseChoiceInto(get, "AMEM_NVLS", {{"keep", Nvls::kKeep}, {"release", Nvls::kRelease}}, options.nvls));
  AMEM_TRY(ParseChoiceInto(get, "AMEM_NETWORK", {{"keep", false}, {"renew", true}}, options.renews));
  if (const char* version = get("AMEM_PROVED")) options.proved_for = version;
  AMEM_TRY(ParseChoiceInto(get, "AMEM_VERIFY", {{"0", false}, {"1", true}}, options.compare));
  options.ranks_of_host = ParseRanksOfHost(get);
  AMEM_TRY(ParseChoiceInto(get, "AMEM_SUSPEND", {{"serve", Suspend::kServe}, {"native", Suspend::kNative}}, options.suspend));
  AMEM_TRY(ParseChoiceInto(get, "AMEM_SCOPE",
                           {{"nccl", LibraryScope::kNccl}, {"shared", LibraryScope::kShared}, {"all", LibraryScope::kAll}},
                           options.scope));
  const std::filesystem::path home = fmt::format("/tmp/amem-{}", getuid());
  AMEM_ASSIGN(options.journal.directory, ParseDirectory(get, "AMEM_JOURNAL_DIR", home / "journal"));
  AMEM_TRY(ParseJournalLimits(get, options.journal));
  AMEM_ASSIGN(options.socket_directory, ParseDirectory(get, "AMEM_SOCKET_DIR", home / "sockets"));
  return options;
}

// The variables that Kubernetes gives to each pod beside a Service: NAME_SERVICE_HOST, NAME_SERVICE_PORT, NAME_SERVICE_PORT_x,
// NAME_PORT=tcp://..., NAME_PORT_80_TCP, NAME_PORT_80_TCP_ADDR, _PORT and _PROTO.
static bool IsOfKubernetes(std::string_view name, std::string_view value) {
  if (name.ends_with("_SERVICE_HOST") || name.ends_with("_SERVICE_PORT") || name.find("_SERVICE_PORT_") != name.npos)
    return true;
  const auto is_address = [&](std::string_view protocol) { return value.starts_with(protocol); };
  if (name.ends_with("_PORT") && std::ranges::any_of(std::array{"tcp://", "udp://", "sctp://"}, is_address)) return true;
  const std::size_t port = name.rfind("_PORT_", name.ends_with("_PORT") ? name.size() - 5 : name.npos);
  if (port == name.npos) return false;
  std::string_view rest = name.substr(port + 6);  // "80_TCP_ADDR"
  const std::size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
  rest.remove_prefix(digits);
  const auto begins = [&](std::string_view protocol) { return rest.starts_with(protocol); };
  return digits > 0 && std::ranges::any_of(std::array{"_TCP", "_UDP", "_SCTP"}, begins);
}

std::vector<std::string> UnknownVariables(const char* const* environment) {
  std::vector<std::string_view> all{"AMEM_LIBRARY", "AMEM_REPLAY"};  // the Python package's
  static_cast<void>(ParseOptions([&](const char* name) -> const char* { return all.emplace_back(name), nullptr; }));
  std::vector<std::string> warnings;
  for (; environment != nullptr && *environment != nullptr; ++environment) {
    const std::string_view entry(*environment);
    const std::string_view name = entry.substr(0, entry.find('='));
    // AMEM_SIM_ variables belong to the simulator of tests and demos.
    if (!name.starts_with("AMEM_") || name.starts_with("AMEM_SIM_") || std::ranges::find(all, name) != all.end()) continue;
    if (IsOfKubernetes(name, entry.substr(std::min(entry.size(), name.size() + 1)))) continue;
    if (const auto* const gone = std::ranges::find(kGone, name, &Gone::name); gone != std::end(kGone)) {
      warnings.push_back(fmt::format("{} is set, but AMem has no such variable any more: {}", name, gone->instead));
      continue;
    }
    const auto nearer = [&](std::string_view a, std::string_view b) { return Distance(name, a) < Distance(name, b); };
    const std::string_view nearest = *std::ranges::min_element(all, nearer);
    warnings.push_back(fmt::format("{} is set, but AMem has no such variable{}", name,
                                   Distance(name, nearest) <= 4 ? fmt::format("; did you mean {}?", nearest) : ""));
  }
  return warnings;
}

}  // namespace amem
