#include "journal/tail.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <csignal>
#include <deque>
#include <functional>
#include <random>
#include <thread>

#include "journal/base/fork_guard.h"
#include "journal/session_dir.h"
#include "journal/shared_memory.h"
#include "tests/journal/base/no_descriptors.h"
#include "tests/journal/small_disk.h"
#include "tests/journal/temporary.h"

namespace {

std::function<void()> before_reading;  // a tail's ring, once; what happens between a reader's look at the header and its copy

std::function<void(void*)> after_mapping;  // a tail's header, once

}  // namespace

// In place of libc's: the call with which a reader maps the header, and the one with which it copies the ring.
extern "C" void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  auto* const mapped = reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, protection, flags, fd, offset));
  if (after_mapping && bytes == amem::kTailHeaderBytes && mapped != MAP_FAILED) std::exchange(after_mapping, nullptr)(mapped);
  return mapped;
}
extern "C" ssize_t pread(int fd, void* into, size_t bytes, off_t offset) {
  if (before_reading && offset >= static_cast<off_t>(amem::kTailHeaderBytes)) std::exchange(before_reading, nullptr)();
  return syscall(SYS_pread64, fd, into, bytes, offset);
}

namespace amem::test {
namespace {

std::vector<std::byte> Payload(std::uint64_t seq) {
  return std::vector<std::byte>(seq * 37 % 900, static_cast<std::byte>(seq));
}

class TailTest : public testing::Test {
 protected:
  TemporaryDirectory directory;
  std::filesystem::path path = directory.path() / "tail";

  Tail Create(Bytes bytes = 32 << 10, Tail::Ring ring = Tail::Ring::kInFile) {
    auto tail = Tail::Create(path, bytes, SessionId{77}, ring);
    EXPECT_TRUE(tail.ok()) << tail.status().message();
    return std::move(*tail);
  }
  TailContents Read() {
    auto contents = ReadTail(path);
    EXPECT_TRUE(contents.ok()) << contents.status().message();
    return contents ? std::move(*contents) : TailContents{};
  }
  void Overwrite(Bytes offset, std::span<const std::byte> bytes) {
    auto all = ReadFile(path);
    std::copy(bytes.begin(), bytes.end(), all.begin() + static_cast<std::ptrdiff_t>(offset));
    WriteFile(path, all);
  }
};

std::vector<std::uint64_t> Numbers(const TailContents& contents) {
  std::vector<std::uint64_t> numbers;
  for (const Record& r : contents.records) numbers.push_back(r.seq);
  return numbers;
}
void Fill(Tail& tail, std::uint64_t first, std::uint64_t last) {
  for (std::uint64_t seq = first; seq <= last; ++seq) ASSERT_TRUE(tail.Append(RecordType::kEvent, seq, Payload(seq)));
}

TEST_F(TailTest, what_is_appended_is_read) {
  Tail tail = Create();
  Fill(tail, 1, 20);
  const TailContents contents = Read();
  ASSERT_EQ(contents.records.size(), 20U);
  for (std::size_t i = 0; i < 20; ++i) {
    const auto expected = Payload(i + 1);
    EXPECT_EQ(contents.records[i].seq, i + 1);
    EXPECT_TRUE(
        std::equal(expected.begin(), expected.end(), contents.records[i].payload.begin(), contents.records[i].payload.end()));
  }
  EXPECT_FALSE(contents.torn);
  EXPECT_EQ(contents.damage.bytes, 0U);
}

TEST_F(TailTest, every_round_of_the_ring_is_read_back_whole) {
  Tail tail = Create(16 << 10);
  std::mt19937_64 random(3);
  std::deque<std::uint64_t> expected;
  std::uint64_t seq = 0;
  for (int i = 0; i < 400; ++i) {
    while (tail.Append(RecordType::kEvent, seq + 1, Payload(seq + 1))) expected.push_back(++seq);
    const TailContents contents = Read();
    ASSERT_EQ(Numbers(contents), std::vector(expected.begin(), expected.end()));
    ASSERT_EQ(contents.damage.bytes, 0U);
    const std::size_t take = 1 + random() % expected.size();  // drains some
    std::size_t taken = 0;
    std::uint64_t end = 0;
    ASSERT_TRUE(WalkRing(tail.Drainable(tail.Published()), [&](std::span<const std::byte> frame, std::uint64_t upto) {
      const auto record = ReadRecord(frame);
      EXPECT_TRUE(record && record->seq == expected.front());
      expected.pop_front();
      end = upto;
      return ++taken < take;
    }));
    tail.Drained(tail.DrainedUpTo() + end);
  }
  EXPECT_GT(seq, 3000U);
}

TEST_F(TailTest, an_append_that_was_interrupted_is_torn_and_not_damage) {
  Tail tail = Create();
  Fill(tail, 1, 5);
  const std::uint64_t begun = tail.Published() + 64;
  Overwrite(offsetof(TailHeader, begun), std::as_bytes(std::span(&begun, 1)));
  const TailContents contents = Read();
  EXPECT_TRUE(contents.torn);
  EXPECT_EQ(contents.damage.bytes, 0U);
  EXPECT_EQ(contents.records.size(), 5U);
}

TEST_F(TailTest, a_flipped_bit_costs_one_record) {
  Tail tail = Create();
  Fill(tail, 1, 40);
  const auto whole = ReadFile(path);
  std::uint64_t at = kTailHeaderBytes;
  for (std::uint64_t seq = 1; seq <= 40; ++seq) {
    const std::uint64_t next = at + RecordBytes(Payload(seq).size());
    auto bytes = whole;
    bytes[at + (seq * 5) % (sizeof(RecordHeader) + Payload(seq).size())] ^= std::byte{16};
    WriteFile(path, bytes);
    const TailContents contents = Read();
    std::vector<std::uint64_t> expected;
    for (std::uint64_t i = 1; i <= 40; ++i) {
      if (i != seq) expected.push_back(i);
    }
    EXPECT_EQ(Numbers(contents), expected) << "damaged " << seq;
    EXPECT_EQ(contents.damage.bytes, next - at);
    EXPECT_EQ(contents.damage.kind, seq == 40 ? TailDamage::Kind::kAtEnd : TailDamage::Kind::kWithin);
    EXPECT_FALSE(contents.torn);
    at = next;
  }
}

// A row of equal records of 64 bytes, so that every place in the ring is known.
void FillEvenly(Tail& tail, std::uint64_t first, std::uint64_t last) {
  for (std::uint64_t seq = first; seq <= last; ++seq)
    ASSERT_TRUE(tail.Append(RecordType::kEvent, seq, std::vector<std::byte>(40, static_cast<std::byte>(seq))));
}

TEST_F(TailTest, records_of_an_earlier_round_behind_a_damaged_place_are_not_taken_for_new_ones) {
  Tail tail = Create(16 << 10);
  const std::uint64_t round = tail.Capacity() / 64;
  FillEvenly(tail, 1, round);
  tail.Drained(tail.Published());
  FillEvenly(tail, round + 1, 2 * round - 2);  // leaves two records of the first round at the end of the ring
  tail.Drained(tail.Published() - 64);
  ASSERT_TRUE(tail.Append(RecordType::kEvent, 2 * round - 1, std::vector<std::byte>(200)));  // they are skipped
  ASSERT_EQ(Numbers(Read()), (std::vector{2 * round - 2, 2 * round - 1}));
  const std::byte damaged{0xff};
  Overwrite(kTailHeaderBytes + (round - 2) * 64, std::span(&damaged, 1));
  EXPECT_EQ(Numbers(Read()), (std::vector{2 * round - 2, 2 * round - 1}));
}

TEST_F(TailTest, records_that_are_drained_while_they_are_copied_are_left_to_the_store) {
  Tail tail = Create(16 << 10);
  const std::uint64_t round = tail.Capacity() / 64;
  FillEvenly(tail, 1, round);
  before_reading = [&] {  // the drain moves half of them, and the appender writes other records in their place
    tail.Drained(round / 2 * 64);
    for (std::uint64_t seq = round + 1; seq <= round + 10; ++seq)
      ASSERT_TRUE(tail.Append(RecordType::kEvent, seq, std::vector<std::byte>(300)));
  };
  const TailContents contents = Read();
  ASSERT_EQ(before_reading, nullptr) << "nothing was read from the ring";
  ASSERT_EQ(contents.records.size(), round - round / 2);
  EXPECT_EQ(contents.records.front().seq, round / 2 + 1);
  EXPECT_EQ(contents.records.back().seq, round);
  EXPECT_EQ(contents.damage.bytes, 0U);
  EXPECT_FALSE(contents.torn);
}

TEST_F(TailTest, any_bytes_are_read_without_harm) {
  Tail tail = Create(16 << 10);
  Fill(tail, 1, 24);
  const auto whole = ReadFile(path);
  std::mt19937_64 random(5);
  for (int round = 0; round < (kSanitized ? 200 : 2000); ++round) {
    auto bytes = whole;
    switch (round % 4) {
      case 0:  // the header
        bytes[random() % sizeof(TailHeader)] = static_cast<std::byte>(random());
        break;
      case 1:  // positions
        for (int i = 0; i < 8; ++i) bytes[64 + random() % 80] = static_cast<std::byte>(random());
        break;
      case 2:  // cut off
        bytes.resize(random() % bytes.size());
        break;
      default:
        for (int i = 0; i < 100; ++i) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    }
    WriteFile(path, bytes);
    const auto contents = ReadTail(path);
    ASSERT_TRUE(contents.ok()) << contents.status().message();
    for (const Record& r : contents->records) {
      const auto expected = Payload(r.seq);
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), r.payload.begin(), r.payload.end()));
    }
  }
}

TEST_F(TailTest, a_tail_with_a_damaged_header_gives_up_its_records) {
  Tail tail = Create();
  Fill(tail, 1, 40);
  auto bytes = ReadFile(path);
  bytes[3] ^= std::byte{1};
  WriteFile(path, bytes);
  const TailContents contents = Read();
  EXPECT_EQ(contents.records.size(), 40U);
  EXPECT_NE(contents.damage.words.find("header"), std::string::npos);
  EXPECT_EQ(contents.damage.kind, TailDamage::Kind::kAtEnd) << "there may have been more";
  bytes.resize(kTailHeaderBytes - 1);
  WriteFile(path, bytes);
  EXPECT_EQ(Read().damage.kind, TailDamage::Kind::kAtEnd) << "and so there may where it was cut off";
}

TEST_F(TailTest, one_that_is_not_there_is_no_failure) {
  const TailContents contents = Read();
  EXPECT_TRUE(contents.records.empty());
}

TEST_F(TailTest, its_blocks_are_there_from_the_beginning) {
  const Tail tail = Create(1 << 20);
  struct stat st {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  EXPECT_EQ(st.st_size, 1 << 20);
  EXPECT_GE(st.st_blocks * 512, 1 << 20);
}

TEST_F(TailTest, the_reason_of_a_break_is_in_it) {
  for (const auto ring : {Tail::Ring::kInFile, Tail::Ring::kInMemory}) {
    Tail tail = Create(32 << 10, ring);
    tail.MarkBroken("the disk " + std::string(1000, 'x'));
    EXPECT_EQ(Read().broken_reason.substr(0, 12), "the disk xxx");
    GiveMemoryBack(path);
    std::filesystem::remove(path);
  }
}

TEST_F(TailTest, what_a_killed_process_left_in_memory_is_read_there_and_moved_to_disk) {
  const pid_t child = fork();
  if (child == 0) {
    Tail tail = Create(64 << 10, Tail::Ring::kInMemory);
    Fill(tail, 1, 100);
    tail.Drained(tail.Published() / 2);
    Fill(tail, 101, 140);
    kill(getpid(), SIGKILL);
  }
  waitpid(child, nullptr, 0);
  const TailContents in_memory = Read();
  ASSERT_FALSE(in_memory.records.empty());
  EXPECT_EQ(in_memory.records.back().seq, 140U);
  EXPECT_NE(in_memory.damage.kind, TailDamage::Kind::kUnreachable);
  struct stat st {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  const auto memory = MemoryOf(SessionId{77}, st);
  MoveToDisk(path);
  EXPECT_FALSE(std::filesystem::exists(memory));
  EXPECT_EQ(Numbers(Read()), Numbers(in_memory));
  EXPECT_FALSE(IsCopy(path));
  EXPECT_FALSE(WriterIsAlive(path));
}

TEST_F(TailTest, a_copy_of_one_that_is_in_memory_does_not_follow_the_living) {
  Tail tail = Create(32 << 10, Tail::Ring::kInMemory);
  struct stat st {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  if (!std::filesystem::exists(MemoryOf(SessionId{77}, st))) GTEST_SKIP() << "WAIVED: this directory is in memory itself";
  std::filesystem::copy_file(path, directory.path() / "copy");
  Fill(tail, 1, 5);
  EXPECT_EQ(Read().records.size(), 5U);
  const auto copy = ReadTail(directory.path() / "copy");
  ASSERT_TRUE(copy.ok());
  EXPECT_TRUE(copy->damage.kind == TailDamage::Kind::kUnreachable && copy->records.empty());
  std::filesystem::remove(MemoryOf(SessionId{77}, st));
  EXPECT_EQ(Read().damage.kind, TailDamage::Kind::kUnreachable) << "as in another container";
}

TEST_F(TailTest, memory_of_journals_whose_place_is_gone_is_given_back) {
  const std::filesystem::path place = directory.path() / "place";
  std::filesystem::create_directory(place);
  std::filesystem::path memory;
  for (const bool alive : {true, false}) {
    auto tail = Tail::Create(place / ("tail" + std::to_string(alive)), 32 << 10, SessionId{78});
    ASSERT_TRUE(tail.ok()) << tail.status().message();
    tail->MovedTo(place / "session");
    struct stat st {};
    ASSERT_EQ(stat((place / ("tail" + std::to_string(alive))).c_str(), &st), 0);
    memory = MemoryOf(SessionId{78}, st);
    if (!std::filesystem::exists(memory)) GTEST_SKIP() << "WAIVED: this directory is in memory itself";
    RemoveForgottenMemory();
    EXPECT_TRUE(std::filesystem::exists(memory));
    if (alive) std::filesystem::remove_all(place);
    RemoveForgottenMemory();
    EXPECT_TRUE(std::filesystem::exists(memory)) << "its writer lives";
    std::filesystem::create_directory(place);
  }
  std::filesystem::remove_all(place);
  RemoveForgottenMemory();
  EXPECT_FALSE(std::filesystem::exists(memory));
}

// Two containers that share /dev/shm: one does not see the directory of the other's journal.
TEST_F(TailTest, memory_of_journals_of_another_container_is_retained) {
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWNS) != 0) _exit(test::kCannot);
    Tail tail = Create(32 << 10, Tail::Ring::kInMemory);
    Fill(tail, 1, 20);
    tail.MovedTo("/not/here/session");
    kill(getpid(), SIGKILL);
  }
  int ended = 0;
  waitpid(child, &ended, 0);
  if (WIFEXITED(ended)) GTEST_SKIP() << "WAIVED: needs the right to make a mount namespace";
  struct stat st {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  const auto memory = MemoryOf(SessionId{77}, st);
  if (!std::filesystem::exists(memory)) GTEST_SKIP() << "WAIVED: this directory is in memory itself";
  RemoveForgottenMemory();
  EXPECT_TRUE(std::filesystem::exists(memory));
  EXPECT_EQ(Read().records.size(), 20U) << "what its process wrote last";
  GiveMemoryBack(path);
  EXPECT_FALSE(std::filesystem::exists(memory));
}

TEST_F(TailTest, a_reader_beside_appender_and_drain_sees_an_unbroken_row) {
  Tail tail = Create(64 << 10);
  std::atomic<std::uint64_t> drained_seq{0};
  std::atomic<std::uint64_t> appended{0};
  std::atomic<bool> stop{false};
  std::thread appender([&] {
    for (std::uint64_t seq = 1; !stop; ++seq) {
      while (!tail.Append(RecordType::kEvent, seq, Payload(seq)) && !stop) std::this_thread::yield();
      appended = seq;
    }
  });
  std::thread drain([&] {
    while (!stop) {
      const std::uint64_t up_to = tail.Published();
      std::uint64_t last = 0;
      WalkRing(tail.Drainable(up_to), [&](std::span<const std::byte> frame, std::uint64_t) {
        last = ReadRecord(frame)->seq;
        return true;
      });
      if (last != 0) drained_seq = last;  // it is in the "store" before it leaves the tail
      tail.Drained(up_to);
    }
  });
  for (int i = 0; i < (kSanitized ? 100 : 1000); ++i) {
    const std::uint64_t before = appended;
    const auto contents = ReadTail(path);
    const std::uint64_t stored = drained_seq;
    ASSERT_TRUE(contents.ok());
    ASSERT_EQ(contents->damage.bytes, 0U);
    std::uint64_t next = contents->records.empty() ? 0 : contents->records.front().seq;
    ASSERT_LE(next, stored + 1);
    for (const Record& r : contents->records) {
      ASSERT_EQ(r.seq, next++);
      ASSERT_EQ(r.payload.size(), Payload(r.seq).size());
    }
    ASSERT_GE(std::max(stored + 1, next), before + 1);
  }
  stop = true;
  appender.join();
  drain.join();
}

#if defined(__x86_64__) && !defined(AMEM_THREAD_SANITIZED)
// Its processor may do something else between any two instructions, for so long that the writer goes once around the ring: here
// after the first position that it reads, where a trap is set.
TEST_F(TailTest, a_reader_that_is_held_up_between_two_positions_finds_no_damage) {
  static Tail* writer = nullptr;
  static void* header = nullptr;
  static int rounds = 0;
  static constexpr greg_t kTrapAfterNext = 0x100;  // of the processor's flags
  Tail tail = Create(kLeastTailBytes);
  writer = &tail;
  struct sigaction touched {
  }, passed{}, before_touched{}, before_passed{};
  touched.sa_flags = passed.sa_flags = SA_SIGINFO;
  touched.sa_sigaction = [](int, siginfo_t*, void* context) {
    mprotect(header, kTailHeaderBytes, PROT_READ);
    static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] |= kTrapAfterNext;
  };
  passed.sa_sigaction = [](int, siginfo_t*, void* context) {
    static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] &= ~kTrapAfterNext;
    for (const std::uint64_t from = writer->Published(); writer->Published() - from <= writer->Capacity(); ++rounds) {
      Fill(*writer, 1, 5);
      writer->Drained(writer->Published());
    }
  };
  ASSERT_EQ(sigaction(SIGSEGV, &touched, &before_touched), 0);
  ASSERT_EQ(sigaction(SIGTRAP, &passed, &before_passed), 0);
  after_mapping = [](void* at) {
    header = at;
    mprotect(at, kTailHeaderBytes, PROT_NONE);
  };
  EXPECT_EQ(Read().damage.words, "");
  EXPECT_GT(rounds, 0);
  sigaction(SIGSEGV, &before_touched, nullptr);
  sigaction(SIGTRAP, &before_passed, nullptr);
}
#endif

TEST_F(TailTest, lives_as_long_as_its_process) {
  EXPECT_FALSE(WriterIsAlive(path));
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    auto tail = Tail::Create(path, 32 << 10, SessionId{1});
    const pid_t grandchild = fork();  // keeps the lock's descriptor, as a data loader's worker would
    if (grandchild == 0) {
      pause();
      _exit(0);
    }
    (void)!write(ready[1], &grandchild, sizeof grandchild);
    pause();
    _exit(0);
  }
  pid_t grandchild = 0;
  ASSERT_EQ(read(ready[0], &grandchild, sizeof grandchild), static_cast<ssize_t>(sizeof grandchild));
  EXPECT_TRUE(WriterIsAlive(path));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(WriterIsAlive(path));
  kill(grandchild, SIGKILL);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(TailTest, of_a_living_writer_is_never_one_of_the_dead_however_few_descriptors_its_reader_has) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto tail = Tail::Create(path, 32 << 10, SessionId{1});
    (void)!write(ready[1], "x", 1);
    pause();
    _exit(0);
  }
  char made = 0;
  ASSERT_EQ(read(ready[0], &made, 1), 1);
  for (std::size_t left = 0; left < 4; ++left) {
    const NoDescriptors few(left);
    EXPECT_NE(LifeOfWriter(path, false), WriterLife::kEnded) << left;
    EXPECT_TRUE(WriterMayLive(path)) << left;
    EXPECT_NE(StatusOf(directory.path()), SessionStatus::kCrashed) << left;
  }
  EXPECT_EQ(LifeOfWriter(path, false), WriterLife::kAlive);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_EQ(LifeOfWriter(path, false), WriterLife::kEnded);
  close(ready[0]);
  close(ready[1]);
}

TEST(ForkGuardTest, knows_a_child_and_a_grandchild) {
  const ForkGuard guard;
  EXPECT_FALSE(guard.InChild());
  const pid_t child = fork();
  if (child == 0) {
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(guard.InChild() ? 1 : 0);
    int status = 0;
    waitpid(grandchild, &status, 0);
    _exit(guard.InChild() && WEXITSTATUS(status) == 1 ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_FALSE(guard.InChild());
}

}  // namespace
}  // namespace amem::test
