// With AMEM_NETWORK=renew: what NCCL registers with network cards by verbs, so that a pause can undo it and a resume do it
// again.
//
// NCCL reads a registration's keys anew for each request, from the ibv_mr. So what it gets of its net buffers is an ibv_mr of
// AMem's, a shadow, whose keys follow the registration that is there today. One registration stands behind each shadow.
//
// A card must have nothing under way that uses a key which is about to end. So AMem counts, in the contexts that NCCL opens,
// what is posted on each queue pair and what has completed, by two functions of its own in the context for posting, and one
// for polling. Once a card is quiet it is shut: what NCCL posts then waits until the registrations are there again, and keys
// in it that have ended since are replaced by those of today, by address.
//
// Everything that does not fit is left as it was, and its memory stays: a registration on another thread than a communicator's
// service thread (windows, transfers from kernels, one-sided ones: their keys are told to others once); at another IO address;
// of other memory than NCCL's own; of a context that AMem did not see opened; and all while receives are posted ahead, because
// what a peer has been told then cannot be counted.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "ncclpatch/intercept/registrations.h"
#include "ncclpatch/intercept/verbs_abi.h"
#include "replay/cycle/network.h"

namespace amem::intercept {

// A queue pair of a context that NCCL opened, as far as it is counted.
struct CountedPair {
  // Posts that are inside the card's function, in the upper half; sends whose completion was asked for and has not come.
  std::atomic<std::int64_t> sends{0};
  std::atomic<std::int64_t> receives{0};
  // The addresses of what the last sends read, which asked for no completion, so that nobody says when they have ended. NCCL
  // sends so from host memory, where it tells a peer of receives; that does no harm. None: `begin` is not below `end`.
  std::atomic<std::uint64_t> silent_begin{~std::uint64_t{0}}, silent_end{0};
  std::atomic<bool> failed{false};  // a request ended with an error; what else did is not known
  std::uint32_t number = 0;
  bool signals_all = false, uncounted = false;
};

// A context that NCCL opened. Its counters are found without a lock.
class Card {
 public:
  void Open(verbs::Context* context);
  void Close();  // its functions are the library's again
  [[nodiscard]] bool Is(const verbs::Context* context) const { return context != nullptr && context_.load() == context; }
  [[nodiscard]] bool in_use() const { return context_.load() != nullptr; }
  [[nodiscard]] std::string name() const { return name_; }

  // This thread has made a queue pair, as the one does that connects to a card.
  [[nodiscard]] static bool ThisThreadConnects();
  void Add(const verbs::Pair& pair, const verbs::PairWanted& wanted);
  std::shared_ptr<CountedPair> Remove(std::uint32_t number);  // null: it was not there
  void PutBack(std::shared_ptr<CountedPair> pair);

  int PostSend(verbs::Pair* pair, verbs::Send* work, verbs::Send** bad);
  int PostReceive(verbs::Pair* pair, verbs::Receive* work, verbs::Receive** bad);
  int Poll(verbs::Queue* queue, int most, verbs::Completion* completions);

  // Shuts the card if it is quiet. Otherwise what is under way, for people; empty: it is shut.
  std::string Shut();
  void Reopen();  // what waits goes on
  [[nodiscard]] bool IsShut() const { return shut_.load(); }
  [[nodiscard]] std::string Busy();                                   // empty: it is quiet
  [[nodiscard]] bool IsHopeless() const { return hopeless_.load(); }  // waiting longer for what Busy said is in vain

 private:
  static constexpr unsigned kPageBits = 8, kNumberBits = 24;  // of a queue pair's number
  using Page = std::array<std::atomic<CountedPair*>, std::size_t{1} << kPageBits>;
  [[nodiscard]] CountedPair* Find(std::uint32_t number) const;
  bool Put(CountedPair* pair, std::uint32_t number);
  [[nodiscard]] bool AwaitReopening();  // false: its communicator ends, so the request is refused

  std::atomic<verbs::Context*> context_{nullptr};
  std::string name_;
  verbs::PollQueue* poll_ = nullptr;
  verbs::PostSend* send_ = nullptr;
  verbs::PostReceive* receive_ = nullptr;
  std::atomic<bool> shut_{false};
  std::atomic<bool> uncounted_{false};  // a pair that AMem did not see made was used
  std::atomic<bool> hopeless_{false};
  std::unique_ptr<std::array<std::atomic<Page*>, std::size_t{1} << (kNumberBits - kPageBits)>> pages_;
  std::mutex mutex_;  // guards the pairs' list
  std::map<std::uint32_t, std::shared_ptr<CountedPair>> pairs_;
  std::vector<std::shared_ptr<CountedPair>> ended_;  // a thread may still count there
};

class Cards final : public Network {
 public:
  // From now on registrations are renewed.
  void Begin() { on_.store(true); }
  [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }

  // How one is made again. `again` returns null and sets errno if it fails.
  struct Way {
    verbs::Domain* domain = nullptr;
    std::uint32_t access = 0;
    bool at_its_address = true;  // the card is told the memory's own address
    std::function<verbs::Region*()> again;
    std::function<int(verbs::Region*)> undo;  // as ibv_dereg_mr
  };
  // What NCCL gets for `real`, which the card has just given. Null: that registration pins, and `pins` says why. The caller
  // holds Registering, and records it.
  verbs::Region* Shadow(verbs::Region* real, const Extent& part, const Way& way, Registered* record, std::string* pins);
  // Undoes the registration behind `handle`, which may be a shadow; without one behind it, succeeds. `real_call` as
  // ibv_dereg_mr.
  int Deregister(void* handle, const std::function<int(void*)>& real_call);
  // What a shadow stands for now; `handle` itself if it is none.
  [[nodiscard]] void* Behind(void* handle);

  // What the library did, in NCCL's calls. Each does nothing for a context that is not counted.
  void Opened(verbs::Context* context);
  void Closing(verbs::Context* context);
  Card* CardOf(const verbs::Context* context);  // null: not counted

  // A communicator ends: its threads wait for no card any more. Once it has ended, threads that are not joined may still come
  // until the cards are open again.
  void Ending(CommunicatorId id, bool begins);
  [[nodiscard]] bool MayWait(CommunicatorId id);  // the caller holds `waiting`
  [[nodiscard]] bool MayWait();                   // of this thread's communicator; the caller does not hold it

  // Puts today's keys into requests that were made before a renewal.
  void Refresh(const verbs::Domain* domain, verbs::Send* work);
  [[nodiscard]] bool IsOfGpu(std::uint64_t address) const {
    return address >= lowest_.load(std::memory_order_relaxed) && address < highest_.load(std::memory_order_relaxed);
  }
  // Whether a registration behind a shadow has any of these addresses. As of the last Publish.
  [[nodiscard]] bool HaveAnyOf(std::uint64_t begin, std::uint64_t end);
  [[nodiscard]] bool HaveRenewed() const { return renewed_.load(std::memory_order_acquire); }
  std::condition_variable reopened;
  std::mutex waiting;

  // ---- Network
  std::vector<Kept> Drain(const std::vector<RegionId>& regions, Deadline until) override;
  Status Deregister(RegionId region) override;
  Status Register(RegionId region) override;
  void Open() override;

 private:
  struct Held {
    verbs::Region shadow{};
    verbs::Region* real = nullptr;  // null while paused
    RegionId id;
    Extent part;
    Way way;
    Card* card = nullptr;
    std::uint32_t ended_remote_key = 0;
  };
  void Publish();  // the ranges for Refresh and HaveAnyOf; the caller holds mutex_

  std::atomic<bool> on_{false};
  std::atomic<bool> renewed_{false};
  std::atomic<std::uint64_t> lowest_{~std::uint64_t{0}}, highest_{0};
  std::mutex mutex_;  // guards the shadows
  std::map<const void*, std::unique_ptr<Held>> shadows_;
  std::map<RegionId, Held*> by_id_;
  std::map<const verbs::Domain*, std::uint64_t> domains_;  // by numbers for the journal
  std::uint64_t next_domain_ = 0;
  struct Range {
    std::uint64_t begin = 0, end = 0;
    const verbs::Domain* domain = nullptr;
    std::uint32_t local_key = 0, remote_key = 0;
    std::uint32_t ended_remote_key = 0;  // before the last renewal
  };
  std::shared_mutex ranges_mutex_;
  std::vector<Range> ranges_;  // by begin
  std::uint64_t longest_ = 0;
  bool dirty_ = false;                  // ranges_ are not today's; guarded by mutex_
  std::vector<CommunicatorId> ending_;  // guarded by `waiting`
};

// For Runtime::Above: the cards, and the plugins whose registrations are renewed.
Network* Renew();

}  // namespace amem::intercept
