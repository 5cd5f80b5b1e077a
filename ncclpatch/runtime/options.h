// Settings: the environment variables that AMem has, read once into one struct.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "journal/journal.h"
#include "replay/session/session_options.h"
#include "statemachine/types.h"

namespace amem {

enum class Suspend : std::uint8_t { kServe, kNative };

// Which libraries' calls of the driver AMem sees. kNccl: libnccl's import tables are written, and no other's.
enum class LibraryScope : std::uint8_t { kNccl, kShared, kAll };

struct Options : SessionOptions {
  bool enable = true;                        // AMEM_ENABLE=0|1
  std::int64_t group = 0;                    // AMEM_GROUPID
  std::int32_t rank = -1;                    // RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK or PMI_RANK; for messages only
  Suspend suspend = Suspend::kServe;         // AMEM_SUSPEND=serve|native
  LibraryScope scope = LibraryScope::kNccl;  // AMEM_SCOPE=nccl|shared|all
  bool renews = false;                       // AMEM_NETWORK=keep|renew: what a pause does with memory that a network card holds
  // AMEM_PROVED: the version of NCCL for which AMEM_NVLS and AMEM_NETWORK were proved here; with another one both keep.
  std::string proved_for;
  // AMEM_JOURNAL_DIR (default /tmp/amem-UID/journal), AMEM_JOURNAL_KEEP
  JournalOptions journal;
  std::filesystem::path socket_directory;      // AMEM_SOCKET_DIR (default /tmp/amem-UID/sockets); best the same for all ranks
  std::vector<std::string> launcher;           // NAME=VALUE of the launcher's variables that are set (SessionOpened::launcher)
  std::uint32_t ranks_of_host = 1;             // LOCAL_WORLD_SIZE or the like
  std::vector<std::string> unknown_variables;  // what UnknownVariables said
  std::string log_level = "warn";              // AMEM_LOG=trace|debug|info|warn|error|off; to stderr
};

// `get` is getenv or a test's map (nullptr: not set). kInvalid: a value is not understood; the message names the variable, the
// value and the known values.
Result<Options> ParseOptions(const std::function<const char*(const char*)>& get);

// What all pools of this process together may pin ahead: this process's share of half of what the host has free now.
// Reads some small files, so not while the library is being loaded.
Bytes PinnedForPools(const Options& options);

// Warnings about variables in `environment` (as environ(7)) that begin with AMEM_ and that AMem does not have, each with the
// variable that was probably meant. Kubernetes sets such variables for a Service whose name begins with amem; those are left
// out.
std::vector<std::string> UnknownVariables(const char* const* environment);

}  // namespace amem
