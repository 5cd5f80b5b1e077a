#include "replay/peers/token.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <set>

namespace amem {
namespace {

Token Example() {
  Token token{SessionId{0x0123456789abcdef}, AllocationId{42}, {}, 4096};
  for (std::size_t i = 0; i < token.secret.size(); ++i) token.secret[i] = static_cast<std::uint8_t>(i * 7 + 1);
  return token;
}

TEST(Token, comes_back_as_it_was) {
  const auto bytes = Encode(Example());
  auto token = Decode(bytes);
  ASSERT_TRUE(token) << token.status().message();
  EXPECT_EQ(*token, Example());
  Token of_whole = Example();
  of_whole.beyond = 1'194'304;
  EXPECT_EQ(*Decode(Encode(of_whole)), of_whole);
}

TEST(Token, layout_is_fixed) {
  const auto bytes = Encode(Example());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), 8), "AMEMTOK1");
  EXPECT_EQ(std::to_integer<int>(bytes[8]), 0xef);  // little-endian
  EXPECT_EQ(std::to_integer<int>(bytes[16]), 42);
  EXPECT_EQ(std::to_integer<int>(bytes[24]), 1);
  EXPECT_EQ(std::to_integer<int>(bytes[41]), 0x10);
}

TEST(Token, every_flipped_bit_is_noticed) {
  for (std::size_t bit = 0; bit < 8 * kTokenBytes; ++bit) {
    auto bytes = Encode(Example());
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    auto token = Decode(bytes);
    ASSERT_FALSE(token) << "bit " << bit;
    EXPECT_EQ(token.status().code(), bit < 56 ? Code::kNotFound : Code::kCorrupt) << "bit " << bit;
  }
}

TEST(Token, bytes_of_somebody_else_are_not_found) {
  std::array<std::byte, 64> bytes{};
  EXPECT_EQ(Decode(bytes).status().code(), Code::kNotFound);
  EXPECT_EQ(Decode({}).status().code(), Code::kNotFound);
}

TEST(Token, a_part_of_one_is_corrupt) {
  const auto bytes = Encode(Example());
  for (std::size_t n : {8u, 40u, 63u}) EXPECT_EQ(Decode(std::span(bytes).first(n)).status().code(), Code::kCorrupt);
}

TEST(Token, another_version_is_named) {
  auto bytes = Encode(Example());
  bytes[7] = std::byte{'2'};
  EXPECT_NE(Decode(bytes).status().message().find("another version"), std::string::npos);
}

TEST(Token, one_without_a_session_is_corrupt) { EXPECT_EQ(Decode(Encode(Token{})).status().code(), Code::kCorrupt); }

TEST(TokenDescriptor, carries_the_token_and_keeps_its_offset) {
  auto fd = MakeTokenDescriptor(Example());
  ASSERT_TRUE(fd) << fd.status().message();
  ASSERT_EQ(::lseek(fd->get(), 17, SEEK_SET), 17);
  auto token = ReadTokenDescriptor(fd->get());
  ASSERT_TRUE(token) << token.status().message();
  EXPECT_EQ(*token, Example());
  EXPECT_EQ(::lseek(fd->get(), 0, SEEK_CUR), 17);
}

TEST(TokenDescriptor, cannot_be_changed_and_is_closed_on_exec) {
  auto fd = MakeTokenDescriptor(Example());
  ASSERT_TRUE(fd);
  EXPECT_LT(::pwrite(fd->get(), "x", 1, 0), 0);
  EXPECT_LT(::ftruncate(fd->get(), 0), 0);
  EXPECT_NE(::fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(TokenDescriptor, memory_of_the_simulator_is_passed_through) {
  const UniqueFd fd(::memfd_create("amem-sim:1:2", MFD_CLOEXEC));
  EXPECT_EQ(ReadTokenDescriptor(fd.get()).status().code(), Code::kNotFound);
}

void ExpectForeign(int fd, const std::string& what) {
  const Status status = ReadTokenDescriptor(fd).status();
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
}

TEST(TokenDescriptor, anything_else_is_named_and_the_cause_suggested) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  ExpectForeign(ends[0], "a pipe");
  ExpectForeign(ends[0], "not under AMem");
  ::close(ends[0]);
  ::close(ends[1]);
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ExpectForeign(socket.get(), "a socket");
  const UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  ExpectForeign(null.get(), "/dev/null");
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  ExpectForeign(file.get(), ::program_invocation_short_name);
  const UniqueFd memory(::memfd_create("somebody", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ExpectForeign(memory.get(), "memfd:somebody");
  ExpectForeign(-1, "descriptor -1");
}

TEST(TokenDescriptor, a_forged_one_is_corrupt) {
  const UniqueFd unsealed(::memfd_create(kTokenDescriptorName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const auto bytes = Encode(Example());
  ASSERT_EQ(::pwrite(unsealed.get(), bytes.data(), bytes.size(), 0), 64);
  EXPECT_EQ(ReadTokenDescriptor(unsealed.get()).status().code(), Code::kCorrupt);
}

TEST(Secret, is_random_and_compared_whole) {
  std::set<Secret> seen;
  for (int i = 0; i < 100; ++i) seen.insert(*RandomSecret());
  EXPECT_EQ(seen.size(), 100u);
  const Secret a = *seen.begin();
  EXPECT_TRUE(SameSecret(a, a));
  for (std::size_t i = 0; i < a.size(); ++i) {
    Secret b = a;
    b[i] ^= 0x80;
    EXPECT_FALSE(SameSecret(a, b));
  }
}

}  // namespace
}  // namespace amem
