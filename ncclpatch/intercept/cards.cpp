#include "ncclpatch/intercept/cards.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "ncclpatch/nccl/attribution.h"

namespace amem::intercept {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMostCards = 64;  // further ones are not counted
constinit std::array<std::atomic<Card*>, kMostCards> g_cards{};
constinit std::mutex g_cards_mutex;  // guards opening and closing

// This thread has made a queue pair, as the one does that connects to a card.
thread_local bool t_connects = false;

constexpr std::int64_t kInside = std::int64_t{1} << 32;  // of CountedPair::sends: a post that has not returned

template <std::size_t C>
struct OfCard {
  static int Send(verbs::Pair* pair, verbs::Send* work, verbs::Send** bad) noexcept {
    return g_cards[C].load(std::memory_order_acquire)->PostSend(pair, work, bad);
  }
  static int Receive(verbs::Pair* pair, verbs::Receive* work, verbs::Receive** bad) noexcept {
    return g_cards[C].load(std::memory_order_acquire)->PostReceive(pair, work, bad);
  }
  static int Poll(verbs::Queue* queue, int most, verbs::Completion* completions) noexcept {
    return g_cards[C].load(std::memory_order_acquire)->Poll(queue, most, completions);
  }
};
struct CardCalls {
  verbs::PostSend* send;
  verbs::PostReceive* receive;
  verbs::PollQueue* poll;
};
template <std::size_t... C>
constexpr auto CallsOfAll(std::index_sequence<C...>) {
  return std::array{CardCalls{&OfCard<C>::Send, &OfCard<C>::Receive, &OfCard<C>::Poll}...};
}
constexpr auto kCallsOfCards = CallsOfAll(std::make_index_sequence<kMostCards>());

std::string Counted(std::int64_t count, const char* one) { return fmt::format("{} {}{}", count, one, count == 1 ? "" : "s"); }

void SetKey(std::uint32_t& field, std::uint32_t value) {  // NCCL's threads may read it
  std::atomic_ref(field).store(value, std::memory_order_relaxed);
}

}  // namespace

// ---- one card

void Card::Open(verbs::Context* context) {
  if (pages_ == nullptr) pages_ = std::make_unique<typename decltype(pages_)::element_type>();
  const auto* const device = context->device;
  name_ = device == nullptr ? "a card" : std::string(device->name, strnlen(device->name, sizeof device->name));
  poll_ = context->poll;
  send_ = context->send;
  receive_ = context->receive;
  shut_ = uncounted_ = false;
  context_.store(context);
}

void Card::Close() {
  verbs::Context* const context = context_.exchange(nullptr);
  if (context == nullptr) return;
  context->poll = poll_;
  context->send = send_;
  context->receive = receive_;
  Reopen();
  const std::lock_guard lock(mutex_);
  for (auto& [number, pair] : pairs_) {
    Put(nullptr, number);
    ended_.push_back(pair);
  }
  pairs_.clear();
}

CountedPair* Card::Find(std::uint32_t number) const {
  if (number >> kNumberBits != 0) return nullptr;
  Page* const page = (*pages_)[number >> kPageBits].load(std::memory_order_acquire);
  return page == nullptr ? nullptr : (*page)[number % page->size()].load(std::memory_order_acquire);
}

bool Card::Put(CountedPair* pair, std::uint32_t number) {
  if (number >> kNumberBits != 0) return false;
  std::atomic<Page*>& place = (*pages_)[number >> kPageBits];
  if (place.load() == nullptr) place.store(new Page{}, std::memory_order_release);
  (*place.load())[number % std::tuple_size_v<Page>].store(pair, std::memory_order_release);
  return true;
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
  const std::lock_guard lock(mutex_);
  if (!Put(pair.get(), pair->number)) uncounted_ = true;
  pairs_[pair->number] = std::move(pair);
}

std::shared_ptr<CountedPair> Card::Remove(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = pairs_.find(number);
  if (found == pairs_.end()) return nullptr;
  Put(nullptr, number);
  ended_.push_back(found->second);
  return std::move(pairs_.extract(found).mapped());
}

bool Card::AwaitReopening() {
  Cards& cards = Forever<Cards>();
  const CommunicatorId communicator = nccl::CurrentCommunicator();
  std::unique_lock lock(cards.waiting);
  cards.reopened.wait(lock, [&] { return !shut_.load() || !cards.MayWait(communicator); });
  return !shut_.load();
}

int Card::PostSend(verbs::Pair* pair, verbs::Send* work, verbs::Send** bad) {
  if (replacements::inert.load(std::memory_order_relaxed)) return send_(pair, work, bad);
  Cards& cards = Forever<Cards>();
  CountedPair* const counted = Find(pair->number);
  constexpr std::uint64_t kNone = ~std::uint64_t{0};
  std::int64_t signaled = 0;
  std::uint64_t silent_begin = kNone, silent_end = 0;
  for (const verbs::Send* one = work; one != nullptr; one = one->next) {
    if ((one->flags & verbs::kSignaled) != 0 || (counted != nullptr && counted->signals_all)) {
      ++signaled;
      silent_begin = kNone, silent_end = 0;
    } else if ((one->flags & verbs::kInline) == 0) {
      for (int i = 0; i < one->count; ++i) {
        silent_begin = std::min(silent_begin, one->parts[i].address);
        silent_end = std::max(silent_end, one->parts[i].address + one->parts[i].bytes);
      }
    }
  }
  if (counted == nullptr) uncounted_.store(true);
  // Whoever shuts the card sees this count, or this thread sees that it is shut.
  const std::int64_t counts = kInside + signaled;
  for (;;) {
    if (counted != nullptr) counted->sends.fetch_add(counts);
    if (!shut_.load()) [[likely]]
      break;
    if (counted != nullptr) counted->sends.fetch_sub(counts);
    if (!AwaitReopening()) return EIO;
  }
  if (cards.HaveRenewed()) cards.Refresh(pair->domain, work);
  if (counted != nullptr && (silent_end != 0 || signaled != 0)) {
    if (signaled == 0) {  // those of before are as silent
      silent_begin = std::min(silent_begin, counted->silent_begin.load(std::memory_order_relaxed));
      silent_end = std::max(silent_end, counted->silent_end.load(std::memory_order_relaxed));
    }
    counted->silent_begin.store(silent_begin, std::memory_order_relaxed);
    counted->silent_end.store(silent_end, std::memory_order_relaxed);
  }
  const int result = send_(pair, work, bad);
  std::int64_t refused = 0;
  if (result != 0 && bad != nullptr) {
    for (const verbs::Send* one = *bad; one != nullptr; one = one->next)
      refused += (one->flags & verbs::kSignaled) != 0 || (counted != nullptr && counted->signals_all) ? 1 : 0;
  }
  if (counted != nullptr) counted->sends.fetch_sub(kInside + refused);
  return result;
}

// A receive is what a peer is told of next, with the key of today.
int Card::PostReceive(verbs::Pair* pair, verbs::Receive* work, verbs::Receive** bad) {
  if (replacements::inert.load(std::memory_order_relaxed)) return receive_(pair, work, bad);
  CountedPair* const counted = Find(pair->number);
  const auto count = [](const verbs::Receive* first) {
    std::int64_t all = 0;
    for (; first != nullptr; first = first->next) ++all;
    return all;
  };
  const std::int64_t posted = count(work);
  if (counted == nullptr) uncounted_.store(true);
  for (;;) {
    if (counted != nullptr) counted->receives.fetch_add(posted);
    if (!shut_.load()) [[likely]]
      break;
    if (counted != nullptr) counted->receives.fetch_sub(posted);
    if (!AwaitReopening()) return EIO;
  }
  const int result = receive_(pair, work, bad);
  if (result != 0 && bad != nullptr && counted != nullptr) counted->receives.fetch_sub(count(*bad));
  return result;
}

int Card::Poll(verbs::Queue* queue, int most, verbs::Completion* completions) {
  const int polled = poll_(queue, most, completions);
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

std::string Card::Busy() {
  hopeless_ = uncounted_.load();
  if (hopeless_) return name_ + ": a queue pair is used that AMem has not seen made";
  const std::lock_guard lock(mutex_);
  std::string first;
  std::size_t others = 0;
  for (const auto& [number, pair] : pairs_) {
    const std::int64_t sends = pair->sends.load(), receives = pair->receives.load();
    const bool failed = pair->failed.load();
    const bool silent = Forever<Cards>().HaveAnyOf(pair->silent_begin.load(), pair->silent_end.load());
    if (sends == 0 && receives == 0 && !failed && !silent && !pair->uncounted) continue;
    if (failed || pair->uncounted || (silent && sends == 0)) hopeless_ = true;
    if (!first.empty()) {
      ++others;
      continue;
    }
    const char* const what = failed             ? ", after a request that failed"
                             : pair->uncounted  ? ", whose receives are shared"
                             : silent           ? ", and sends whose end nobody tells"
                             : sends >= kInside ? ", of which one is being posted"
                                                : "";
    first = fmt::format("{}: queue pair {} has {} and {} under way{}", name_, number, Counted(sends % kInside, "send"),
                        Counted(receives, "receive"), what);
  }
  return others == 0 ? first : first + fmt::format(" (and {} more)", Counted(static_cast<std::int64_t>(others), "queue pair"));
}

std::string Card::Shut() {
  std::string busy = Busy();
  if (!busy.empty()) return busy;
  shut_.store(true);
  for (int tries = 0; tries < 20; ++tries) {  // a thread may be on its way to the wait
    busy = Busy();
    if (busy.empty()) return {};
    std::this_thread::sleep_for(50us);
  }
  Reopen();
  return busy;
}

void Card::Reopen() {
  Cards& cards = Forever<Cards>();
  {
    const std::lock_guard lock(cards.waiting);
    shut_.store(false);
  }
  cards.reopened.notify_all();
}

// ---- all cards

void Cards::Opened(verbs::Context* context) {
  if (!on() || context == nullptr) return;
  const std::lock_guard lock(g_cards_mutex);
  for (std::size_t i = 0; i < kMostCards; ++i) {
    Card* card = g_cards[i].load();
    if (card != nullptr && card->in_use()) continue;
    if (card == nullptr) card = new Card;  // never destroyed: a thread may be inside
    card->Open(context);
    g_cards[i].store(card, std::memory_order_release);
    context->send = kCallsOfCards[i].send;
    context->receive = kCallsOfCards[i].receive;
    context->poll = kCallsOfCards[i].poll;
    return;
  }
}

void Cards::Closing(verbs::Context* context) {
  const std::lock_guard lock(g_cards_mutex);
  if (Card* const card = CardOf(context)) card->Close();
}

Card* Cards::CardOf(const verbs::Context* context) {
  if (!on()) return nullptr;
  for (const auto& place : g_cards) {
    Card* const card = place.load(std::memory_order_acquire);
    if (card == nullptr) return nullptr;
    if (card->Is(context)) return card;
  }
  return nullptr;
}

verbs::Region* Cards::Shadow(verbs::Region* real, const Extent& part, const Way& way, Registered* record, std::string* pins) {
  Session* const session = Runtime::Get().started();
  if (!on() || session == nullptr || part.bytes == 0) return nullptr;
  Card* const card = way.domain == nullptr ? nullptr : CardOf(way.domain->context);
  *pins = session->WhyPins(part);
  if (!pins->empty()) return nullptr;
  if (!nccl::OnServiceThread() || !t_connects)
    *pins = "it was not registered by the thread that serves a communicator's connections";
  else if (!way.at_its_address)
    *pins = "the card knows it by another address";
  else if (card == nullptr)
    *pins = "AMem did not see its card opened";
  if (!pins->empty()) return nullptr;
  auto made = std::make_unique<Held>();
  made->shadow = *real;
  made->real = real;
  made->part = part;
  made->way = way;
  made->card = card;
  const std::lock_guard lock(mutex_);
  made->id = Registrations::NewRegion();
  std::uint64_t& domain = domains_[way.domain];
  if (domain == 0) domain = ++next_domain_;
  record->region = made->id;
  record->card = card->name();
  record->domain = domain;
  record->access_flags = way.access;
  Held* const held = made.get();
  by_id_[held->id] = held;
  shadows_[&held->shadow] = std::move(made);
  lowest_.store(std::min(lowest_.load(), part.address.value));
  highest_.store(std::max(highest_.load(), part.address.value + part.bytes));
  if (renewed_.load()) Publish();
  return &held->shadow;
}

int Cards::Deregister(void* handle, const std::function<int(void*)>& real_call) {
  if (!on()) return real_call(handle);
  std::unique_lock lock(mutex_);
  const auto found = shadows_.find(handle);
  if (found == shadows_.end()) {
    lock.unlock();
    return real_call(handle);
  }
  if (found->second->real != nullptr)
    if (const int result = real_call(found->second->real); result != 0) return result;
  by_id_.erase(found->second->id);
  shadows_.erase(found);
  if (renewed_.load()) Publish();
  return 0;
}

void* Cards::Behind(void* handle) {
  if (!on()) return handle;
  const std::lock_guard lock(mutex_);
  const auto* const found = FindIn(shadows_, handle);
  return found == nullptr ? handle : (*found)->real;
}

void Cards::Ending(CommunicatorId id, bool begins) {
  if (!on()) return;
  {
    const std::lock_guard lock(waiting);
    const bool open = std::ranges::none_of(g_cards, [](const auto& place) {
      const Card* const card = place.load();
      return card != nullptr && card->IsShut();
    });
    const auto known = std::ranges::find(ending_, id);
    if (begins)
      ending_.push_back(id);
    else if (open && known != ending_.end())
      ending_.erase(known);
  }
  reopened.notify_all();
}

// Of a thread whose communicator is not known, none may be kept.
bool Cards::MayWait(CommunicatorId id) {
  return id ? std::ranges::find(ending_, id) == ending_.end() && std::ranges::find(ending_, CommunicatorId{}) == ending_.end()
            : ending_.empty();
}

void Cards::Publish() {
  std::vector<Range> ranges;
  std::uint64_t longest = 0;
  for (const auto& [at, held] : shadows_) {
    if (held->real == nullptr) continue;
    const std::uint64_t begin = held->part.address.value;
    ranges.push_back({begin, begin + held->part.bytes, held->way.domain, held->shadow.local_key, held->shadow.remote_key,
                      held->ended_remote_key});
    longest = std::max<std::uint64_t>(longest, held->part.bytes);
  }
  std::ranges::sort(ranges, {}, &Range::begin);
  const std::unique_lock lock(ranges_mutex_);
  ranges_.swap(ranges);
  longest_ = longest;
}

bool Cards::HaveAnyOf(std::uint64_t begin, std::uint64_t end) {
  const std::shared_lock lock(ranges_mutex_);
  return begin < end &&
         std::ranges::any_of(ranges_, [&](const Range& range) { return range.begin < end && begin < range.end; });
}

void Cards::Refresh(const verbs::Domain* domain, verbs::Send* work) {
  const std::shared_lock lock(ranges_mutex_);
  // Calls for each registration of that domain that covers the range, until one returns true.
  const auto covering = [&](std::uint64_t address, std::uint64_t bytes, const auto& is_last) {
    auto at = std::ranges::upper_bound(ranges_, address, {}, &Range::begin);
    while (at != ranges_.begin()) {
      --at;
      if (at->begin + longest_ <= address) return;
      if (at->domain == domain && address + bytes <= at->end && is_last(*at)) return;
    }
  };
  for (; work != nullptr; work = work->next) {
    for (int i = 0; (work->flags & verbs::kInline) == 0 && i < work->count; ++i) {
      verbs::Part& part = work->parts[i];
      if (!IsOfGpu(part.address)) continue;
      std::optional<std::uint32_t> today;
      covering(part.address, part.bytes, [&](const Range& range) {
        today = range.local_key;
        return range.local_key == part.local_key;
      });
      if (today) part.local_key = *today;
    }
    // NCCL reads from its own memory, to flush it; elsewhere an address is not this process's.
    if (work->opcode != verbs::kReads || !IsOfGpu(work->remote_address)) continue;
    covering(work->remote_address, 1, [&](const Range& range) {
      if (range.remote_key == work->remote_key) return true;
      if (range.ended_remote_key == 0 || range.ended_remote_key != work->remote_key) return false;
      work->remote_key = range.remote_key;
      return true;
    });
  }
}

// ---- what a pause and a resume ask for

std::vector<Network::Kept> Cards::Drain(const std::vector<RegionId>& regions, Deadline until) {
  std::map<Card*, std::string> busy;
  std::map<RegionId, Card*> card_of;
  {
    const std::lock_guard lock(mutex_);
    Publish();
    for (const RegionId id : regions)
      if (auto* const held = FindIn(by_id_, id)) busy[card_of[id] = (*held)->card];
  }
  for (auto& [card, why] : busy) {
    for (why = card->Shut(); !why.empty() && !card->IsHopeless() && !Passed(until); why = card->Shut())
      std::this_thread::sleep_for(200us);
  }
  std::vector<Kept> kept;
  for (const auto& [id, card] : card_of)
    if (!busy[card].empty()) kept.push_back({id, busy[card]});
  return kept;
}

Status Cards::Deregister(RegionId region) {
  const std::lock_guard lock(mutex_);
  auto* const found = FindIn(by_id_, region);
  if (found == nullptr || (*found)->real == nullptr) return {};
  Held& held = **found;
  if (!held.card->IsShut()) return {Code::kInvalid, held.card->name() + " is not shut"};
  if (const int result = held.way.undo(held.real); result != 0)
    return {Code::kIo,
            fmt::format("{} did not deregister {} at {}: {} (errno {})", held.card->name(), FormatBytes(held.part.bytes),
                        Hex(held.part.address), std::generic_category().message(result), result)};
  held.ended_remote_key = held.shadow.remote_key;
  held.real = nullptr;
  return {};
}

Status Cards::Register(RegionId region) {
  const std::lock_guard lock(mutex_);
  auto* const found = FindIn(by_id_, region);
  if (found == nullptr || (*found)->real != nullptr) return {};
  Held& held = **found;
  held.real = held.way.again();
  if (held.real == nullptr) {
    const int why = errno;
    return {Code::kIo,
            fmt::format("{} did not register {} at {} again: {} (errno {})", held.card->name(), FormatBytes(held.part.bytes),
                        Hex(held.part.address), std::generic_category().message(why), why)};
  }
  SetKey(held.shadow.handle, held.real->handle);
  SetKey(held.shadow.local_key, held.real->local_key);
  SetKey(held.shadow.remote_key, held.real->remote_key);
  renewed_.store(true, std::memory_order_release);
  dirty_ = true;
  return {};
}

void Cards::Open() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(dirty_, false)) Publish();
  }
  {
    const std::lock_guard lock(waiting);
    ending_.clear();
  }
  for (const auto& place : g_cards) {
    Card* const card = place.load(std::memory_order_acquire);
    if (card != nullptr && card->IsShut()) card->Reopen();
  }
}

bool Cards::MayWait() {
  const std::lock_guard lock(waiting);
  return MayWait(nccl::CurrentCommunicator());
}

}  // namespace amem::intercept
