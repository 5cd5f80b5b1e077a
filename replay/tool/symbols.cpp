#include "replay/tool/symbols.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gelf.h>

#include <filesystem>
#include <memory>
#include <span>

#include "journal/base/unique_fd.h"

namespace amem::tool {
namespace {

// Hands out the sections that can be read, with their contents. Only those are read: libnccl is 200 MB.
template <class Wanted, class Visit>
void ForEachSection(Elf* elf, const Wanted& wanted, const Visit& visit) {
  if (elf_kind(elf) != ELF_K_ELF) return;
  for (Elf_Scn* section = nullptr; (section = elf_nextscn(elf, section)) != nullptr;) {
    GElf_Shdr header;
    if (gelf_getshdr(section, &header) == nullptr || !wanted(header.sh_type)) continue;
    if (Elf_Data* data = elf_getdata(section, nullptr)) visit(header, data);
  }
}

std::string BuildId(Elf* elf) {
  std::string id;
  const auto is_note = [](GElf_Word type) { return type == SHT_NOTE; };
  ForEachSection(elf, is_note, [&id](const GElf_Shdr&, Elf_Data* data) {
    GElf_Nhdr note;
    std::size_t name = 0, description = 0;
    for (std::size_t at = 0; (at = gelf_getnote(data, at, &note, &name, &description)) != 0;) {
      if (note.n_type != NT_GNU_BUILD_ID || !id.empty()) continue;
      const std::span bytes(static_cast<const unsigned char*>(data->d_buf) + description, note.n_descsz);
      id = fmt::format("{:02x}", fmt::join(bytes, ""));
    }
  });
  return id;
}

template <class Visit>
void ForEachFunction(Elf* elf, const Visit& visit) {
  const auto has_symbols = [](GElf_Word type) { return type == SHT_SYMTAB || type == SHT_DYNSYM; };
  ForEachSection(elf, has_symbols, [&](const GElf_Shdr& header, Elf_Data* data) {
    GElf_Sym symbol;
    for (int i = 0; gelf_getsym(data, i, &symbol) != nullptr; ++i) {
      if (GELF_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_value == 0) continue;
      if (const char* name = elf_strptr(elf, header.sh_link, symbol.st_name)) visit(symbol.st_value, symbol.st_size, name);
    }
  });
}

}  // namespace

Symbols::Symbols(const std::vector<LibraryAttached>& libraries) {
  for (const LibraryAttached& library : libraries) Read(library);
}

void Symbols::Read(const LibraryAttached& library) {
  elf_version(EV_CURRENT);
  const UniqueFd file(::open(library.path.c_str(), O_RDONLY | O_CLOEXEC));
  const std::unique_ptr<Elf, decltype(&elf_end)> elf(elf_begin(file.get(), ELF_C_READ, nullptr), &elf_end);  // null: unreadable
  const std::string build = BuildId(elf.get());
  if (build == library.build_id) {
    ForEachFunction(elf.get(), [this](std::uint64_t begin, std::uint64_t size, const char* name) {
      functions_.emplace(begin, Function{begin + size, name});
    });
  }
  if (!functions_.empty()) return;
  note_ = fmt::format("{}, build {}: no symbols for its call sites here{}",
                      std::filesystem::path(library.path).filename().string(), library.build_id,
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
