#include <fcntl.h>
#include <gelf.h>
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
#include <sstream>

#include "journal/base/unique_fd.h"
#include "ncclpatch/patch/copy.h"

namespace amem::patch {
namespace {

#if defined(__x86_64__)
constexpr GElf_Half kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr GElf_Half kMachine = EM_AARCH64;
#endif

// Calls `take` for every entry of sections of that type, with the section of their names.
template <class Entry, class Take>
void ForEachEntry(Elf* elf, GElf_Word type, Entry* (*get)(Elf_Data*, int, Entry*), const Take& take) {
  for (Elf_Scn* section = nullptr; (section = elf_nextscn(elf, section)) != nullptr;) {
    GElf_Shdr header;
    if (gelf_getshdr(section, &header) == nullptr || header.sh_type != type) continue;
    Elf_Data* data = elf_getdata(section, nullptr);
    Entry entry;
    for (int i = 0; get(data, i, &entry) != nullptr; ++i) take(entry, header.sh_link);
  }
}

std::string Text(Elf* elf, GElf_Word strings, GElf_Xword at) {
  const char* text = elf_strptr(elf, strings, at);
  return text == nullptr ? "" : text;
}

// Whether its dynamic symbol table, which strip keeps, has NCCL's functions.
bool DefinesNccl(Elf* elf) {
  std::set<std::string> missing = {"ncclGetVersion", "ncclCommInitRank"};
  ForEachEntry(elf, SHT_DYNSYM, gelf_getsym, [&](const GElf_Sym& symbol, GElf_Word strings) {
    if (symbol.st_shndx != SHN_UNDEF) missing.erase(Text(elf, strings, symbol.st_name));
  });
  return missing.empty();
}

}  // namespace

std::vector<std::string> SplitAtColons(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ':');)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

bool LibraryFile::Needs(const std::string& name) const { return std::ranges::find(needed, name) != needed.end(); }

Result<LibraryFile> Inspect(const std::filesystem::path& path) {
  const auto damaged = [&path](const char* what) { return Status{Code::kCorrupt, path.string() + ": " + what}; };
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return Status{Code::kIo, fmt::format("opening {}: {}", path.string(), std::strerror(errno))};
  if (!std::filesystem::is_regular_file(path)) return damaged("not an ELF file");
  elf_version(EV_CURRENT);
  const std::unique_ptr<Elf, decltype(&elf_end)> elf(elf_begin(fd.get(), ELF_C_READ, nullptr), &elf_end);
  if (!elf) return damaged("its headers lie outside the file; is the download complete?");
  GElf_Ehdr header;
  if (gelf_getehdr(elf.get(), &header) == nullptr) return damaged("not an ELF file");
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != kMachine || header.e_type != ET_DYN)
    return damaged("an ELF file, but not a shared library for this machine's processor");

  LibraryFile file;
  file.path = path;
  std::string runpath, rpath;
  bool whole = false;
  ForEachEntry(elf.get(), SHT_DYNAMIC, gelf_getdyn, [&](const GElf_Dyn& entry, GElf_Word strings) {
    const auto text = [&] { return Text(elf.get(), strings, entry.d_un.d_val); };
    if (entry.d_tag == DT_NULL) whole = true;
    if (entry.d_tag == DT_NEEDED) file.needed.push_back(text());
    if (entry.d_tag == DT_SONAME) file.soname = text();
    if (entry.d_tag == DT_RUNPATH) runpath = text();
    if (entry.d_tag == DT_RPATH) rpath = text();
  });
  if (!whole) return damaged("has no readable dynamic section; is the download complete?");
  file.search = SplitAtColons(runpath.empty() ? rpath : runpath);
  file.is_nccl = file.soname.starts_with("libnccl.so") || DefinesNccl(elf.get());
  return file;
}

}  // namespace amem::patch
