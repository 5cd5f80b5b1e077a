#include "replay/tool/events/filter.h"

#include <map>
#include <variant>

#include "statemachine/state.h"

namespace amem::tool {

// Which events are about one allocation: those that name it, and those about an address while it is mapped there. Must see
// every event from where it starts.
class AllocationFollower {
 public:
  explicit AllocationFollower(AllocationId allocation) : wanted_(allocation) {}

  // For a journal whose beginning was dropped: where the allocation was then.
  void StartFrom(const State& state) {
    for (const auto& [address, mapping] : state.mappings) {
      if (mapping.allocation == wanted_) places_[address] = mapping.bytes;
    }
    for (const auto& [address, legacy] : state.legacy) {
      if (legacy.backing == wanted_) legacy_[address] = legacy.bytes;
    }
  }

  bool Concerns(const Event& event) {
    return std::visit([this](const auto& body) { return About(body); }, event.body);
  }

 private:
  bool Inside(Address address) const {
    auto after = places_.upper_bound(address);
    if (after == places_.begin()) return false;
    --after;
    return address.value - after->first.value < after->second;
  }

  bool About(const Mapped& e) {
    if (e.allocation == wanted_) places_[e.address] = e.bytes;
    return e.allocation == wanted_;
  }
  bool About(const Unmapped& e) { return places_.erase(e.address) != 0; }
  bool About(const AccessSet& e) {
    const auto next = places_.lower_bound(e.address);  // one call may cover several mappings
    return Inside(e.address) || (next != places_.end() && next->first.value - e.address.value < e.bytes);
  }
  bool About(const LegacyAllocated& e) {
    if (e.backing == wanted_) legacy_[e.address] = e.bytes;
    return e.backing == wanted_;
  }
  bool About(const LegacyFreed& e) { return legacy_.erase(e.address) != 0; }
  bool About(const LegacyExported& e) { return e.backing == wanted_; }
  bool About(const LegacyImported& e) { return e.allocation == wanted_; }
  bool About(const LegacyClosed& e) { return Inside(e.address); }
  bool About(const PoolAllocated& e) { return e.backing == wanted_; }
  bool About(const PoolFreed& e) { return Inside(e.address); }
  bool About(const MulticastBound& e) { return e.multicast == wanted_ || e.allocation == wanted_ || Inside(e.address); }
  bool About(const MulticastUnbound& e) { return e.multicast == wanted_; }
  bool About(const Registered& e) { return Inside(e.address); }
  bool About(const Deregistered& e) { return Inside(e.address); }
  template <class Body>
  bool About(const Body& e) {
    if constexpr (requires { e.allocation; }) {
      return e.allocation == wanted_;
    } else if constexpr (requires { e.step.allocation; }) {
      return e.step.allocation == wanted_;
    } else if constexpr (requires { e.multicast; }) {
      return e.multicast == wanted_;
    } else {
      return false;
    }
  }

  AllocationId wanted_;
  std::map<Address, Bytes> places_;
  std::map<Address, Bytes> legacy_;
};

EventFilter::EventFilter(const EventWishes& wishes, std::uint64_t since_ns, std::uint64_t until_ns)
    : wishes_(wishes), since_ns_(since_ns), until_ns_(until_ns) {
  if (wishes.allocation) follower_ = std::make_unique<AllocationFollower>(AllocationId{*wishes.allocation});
}
EventFilter::EventFilter(EventFilter&&) noexcept = default;
EventFilter::~EventFilter() = default;

SequenceNumber EventFilter::ReadFrom() const { return SequenceNumber{follower_ ? 1 : wishes_.from}; }

void EventFilter::StartFrom(const State& before) {
  if (follower_) follower_->StartFrom(before);
}

bool EventFilter::Wants(const Event& event) {
  if (follower_ && !follower_->Concerns(event)) return false;
  if (event.seq.value < wishes_.from || event.time_ns < since_ns_ || event.time_ns > until_ns_) return false;
  if (!wishes_.kinds[event.body.index()]) return false;
  return !wishes_.pattern || wishes_.pattern->Matches(ToText(event.body));
}

// ---- patterns --------------------------------------------------------------------------------------------------------------

Result<std::shared_ptr<const Pattern>> Pattern::Compile(const std::string& text) {
  regex_t compiled;
  if (const int failed = ::regcomp(&compiled, text.c_str(), REG_EXTENDED | REG_NOSUB); failed != 0) {
    char why[200];
    ::regerror(failed, &compiled, why, sizeof why);
    return Status{Code::kInvalid, "\"" + text + "\" is not a regular expression as grep -E has them: " + why};
  }
  return std::shared_ptr<const Pattern>(new Pattern(compiled));
}

Pattern::~Pattern() { ::regfree(&compiled_); }

bool Pattern::Matches(const std::string& text) const { return ::regexec(&compiled_, text.c_str(), 0, nullptr, 0) == 0; }

}  // namespace amem::tool
