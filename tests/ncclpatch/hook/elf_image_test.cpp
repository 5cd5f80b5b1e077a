// Reading loaded ELF objects, on this program, libc, and fixtures bound lazily and at load.
#include "ncclpatch/hook/elf_image.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

namespace amem {
namespace {

ElfImage ImageOf(const void* address) {
  ElfImage image;
  EXPECT_TRUE(ElfImage::Containing(address, &image));
  return image;
}

ElfImage Load(const char* path) {
  void* library = dlmopen(LM_ID_BASE, path, RTLD_LAZY | RTLD_LOCAL);
  EXPECT_NE(library, nullptr) << dlerror();
  return ImageOf(dlsym(library, "ncclGetVersion"));
}

int Marker() { return 1; }

TEST(ElfImage, finds_the_object_of_an_address) {
  const ElfImage program = ImageOf(reinterpret_cast<const void*>(&Marker));
  EXPECT_TRUE(program.InText(reinterpret_cast<std::uintptr_t>(&Marker)));
  EXPECT_STREQ(program.path(), "");
  ElfImage none;
  EXPECT_FALSE(ElfImage::Containing(nullptr, &none));
}

TEST(ElfImage, finds_what_libc_defines_as_dlsym_does) {
  void* libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  const ElfImage image = ImageOf(dlsym(libc, "getpid"));
  EXPECT_STREQ(image.soname(), "libc.so.6");
  for (const char* name : {"dlsym", "dlvsym", "getpid", "dlopen", "malloc_usable_size"})
    EXPECT_EQ(image.Find(name), dlsym(libc, name)) << name;
  for (int i = 0; i < 20'000; ++i)  // enough of them share a bucket with what is there
    EXPECT_EQ(image.Find(("no_such_function_" + std::to_string(i)).c_str()), nullptr) << i;
}

TEST(ElfImage, slot_is_unbound_until_the_first_call_through_it) {
  const ElfImage image = Load(AMEM_STAND_INS "/libnccl.so.2");
  const auto slot = image.ImportSlot("fprintf");
  ASSERT_TRUE(slot);
  EXPECT_TRUE(slot.plt);
  EXPECT_TRUE(image.Unbound(slot));
  const auto bound = image.ImportSlot("snprintf");
  ASSERT_TRUE(bound);
  char id[128];
  reinterpret_cast<int (*)(char*)>(image.Find("ncclGetUniqueId"))(id);
  EXPECT_FALSE(image.Unbound(bound));
  EXPECT_TRUE(image.Unbound(slot));
  EXPECT_FALSE(image.ImportSlot("no_such_function"));
}

TEST(ElfImage, writes_the_sealed_slot_of_a_library_bound_at_load) {
  const ElfImage image = Load(AMEM_NCCL_BOUND_NOW);
  const auto slot = image.ImportSlot("dlsym");
  ASSERT_TRUE(slot);
  EXPECT_FALSE(image.Unbound(slot));
  const std::uintptr_t before = *slot.where;
  ASSERT_TRUE(image.Write(slot, reinterpret_cast<const void*>(&Marker)).ok());
  EXPECT_EQ(*slot.where, reinterpret_cast<std::uintptr_t>(&Marker));
  ASSERT_TRUE(image.Write(slot, reinterpret_cast<const void*>(before)).ok());
  EXPECT_DEATH(*const_cast<volatile std::uintptr_t*>(slot.where) = 0, "") << "the page must be read-only again";
}

TEST(ElfImage, finds_code_addresses_of_another_object) {
  const ElfImage image = Load(AMEM_STAND_INS "/libnccl.so.2");
  void* libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  EXPECT_TRUE(image.HoldsCodeOf(ImageOf(dlsym(libc, "getpid")))) << "its bound imports, for a start";
  // Not this program, which may have a table of the standard library's that the loader gave to both.
  void* libm = dlopen("libm.so.6", RTLD_LAZY | RTLD_NOLOAD);
  EXPECT_FALSE(image.HoldsCodeOf(ImageOf(dlsym(libm, "lgamma")))) << "it computes nothing";
}

TEST(ElfImage, knows_soname_and_needed_libraries) {
  const ElfImage image = Load(AMEM_STAND_INS "/libnccl.so.2");
  EXPECT_STREQ(image.soname(), "libnccl.so.2");
  EXPECT_TRUE(image.Needs("libc.so.6"));
  EXPECT_FALSE(image.Needs("libamem_nccl.so"));
}

// Of libm, which has one wherever there is a distribution, and of a copy whose note claims bytes that lie behind its segment.
TEST(ElfImage, a_build_id_is_what_the_note_says_within_its_segment) {
  constexpr std::string_view kNote("\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0", 16);  // sizes of name and id, kind, name
  void* libm = dlopen("libm.so.6", RTLD_LAZY);
  const ElfImage image = ImageOf(dlsym(libm, "lgamma"));
  std::ifstream file(image.path(), std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  const std::size_t note = bytes.find(kNote);
  ASSERT_NE(note, std::string::npos) << image.path();
  std::string id;
  for (const char byte : bytes.substr(note + kNote.size(), 20)) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    id += {kDigits[static_cast<unsigned char>(byte) / 16], kDigits[static_cast<unsigned char>(byte) % 16]};
  }
  EXPECT_EQ(image.BuildId(), id);

  bytes[note + 6] = 1;  // 65 556 bytes
  const std::string copy = std::filesystem::temp_directory_path() / ("libm-" + std::to_string(getpid()) + ".so");
  std::ofstream(copy, std::ios::binary) << bytes;
  void* loaded = dlopen(copy.c_str(), RTLD_LAZY | RTLD_LOCAL);
  std::filesystem::remove(copy);
  ASSERT_NE(loaded, nullptr) << dlerror();
  EXPECT_EQ(ImageOf(dlsym(loaded, "lgamma")).BuildId(), "");
}

}  // namespace
}  // namespace amem
