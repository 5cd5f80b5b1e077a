#include "replay/tool/symbols.h"

#include <fmt/format.h>
#include <gelf.h>

#include <filesystem>
#include <memory>
#include <span>

#include "journal/base/file.h"

namespace amem::tool {

static std::string BuildId(Elf_Data* notes) {
  GElf_Nhdr note;
  std::size_t name = 0, description = 0;
  for (std::size_t at = 0; (at = gelf_getnote(notes, at, &note, &name, &description)) != 0;) {
    if (note.n_type != NT_GNU_BUILD_ID) continue;
    return fmt::format("{:02x}",
                       fmt::join(std::span(static_cast<const unsigned char*>(notes->d_buf) + description, note.n_descsz), ""));
  }
  return {};
}

Symbols::Symbols(const std::vector<LibraryAttached>& libraries) {
  for (const LibraryAttached& library : libraries) Read(library);
}

void Symbols::Read(const LibraryAttached& library) {
  elf_version(EV_CURRENT);
  const std::filesystem::path path = static_cast<const std::string&>(library.path);
  const auto file = File::OpenToRead(path, File::Links::kFollowed);  // the journal may be a stranger's, and name a pipe
  const std::unique_ptr<Elf, decltype(&elf_end)> elf(elf_begin(file ? file->fd() : -1, ELF_C_READ, nullptr),
                                                     &elf_end);  // null: unreadable
  std::string build;
  std::map<std::uint64_t, Function> found;
  for (Elf_Scn* section = nullptr;
       elf_kind(elf.get()) == ELF_K_ELF && (section = elf_nextscn(elf.get(), section)) != nullptr;) {
    GElf_Shdr header;
    if (gelf_getshdr(section, &header) == nullptr) continue;
    const bool notes = header.sh_type == SHT_NOTE, symbols = header.sh_type == SHT_SYMTAB || header.sh_type == SHT_DYNSYM;
    Elf_Data* data = notes || symbols ? elf_getdata(section, nullptr) : nullptr;  // no others are read: libnccl is 200 MB
    if (data == nullptr) continue;
    if (notes && build.empty()) build = BuildId(data);
    GElf_Sym symbol;
    for (int i = 0; symbols && gelf_getsym(data, i, &symbol) != nullptr; ++i) {
      if (GELF_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_value == 0) continue;
      if (const char* name = elf_strptr(elf.get(), header.sh_link, symbol.st_name))
        found.emplace(symbol.st_value, Function{symbol.st_value + symbol.st_size, name});
    }
  }
  if (build == library.build_id) functions_.merge(found);
  if (!functions_.empty()) return;
  note_ = fmt::format("{}, build {}: no symbols for its call sites here{}", path.filename().string(), library.build_id,
                      build.empty() || build == library.build_id ? "" : " (the library at that path is another build)");
}

std::string Symbols::Name(const CallSite& site) const {
  std::string text;
  for (const std::uint64_t frame : site.frames) {
    if (frame == 0) break;
    if (!text.empty()) text += " < ";
    const auto after = functions_.upper_bound(frame);
    if (after != functions_.begin() && frame < std::prev(after)->second.end) {
      const auto& [begin, function] = *std::prev(after);
      text += fmt::format("{}+{:#x}", function.name, frame - begin);
    } else {
      text += fmt::format("{}+{:x}", text.empty() ? "libnccl" : "", frame);
    }
  }
  return text.empty() ? "unknown" : text;
}

}  // namespace amem::tool
