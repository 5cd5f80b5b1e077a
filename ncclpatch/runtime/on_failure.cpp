#include "ncclpatch/runtime/on_failure.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <string_view>
#include <system_error>

#include "journal/base/thread.h"

namespace amem {
namespace {

// $1 the command, $2 amem-replay or nothing, $3 the pack's directory, $4 its file, $5... journals. It sleeps because the other
// ranks are still recording what they know of the failure. Old packs are removed.
constexpr const char* kScript = R"sh(
command=$1 replay=$2 directory=$3 pack=$3/$4
shift 4
export AMEM_FAILURE_PACK="$AMEM_FAILURE_JOURNAL"
[ -n "$replay" ] || replay=$(command -v amem-replay)
if [ -n "$replay" ] && mkdir -p -m 700 "$directory"; then
  sleep 1
  ls -t "$directory" | tail -n +16 | while IFS= read -r old; do rm -f "$directory/$old"; done
  if command -v timeout >/dev/null; then limit="timeout 60"; else limit=; fi
  $limit "$replay" pack "$@" -o "$pack" >/dev/null 2>&1
  [ -s "$pack" ] && AMEM_FAILURE_PACK=$pack
fi
exec /bin/sh -c "$command"
)sh";

bool IsPlain(std::string_view text) {
  return !text.empty() &&
         text.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._-+:@%,=") == text.npos;
}
std::string Quoted(std::string_view text) {
  if (IsPlain(text)) return std::string(text);
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// amem-replay in the build or the installation: in ../bin from this library, or beside it.
std::string FindReplay() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&FindReplay), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::absolute(info.dli_fname, error).parent_path();
  for (const auto& place : {folder / "amem-replay", folder.parent_path() / "bin" / "amem-replay"})
    if (::access(place.c_str(), X_OK) == 0) return place.string();
  return {};
}

// The folders of a list that do not depend on the current directory. An empty one means that directory.
std::string AbsoluteOnes(std::string_view folders) {
  std::string kept;
  while (!folders.empty()) {
    const std::string_view folder = folders.substr(0, folders.find_first_of(":;"));
    folders.remove_prefix(std::min(folder.size() + 1, folders.size()));
    if (folder.starts_with('/')) kept.append(kept.empty() ? "" : ":").append(folder);
  }
  return kept;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// An errno; 0: it has started.
int StartShell(pid_t& child, char* const* arguments, char* const* environment) {
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
#if __GLIBC_PREREQ(2, 34)
  // the command must not inherit the job's devices and sockets
  ::posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
#endif
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  const int error = ::posix_spawn(&child, "/bin/sh", &files, &attributes, arguments, environment);
  ::posix_spawn_file_actions_destroy(&files);
  ::posix_spawnattr_destroy(&attributes);
  return error;
}

}  // namespace

std::string WhereToReadOn(const std::filesystem::path& session_directory) {
  return "; journal " + session_directory.string() + "; to see why: amem-replay why " +
         Quoted(session_directory.parent_path().string());
}

std::filesystem::path PackDirectory(const std::filesystem::path& journals) {
  std::filesystem::path beside = journals.has_filename() ? journals : journals.parent_path();
  beside += "-failures";
  return beside;
}

void OnFailure::Configure(const std::string& command, const std::string& replay, const std::filesystem::path& pack_directory,
                          const char* const* environment) {
  command_ = command;
  if (command_.empty()) return;
  replay_ = replay.empty() ? FindReplay() : replay;
  std::error_code unknown;
  if (replay_.find('/') != replay_.npos)  // the job may change its directory; a mere name is searched in PATH
    replay_ = std::filesystem::absolute(replay_, unknown).string();
  pack_directory_ = pack_directory;
  for (; environment != nullptr && *environment != nullptr; ++environment) {
    const std::string_view variable(*environment);
    const bool ours = variable.starts_with("AMEM_ON_FAILURE=") || variable.starts_with("AMEM_FAILURE_");
    if (ours || variable.starts_with("LD_PRELOAD=")) continue;
    const std::string_view name = variable.substr(0, variable.find('=') + 1);
    if (name != "PATH=" && name != "LD_LIBRARY_PATH=") {
      environment_.emplace_back(variable);
    } else if (const std::string folders = AbsoluteOnes(variable.substr(name.size())); !folders.empty()) {
      environment_.push_back(std::string(name) + folders);
    }
  }
}

std::string OnFailure::Run(const FailureReport& report) const {
  if (command_.empty()) return {};
  std::vector<std::string> environment = environment_;
  environment.push_back("AMEM_FAILURE_MESSAGE=" + report.message);
  environment.push_back("AMEM_FAILURE_JOURNAL=" + report.journals.string());
  std::vector<std::string> arguments{
      "sh", "-c", kScript, "amem-on-failure", command_, replay_, pack_directory_.string(), report.name + ".amem"};
  for (const auto& session : report.sessions) arguments.push_back(session.string());
  pid_t child = 0;
  if (const int error = StartShell(child, Pointers(arguments).data(), Pointers(environment).data()); error != 0)
    return "starting /bin/sh: " + std::system_category().message(error);
  auto reaper = StartThread("amem-reaper", [child] {
    while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
  });
  if (!reaper) return "waiting for it: " + reaper.status().message();
  (*std::move(reaper)).detach();
  return {};
}

}  // namespace amem
