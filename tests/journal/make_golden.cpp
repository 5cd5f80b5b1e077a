// Makes the golden journals of this build's format:  journal_make_golden tests/journal/golden/vN
// Run once when the format's version rises, never for a version that has been released.
#include <lmdb.h>

#include <cstdio>
#include <fstream>

#include "statemachine/apply.h"
#include "tests/journal/golden.h"

namespace amem::test {
namespace {

namespace fs = std::filesystem;

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "journal_make_golden: %s\n", status.message().c_str());
  std::exit(1);
}

// Only what is needed to read it: data.mdb without free pages, and the tail or `closed`.
void Keep(const fs::path& from, const fs::path& to) {
  fs::create_directories(to);
  MDB_env* env = nullptr;
  int rc = mdb_env_create(&env);
  if (rc == 0) rc = mdb_env_open(env, from.c_str(), MDB_RDONLY | MDB_NOLOCK, 0);
  if (rc == 0) rc = mdb_env_copy2(env, to.c_str(), MDB_CP_COMPACT);
  mdb_env_close(env);
  Require(rc == 0 ? Status{} : Status{Code::kIo, mdb_strerror(rc)});
  for (const char* file : {"tail", "closed"}) {
    if (fs::exists(from / file)) fs::copy_file(from / file, to / file, fs::copy_options::overwrite_existing);
  }
  std::ofstream(to / "expected.txt") << Describe(to);
}

// Dead, with every kind of event, the last third of them in the tail.
void Crashed(const fs::path& to) {
  const TemporaryDirectory directory;
  JournalOptions options;
  options.directory = directory.path();
  options.tail_bytes = 16 << 10;
  options.map_bytes = 1 << 20;
  auto writer = JournalWriter::Open(options, SessionId{0x60d1});
  Require(writer.status());
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    Require((*writer)->Append({SequenceNumber{kind + 1}, 1000 + kind, 77, Sample(kind)}));
    if (kind == kEventKinds * 2 / 3) Require((*writer)->Flush());
  }
  const fs::path session = (*writer)->Directory();
  writer->reset();
  Keep(session, to);
}

// Closed, with two snapshots, and the events before the first of them gone.
void Closed(const fs::path& to) {
  const TemporaryDirectory directory;
  JournalOptions options;
  options.directory = directory.path();
  options.tail_bytes = 16 << 10;
  options.map_bytes = 1 << 20;
  options.snapshot_every = 30;
  auto writer = JournalWriter::Open(options, SessionId{0x60d2});
  Require(writer.status());
  State state;
  for (std::uint64_t seq = 1; seq <= 70; ++seq) {
    Require(Apply(state, LegalEvent(seq)));
    Require((*writer)->Append(LegalEvent(seq)));
    if ((*writer)->SnapshotDue()) Require((*writer)->Snapshot(state));
  }
  Require((*writer)->Close());
  Keep((*writer)->Directory(), to);
}

}  // namespace
}  // namespace amem::test

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: journal_make_golden tests/journal/golden/vN\n");
    return 1;
  }
  amem::test::Crashed(std::filesystem::path(argv[1]) / "crashed");
  amem::test::Closed(std::filesystem::path(argv[1]) / "closed");
  return 0;
}
