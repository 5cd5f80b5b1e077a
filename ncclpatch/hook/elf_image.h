// A loaded ELF object, read through its program headers and dynamic section.
//
// Reading allocates nothing and takes no lock but the loader's, so it works before main, inside dlsym, and under a malloc that
// is being set up. An ElfImage is a view, valid while the object stays loaded.
#pragma once

#include <elf.h>
#include <link.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "statemachine/types.h"

namespace amem {

class ElfImage {
 public:
  // Calls `visit(image)` for loaded objects until it returns true; true if it did.
  template <class Visit>
  static bool ForEach(Visit&& visit) {
    const auto look = [](dl_phdr_info* info, std::size_t, void* context) {
      ElfImage image;
      return image.Parse(*info) && (*static_cast<std::remove_reference_t<Visit>*>(context))(image) ? 1 : 0;
    };
    return dl_iterate_phdr(look, &visit) != 0;
  }
  // The object whose segments contain `address`.
  static bool Containing(const void* address, ElfImage* found);

  [[nodiscard]] const char* path() const { return path_; }      // as the loader calls it; empty for the program
  [[nodiscard]] const char* soname() const { return soname_; }  // empty if it has none
  [[nodiscard]] std::uintptr_t base() const { return base_; }   // load address, from which call-site offsets count
  [[nodiscard]] bool Contains(std::uintptr_t address) const { return address >= begin_ && address < end_; }
  [[nodiscard]] std::uintptr_t text_begin() const { return text_begin_; }
  [[nodiscard]] std::uintptr_t text_end() const { return text_end_; }
  [[nodiscard]] bool InText(std::uintptr_t address) const { return address >= text_begin_ && address < text_end_; }
  [[nodiscard]] bool Needs(const char* soname) const;  // as DT_NEEDED
  [[nodiscard]] std::string BuildId() const;           // in hex; empty: none

  // The address of a symbol in this object's dynamic table (the default version). `bytes` receives its size.
  [[nodiscard]] void* Find(const char* name, std::size_t* bytes = nullptr) const;

  // Calls `visit(name, address, index)` for every function in this object's dynamic table, with the address that a look-up
  // gives. `index` is for PointNameTo.
  template <class Visit>
  void ForEachExport(const Visit& visit) const {
    for (std::uint32_t index = 1, count = SymbolCount(); index < count; ++index) {
      const ElfW(Sym)& symbol = symbols_[index];
      if (symbol.st_shndx != SHN_UNDEF && symbol.st_value != 0 && ELF64_ST_TYPE(symbol.st_info) == STT_FUNC)
        visit(static_cast<const char*>(strings_ + symbol.st_name), base_ + symbol.st_value, index);
    }
  }
  // Later look-ups of the name lead to `target`: by dlsym, by the loader when it binds an import, and by Find(). Null hides the
  // name. What was bound before does not change.
  [[nodiscard]] Status PointNameTo(std::uint32_t index, const void* target) const;

  // Where the address of an imported function is stored: the PLT's GOT slot, or the GLOB_DAT slot of code built without a PLT.
  struct Slot {
    std::uintptr_t* where = nullptr;  // null: not imported
    bool plt = false;                 // a PLT slot, which the loader may fill at the first call
    explicit operator bool() const { return where != nullptr; }
  };
  [[nodiscard]] Slot ImportSlot(const char* name) const;
  // A PLT slot points into its own object until the first call through it.
  [[nodiscard]] bool Unbound(const Slot& slot) const { return slot.plt && InText(*slot.where); }
  // Calls `visit(name, slot)` for every place where the loader stores an imported function's address: slots of the PLT, of code
  // built without one, and pointers in data.
  template <class Visit>
  void ForEachImport(const Visit& visit) const {
    for (const auto table : {plt_relocations_, relocations_}) {
      for (const ElfW(Rela) & relocation : table) {
        const Import import = ImportOf(relocation);
        if (import.slot) visit(import.name, import.slot);
      }
    }
  }
  // Whether its writable data holds an address in the code of `other`, as after it has looked up functions there.
  [[nodiscard]] bool HoldsCodeOf(const ElfImage& other) const;
  // Points the slot at `target`, even if its page is read-only (RELRO), which it is again afterwards. One thread at a time: two
  // slots may share a page.
  Status Write(const Slot& slot, const void* target) const;

 private:
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

  const char* path_ = "";
  const char* soname_ = "";
  std::uintptr_t base_ = 0, begin_ = 0, end_ = 0, text_begin_ = 0, text_end_ = 0, relro_begin_ = 0, relro_end_ = 0;
  std::span<const ElfW(Phdr)> headers_;
  const ElfW(Dyn) * dynamic_ = nullptr;
  const ElfW(Sym) * symbols_ = nullptr;
  const char* strings_ = nullptr;
  const ElfW(Half) * versions_ = nullptr;
  const std::uint32_t* gnu_hash_ = nullptr;
  const std::uint32_t* sysv_hash_ = nullptr;
  std::span<const ElfW(Rela)> plt_relocations_, relocations_;
};

}  // namespace amem
