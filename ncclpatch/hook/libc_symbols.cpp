#include "ncclpatch/hook/libc_symbols.h"

#include <link.h>

#include <cstddef>
#include <cstdint>

// No function of libc may be called, not even one that a compiler puts in place of a loop.
#if defined(__clang__)
#define AMEM_ALONE __attribute__((no_builtin, no_sanitize("address", "thread", "undefined")))
#else
#define AMEM_ALONE __attribute__((optimize("no-tree-loop-distribute-patterns"), no_sanitize("address", "thread", "undefined")))
#endif

namespace amem::hook {

AMEM_ALONE bool SameName(const char* a, const char* b) {
  for (; *a == *b; ++a, ++b)
    if (*a == '\0') return true;
  return false;
}

namespace {

struct Symbols {
  const ElfW(Sym) * table = nullptr;
  const char* strings = nullptr;
  const ElfW(Half) * versions = nullptr;
  const std::uint32_t* gnu_hash = nullptr;
  const char* soname = nullptr;
};

// The loader has made addresses in dynamic sections absolute, except the vDSO's.
AMEM_ALONE Symbols Read(const link_map& object) {
  const auto absolute = [&](ElfW(Addr) value) { return value < object.l_addr ? object.l_addr + value : value; };
  Symbols symbols;
  std::size_t soname = 0;
  for (const ElfW(Dyn)* entry = object.l_ld; entry != nullptr && entry->d_tag != DT_NULL; ++entry) {
    const ElfW(Addr) value = entry->d_un.d_ptr;
    if (entry->d_tag == DT_SYMTAB) symbols.table = reinterpret_cast<const ElfW(Sym)*>(absolute(value));
    if (entry->d_tag == DT_STRTAB) symbols.strings = reinterpret_cast<const char*>(absolute(value));
    if (entry->d_tag == DT_VERSYM) symbols.versions = reinterpret_cast<const ElfW(Half)*>(absolute(value));
    if (entry->d_tag == DT_GNU_HASH) symbols.gnu_hash = reinterpret_cast<const std::uint32_t*>(absolute(value));
    if (entry->d_tag == DT_SONAME) soname = value;
  }
  if (soname != 0 && symbols.strings != nullptr) symbols.soname = symbols.strings + soname;
  return symbols;
}

// Walks all chains of the hash table, which is simpler than a look-up by hash, and happens once in a process.
AMEM_ALONE void* Find(const link_map& object, const Symbols& symbols, const char* name) {
  constexpr ElfW(Half) kHiddenVersion = 0x8000;  // an old version, kept for programs linked against it
  if (symbols.table == nullptr || symbols.gnu_hash == nullptr) return nullptr;
  const std::uint32_t buckets = symbols.gnu_hash[0], first = symbols.gnu_hash[1], bloom_words = symbols.gnu_hash[2];
  const std::uint32_t* bucket = symbols.gnu_hash + 4 + std::size_t{bloom_words} * (sizeof(ElfW(Addr)) / sizeof *bucket);
  const std::uint32_t* chain = bucket + buckets;
  for (std::uint32_t i = 0; i < buckets; ++i) {
    for (std::uint32_t index = bucket[i]; index >= first; ++index) {
      const ElfW(Sym)& symbol = symbols.table[index];
      const bool current = symbols.versions == nullptr || (symbols.versions[index] & kHiddenVersion) == 0;
      if (current && symbol.st_shndx != SHN_UNDEF && SameName(symbols.strings + symbol.st_name, name))
        return reinterpret_cast<void*>(object.l_addr + symbol.st_value);
      if ((chain[index - first] & 1U) != 0) break;
    }
  }
  return nullptr;
}

}  // namespace

AMEM_ALONE void* FindInLibc(const char* name) {
  for (const link_map* object = _r_debug.r_map; object != nullptr; object = object->l_next) {
    const Symbols symbols = Read(*object);
    if (symbols.soname != nullptr && SameName(symbols.soname, "libc.so.6")) return Find(*object, symbols, name);
  }
  return nullptr;
}

}  // namespace amem::hook
