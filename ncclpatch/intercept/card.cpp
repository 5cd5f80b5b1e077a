// One card's contexts: what is posted on its queue pairs and what has completed, and the gate before it.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ncclpatch/intercept/cards.h"

namespace amem::intercept {
namespace {

thread_local bool t_connects = false;

constexpr std::int64_t kInside = std::int64_t{1} << 32;  // of CountedPair::sends: a post that has not returned

std::string Numbered(std::int64_t count, const char* one) { return fmt::format("{} {}{}", count, one, count == 1 ? "" : "s"); }

}  // namespace

bool Card::ThisThreadConnects() { return t_connects; }

void Card::Open(verbs::Context* context) {
  if (pages_ == nullptr) pages_ = std::make_unique<typename decltype(pages_)::element_type>();
  const auto* const device = context->device;
  name_ = device == nullptr ? "a card" : std::string(device->name, strnlen(device->name, sizeof device->name));
  real_ = verbs::Functions::Of(*context);
  uses_unseen_ = false;
  context_.store(context);
}

verbs::Functions Card::GiveBack(verbs::Context& context) {
  const verbs::Functions ours = verbs::Functions::Of(context);
  real_.SetIn(context);
  return ours;
}

void Card::Closed() {
  context_.store(nullptr);
  Reopen();
  const std::lock_guard lock(mutex_);
  while (!pairs_.empty()) End(pairs_.begin());
}

CountedPair* Card::Find(std::uint32_t number) const {
  if (number >> kNumberBits != 0) return nullptr;
  Page* const page = (*pages_)[number >> kPageBits].load(std::memory_order_acquire);
  return page == nullptr ? nullptr : (*page)[number % page->size()].load(std::memory_order_acquire);
}

std::atomic<CountedPair*>* Card::PlaceOf(std::uint32_t number) {
  if (number >> kNumberBits != 0) return nullptr;
  std::atomic<Page*>& page = (*pages_)[number >> kPageBits];
  if (page.load() == nullptr) page.store(new Page{}, std::memory_order_release);
  return &(*page.load())[number % std::tuple_size_v<Page>];
}

void Card::Add(const verbs::Pair& pair, const verbs::PairWanted& wanted) {
  t_connects = true;
  auto counted = std::make_shared<CountedPair>();
  counted->number = pair.number;
  counted->signals_all = wanted.signals_all != 0;
  counted->uncounted = wanted.shared_receives != nullptr;
  PutBack(std::move(counted));
}

void Card::PutBack(std::shared_ptr<CountedPair> pair) {
  CountedPair* const counted = pair.get();
  const std::lock_guard lock(mutex_);
  std::atomic<CountedPair*>* const place = PlaceOf(counted->number);
  if (const auto before = pairs_.find(counted->number); before != pairs_.end()) End(before);  // its end was not seen
  pairs_.emplace(counted->number, std::move(pair));  // the last for which there may be no memory
  if (place == nullptr)
    uses_unseen_ = true;
  else
    place->store(counted, std::memory_order_release);
}

CountedPair& Card::Counted(std::uint32_t number) {
  if (CountedPair* const found = Find(number)) [[likely]]
    return *found;
  uses_unseen_.store(true);
  return unseen_;
}

// Takes no memory: its page is there.
std::shared_ptr<CountedPair> Card::End(Pairs::iterator pair) {
  if (auto* const place = PlaceOf(pair->first)) place->store(nullptr, std::memory_order_release);
  std::shared_ptr<CountedPair> ended = std::move(pair->second);
  pairs_.erase(pair);
  ended_[ended_so_far_++ % ended_.size()] = ended;
  return ended;
}

std::shared_ptr<CountedPair> Card::Remove(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = pairs_.find(number);
  if (found == pairs_.end()) return nullptr;
  return End(found);
}

// The sends of one list, by what says that they have ended: a completion, which is counted; nothing, so that what they read is
// noted; or the call itself, which has copied what it sends inline.
struct SendsByEnd {
  std::int64_t signaled = 0;
  SilentRange silent;  // of those after the last one with a completion, which ends after all before it

  void Add(const verbs::Send& one, bool is_signaled) {
    if (is_signaled) *this = {.signaled = signaled + 1};
    if (is_signaled || (one.flags & verbs::kInline) != 0) return;
    for (int i = 0; i < one.count; ++i) silent = silent.With({one.parts[i].address, one.parts[i].address + one.parts[i].bytes});
  }
  // Without a completion, those of before are as silent as before.
  void NoteSilent(CountedPair& pair) const {
    if (silent.end != 0 || signaled != 0) pair.SetSilent(signaled != 0 ? silent : silent.With(pair.silent()));
  }
};

static bool IsSignaled(const verbs::Send& one, const CountedPair& pair) {
  return (one.flags & verbs::kSignaled) != 0 || pair.signals_all;
}

// From where on the card has taken none of a list. Without `bad` it cannot say so, and all count as taken.
template <class Work>
static Work* Refused(Work* work, Work** bad) {
  return bad == nullptr ? nullptr : *bad == nullptr ? work : *bad;
}

// Counts what is posted before the gate is checked. False: the gate stays shut, and nothing is counted.
bool Card::Enter(std::atomic<std::int64_t>& count, std::int64_t posted) {
  for (;;) {
    count.fetch_add(posted);
    if (!IsShut()) [[likely]]
      return true;
    count.fetch_sub(posted);
    if (!AwaitReopening()) return false;
  }
}

int Card::PostSend(verbs::Pair* pair, verbs::Send* work, verbs::Send** bad) {
  if (replacements::inert.load(std::memory_order_relaxed)) return real_.send(pair, work, bad);
  CountedPair& counted = Counted(pair->number);
  SendsByEnd sends;
  for (const verbs::Send* one = work; one != nullptr; one = one->next) sends.Add(*one, IsSignaled(*one, counted));
  // A send that is signaled is under way until its completion, so it needs no count of those that are inside.
  if (bad != nullptr) *bad = work;
  if (!Enter(counted.sends, sends.signaled > 0 ? sends.signaled : kInside)) return EIO;
  Forever<Cards>().Refresh(pair->domain, work);
  const SilentRange silent_before = counted.silent();
  sends.NoteSilent(counted);  // before they are under way
  const int result = real_.send(pair, work, bad);
  std::int64_t ended = sends.signaled > 0 ? 0 : kInside;
  if (result != 0) [[unlikely]] {
    // It may have taken silent ones, and not the signaled one after which they would have ended.
    const verbs::Send* const refused = Refused(work, bad);
    SendsByEnd taken;
    for (const verbs::Send* one = work; one != refused; one = one->next) taken.Add(*one, IsSignaled(*one, counted));
    counted.SetSilent(silent_before);
    taken.NoteSilent(counted);
    ended += sends.signaled - taken.signaled;
  }
  if (ended != 0) counted.sends.fetch_sub(ended);
  return result;
}

// A receive is what a peer is told of next, with the key of today.
int Card::PostReceive(verbs::Pair* pair, verbs::Receive* work, verbs::Receive** bad) {
  if (replacements::inert.load(std::memory_order_relaxed)) return real_.receive(pair, work, bad);
  CountedPair& counted = Counted(pair->number);
  const auto count = [](const verbs::Receive* first) {
    std::int64_t all = 0;
    for (; first != nullptr; first = first->next) ++all;
    return all;
  };
  if (bad != nullptr) *bad = work;
  if (!Enter(counted.receives, count(work))) return EIO;
  const int result = real_.receive(pair, work, bad);
  if (result != 0) counted.receives.fetch_sub(count(Refused(work, bad)));
  return result;
}

int Card::Poll(verbs::Queue* queue, int most, verbs::Completion* completions) {
  const int polled = real_.poll(queue, most, completions);
  for (int i = 0; i < polled; ++i) {
    CountedPair* const counted = Find(completions[i].number);
    if (counted == nullptr) continue;
    if (completions[i].status != 0)
      counted->failed.store(true);
    else
      ((completions[i].opcode & verbs::kReceived) != 0 ? counted->receives : counted->sends).fetch_sub(1);
  }
  return polled;
}

TrafficGate::Traffic Card::UnderWay() {
  if (uses_unseen_.load()) return {name_ + ": a queue pair is used that AMem has not seen made", true};
  const RegisteredRanges registered = Forever<Cards>().CoveredNow();
  const std::lock_guard lock(mutex_);
  Traffic first;
  std::size_t others = 0;
  for (const auto& [number, pair] : pairs_) {
    const std::int64_t sends = pair->sends.load(), receives = pair->receives.load();
    const bool failed = pair->failed.load();
    const bool silent = registered.HaveAnyOf(pair->silent().begin, pair->silent().end);
    if (const std::int64_t now = sends == 0 ? receives : 0; now != pair->steady) {
      pair->steady = now;
      pair->steady_since = std::chrono::steady_clock::now();
    }
    if (receives == 0) pair->in_vain = 0;
    if (sends == 0 && receives == 0 && !failed && !silent && !pair->uncounted) continue;
    const bool ahead = sends == 0 && receives != 0 && receives == pair->in_vain;
    if (failed || pair->uncounted || (silent && sends == 0)) first.for_ever = true;
    first.as_before = first.as_before || ahead;
    if (!first.what.empty()) {
      ++others;
      continue;
    }
    const char* const what = failed             ? ", after a request that failed"
                             : pair->uncounted  ? ", whose receives are shared"
                             : silent           ? ", and sends whose end nobody tells"
                             : ahead            ? ", as many as at an earlier pause, so perhaps posted ahead"
                             : sends >= kInside ? ", of which one is being posted"
                                                : "";
    first.what = fmt::format("{}: queue pair {} has {} and {} under way{}", name_, number, Numbered(sends % kInside, "send"),
                             Numbered(receives, "receive"), what);
  }
  if (others != 0) first.what += fmt::format(" (and {} more)", Numbered(static_cast<std::int64_t>(others), "queue pair"));
  return first;
}

// NCCL may post receives ahead (NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS), and one more for each that ends: a pair then never
// becomes quiet, and has as many open whenever the card is idle. One pause waits for them as long as it may, and later ones
// shortly.
void Card::BeginsToWait() {
  const std::lock_guard lock(mutex_);
  for (const auto& [number, pair] : pairs_) pair->steady = 0;
}
void Card::WaitedInVain(std::chrono::nanoseconds waited) {
  constexpr std::chrono::milliseconds kLong{200};
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  for (const auto& [number, pair] : pairs_)
    pair->in_vain = waited >= kLong && now - pair->steady_since >= waited / 2 ? pair->steady : 0;
}

}  // namespace amem::intercept
