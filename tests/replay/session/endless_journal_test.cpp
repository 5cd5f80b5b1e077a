// The journal of a session that is never resumed: bounded, readable at any moment, and a pause works afterwards.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "tests/journal/small_disk.h"
#include "tests/journal/temporary.h"
#include "tests/replay/session/session_process.h"

namespace amem::test {
namespace {

namespace fs = std::filesystem;

Bytes BytesOnDisk(const fs::path& directory) {
  Bytes bytes = 0;
  for (const auto& file : fs::recursive_directory_iterator(directory)) {
    struct stat st {};
    if (stat(file.path().c_str(), &st) == 0 && S_ISREG(st.st_mode)) bytes += static_cast<Bytes>(st.st_blocks) * 512;
  }
  return bytes;
}

// Reads all the time; what a reader meets that is not as it should be.
std::string ReadOften(const fs::path& journal, const std::atomic<bool>& stop) {
  for (std::uint64_t last = 0; !stop;) {
    auto reader = JournalReader::Open(journal);
    if (!reader) return "open: " + reader.status().message();
    const auto info = (*reader)->Info();
    if (!info) return "info: " + info.status().message();
    if (info->last.value < last) return "the journal became shorter";
    last = info->last.value;
    ReadReport report;
    const auto state = (*reader)->StateAt(std::nullopt, &report);
    if (!state) return "state: " + state.status().message();
    if (report.corrupt_records != 0) return "damage: " + report.corruption;
    const auto read = (*reader)->Read(info->last, kToTheEnd, [](const Event&) { return false; });
    if (!read) return "read: " + read.status().message();
  }
  return {};
}

// AMEM_ENDLESS_EVENTS: how many; by night 50 million.
std::uint64_t HowMany() {
#if defined(AMEM_THREAD_SANITIZED)
  constexpr std::uint64_t kEvents = 20'000;
#elif defined(AMEM_SANITIZED)
  constexpr std::uint64_t kEvents = 50'000;
#elif defined(AMEM_BY_NIGHT)
  constexpr std::uint64_t kEvents = 1'000'000;
#else
  constexpr std::uint64_t kEvents = 400'000;
#endif
  const char* wanted = std::getenv("AMEM_ENDLESS_EVENTS");
  return wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : kEvents;
}

TEST(EndlessJournal, of_a_session_that_never_resumes_stays_small_and_a_pause_works_afterwards) {
  char name[] = "/tmp/amem-test-XXXXXX";
  ASSERT_NE(mkdtemp(name), nullptr);
  const std::unique_ptr<char, void (*)(char*)> removed(name, [](char* path) { fs::remove_all(path); });
  SimulatorOptions simulated;
  simulated.in_memory = *SimulatorWorld::InMemory(1, Bytes{64} << 20);
  const auto simulator = *Simulator::Open(simulated);
  LocalNetwork network;
  SessionOpened who;
  who.session = SessionId{1};
  JournalOptions options;
  options.directory = fs::path(name) / "journal";
  auto session = *Session::Start({.layout = Layout::kDirect}, *simulator, who, JournalWriter::OpenLasting(options, who.session),
                                 [&](const PeerIdentity& self, PeerDelegate& delegate) {
                                   return Result<std::unique_ptr<Peers>>(network.Join(self, delegate));
                                 });
  const fs::path journal = options.directory / "0000000000000001";
  std::atomic<bool> stop{false};
  std::string wrong;
  std::thread reader([&] { wrong = ReadOften(journal, stop); });
  const std::uint64_t events = HowMany();
  Bytes most = 0;
  for (std::uint64_t i = 0; i < events; i += 6) {
    const Address place{0x10000000 + i % 600 * 4096};
    session->records().Note(HostAllocated{place, 4096, 0, false});
    const auto id = session->nccl().Create(k2M, Process::On(kDevice), 0, {{0x1000, 0x2000, 0x3000}});
    ASSERT_TRUE(id.ok()) << id.status().message();
    session->records().Note(PassedThrough{"cuMemGetAddressRange", "", 0});
    ASSERT_TRUE(session->sharing().Export(*id).ok());
    ASSERT_TRUE(session->nccl().Release(*id).ok());
    ASSERT_TRUE(session->records().NoteFree(HostFreed{place}));
    if (i % 60'000 == 0) most = std::max(most, BytesOnDisk(options.directory));
  }
  stop = true;
  reader.join();
  EXPECT_EQ(wrong, "");
  EXPECT_LT(std::max(most, BytesOnDisk(options.directory)), Bytes{100} << 20);
  EXPECT_GE(session->CopyState().last.value, events);
  const Status paused = session->Pause(), resumed = session->Resume();
  EXPECT_TRUE(paused.ok()) << paused.message();
  EXPECT_TRUE(resumed.ok()) << resumed.message();
  EXPECT_TRUE(session->Close("test").ok());
}

// Its disk is frozen for a while, as for a snapshot of the volume.
TEST(FrozenJournal, costs_nccls_calls_nothing_and_refuses_a_pause_at_its_deadline) {
  const TemporaryDirectory directory;
  EXPECT_FINE_IN_CHILD([&]() -> std::string {
    if (!MountDisk(directory.path(), "mkfs.ext4 -q", "24M")) return "cannot";
    SimulatorOptions simulated;
    simulated.in_memory = *SimulatorWorld::InMemory(1, Bytes{64} << 20);
    const auto simulator = *Simulator::Open(simulated);
    LocalNetwork network;
    SessionOpened who;
    who.session = SessionId{1};
    JournalOptions options;
    options.directory = directory.path() / "journal";
    SessionOptions settings{.layout = Layout::kDirect};
    settings.deadlines = Deadlines(std::chrono::milliseconds(400));
    const auto session = *Session::Start(settings, *simulator, who, JournalWriter::OpenLasting(options, who.session),
                                         [&](const PeerIdentity& self, PeerDelegate& delegate) {
                                           return Result<std::unique_ptr<Peers>>(network.Join(self, delegate));
                                         });
    if (const Status paused = session->Pause(); !paused) return "before: " + paused.message();
    if (const Status resumed = session->Resume(); !resumed) return "before: " + resumed.message();
    const Frozen frozen(directory.path());
    if (!frozen.is()) return "cannot";
    std::string wrong;
    std::chrono::nanoseconds longest{0};
    for (int i = 0; i < 200; ++i) {
      const auto began = Now();
      const auto id = session->nccl().Create(k2M, Process::On(kDevice), 0, {});
      if (!id || !session->nccl().Release(*id)) wrong = "a call failed";
      longest = std::max<std::chrono::nanoseconds>(longest, Now() - began);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (longest > std::chrono::milliseconds(200)) wrong = "a call took " + std::to_string(longest.count()) + " ns";
    const auto began = Now();
    const Status refused = session->Pause();
    const auto took = Now() - began;
    frozen.Thaw();
    if (!wrong.empty()) return wrong;
    if (refused.code() != Code::kRefused || refused.message().find("has not answered for") == std::string::npos)
      return "frozen: " + refused.message();
    if (took < std::chrono::milliseconds(250) || took > std::chrono::seconds(3)) return "it was not refused at its deadline";
    if (const Status paused = session->Pause(); !paused) return "afterwards: " + paused.message();
    return session->Resume().message();
  });
}

}  // namespace
}  // namespace amem::test
