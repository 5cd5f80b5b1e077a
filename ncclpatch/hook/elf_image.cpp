#include "ncclpatch/hook/elf_image.h"

#include <spdlog/fmt/fmt.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace amem {
namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kJumpSlot = R_X86_64_JUMP_SLOT, kGlobDat = R_X86_64_GLOB_DAT, kPointer = R_X86_64_64;
#elif defined(__aarch64__)
constexpr std::uint32_t kJumpSlot = R_AARCH64_JUMP_SLOT, kGlobDat = R_AARCH64_GLOB_DAT, kPointer = R_AARCH64_ABS64;
#else
#error "AMem knows the relocations of x86-64 and aarch64 only"
#endif

std::uint32_t GnuHash(const char* name) {
  std::uint32_t hash = 5381;
  for (; *name != '\0'; ++name) hash = hash * 33 + static_cast<unsigned char>(*name);
  return hash;
}

}  // namespace

bool ElfImage::Containing(const void* address, ElfImage* found) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  return ForEach([&](const ElfImage& image) {
    if (!image.Contains(wanted)) return false;
    *found = image;
    return true;
  });
}

bool ElfImage::Parse(const dl_phdr_info& info) {
  base_ = info.dlpi_addr;
  path_ = info.dlpi_name == nullptr ? "" : info.dlpi_name;
  headers_ = {info.dlpi_phdr, info.dlpi_phnum};
  begin_ = text_begin_ = UINTPTR_MAX;
  const ElfW(Dyn)* dynamic = nullptr;
  for (const ElfW(Phdr) & header : headers_) {
    const std::uintptr_t from = base_ + header.p_vaddr, to = from + header.p_memsz;
    if (header.p_type == PT_LOAD) {
      begin_ = std::min(begin_, from);
      end_ = std::max(end_, to);
      if ((header.p_flags & PF_X) != 0) {
        text_begin_ = std::min(text_begin_, from);
        text_end_ = std::max(text_end_, to);
      }
    } else if (header.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(from);
    } else if (header.p_type == PT_GNU_RELRO) {
      relro_begin_ = from;
      relro_end_ = to;
    }
  }
  if (dynamic == nullptr || end_ == 0) return false;
  ParseDynamic(dynamic);
  return symbols_ != nullptr && strings_ != nullptr;
}

void ElfImage::ParseDynamic(const ElfW(Dyn) * entry) {
  dynamic_ = entry;
  std::uint64_t soname_offset = 0;
  const ElfW(Rela)* plt_relocations = nullptr, *relocations = nullptr;
  std::size_t plt_bytes = 0, relocation_bytes = 0;
  for (; entry->d_tag != DT_NULL; ++entry) {
    const ElfW(Addr) value = entry->d_un.d_ptr;
    const auto is = [&](ElfW(Sxword) tag, auto*& table) {
      if (entry->d_tag == tag) table = reinterpret_cast<std::remove_reference_t<decltype(table)>>(Absolute(value));
    };
    is(DT_SYMTAB, symbols_);
    is(DT_STRTAB, strings_);
    is(DT_VERSYM, versions_);
    is(DT_GNU_HASH, gnu_hash_);
    is(DT_HASH, sysv_hash_);
    is(DT_JMPREL, plt_relocations);
    is(DT_RELA, relocations);
    if (entry->d_tag == DT_SONAME) soname_offset = value;
    if (entry->d_tag == DT_PLTRELSZ) plt_bytes = value;
    if (entry->d_tag == DT_RELASZ) relocation_bytes = value;
  }
  if (plt_relocations != nullptr) plt_relocations_ = {plt_relocations, plt_bytes / sizeof *plt_relocations};
  if (relocations != nullptr) relocations_ = {relocations, relocation_bytes / sizeof *relocations};
  if (soname_offset != 0 && strings_ != nullptr) soname_ = strings_ + soname_offset;
}

bool ElfImage::Needs(const char* soname) const {
  for (const ElfW(Dyn)* entry = dynamic_; entry->d_tag != DT_NULL; ++entry)
    if (entry->d_tag == DT_NEEDED && std::strcmp(strings_ + entry->d_un.d_val, soname) == 0) return true;
  return false;
}

std::string ElfImage::BuildId() const {
  for (const ElfW(Phdr) & header : headers_) {
    if (header.p_type != PT_NOTE) continue;
    const auto* at = reinterpret_cast<const unsigned char*>(base_ + header.p_vaddr);
    const auto* end = at + header.p_memsz;
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      const auto& note = *reinterpret_cast<const ElfW(Nhdr)*>(at);
      const auto* const name = at + sizeof note;
      const auto* const content = name + (note.n_namesz + 3U) / 4U * 4U;
      if (content + note.n_descsz > end) break;
      if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0)
        return fmt::format("{:02x}", fmt::join(content, content + note.n_descsz, ""));
      at = content + (note.n_descsz + 3U) / 4U * 4U;
    }
  }
  return {};
}

bool ElfImage::Defines(std::uint32_t index, const char* name) const {
  const ElfW(Sym)& symbol = symbols_[index];
  if (symbol.st_shndx == SHN_UNDEF || symbol.st_value == 0 || std::strcmp(strings_ + symbol.st_name, name) != 0) return false;
  constexpr ElfW(Half) kHiddenVersion = 0x8000;  // an old version, kept for programs linked against it
  return versions_ == nullptr || (versions_[index] & kHiddenVersion) == 0;
}

std::uint32_t ElfImage::FindGnu(const char* name) const {
  const std::uint32_t buckets = gnu_hash_[0], first = gnu_hash_[1], bloom_words = gnu_hash_[2], shift = gnu_hash_[3];
  const auto* bloom = reinterpret_cast<const std::uint64_t*>(gnu_hash_ + 4);
  const auto* bucket = reinterpret_cast<const std::uint32_t*>(bloom + bloom_words);
  const std::uint32_t* chain = bucket + buckets;
  if (buckets == 0 || bloom_words == 0) return 0;
  const std::uint32_t hash = GnuHash(name);
  const std::uint64_t word = bloom[(hash / 64) % bloom_words];
  if (((word >> (hash % 64)) & (word >> ((hash >> shift) % 64)) & 1U) == 0) return 0;
  std::uint32_t index = bucket[hash % buckets];
  if (index < first) return 0;
  for (;; ++index) {
    const std::uint32_t here = chain[index - first];
    if ((here | 1U) == (hash | 1U) && Defines(index, name)) return index;
    if ((here & 1U) != 0) return 0;
  }
}

std::uint32_t ElfImage::SymbolCount() const {
  if (sysv_hash_ != nullptr) return sysv_hash_[1];
  if (gnu_hash_ == nullptr) return 0;
  const std::uint32_t buckets = gnu_hash_[0], first = gnu_hash_[1];
  const std::uint32_t* bucket = gnu_hash_ + 4 + std::size_t{gnu_hash_[2]} * 2;
  const std::uint32_t* chain = bucket + buckets;
  std::uint32_t last = 0;  // the chains follow each other, so the last one ends the table
  for (std::uint32_t i = 0; i < buckets; ++i) last = std::max(last, bucket[i]);
  if (last < first) return first;
  while ((chain[last - first] & 1U) == 0) ++last;
  return last + 1;
}

std::uint32_t ElfImage::FindLinear(const char* name) const {
  for (std::uint32_t index = 1; index < sysv_hash_[1]; ++index)
    if (Defines(index, name)) return index;
  return 0;
}

void* ElfImage::Find(const char* name, std::size_t* bytes) const {
  const std::uint32_t index = gnu_hash_ != nullptr ? FindGnu(name) : sysv_hash_ != nullptr ? FindLinear(name) : 0;
  if (bytes != nullptr) *bytes = index == 0 ? 0 : symbols_[index].st_size;
  return index == 0 ? nullptr : reinterpret_cast<void*>(base_ + symbols_[index].st_value);
}

ElfImage::Import ElfImage::ImportOf(const ElfW(Rela) & relocation) const {
  const auto type = static_cast<std::uint32_t>(ELF64_R_TYPE(relocation.r_info));
  const auto symbol = ELF64_R_SYM(relocation.r_info);
  if (symbol == 0 || (type != kJumpSlot && type != kGlobDat && type != kPointer)) return {};
  if (type == kPointer && (relocation.r_addend != 0 || relocation.r_offset % sizeof(std::uintptr_t) != 0)) return {};
  return {strings_ + symbols_[symbol].st_name,
          {reinterpret_cast<std::uintptr_t*>(base_ + relocation.r_offset), type == kJumpSlot}};
}

ElfImage::Slot ElfImage::ImportSlot(const char* name) const {
  for (const auto table : {plt_relocations_, relocations_}) {
    for (const ElfW(Rela) & relocation : table) {
      if (static_cast<std::uint32_t>(ELF64_R_TYPE(relocation.r_info)) == kPointer) continue;
      const Import import = ImportOf(relocation);
      if (import.slot && std::strcmp(import.name, name) == 0) return import.slot;
    }
  }
  return {};
}

// Reads a sanitizer's red zones around the library's variables like the rest.
__attribute__((no_sanitize("address", "thread"))) bool ElfImage::HoldsCodeOf(const ElfImage& other) const {
  for (const ElfW(Phdr) & header : headers_) {
    if (header.p_type != PT_LOAD || (header.p_flags & PF_W) == 0) continue;
    const std::uintptr_t from = base_ + header.p_vaddr, to = from + header.p_memsz;
    const auto* end = reinterpret_cast<const volatile std::uintptr_t*>(to / sizeof(void*) * sizeof(void*));
    for (const auto* at =
             reinterpret_cast<const volatile std::uintptr_t*>((from + sizeof(void*) - 1) / sizeof(void*) * sizeof(void*));
         at < end; ++at)
      if (other.InText(*at)) return true;
  }
  return false;
}

// The protection that the loader gave to a page: its segment's, except that whole pages of the RELRO segment are read-only
// after relocation.
int ElfImage::ProtectionOf(std::uintptr_t page, std::uintptr_t page_size) const {
  if (page >= relro_begin_ / page_size * page_size && page < relro_end_ / page_size * page_size) return PROT_READ;
  int protection = 0;
  for (const ElfW(Phdr) & header : headers_) {
    const std::uintptr_t from = base_ + header.p_vaddr;
    if (header.p_type != PT_LOAD || page + page_size <= from || page >= from + header.p_memsz) continue;
    protection |= ((header.p_flags & PF_R) != 0 ? PROT_READ : 0) | ((header.p_flags & PF_W) != 0 ? PROT_WRITE : 0) |
                  ((header.p_flags & PF_X) != 0 ? PROT_EXEC : 0);
  }
  return protection;
}

// NCCL's symbol table shares a segment with its code, so the page stays executable while it is written: other threads may be
// running on it.
Status ElfImage::WriteWord(std::uintptr_t* where, std::uintptr_t value) const {
  const auto page_size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t page = reinterpret_cast<std::uintptr_t>(where) / page_size * page_size;
  const int protection = ProtectionOf(page, page_size);
  const bool sealed = (protection & PROT_WRITE) == 0;
  if (sealed && mprotect(reinterpret_cast<void*>(page), page_size, protection | PROT_WRITE) != 0)
    return {Code::kIo, fmt::format("making a table of {} writable (mprotect): {}", path_, std::strerror(errno))};
  __atomic_store_n(where, value, __ATOMIC_RELEASE);
  if (sealed) mprotect(reinterpret_cast<void*>(page), page_size, protection);
  return Status::Ok();
}

Status ElfImage::Write(const Slot& slot, const void* target) const {
  return WriteWord(slot.where, reinterpret_cast<std::uintptr_t>(target));
}

Status ElfImage::PointNameTo(std::uint32_t index, const void* target) const {
  auto* value = const_cast<ElfW(Addr)*>(&symbols_[index].st_value);
  static_assert(sizeof *value == sizeof(std::uintptr_t));
  const std::uintptr_t offset = target == nullptr ? 0 : reinterpret_cast<std::uintptr_t>(target) - base_;  // may wrap around
  return WriteWord(reinterpret_cast<std::uintptr_t*>(value), offset);
}

}  // namespace amem
