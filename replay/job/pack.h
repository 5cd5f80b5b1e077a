// Packs: the journals of a job in one compressed file, for a bug report or a test.
//
//   "AMEMPACK" 1, then one zstd stream of blocks, each behind its kind and length (little endian, 32 bits):
//     session  JSON: session, process, and status of the journal when it was packed
//     snapshot the state before the first event, when older events had been let go
//     event    as in the journal
//     damage   text: what could not be read of the journal
// The blocks of a session follow its first one. Facts are packed, not files: damaged records stay out, and the pack says so.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

struct PackOptions {
  // Host names, GPU ids and paths become "host-1", "gpu-1" and file names.
  bool anonymous = false;
};
struct Packed {
  std::uint64_t sessions = 0, events = 0;
  Bytes file_bytes = 0;
  bool to_standard_output = false;
  std::vector<std::string> damage;  // what could not be read and is missing in the pack
};

// Writes `file` as OutputFile does. Live journals are packed as they are at that moment.
Result<Packed> Pack(std::span<const std::filesystem::path> sessions, const std::filesystem::path& file,
                    const PackOptions& options = {});

bool IsPack(const std::filesystem::path& file);

struct Unpacked {
  std::vector<std::filesystem::path> sessions;  // directories, readable like any journal
  std::uint64_t events = 0;
  std::vector<std::string> damage;  // of the journals when they were packed, and of the pack itself: what was lost
};
// Makes a directory for each session in `directory`. A pack that is cut short or damaged gives what comes before that, and its
// damage. A journal that was live keeps that word in a file `status` of its own. A pack that unpacks to far more than journals
// do is kRefused: it may be made to fill memory and disk. `however_large` takes it all the same.
Result<Unpacked> Unpack(const std::filesystem::path& file, const std::filesystem::path& directory, bool however_large = false);

// Replaces what a bug report need not show: host names, GPU and boot ids, ids of jobs, programs, paths.
// The same name becomes the same word in all journals that go through one object.
class Anonymizer {
 public:
  Event Clean(Event event);
  State Clean(State state);
  // Known names, and everything that looks like an absolute path, within a text for people.
  std::string CleanText(std::string text);

 private:
  void Clean(SessionOpened& who);
  void Clean(FreezeStep& freeze);
  void Clean(StepFailed& failed);
  static void Clean(LibraryAttached& library);
  std::string Word(std::map<std::string, std::string>& words, const std::string& name, const char* kind);
  std::string Host(const std::string& name) { return Word(hosts_, name, "host-"); }

  std::map<std::string, std::string> hosts_, gpus_, boots_, jobs_, programs_;
};

}  // namespace amem
