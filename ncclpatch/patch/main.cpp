// amem-patch: makes the patched copy of an NCCL library.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "ncclpatch/patch/copy.h"

namespace {

enum ExitCode : int { kFine = 0, kWrongUsage = 1, kFailed = 2 };

constexpr const char* kFooter =
    "Exit codes: 0 done (--check: patched, and its partner is found), 1 wrong usage, 2 not done (--check: not so).\n"
    "\n"
    "Example:\n"
    "  amem-patch $(python -c 'import nvidia.nccl as n; print(n.__path__[0])')/lib/libnccl.so.2 -o $HOME/amem\n"
    "  LD_LIBRARY_PATH=$HOME/amem ./program\n"
    "\n"
    "A program that finds its libnccl by an own path (PyTorch's wheels) gets the copy in that place. Do not preload a libnccl: "
    "its\n"
    "functions would also serve every other NCCL of the process. LD_PRELOAD=libamem_nccl.so needs no patched copy at all.";

int Complain(const std::string& message) {
  std::fprintf(stderr, "amem-patch: %s\n", message.c_str());
  return kFailed;
}

int Patch(const amem::patch::Request& request) {
  const auto patched = amem::patch::MakePatchedCopy(request);
  if (!patched) return Complain(patched.status().message());
  if (patched->was_patched) std::printf("%s was patched already\n", request.library.c_str());
  std::printf("wrote %s\n", patched->library.c_str());
  for (const auto& companion : patched->companions) std::printf("wrote %s\n", companion.c_str());
  std::error_code error;
  const auto copy = std::filesystem::absolute(patched->library, error).lexically_normal();
  std::printf("let the program find it in place of the original, for example with\n  LD_LIBRARY_PATH=%s\n",
              copy.parent_path().c_str());
  return kFine;
}

int Check(const std::filesystem::path& library) {
  const auto file = amem::patch::Inspect(library);
  if (!file) return Complain(file.status().message());
  if (!file->Needs(amem::patch::kPartner))
    return Complain(library.string() + " is not patched: it does not need " + amem::patch::kPartner);
  const auto partner = amem::patch::FindPartner(*file);
  if (!partner)
    return Complain(
        library.string() + " is patched, but " + amem::patch::kPartner +
        " is not where it looks (its own directory, LD_LIBRARY_PATH); a program with it will not start. Run amem-patch again");
  std::printf("%s is patched and finds %s\n", library.c_str(), partner->c_str());
  return kFine;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Makes a copy of an NCCL library that AMem can pause and resume. The original stays as it is.");
  app.footer(kFooter);
  amem::patch::Request request;
  bool check = false;
  app.add_option("LIBNCCL", request.library, "the libnccl.so.2 to copy, of any version")->required();
  auto* output = app.add_option("-o,--output", request.directory, "directory for the copy and AMem's libraries");
  app.add_flag("--link", request.link, "link to AMem's libraries in place of copying them")->needs(output);
  app.add_flag("--check", check, "only tell whether LIBNCCL is a patched copy whose partner is found")->excludes(output);
  app.set_version_flag("--version", std::string(AMEM_VERSION));
  try {
    app.parse(argc, argv);
    if (!check && output->count() == 0) throw CLI::RequiredError("-o");
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kFine : kWrongUsage;
  }
  try {
    return check ? Check(request.library) : Patch(request);
  } catch (const std::exception& error) {
    return Complain(error.what());
  }
}
