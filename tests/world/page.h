// What all ranks of a world share, and its conductor: one page of memory, also between processes.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "replay/peers/token.h"
#include "statemachine/event_cycle.h"
#include "statemachine/types.h"
#include "tests/world/settings.h"

namespace amem::world {

// What a pause or resume of all ranks has in store for them, by rank.
struct Fate {
  std::uint32_t delay_ms = 0;
  bool absent = false;             // it does not take part
  std::array<char, 24> call = {};  // of the driver, that fails; empty: none
  std::uint32_t nth = 0;
  std::int32_t result = 0;
  bool undo_too = false;      // memory of its own cannot be made anew either, where the pause is undone
  std::uint32_t hang_ms = 0;  // `call` does not fail, but takes so long once
  bool of_program = false;    // when the program makes it, and not the pause or resume
};

struct Order {
  CycleKind kind{};
  bool faulty = false;  // it may fail
  std::array<Fate, kMostRanks> fates = {};
};

struct Answer {
  std::atomic<std::uint64_t> order = 0;  // to which it is
  Code code{};
  std::int32_t driver_result = 0;
  std::uint32_t took_ms = 0;
  Lifecycle lifecycle{};                   // after it, also of a rank that stayed away
  bool began = false;                      // this order's pause or resume, or one of a tag,
  bool carried_out = false;                // and the order's succeeded
  std::array<bool, kMostRanks> with = {};  // these ranks were members of the last one of its kind
  std::array<char, 700> text = {};
};

// Memory that a rank has exported, for the others to import. Its contents do not change any more.
struct Offer {
  enum class State : std::uint8_t { kNone, kOpen, kWithdrawn } state{};
  bool legacy = false;
  std::array<std::uint16_t, kMostRanks> openings =
      {};  // of an IPC handle, by rank: its owner must not free the memory meanwhile
  std::int32_t owner = 0;
  Bytes bytes = 0;
  std::uint64_t value = 0;
  std::array<std::byte, kTokenBytes> token = {};
};

// Of whoever asks from outside.
struct ToolAnswer {
  std::atomic<Code> code{};
  std::array<char, 3000> text = {};
};

using OfRanks = std::array<std::atomic<bool>, kMostRanks>;
struct Page {
  pthread_mutex_t mutex;  // over the offers; robust
  std::array<Offer, 16> offers;
  OfRanks begun;  // its threads run
  std::array<std::atomic<std::uint64_t>, kMostRanks> sessions;
  OfRanks dead, gone;  // killed, and seen to have ended: on a busy machine that is later
  std::atomic<std::uint64_t> order_number;
  Order order;  // does not change until all have answered
  std::array<Answer, kMostRanks> answers;
  std::atomic<std::uint32_t> starving;                            // ranks that have no descriptor now
  std::atomic<std::uint64_t> starved;                             // how often one had none
  std::atomic<std::uint64_t> shortages;                           // of memory or disk, that began
  std::atomic<bool> short_of_something;                           // some rank, now
  std::atomic<std::uint64_t> stops, stops_ended;                  // of ranks' processes
  std::array<std::atomic<std::uint64_t>, kMostRanks> stopped_us;  // for how long, up to now
  // By rank (launches.h): how far it is in its script; and on each communicator, what it launched, and whose kernels have
  // ended.
  std::array<std::atomic<std::uint64_t>, kMostRanks> at;
  std::array<std::array<std::atomic<std::uint64_t>, kCommunicators>, kMostRanks> launched, ended;
  [[nodiscard]] auto Launched() const {
    std::array<std::array<std::uint64_t, kCommunicators>, kMostRanks> now{};
    for (std::size_t rank = 0; rank < now.size(); ++rank) std::ranges::copy(launched[rank], now[rank].begin());
    return now;
  }
  ToolAnswer tool;
  std::atomic<bool> found;                                      // something, by anybody
  std::atomic<std::uint32_t> stage;                             // Stage
  std::array<std::atomic<std::uint32_t>, kMostRanks> finished;  // the stage that this rank has ended
};

// What all ranks do, one after the other at the end.
enum Stage : std::uint32_t { kRunning, kStopping, kFreeingImports, kFreeingAll, kLeaving };

// How many ranks have been killed.
std::uint64_t Count(const OfRanks& ranks);
std::uint64_t Deaths(const Page& page);

// A file that processes share; empty: memory of this process.
std::shared_ptr<Page> OpenPage(const std::filesystem::path& file);

class OffersLock {
 public:
  explicit OffersLock(Page& page);
  ~OffersLock();
  OffersLock(const OffersLock&) = delete;
  OffersLock& operator=(const OffersLock&) = delete;

 private:
  Page& page_;
};

}  // namespace amem::world
