// Launches of NCCL's, counted on each communicator and each pair of its ranks, and held where a stop is asked for: what a
// process knows of its own (statemachine/agreement/clocks.h has the rule, launches.h what is told of it).
//
// A call that launches passes through Launch, a group as one at its end, and every other call that its peers may have to wait
// for (communicators that are made or end, windows) through Pass. While the gate is open a launch costs one atomic addition and
// some stores of its own thread; whoever closes the gate has the kernel make those visible (membarrier). While it is closed all
// of that happens under one lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "journal/base/addressed_once.h"
#include "ncclpatch/nccl/communicators.h"
#include "ncclpatch/nccl/places.h"
#include "statemachine/agreement/launches.h"

namespace amem::nccl::launches {

// A count. One thread makes most launches of a communicator, and adds without a locked instruction; the others have a count of
// their own.
class Count {
 public:
  void Add(bool by_owner, std::int64_t some) noexcept {
    if (by_owner)
      own_.store(own_.load(std::memory_order_relaxed) + static_cast<std::uint64_t>(some), std::memory_order_relaxed);
    else
      others_.fetch_add(static_cast<std::uint64_t>(some), std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t value() const noexcept {
    return own_.load(std::memory_order_relaxed) + others_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t> own_{0}, others_{0};
};

// NCCL's operations that go on in the background. NCCL's answer that none goes on covers only those that had begun when it was
// asked, and a thread may report that answer late.
class Background {
 public:
  void Begin() noexcept { begun_.fetch_add(1); }
  [[nodiscard]] std::uint64_t begun() const noexcept { return begun_.load(); }
  void End(std::uint64_t begun) noexcept {
    std::uint64_t known = ended_.load();
    while (known < begun && !ended_.compare_exchange_weak(known, begun)) {
    }
  }
  [[nodiscard]] bool goes_on() const noexcept { return ended_.load() < begun_.load(); }

 private:
  std::atomic<std::uint64_t> begun_{0}, ended_{0};
};

enum class Life : std::uint8_t {
  kLives,
  kEnding,  // the program ends it, and NCCL frees it
  kEnded,
};

enum class Shape : std::uint8_t { kCollective, kSend, kReceive, kNothing };  // kNothing: a call that needs it to live

struct Counted;
// What NCCL was told when it asked whether a stream is captured, during one call.
struct Capture {
  bool captures = false;
  bool several = false;         // into different graphs
  const void* graph = nullptr;  // null: NCCL did not ask for it
  std::uint64_t id = 0;         // of the capture, which no other of the process has; 0: not asked for
};
struct Launched {
  Counted* counted = nullptr;  // null: of a communicator that is not known
  Shape shape{};
  std::int32_t peer = -1;
  Stream stream = nullptr;
  bool on_stream = true;  // else the host alone waits for the other ranks
  Capture capture;        // in a group: as NCCL was told in the call; it asks once for each stream of a communicator
};

// The rank of a communicator that this process has.
struct Member {
  CommunicatorId id;
  std::size_t place = 0;   // of its library
  std::uint64_t name = 0;  // Communicator::name
  std::int32_t rank = -1, ranks = 0, device = -1;
};

// How often a rank has launched, alone and with each other rank.
class Counts {
 public:
  // Once the number of ranks is known; nothing has been launched before.
  void SetRanks(std::int32_t ranks) { pairs_ = std::vector<Count>(2 * static_cast<std::size_t>(ranks)); }
  // `thread`: the state of the thread that launches. The first one owns the counts.
  void Add(const Launched& one, const Member& member, const void* thread, std::int64_t some) noexcept {
    const void* owner = owner_.load(std::memory_order_relaxed);
    if (owner == nullptr) [[unlikely]]
      if (owner_.compare_exchange_strong(owner, thread)) owner = thread;
    const bool by_owner = owner == thread;
    if (one.shape == Shape::kNothing) return;
    if (one.shape == Shape::kCollective) return collectives_.Add(by_owner, some);
    const std::size_t ranks = pairs_.size() / 2;
    if (one.peer == member.rank || one.peer < 0 || static_cast<std::size_t>(one.peer) >= ranks)
      return;  // NCCL refuses the latter
    pairs_[static_cast<std::size_t>(one.peer) + (one.shape == Shape::kSend ? 0 : ranks)].Add(by_owner, some);
  }
  [[nodiscard]] std::uint64_t collectives() const noexcept { return collectives_.value(); }
  [[nodiscard]] std::uint64_t WithPeer(std::int32_t peer, bool sends) const noexcept {
    const std::size_t at = static_cast<std::size_t>(peer) + (sends ? 0 : pairs_.size() / 2);
    return at < pairs_.size() ? pairs_[at].value() : 0;
  }

 private:
  std::atomic<const void*> owner_{nullptr};
  Count collectives_;
  std::vector<Count> pairs_;  // to each rank, then from each
};

// The streams on which a rank has launched, while they can all be waited for. Under the lock, but for the last one.
class LaunchStreams {
 public:
  void Add(Stream stream);
  bool Remove(Stream stream);  // false: it has launched nothing there
  void CannotAwait(const char* why) noexcept { unawaited_.store(why); }

  [[nodiscard]] bool IsLast(Stream stream) const noexcept { return last_.load(std::memory_order_relaxed) == stream; }
  [[nodiscard]] bool Has(Stream stream) const noexcept { return std::ranges::find(all_, stream) != all_.end(); }
  [[nodiscard]] const std::vector<Stream>& all() const noexcept { return all_; }
  [[nodiscard]] const char* unawaited() const noexcept { return unawaited_.load(); }  // why they cannot all be waited for

 private:
  static inline const Stream kNone = const_cast<char*>("none");

  std::atomic<Stream> last_{kNone};
  std::atomic<const char*> unawaited_{nullptr};
  std::vector<Stream> all_;
};

// Whether a communicator lives, and who still needs what is known of it.
struct Lifetime {
  std::atomic<Life> life{Life::kLives};
  // The thread whose group ends it, while that is open; a mark for good if it ends in the background, where its end is not
  // seen. Null: neither (MayStillRun).
  std::atomic<const void*> still_ends{nullptr};
  int held = 0;  // under the lock: threads that wait at the gate to call NCCL with it
};

// What of one communicator of this process is counted. Its address is found by FindCounted; it outlives the communicator by
// far.
struct Counted {
  Member member;
  Counts counts;
  LaunchStreams streams;
  Lifetime lifetime;
  Background background;
  std::atomic<const char*> uncounted{nullptr};  // a call whose launches this cannot see
  std::atomic<const char*> captured{nullptr};   // why some graph's launches on it are not counted

  [[nodiscard]] bool lives() const noexcept { return lifetime.life.load() == Life::kLives; }
  [[nodiscard]] bool ended() const noexcept { return lifetime.life.load() == Life::kEnded; }
};

// ---- what the registry knows, as it learns it

void Began(const Communicator& known) noexcept;
void Bound(CommunicatorId id, const ncclComm* address) noexcept;
void Ready(const Communicator& now) noexcept;
void Unbound(const ncclComm* address) noexcept;
void Ended(CommunicatorId id) noexcept;
// Its end has been asked for, and goes on in this thread's group or in the background.
void EndsLater(CommunicatorId id, bool in_group) noexcept;
void GroupHasEnded() noexcept;
// Before NCCL frees it: wakes the threads held at the gate with it, and waits for a second at most until they have left.
void LetHeldLeave(CommunicatorId id) noexcept;
std::uint64_t Begun(const ncclComm* address) noexcept;                 // in the background, before NCCL is asked about it
void Finished(const ncclComm* address, std::uint64_t begun) noexcept;  // nothing of that goes on
// A communicator whose launches cannot be counted, because of this call; null: some.
void CannotCount(const ncclComm* address, const char* call) noexcept;
// NCCL makes a communicator in the background, and writes its address later than anybody here sees.
void WrittenLater() noexcept;
// The program captures what this thread launches into a graph (CapturesSeen: NCCL asks before each launch, and its question is
// seen).
void NoteCapture(bool captures, const void* graph = nullptr, std::uint64_t id = 0) noexcept;
// Whether a launch that counts is on that stream, so that it is waited for.
bool IsAwaited(Stream stream) noexcept;
// A call that destroys a stream. What still runs there can be waited for no more. Before the driver has answered, its handle
// may be another's.
class StreamEnding {
 public:
  explicit StreamEnding(Stream stream) noexcept;
  void Done(bool is_gone, bool was_done) noexcept;  // is_gone false: the driver has refused

 private:
  const Stream stream_;
  std::vector<CommunicatorId> of_;  // that have launched there
};

// ---- calls

struct ThreadState {
  struct Found {
    const ncclComm* address = nullptr;
    Counted* counted = nullptr;
  };
  std::uint64_t generation = 0;  // of `found`
  Found found[4];
  Place* place = nullptr;  // this thread's, in the list of threads
  bool launching = false;  // inside a call that is counted: what NCCL calls then is not the program's
  Capture capture;         // of what that call launches
};
extern constinit thread_local ThreadState t_launches;
extern constinit std::atomic<bool> g_closed;
extern constinit std::atomic<std::uint64_t> g_generation;  // of which communicator has which address

Counted* LearnCounted(const ncclComm* address) noexcept;
inline ThreadState& OfThread() noexcept { return AddressedOnce(t_launches); }
inline Counted* FindCounted(const ncclComm* address, const ThreadState& state = OfThread()) noexcept {
  const ThreadState::Found& one = state.found[(reinterpret_cast<std::uintptr_t>(address) >> 12U) % std::size(state.found)];
  const bool known = state.generation == g_generation.load(std::memory_order_acquire) && one.address == address;
  return known ? one.counted : LearnCounted(address);
}
Place& PlaceOfThread() noexcept;

// Whether NCCL must get the call also if a communicator in it ended meanwhile: else its group would stay open.
enum class Made : std::uint8_t { kIfAllLive, kAlways };
enum class Entered : std::uint8_t { kCounted, kRefused, kWithEnding };
// Closed gate: waits until the launch is allowed, and counts it.
Entered EnterClosed(const char* call, std::span<const Launched> launched, Made made) noexcept;
void LeftWithEnding(std::span<const Launched> launched) noexcept;
void Undo(std::span<const Launched> launched) noexcept;
void AfterLaunch(std::span<const Launched> launched, int result) noexcept;  // what is not the ordinary case

inline void AddTo(const Launched& one, std::int64_t some, const ThreadState& state = OfThread()) noexcept {
  one.counted->counts.Add(one, one.counted->member, &state, some);
}
inline void CountOne(const Launched& one, const ThreadState& state = OfThread()) noexcept {
  one.counted == nullptr ? CannotCount(nullptr, nullptr) : AddTo(one, 1, state);
}

inline bool IsOnLastStream(const Launched& one) noexcept {
  return one.counted == nullptr || !one.on_stream || one.counted->streams.IsLast(one.stream);
}

// Makes a call of NCCL's that launches. `launched` may be empty: a call that others may have to wait for.
template <class Call>
int Launch(const char* name, std::span<const Launched> launched, const Call& call, Made made = Made::kIfAllLive,
           ThreadState& state = OfThread()) noexcept {
  if (state.launching) return call();
  Place& place = state.place != nullptr ? *state.place : PlaceOfThread();
  std::atomic<const char*>& inside = place.inside;
  Entered entered = Entered::kCounted;
  place.on.store(launched.empty() || launched[0].counted == nullptr ? 0 : launched[0].counted->member.id.value,
                 std::memory_order_relaxed);
  inside.store(name, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (g_closed.load(std::memory_order_relaxed)) [[unlikely]] {
    inside.store(nullptr, std::memory_order_release);
    entered = EnterClosed(name, launched, made);
    if (entered == Entered::kRefused) return kInvalidUsage;
  } else {
    for (const Launched& one : launched) CountOne(one, state);
  }
  state.launching = true;
  const int result = call();
  state.launching = false;
  // A stop that begins meanwhile waits until this thread is no longer inside.
  bool is_ordinary = result == kSuccess && !state.capture.captures;
  for (const Launched& one : launched) is_ordinary = is_ordinary && !one.capture.captures && IsOnLastStream(one);
  if (!is_ordinary) [[unlikely]]
    AfterLaunch(launched, result);
  if (entered == Entered::kWithEnding) [[unlikely]]
    LeftWithEnding(launched);
  inside.store(nullptr, std::memory_order_release);
  return result;
}
// Makes a call of NCCL's in a group, at whose end it launches.
template <class Call>
int InGroup(Launched& one, const Call& call) noexcept {
  ThreadState& state = OfThread();
  state.launching = true;
  const int result = call();
  state.launching = false;
  one.capture = std::exchange(state.capture, {});
  return result;
}
template <class Call>
int Pass(const char* name, const ncclComm* comm, const Call& call) noexcept {
  const Launched one{.counted = comm == nullptr ? nullptr : FindCounted(comm), .shape = Shape::kNothing, .on_stream = false};
  return Launch(name, {&one, one.counted != nullptr ? std::size_t{1} : std::size_t{0}}, call);
}

// ---- the stop; one thread at a time

agreement::LaunchReading Read();
// Closes the gate, or takes the targets of a later order, and reads.
agreement::LaunchReading Hold(const agreement::LaunchOrder& order);
void LetGo();
int HeldNow();  // threads
// On which something was launched for communicators that live.
std::vector<std::pair<DeviceOrdinal, Stream>> Streams();

// Around fork, as of the registry, whose lock is taken first.
void BeforeFork();
void AfterFork();

}  // namespace amem::nccl::launches
