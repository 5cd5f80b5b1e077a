#include "ncclpatch/patch/elf.h"

#include <elf.h>
#include <fcntl.h>
#include <spdlog/fmt/fmt.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>
#include <sstream>
#include <string_view>

#include "journal/base/unique_fd.h"

namespace amem::patch {
namespace {

#if defined(__x86_64__)
constexpr Elf64_Half kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr Elf64_Half kMachine = EM_AARCH64;
#endif

// A file mapped for reading; every access is checked against its size.
class View {
 public:
  View(const std::byte* data, std::size_t size) : data_(data), size_(size) {}
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() {
    if (size_ > 0) munmap(const_cast<std::byte*>(data_), size_);
  }

  template <class T>
  const T* At(std::uint64_t offset, std::uint64_t count = 1) const {
    if (offset % alignof(T) != 0 || offset > size_ || count > (size_ - offset) / sizeof(T)) return nullptr;
    return reinterpret_cast<const T*>(data_ + offset);
  }
  std::optional<std::string> Text(std::uint64_t offset, std::uint64_t end) const {
    if (offset >= end || end > size_) return std::nullopt;
    const auto* text = reinterpret_cast<const char*>(data_ + offset);
    const std::size_t length = strnlen(text, end - offset);
    if (length == end - offset) return std::nullopt;
    return std::string(text, length);
  }

 private:
  const std::byte* data_;
  std::size_t size_;
};

struct Dynamic {
  std::vector<std::uint64_t> needed;
  std::uint64_t soname = 0, runpath = 0, rpath = 0, strings = 0, strings_size = 0;
};

Status Damaged(const std::filesystem::path& path, const std::string& what) {
  return {Code::kCorrupt, path.string() + ": " + what};
}

std::optional<std::uint64_t> ToOffset(std::span<const Elf64_Phdr> headers, std::uint64_t address) {
  for (const Elf64_Phdr& header : headers)
    if (header.p_type == PT_LOAD && address >= header.p_vaddr && address - header.p_vaddr < header.p_filesz)
      return header.p_offset + (address - header.p_vaddr);
  return std::nullopt;
}

Dynamic ReadDynamic(std::span<const Elf64_Dyn> entries) {
  Dynamic dynamic;
  for (const Elf64_Dyn& entry : entries) {
    switch (entry.d_tag) {
      case DT_NULL:
        return dynamic;
      case DT_NEEDED:
        dynamic.needed.push_back(entry.d_un.d_val);
        break;
      case DT_SONAME:
        dynamic.soname = entry.d_un.d_val;
        break;
      case DT_RUNPATH:
        dynamic.runpath = entry.d_un.d_val;
        break;
      case DT_RPATH:
        dynamic.rpath = entry.d_un.d_val;
        break;
      case DT_STRTAB:
        dynamic.strings = entry.d_un.d_ptr;
        break;
      case DT_STRSZ:
        dynamic.strings_size = entry.d_un.d_val;
        break;
      default:
        break;
    }
  }
  return dynamic;
}

std::vector<std::string> SplitAtColons(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ':');)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

// Whether the library defines `name`, by its dynamic symbol table (found through the section headers, which strip keeps).
bool Defines(const View& view, const Elf64_Ehdr& header, std::string_view name) {
  const auto* sections = view.At<Elf64_Shdr>(header.e_shoff, header.e_shnum);
  if (sections == nullptr) return false;
  for (std::size_t i = 0; i < header.e_shnum; ++i) {
    if (sections[i].sh_type != SHT_DYNSYM || sections[i].sh_link >= header.e_shnum) continue;
    const std::uint64_t count = sections[i].sh_size / sizeof(Elf64_Sym);
    const auto* symbols = view.At<Elf64_Sym>(sections[i].sh_offset, count);
    const Elf64_Shdr& strings = sections[sections[i].sh_link];
    for (std::uint64_t s = 0; symbols != nullptr && s < count; ++s)
      if (symbols[s].st_shndx != SHN_UNDEF &&
          view.Text(strings.sh_offset + symbols[s].st_name, strings.sh_offset + strings.sh_size) == name)
        return true;
  }
  return false;
}

Result<LibraryFile> Parse(const View& view, const std::filesystem::path& path) {
  const auto* header = view.At<Elf64_Ehdr>(0);
  if (header == nullptr || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return Damaged(path, "not an ELF file");
  if (header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_machine != kMachine || header->e_type != ET_DYN)
    return Damaged(path, "an ELF file, but not a shared library for this machine's processor");
  const auto* program = view.At<Elf64_Phdr>(header->e_phoff, header->e_phnum);
  if (program == nullptr) return Damaged(path, "its program headers lie outside the file; is the download complete?");
  const std::span<const Elf64_Phdr> headers(program, header->e_phnum);
  const auto place = std::find_if(headers.begin(), headers.end(), [](const Elf64_Phdr& h) { return h.p_type == PT_DYNAMIC; });
  const auto* entries =
      place == headers.end() ? nullptr : view.At<Elf64_Dyn>(place->p_offset, place->p_filesz / sizeof(Elf64_Dyn));
  if (entries == nullptr) return Damaged(path, "has no readable dynamic section; is the download complete?");

  const Dynamic dynamic = ReadDynamic({entries, place->p_filesz / sizeof(Elf64_Dyn)});
  const auto strings = ToOffset(headers, dynamic.strings);
  if (!strings) return Damaged(path, "its string table lies outside the file; is the download complete?");
  const auto text = [&](std::uint64_t at) { return view.Text(*strings + at, *strings + dynamic.strings_size).value_or(""); };

  LibraryFile file;
  file.path = path;
  if (dynamic.soname != 0) file.soname = text(dynamic.soname);
  for (const std::uint64_t name : dynamic.needed) file.needed.push_back(text(name));
  if (dynamic.runpath != 0 || dynamic.rpath != 0)
    file.search = SplitAtColons(text(dynamic.runpath != 0 ? dynamic.runpath : dynamic.rpath));
  file.is_nccl = file.soname.starts_with("libnccl.so") ||
                 (Defines(view, *header, "ncclGetVersion") && Defines(view, *header, "ncclCommInitRank"));
  return file;
}

}  // namespace

bool LibraryFile::Needs(const std::string& name) const { return std::find(needed.begin(), needed.end(), name) != needed.end(); }

Result<LibraryFile> Inspect(const std::filesystem::path& path) {
  const auto failed = [&](const char* what) {
    return Status{Code::kIo, fmt::format("{} {}: {}", what, path.string(), std::strerror(errno))};
  };
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return failed("opening");
  struct stat about {};
  if (fstat(fd.get(), &about) != 0) return failed("examining");
  if (!S_ISREG(about.st_mode) || about.st_size == 0) return Damaged(path, "not an ELF file");
  void* data = mmap(nullptr, static_cast<std::size_t>(about.st_size), PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) return failed("reading");
  const View view(static_cast<const std::byte*>(data), static_cast<std::size_t>(about.st_size));
  return Parse(view, path);
}

}  // namespace amem::patch
