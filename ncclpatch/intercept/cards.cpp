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

void SetKey(std::uint32_t& field, std::uint32_t value) {  // NCCL's threads may read it
  std::atomic_ref(field).store(value, std::memory_order_relaxed);
}

}  // namespace

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
  if (!nccl::OnServiceThread() || !Card::ThisThreadConnects())
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
