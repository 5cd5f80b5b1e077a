// A loaded ELF object, seen through its own program headers and dynamic section.
//
// Reading allocates nothing and takes no lock but the loader's, so that it can be used before main, from inside dlsym and from
// under a malloc that is itself being set up. An ElfImage is a view: valid while the object stays loaded.
#pragma once

#include <elf.h>
#include <link.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "statemachine/types.h"

namespace amem {

class ElfImage {
 public:
  // Calls `visit(image)` for every loaded object until it returns true; true when one did.
  template <class Visit>
  static bool ForEach(Visit&& visit) {
    return Iterate(
        [](const ElfImage& image, void* context) { return static_cast<bool>((*static_cast<Visit*>(context))(image)); }, &visit);
  }
  // The object whose segments contain `address`.
  static bool Containing(const void* address, ElfImage* found);

  [[nodiscard]] const char* path() const { return path_; }      // as the loader calls it; empty for the program
  [[nodiscard]] const char* soname() const { return soname_; }  // empty if it has none
  [[nodiscard]] std::uintptr_t base() const { return base_; }   // load address; call-site offsets count from here
  [[nodiscard]] bool Contains(std::uintptr_t address) const { return address >= begin_ && address < end_; }
  [[nodiscard]] std::uintptr_t text_begin() const { return text_begin_; }
  [[nodiscard]] std::uintptr_t text_end() const { return text_end_; }
  [[nodiscard]] bool InText(std::uintptr_t address) const { return address >= text_begin_ && address < text_end_; }
  [[nodiscard]] bool Needs(const char* soname) const;  // has it as DT_NEEDED
  [[nodiscard]] std::string BuildId() const;           // in hex, empty if it has none

  // The address of a symbol that this object defines in its dynamic table (its default version, if it has several). `bytes`
  // receives the symbol's size.
  [[nodiscard]] void* Find(const char* name, std::size_t* bytes = nullptr) const;

  // Calls `visit(name)` for every function that this object defines in its dynamic table.
  template <class Visit>
  void ForEachDefined(const Visit& visit) const {
    for (std::uint32_t index = 1, count = SymbolCount(); index < count; ++index) {
      const ElfW(Sym)& symbol = symbols_[index];
      if (symbol.st_shndx != SHN_UNDEF && ELF64_ST_TYPE(symbol.st_info) == STT_FUNC) visit(strings_ + symbol.st_name);
    }
  }

  // Calls `visit(name, address, index)` for every function that this object defines in its dynamic table, with the address that
  // a look-up of the name gives. `index` is for PointNameTo.
  template <class Visit>
  void ForEachExport(const Visit& visit) const {
    for (std::uint32_t index = 1, count = SymbolCount(); index < count; ++index) {
      const ElfW(Sym)& symbol = symbols_[index];
      if (symbol.st_shndx != SHN_UNDEF && symbol.st_value != 0 && ELF64_ST_TYPE(symbol.st_info) == STT_FUNC)
        visit(static_cast<const char*>(strings_ + symbol.st_name), base_ + symbol.st_value, index);
    }
  }
  // From now on a look-up of the name leads to `target`: by dlsym, and by the loader when it binds an import. Null hides the
  // name. Find() gives the new answer, too. What was bound before stays as it is.
  [[nodiscard]] Status PointNameTo(std::uint32_t index, const void* target) const;

  // Where an imported function's address is kept: the PLT's GOT slot or, for code built without a PLT, the GLOB_DAT slot.
  struct Slot {
    std::uintptr_t* where = nullptr;  // null: the object does not import it
    bool plt = false;                 // a PLT slot, which the loader may fill at the first call
    explicit operator bool() const { return where != nullptr; }
  };
  [[nodiscard]] Slot ImportSlot(const char* name) const;
  // Until the first call through it, a PLT slot points back into its own object.
  [[nodiscard]] bool Unbound(const Slot& slot) const { return slot.plt && InText(*slot.where); }
  // Calls `visit(name, slot)` for every place that the loader fills with the address of an imported function: the slots of the
  // PLT, of code built without one, and pointers in data.
  template <class Visit>
  void ForEachImport(const Visit& visit) const {
    for (const auto& [table, bytes] : {std::pair(plt_relocations_, plt_bytes_), std::pair(relocations_, relocation_bytes_)}) {
      for (std::size_t i = 0; table != nullptr && i < bytes / sizeof *table; ++i) {
        const Import import = ImportOf(table[i]);
        if (import.slot) visit(import.name, import.slot);
      }
    }
  }
  // Whether its writable data has an address in the code of `other`, as it has once it has looked up functions there.
  [[nodiscard]] bool HoldsCodeOf(const ElfImage& other) const;
  // Points the slot at `target`, also when the loader has made that page read-only (RELRO); it is read-only again afterwards.
  // By one thread at a time: two slots may share a page.
  Status Write(const Slot& slot, const void* target) const;

 private:
  using Visitor = bool (*)(const ElfImage&, void*);
  static bool Iterate(Visitor visit, void* context);
  static int Step(dl_phdr_info* info, std::size_t size, void* context);
  bool Parse(const dl_phdr_info& info);
  void ParseDynamic(const ElfW(Dyn) * entry);
  [[nodiscard]] std::uintptr_t Absolute(ElfW(Addr) value) const { return value < base_ ? base_ + value : value; }
  [[nodiscard]] bool Defines(std::uint32_t index, const char* name) const;
  [[nodiscard]] std::uint32_t SymbolCount() const;
  [[nodiscard]] std::uint32_t FindGnu(const char* name) const;
  [[nodiscard]] std::uint32_t FindLinear(const char* name) const;
  struct Import {
    const char* name = nullptr;
    Slot slot;
  };
  [[nodiscard]] Import ImportOf(const ElfW(Rela) & relocation) const;
  [[nodiscard]] int ProtectionOf(std::uintptr_t page, std::uintptr_t page_size) const;
  [[nodiscard]] Status WriteWord(std::uintptr_t* where, std::uintptr_t value) const;
  [[nodiscard]] Slot ScanRelocations(const ElfW(Rela) * table, std::size_t bytes, const char* name) const;

  const char* path_ = "";
  const char* soname_ = "";
  std::uintptr_t base_ = 0, begin_ = 0, end_ = 0, text_begin_ = 0, text_end_ = 0, relro_begin_ = 0, relro_end_ = 0;
  const ElfW(Phdr) * headers_ = nullptr;
  std::size_t header_count_ = 0;
  const ElfW(Dyn) * dynamic_ = nullptr;
  const ElfW(Sym) * symbols_ = nullptr;
  const char* strings_ = nullptr;
  const ElfW(Half) * versions_ = nullptr;
  const std::uint32_t* gnu_hash_ = nullptr;
  const std::uint32_t* sysv_hash_ = nullptr;
  const ElfW(Rela) * plt_relocations_ = nullptr;
  const ElfW(Rela) * relocations_ = nullptr;
  std::size_t plt_bytes_ = 0, relocation_bytes_ = 0;
};

}  // namespace amem
