// Journals whose bytes are not what was written: what is left is read, what is lost is told, and nothing worse happens.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <lmdb.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstring>
#include <random>

#include "journal/base/file.h"
#include "journal/codec.h"
#include "journal/record.h"
#include "journal/record_source.h"
#include "journal/session_dir.h"
#include "journal/tail.h"
#include "statemachine/apply.h"
#include "tests/journal/temporary.h"

namespace amem::test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kStored = 600, kInTail = 40, kAll = kStored + kInTail;

class Damage : public testing::Test {
 protected:
  TemporaryDirectory directory;
  fs::path session = directory.path() / "0000000000000001";

  // `stored` events in LMDB, `in_tail` after them in the tail, of a writer that died; with a snapshot every `snapshot_every`.
  void Make(std::uint64_t stored = kStored, std::uint64_t in_tail = kInTail, std::uint64_t snapshot_every = ~0ULL) {
    JournalOptions options = SmallJournal(directory.path());
    options.snapshot_every = snapshot_every;
    auto writer = JournalWriter::Open(options, SessionId{1});
    ASSERT_TRUE(writer.ok()) << writer.status().message();
    State state;
    for (std::uint64_t seq = 1; seq <= stored; ++seq) {
      ASSERT_TRUE(Apply(state, LegalEvent(seq)).ok());
      ASSERT_TRUE((*writer)->Append(LegalEvent(seq)).ok());
      if ((*writer)->SnapshotDue()) {
        ASSERT_TRUE((*writer)->Snapshot(state).ok());
      }
    }
    ASSERT_TRUE((*writer)->Close().ok());
    Compact();
    if (in_tail == 0) return;
    fs::remove(session / "closed");
    auto tail = Tail::Create(session / "tail", 64 << 10, SessionId{1}, Tail::Ring::kInFile);
    ASSERT_TRUE(tail.ok()) << tail.status().message();
    Encoder encoder;
    for (std::uint64_t seq = stored + 1; seq <= stored + in_tail; ++seq) {
      ASSERT_TRUE(tail->Append(RecordType::kEvent, seq, encoder.Encode(LegalEvent(seq))));
    }
  }
  // Leaves out the pages that are not in use any more, so that each record is in the file once.
  void Compact() const {
    const fs::path compacted = directory.path() / "compacted";
    fs::create_directory(compacted);
    MDB_env* env = nullptr;
    ASSERT_EQ(mdb_env_create(&env), 0);
    EXPECT_EQ(mdb_env_open(env, session.c_str(), MDB_RDONLY, 0), 0);
    EXPECT_EQ(mdb_env_copy2(env, compacted.c_str(), MDB_CP_COMPACT), 0);
    mdb_env_close(env);
    fs::rename(compacted / "data.mdb", session / "data.mdb");
    fs::remove(compacted);
  }
  void Change(const char* file, const std::function<void(std::vector<std::byte>&)>& change) const {
    auto bytes = ReadFile(session / file);
    change(bytes);
    WriteFile(session / file, bytes);
  }
  // What must be true whatever happened to the bytes. The number of events that are left.
  std::size_t ReadWhatIsLeft() const {
    auto reader = JournalReader::Open(session);
    if (!reader) {
      EXPECT_FALSE(reader.status().message().empty());
      return 0;
    }
    (void)(*reader)->Info();
    (void)(*reader)->StateAt(std::nullopt);
    const Contents contents = ReadAll(session);
    std::uint64_t last = 0;
    for (const Event& event : contents.events) {
      EXPECT_GT(event.seq.value, last);
      EXPECT_EQ(event, LegalEvent(event.seq.value));
      last = event.seq.value;
    }
    return contents.events.size();
  }
};

// Where the frame of an event is in a file.
std::size_t Find(const std::vector<std::byte>& bytes, RecordType type, std::uint64_t seq) {
  std::size_t found = 0;
  ScanRecords(bytes, [&](const Record& r) {
    if (r.type == type && r.seq == seq)
      found = static_cast<std::size_t>(r.payload.data() - bytes.data()) - sizeof(RecordHeader);
  });
  return found;
}

TEST_F(Damage, of_a_stored_event_is_told_with_its_number_and_size) {
  Make();
  std::size_t dropped = 0;
  Change("data.mdb", [&](auto& bytes) {
    const std::size_t at = Find(bytes, RecordType::kEvent, 77);
    dropped = sizeof(RecordHeader) + PeekRecord(std::span(bytes).subspan(at))->length;
    bytes[at + sizeof(RecordHeader) + 20] ^= std::byte{1};
  });
  const Contents contents = ReadAll(session);
  EXPECT_EQ(contents.events.size(), kAll - 1);
  EXPECT_EQ(contents.report.corrupt_records, 1U);
  EXPECT_NE(contents.report.corruption.find("event 77 "), std::string::npos) << contents.report.corruption;
  EXPECT_NE(contents.report.corruption.find(std::to_string(dropped) + " bytes dropped"), std::string::npos)
      << contents.report.corruption << dropped;
  EXPECT_FALSE(contents.report.torn_tail);

  auto reader = JournalReader::Open(session);
  ASSERT_TRUE(reader.ok());
  EXPECT_TRUE((*reader)->StateAt(SequenceNumber{76}).ok());
  const auto lost = (*reader)->StateAt(SequenceNumber{100});
  EXPECT_EQ(lost.status().code(), Code::kCorrupt);
  EXPECT_NE(lost.status().message().find("event 77"), std::string::npos) << lost.status().message();
}

TEST_F(Damage, of_an_event_in_the_tail_costs_that_event) {
  Make();
  Change("tail", [&](auto& bytes) { bytes[Find(bytes, RecordType::kEvent, kStored + 9) + 30] ^= std::byte{1}; });
  const Contents contents = ReadAll(session);
  EXPECT_EQ(contents.events.size(), kAll - 1);
  EXPECT_EQ(contents.report.corrupt_records, 1U);
  EXPECT_NE(contents.report.corruption.find("event " + std::to_string(kStored + 9)), std::string::npos)
      << contents.report.corruption;
  EXPECT_FALSE(contents.report.torn_tail);
}

TEST_F(Damage, of_a_row_of_events_is_told_with_the_first_and_the_last_and_all_are_counted) {
  Make(2, 40);
  Change("tail", [](auto& bytes) {
    for (std::uint64_t seq = 3; seq <= 12; ++seq) bytes[Find(bytes, RecordType::kEvent, seq) + 30] ^= std::byte{1};
  });
  const Contents contents = ReadAll(session);
  EXPECT_EQ(contents.events.size(), 32U);
  EXPECT_EQ(contents.report.corrupt_records, 10U);
  EXPECT_NE(contents.report.corruption.find("events 3 to 12 are missing"), std::string::npos) << contents.report.corruption;
}

TEST_F(Damage, of_the_last_event_in_the_tail_is_told) {
  Make();
  Change("tail", [&](auto& bytes) { bytes[Find(bytes, RecordType::kEvent, kAll) + 30] ^= std::byte{1}; });
  const Contents contents = ReadAll(session);
  EXPECT_EQ(contents.events.size(), kAll - 1);
  EXPECT_EQ(contents.report.corrupt_records, 1U);
  EXPECT_FALSE(contents.report.torn_tail);
}

// The checksum of such a record is right: it is the writer that was wrong.
TEST_F(Damage, an_event_whose_number_is_not_its_records_is_told) {
  Make(kStored, 0);
  fs::remove(session / "closed");
  const pid_t writer = ::fork();  // which dies without closing it
  if (writer == 0) {
    auto tail = Tail::Create(session / "tail", 64 << 10, SessionId{1}, Tail::Ring::kInFile);
    Encoder encoder;
    const bool appended = tail.ok() && tail->Append(RecordType::kEvent, kStored + 1, encoder.Encode(LegalEvent(kStored + 2))) &&
                          tail->Append(RecordType::kEvent, kStored + 2, encoder.Encode(LegalEvent(kStored + 2)));
    ::_exit(appended ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(writer, &status, 0), writer);
  ASSERT_EQ(status, 0);
  const Contents contents = ReadAll(session);
  EXPECT_EQ(contents.events.size(), kStored + 1);
  EXPECT_EQ(contents.report.corrupt_records, 1U);
  EXPECT_NE(contents.report.corruption.find("event 601 calls itself 602"), std::string::npos) << contents.report.corruption;
}

TEST_F(Damage, a_torn_tail_is_no_corruption) {
  Make();
  Change("tail", [&](auto& bytes) {
    std::uint64_t begun;
    std::memcpy(&begun, bytes.data() + offsetof(TailHeader, begun), sizeof begun);
    begun += 128;
    std::memcpy(bytes.data() + offsetof(TailHeader, begun), &begun, sizeof begun);
  });
  const Contents contents = ReadAll(session);
  EXPECT_EQ(contents.events.size(), kAll);
  EXPECT_EQ(contents.report.corrupt_records, 0U) << contents.report.corruption;
  EXPECT_TRUE(contents.report.torn_tail);
}

TEST_F(Damage, a_journal_without_its_tail_ends_earlier) {
  Make();
  fs::remove(session / "tail");
  const Contents contents = ReadAll(session);
  EXPECT_EQ(contents.events.size(), kStored);
  EXPECT_EQ(contents.report.corrupt_records, 0U);
}

TEST_F(Damage, a_damaged_snapshot_is_replaced_by_the_one_before) {
  Make(500, 0, 200);
  Change("data.mdb", [&](auto& bytes) { bytes[Find(bytes, RecordType::kSnapshot, 400) + 100] ^= std::byte{1}; });
  State expected;
  for (std::uint64_t seq = 1; seq <= 450; ++seq) ASSERT_TRUE(Apply(expected, LegalEvent(seq)).ok());
  auto reader = JournalReader::Open(session);
  ASSERT_TRUE(reader.ok());
  ReadReport report;
  const auto state = (*reader)->StateAt(SequenceNumber{450}, &report);
  ASSERT_TRUE(state.ok()) << state.status().message();
  EXPECT_TRUE(*state == expected);
  EXPECT_EQ(report.corrupt_records, 1U);
  EXPECT_NE(report.corruption.find("snapshot through event 400"), std::string::npos) << report.corruption;
}

TEST_F(Damage, of_the_pages_of_the_store_leaves_the_whole_records) {
  Make();
  Change("data.mdb", [&](auto& bytes) {  // the page that holds event 300 gets the number of another
    const std::size_t page = Find(bytes, RecordType::kEvent, 300) / 4096 * 4096;
    bytes[page] ^= std::byte{0x55};
  });
  const Contents contents = ReadAll(session);
  EXPECT_EQ(contents.events.size(), kAll);
  EXPECT_EQ(contents.report.corrupt_records, 1U);
  EXPECT_NE(contents.report.corruption.find("page"), std::string::npos) << contents.report.corruption;
  const auto info = (*JournalReader::Open(session))->Info();
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->last, SequenceNumber{kAll});
  EXPECT_EQ(info->session, SessionId{1});
}

TEST_F(Damage, a_store_that_is_cut_off_gives_what_is_left) {
  Make();
  const auto whole = ReadFile(session / "data.mdb");
  std::size_t before = 0;
  for (const std::size_t part : {3, 10, 40, 70, 95}) {
    WriteFile(session / "data.mdb", std::span(whole).first(whole.size() * part / 100));
    const std::size_t left = ReadWhatIsLeft();
    EXPECT_GE(left, before);
    before = left;
    const Contents contents = ReadAll(session);
    EXPECT_TRUE(!contents.status.ok() || contents.report.corrupt_records > 0);
  }
  EXPECT_GT(before, kStored / 2);
}

TEST_F(Damage, anywhere_in_the_store_never_does_more_than_lose_events) {
  Make(300, 20, 120);
  const auto whole = ReadFile(session / "data.mdb");
  const fs::path copy = session / "data.mdb";
  std::mt19937_64 random(4);
  constexpr int kRounds = kSanitized ? 30 : 300;
  int intact = 0;
  for (int round = 0; round < kRounds; ++round) {
    auto bytes = whole;
    if (round % 3 == 0) {  // the heads of pages
      for (int i = 0; i < 4; ++i)
        bytes[random() % (bytes.size() / 4096) * 4096 + random() % 64] = static_cast<std::byte>(random());
    } else if (round % 3 == 1) {
      for (int i = 0; i < 50; ++i) bytes[random() % bytes.size()] ^= std::byte{1} << random() % 8;
    } else {
      const std::size_t at = random() % bytes.size();
      const std::size_t n = std::min<std::size_t>(bytes.size() - at, random() % 9000);
      for (std::size_t i = 0; i < n; ++i) bytes[at + i] = static_cast<std::byte>(random());
    }
    WriteFile(copy, bytes);
    intact += ReadWhatIsLeft() > 100 ? 1 : 0;
    if (HasFailure()) break;
  }
  EXPECT_GT(intact, kRounds / 6);
}

// Anybody who can read a journal can lock its tail, and then it looks as if its writer lived.
#ifdef AMEM_BY_NIGHT
constexpr int kDamagedStores = 100;
#else
constexpr int kDamagedStores = 10;
#endif

TEST_F(Damage, behind_a_locked_tail_is_found_as_well) {
  Make();
  const std::vector<std::byte> sound = ReadFile(session / "data.mdb");
  std::mt19937_64 random(11);
  for (const bool by_child : {false, true}) {
    const auto tail = File::Open(session / "tail", O_RDWR);
    ASSERT_TRUE(tail.ok());
    int ready[2], go[2];
    ASSERT_EQ(pipe(ready) | pipe(go), 0);
    char c = 0;
    const pid_t child = by_child ? fork() : 0;
    if (child == 0) {
      ASSERT_EQ(flock(tail->fd(), LOCK_EX | LOCK_NB), 0);
      if (by_child) {
        (void)!write(ready[1], "x", 1);
        (void)!read(go[0], &c, 1);
        _exit(0);
      }
    } else {
      (void)!read(ready[0], &c, 1);
    }
    EXPECT_EQ(ReadWhatIsLeft(), kAll) << "a sound one is read whole";
    for (int i = 0; i < kDamagedStores; ++i) {
      auto bytes = sound;
      for (int changes = 0; changes < 40; ++changes) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
      WriteFile(session / "data.mdb", bytes);
      ReadWhatIsLeft();
    }
    WriteFile(session / "data.mdb", sound);
    (void)!write(go[1], "x", 1);
    if (by_child) waitpid(child, nullptr, 0);
    for (const int fd : {ready[0], ready[1], go[0], go[1]}) close(fd);
  }
}

TEST_F(Damage, sound_stores_are_found_sound) {
  for (const std::uint64_t every : {~0ULL, 100ULL, 30ULL}) {
    Make(2000, 0, every);
    auto file = File::Open(session / "data.mdb", O_RDONLY);
    ASSERT_TRUE(file.ok());
    const Status status = CheckStructure(*file);
    EXPECT_TRUE(status.ok()) << status.message();
    fs::remove_all(session);
  }
}

TEST_F(Damage, a_copy_without_write_permission_is_read_and_left_as_it_is) {
  Make();
  fs::remove(session / "lock.mdb");
  chmod(session.c_str(), 0500);
  for (const auto& entry : fs::directory_iterator(session)) chmod(entry.path().c_str(), 0400);
  const Contents contents = ReadAll(session);
  EXPECT_EQ(contents.events.size(), kAll) << contents.status.message();
  EXPECT_FALSE(fs::exists(session / "lock.mdb"));
  chmod(session.c_str(), 0700);
}

}  // namespace
}  // namespace amem::test
