// Packs: the journals of a job in one compressed file, for a bug report or a test.
//
//   "AMEMPACK" 1, then one zstd stream of blocks, each behind its kind and length (little endian, 32 bits):
//     session  JSON: session, process, and status of the journal when it was packed
//     snapshot the state before the first event, when older events had been let go
//     event    as in the journal
//     damage   text: what could not be read of the journal
//     absent   text: a journal that could not be packed at all; of the whole pack
// The blocks of a session follow its first one. Facts are packed, not files: damaged records stay out, and the pack says so.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "statemachine/event.h"

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

// Writes `file` as OutputFile does, for its owner alone (0600). Live journals are packed as they are at that moment.
Result<Packed> Pack(std::span<const std::filesystem::path> sessions, const std::filesystem::path& file,
                    const PackOptions& options = {});

bool IsPack(const std::filesystem::path& file);

// What a pack is called in messages. A file of this name has what came from standard input.
inline constexpr const char* kStandardInputFile = "amem-standard-input";
std::string PackName(const std::filesystem::path& file);

struct Unpacked {
  std::vector<std::filesystem::path> sessions;  // directories, readable like any journal
  std::uint64_t events = 0;
  std::vector<std::string> damage;  // of the journals when they were packed, and of the pack itself: what was lost
};
// Makes a directory for each session in `directory`. A pack that is cut short or damaged gives what comes before that, and its
// damage; each of its journals then says of itself that it is incomplete (MarkIncomplete), because what is missing may be of
// any of them, or of one that is not there. A journal that was live keeps that word in a file `status` of its own. kRefused:
// the pack unpacks to more than 8 MiB and 64 times its own size, which journals never do: it may be made to fill memory and
// disk. `however_large` takes it all the same.
Result<Unpacked> Unpack(const std::filesystem::path& file, const std::filesystem::path& directory, bool however_large = false);

// Replaces what a bug report need not show, by the types of an event's fields (statemachine/texts.h): names of hosts, GPUs,
// boots, programs and threads, ids of jobs, folders. The same name becomes the same word in all journals that go through one
// object.
class Anonymizer {
 public:
  // The names in an event, so that they are found in a text for people that comes before it, or in another journal. Whatever is
  // to be cleaned is to be learned before.
  void Learn(const EventBody& event);
  void Clean(EventBody& event);
  // Known names, and everything that looks like an absolute path, within a text for people.
  [[nodiscard]] std::string CleanText(std::string text) const;

 private:
  struct Names;  // the fields of an event that are names
  struct FreeTexts;
  enum Kind : std::size_t { kHost, kGpu, kBoot, kProgram, kThread, kJob, kKinds };
  const std::string& WordFor(Kind kind, const std::string& name);

  std::map<std::string, std::string> words_[kKinds];  // by name
};

}  // namespace amem
