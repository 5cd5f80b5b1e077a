#include "replay/tool/symbols.h"

#include <elf.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>

namespace amem::tool {
namespace {

// Parts of an ELF file, read one by one: libnccl is 200 MB.
class ElfFile {
 public:
  explicit ElfFile(const std::string& path) : file_(path, std::ios::binary) {
    const auto header = At<Elf64_Ehdr>(0);
    if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_ident[EI_CLASS] != ELFCLASS64) return;
    if (header->e_shentsize != sizeof(Elf64_Shdr)) return;
    for (std::uint64_t i = 0; i < header->e_shnum; ++i) {
      if (const auto section = At<Elf64_Shdr>(header->e_shoff + i * sizeof(Elf64_Shdr))) sections_.push_back(*section);
    }
  }

  [[nodiscard]] std::string BuildId() {
    for (const Elf64_Shdr& section : sections_) {
      if (section.sh_type != SHT_NOTE || section.sh_size > kLargestTable) continue;
      const std::string notes = Bytes(section.sh_offset, section.sh_size);
      Elf64_Nhdr note{};
      for (std::size_t at = 0; at + sizeof note <= notes.size();) {
        std::memcpy(&note, notes.data() + at, sizeof note);
        const std::size_t name = at + sizeof note, description = name + ((note.n_namesz + 3U) & ~3U);
        if (note.n_type == NT_GNU_BUILD_ID && description + note.n_descsz <= notes.size()) {
          std::string id;
          for (std::size_t i = 0; i < note.n_descsz; ++i) {
            char hex[3];
            std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned char>(notes[description + i]));
            id += hex;
          }
          return id;
        }
        at = description + ((note.n_descsz + 3U) & ~3U);
      }
    }
    return {};
  }

  template <class Visit>
  void Functions(const Visit& visit) {
    for (const Elf64_Shdr& section : sections_) {
      const bool symbols = section.sh_type == SHT_SYMTAB || section.sh_type == SHT_DYNSYM;
      if (!symbols || section.sh_link >= sections_.size() || section.sh_size > kLargestTable) continue;
      const Elf64_Shdr& names = sections_[section.sh_link];
      if (names.sh_size > kLargestTable) continue;
      const std::string table = Bytes(section.sh_offset, section.sh_size), text = Bytes(names.sh_offset, names.sh_size);
      Elf64_Sym symbol{};
      for (std::size_t at = 0; at + sizeof symbol <= table.size(); at += sizeof symbol) {
        std::memcpy(&symbol, table.data() + at, sizeof symbol);
        if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_value == 0 || symbol.st_name >= text.size()) continue;
        visit(symbol.st_value, symbol.st_size, std::string(text.c_str() + symbol.st_name));
      }
    }
  }

 private:
  static constexpr std::uint64_t kLargestTable = std::uint64_t{256} << 20;
  template <class Part>
  std::optional<Part> At(std::uint64_t offset) {
    Part part;
    file_.clear();
    file_.seekg(static_cast<std::streamoff>(offset));
    if (!file_.read(reinterpret_cast<char*>(&part), sizeof part)) return std::nullopt;
    return part;
  }
  std::string Bytes(std::uint64_t offset, std::uint64_t size) {
    std::string bytes(size, '\0');
    file_.clear();
    file_.seekg(static_cast<std::streamoff>(offset));
    file_.read(bytes.data(), static_cast<std::streamsize>(size));
    bytes.resize(static_cast<std::size_t>(file_.gcount()));
    return bytes;
  }

  std::ifstream file_;
  std::vector<Elf64_Shdr> sections_;
};

}  // namespace

Symbols::Symbols(const std::vector<LibraryAttached>& libraries) {
  for (const LibraryAttached& library : libraries) Read(library);
}

void Symbols::Read(const LibraryAttached& library) {
  ElfFile file(library.path);
  const std::string build = file.BuildId();
  if (build == library.build_id) {
    file.Functions([this](std::uint64_t begin, std::uint64_t size, std::string name) {
      functions_.emplace(begin, Function{begin + size, std::move(name)});
    });
  }
  if (!functions_.empty()) return;
  note_ = std::filesystem::path(library.path).filename().string() + ", build " + library.build_id +
          ": no symbols for its call sites here" +
          (build.empty() || build == library.build_id ? "" : " (the library at that path is another build)");
}

std::string Symbols::Name(const CallSite& site) const {
  std::string text;
  for (const std::uint64_t frame : site.frames) {
    if (frame == 0) break;
    if (!text.empty()) text += " < ";
    char offset[32];
    auto at = functions_.upper_bound(frame);
    const bool named = at != functions_.begin() && frame < std::prev(at)->second.end;
    if (named) {
      --at;
      std::snprintf(offset, sizeof offset, "+0x%llx", static_cast<unsigned long long>(frame - at->first));
      text += at->second.name + offset;
    } else {
      std::snprintf(offset, sizeof offset, "+%llx", static_cast<unsigned long long>(frame));
      text += (text.empty() ? "libnccl" : "") + std::string(offset);
    }
  }
  return text.empty() ? "unknown" : text;
}

}  // namespace amem::tool
