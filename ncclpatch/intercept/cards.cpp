#include "ncclpatch/intercept/cards.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <optional>
#include <system_error>

#include "ncclpatch/intercept/live_keys.h"
#include "ncclpatch/nccl/attribution.h"
#include "statemachine/check.h"

namespace amem::intercept {
namespace {

constexpr std::size_t kMostCards = 64;  // further ones are not counted
constinit std::array<std::atomic<Card*>, kMostCards> g_cards{};
constinit std::mutex g_cards_mutex;  // guards opening and closing

constexpr std::size_t kMostEndedKeys = 32;

constinit LiveKeys g_local_keys, g_remote_keys;  // of all that NCCL has registered by verbs

void AddKeys(const verbs::Region& region, const verbs::Domain* domain, const Extent& part) {
  const std::uint64_t begin = part.address.value, end = begin + part.bytes;
  g_local_keys.Add({region.local_key, domain, begin, end});
  g_remote_keys.Add({region.remote_key, domain, begin, end});
}
void RemoveKeys(const verbs::Region& region, const verbs::Domain* domain) {
  g_local_keys.Remove(region.local_key, domain);
  g_remote_keys.Remove(region.remote_key, domain);
}

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
template <std::size_t... C>
constexpr auto CallsOfAll(std::index_sequence<C...>) {
  return std::array{verbs::Functions{&OfCard<C>::Poll, &OfCard<C>::Send, &OfCard<C>::Receive}...};
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
    kCallsOfCards[i].SetIn(*context);
    return;
  }
}

// A card that is in use refuses to be closed, and is counted on.
int Cards::Close(verbs::Context* context, const std::function<int()>& real_call) {
  const std::lock_guard lock(g_cards_mutex);
  Card* const card = CardOf(context);
  if (card == nullptr) return real_call();
  const verbs::Functions ours = card->GiveBack(*context);
  const int result = real_call();
  if (result == 0)
    card->Closed();
  else
    ours.SetIn(*context);
  return result;
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
  if (card != nullptr) record->card = card->name();
  *pins = session->records().WhyPins(part);
  if (pins->empty() && (!nccl::OnServiceThread() || !Card::ThisThreadConnects()))
    *pins = "it was not registered by the thread that serves a communicator's connections";
  else if (pins->empty() && !way.at_its_address)
    *pins = "the card knows it by another address";
  else if (pins->empty() && card == nullptr)
    *pins = "AMem did not see its card opened";
  const std::lock_guard lock(mutex_);
  if (way.domain != nullptr && way.at_its_address) AddKeys(*real, way.domain, part);
  if (!pins->empty()) return nullptr;
  auto made = std::make_unique<Held>();
  made->shadow = *real;
  made->real = real;
  made->part = part;
  made->way = way;
  made->card = card;
  made->id = Registrations::NewRegion();
  made->ended_remote_keys.reserve(kMostEndedKeys);
  std::uint64_t& domain = domains_[way.domain];
  if (domain == 0) domain = ++next_domain_;
  record->region = made->id;
  record->domain = domain;
  record->access_flags = way.access;
  Held* const held = made.get();
  by_id_[held->id] = held;
  shadows_[&held->shadow] = std::move(made);
  lowest_.store(std::min(lowest_.load(), part.address.value));
  highest_.store(std::max(highest_.load(), part.address.value + part.bytes));
  return &held->shadow;
}

int Cards::Deregister(void* handle, const std::function<int(void*)>& real_call) {
  if (!on()) return real_call(handle);
  std::unique_lock lock(mutex_);
  const auto found = shadows_.find(handle);
  const auto* const region = static_cast<const verbs::Region*>(handle);
  if (found == shadows_.end()) {
    if (region != nullptr) RemoveKeys(*region, region->domain);
    lock.unlock();
    return real_call(handle);
  }
  Held& held = *found->second;
  if (held.real != nullptr) {
    RemoveKeys(held.shadow, held.way.domain);
    if (const int result = real_call(held.real); result != 0) {
      AddKeys(held.shadow, held.way.domain, held.part);
      return result;
    }
  }
  by_id_.erase(held.id);
  shadows_.erase(found);
  return 0;
}

void* Cards::Behind(void* handle) {
  if (!on()) return handle;
  const std::lock_guard lock(mutex_);
  const auto* const found = FindIn(shadows_, handle);
  return found == nullptr ? handle : (*found)->real;
}

RegisteredRanges Cards::CoveredNow() {
  std::vector<RegisteredRanges::Range> ranges;
  const std::lock_guard lock(mutex_);
  ranges.reserve(shadows_.size());
  for (const auto& [at, held] : shadows_)
    if (held->real != nullptr) ranges.push_back({held->part.address.value, held->part.address.value + held->part.bytes});
  return RegisteredRanges(std::move(ranges));
}

RegisteredRanges::RegisteredRanges(std::vector<Range> ranges) : ranges_(std::move(ranges)) {
  std::ranges::sort(ranges_, {}, &Range::begin);
  std::uint64_t furthest = 0;
  for (Range& one : ranges_) furthest = one.end = std::max(one.end, furthest);
}

bool RegisteredRanges::HaveAnyOf(std::uint64_t begin, std::uint64_t end) const {
  if (begin >= end) return false;
  const auto after = std::ranges::lower_bound(ranges_, end, {}, &Range::begin);
  return after != ranges_.begin() && std::prev(after)->end > begin;
}

void Cards::RefreshAll(const verbs::Domain* domain, verbs::Send* work) {
  for (; work != nullptr; work = work->next) {
    for (int i = 0; (work->flags & verbs::kInline) == 0 && i < work->count; ++i) {
      verbs::Part& part = work->parts[i];
      if (MayBeOurs(part.address) && !g_local_keys.Cover(part.local_key, domain, part.address, part.bytes))
        Refresh(domain, &part);
    }
    // NCCL reads from its own memory, to flush it; elsewhere an address is not this process's.
    if (work->opcode == verbs::kReads && MayBeOurs(work->remote_address) &&
        !g_remote_keys.Cover(work->remote_key, domain, work->remote_address, 1))
      RefreshRemote(domain, work);
  }
}

void Cards::Refresh(const verbs::Domain* domain, verbs::Part* part) {
  const std::lock_guard lock(mutex_);
  std::optional<std::uint32_t> today;
  for (const auto& [at, held] : shadows_) {
    if (!held->Covers(domain, part->address, part->bytes)) continue;
    today = held->shadow.local_key;
    if (*today == part->local_key) return;
  }
  if (today) part->local_key = *today;
}

void Cards::RefreshRemote(const verbs::Domain* domain, verbs::Send* work) {
  const std::lock_guard lock(mutex_);
  std::optional<std::uint32_t> today;
  for (const auto& [at, held] : shadows_) {
    if (!held->Covers(domain, work->remote_address, 1)) continue;
    if (held->shadow.remote_key == work->remote_key) return;
    if (std::ranges::find(held->ended_remote_keys, work->remote_key) != held->ended_remote_keys.end())
      today = held->shadow.remote_key;
  }
  if (today) work->remote_key = *today;
}

// ---- what a pause and a resume ask for

void Cards::FindGates(const std::vector<RegionId>& regions, std::map<RegionId, TrafficGate*>* gates) {
  const std::lock_guard lock(mutex_);
  for (const RegionId id : regions)
    if (auto* const held = FindIn(by_id_, id)) (*gates)[id] = (*held)->card;
}

Status Cards::Deregister(RegionId region) {
  const std::lock_guard lock(mutex_);
  auto* const found = FindIn(by_id_, region);
  if (found == nullptr || (*found)->real == nullptr) return {};
  Held& held = **found;
  AMEM_CHECK(held.id == region);
  AMEM_CHECK(held.card != nullptr, region);
  if (!held.card->IsShut()) return {Code::kInvalid, held.card->name() + " is not shut"};
  if (const int result = held.way.undo(held.real); result != 0)
    return {Code::kIo,
            fmt::format("{} did not deregister {} at {}: {} (errno {})", held.card->name(), FormatBytes(held.part.bytes),
                        Hex(held.part.address), std::generic_category().message(result), result)};
  RemoveKeys(held.shadow, held.way.domain);
  if (held.ended_remote_keys.size() == kMostEndedKeys) held.ended_remote_keys.erase(held.ended_remote_keys.begin());
  held.ended_remote_keys.push_back(held.shadow.remote_key);  // there is room
  held.real = nullptr;
  return {};
}

Status Cards::Register(RegionId region) {
  const std::lock_guard lock(mutex_);
  auto* const found = FindIn(by_id_, region);
  if (found == nullptr || (*found)->real != nullptr) return {};
  Held& held = **found;
  AMEM_CHECK(held.id == region);
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
  AddKeys(held.shadow, held.way.domain, held.part);
  renewed_.store(true, std::memory_order_release);
  return {};
}

}  // namespace amem::intercept
