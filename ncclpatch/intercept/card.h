// A context of a network card that NCCL opened, with AMEM_NETWORK=renew: what is posted on its queue pairs and what has
// completed, counted without a lock, and the gate before it (cards.h).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ncclpatch/intercept/traffic_gate.h"
#include "ncclpatch/intercept/verbs_abi.h"

namespace amem::intercept {

// Addresses that sends read which asked for no completion, so nothing tells when they have ended. None: `begin` is not below
// `end`.
struct SilentRange {
  std::uint64_t begin = ~std::uint64_t{0}, end = 0;
  [[nodiscard]] SilentRange With(const SilentRange& other) const {
    return {std::min(begin, other.begin), std::max(end, other.end)};
  }
};

// A queue pair, as far as it is counted.
struct CountedPair {
  // Sends whose completion was asked for and has not come; in the upper half, posts of others that are inside the card's
  // function.
  std::atomic<std::int64_t> sends{0};
  std::atomic<std::int64_t> receives{0};
  // Of the last sends. NCCL makes such ones from host memory, to tell a peer of receives; they do no harm.
  std::atomic<std::uint64_t> silent_begin{~std::uint64_t{0}}, silent_end{0};
  [[nodiscard]] SilentRange silent() const {
    return {silent_begin.load(std::memory_order_relaxed), silent_end.load(std::memory_order_relaxed)};
  }
  void SetSilent(const SilentRange& range) {
    silent_begin.store(range.begin, std::memory_order_relaxed);
    silent_end.store(range.end, std::memory_order_relaxed);
  }
  std::atomic<bool> failed{false};  // a request ended with an error; what else did is not known
  std::uint32_t number = 0;
  bool signals_all = false, uncounted = false;
  // Receives that are open, without a send; 0: none, or not so. The card's mutex guards these three.
  std::int64_t steady = 0;  // as many since:
  std::chrono::steady_clock::time_point steady_since{};
  std::int64_t in_vain = 0;  // as many during the second half of an earlier wait, which was long
};

class Card final : public TrafficGate {
 public:
  void Open(verbs::Context* context);
  verbs::Functions GiveBack(verbs::Context& context);  // its functions are the library's again; those it had
  void Closed();                                       // the context is gone
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

 private:
  static constexpr unsigned kPageBits = 8, kNumberBits = 24;  // of a queue pair's number
  using Page = std::array<std::atomic<CountedPair*>, std::size_t{1} << kPageBits>;
  Traffic UnderWay() override;
  void BeginsToWait() override;
  void WaitedInVain(std::chrono::nanoseconds waited) override;
  [[nodiscard]] CountedPair* Find(std::uint32_t number) const;
  [[nodiscard]] CountedPair& Counted(std::uint32_t number);
  using Pairs = std::map<std::uint32_t, std::shared_ptr<CountedPair>>;
  std::atomic<CountedPair*>* PlaceOf(std::uint32_t number);  // null: no card has that many
  std::shared_ptr<CountedPair> End(Pairs::iterator pair);
  bool Enter(std::atomic<std::int64_t>& count, std::int64_t posted);

  std::atomic<verbs::Context*> context_{nullptr};
  std::string name_;
  verbs::Functions real_;
  CountedPair unseen_;  // of pairs that AMem did not see made
  std::atomic<bool> uses_unseen_{false};
  std::unique_ptr<std::array<std::atomic<Page*>, std::size_t{1} << (kNumberBits - kPageBits)>> pages_;
  std::mutex mutex_;  // guards the pairs' list
  Pairs pairs_;
  // The last ones, because a thread may still count there. NCCL ends thousands when it makes its communicators anew.
  std::array<std::shared_ptr<CountedPair>, 4096> ended_;
  std::size_t ended_so_far_ = 0;
};

}  // namespace amem::intercept
