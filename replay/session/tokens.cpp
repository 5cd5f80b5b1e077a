#include "replay/session/tokens.h"

#include <sys/resource.h>

#include <algorithm>
#include <string>
#include <utility>

namespace amem {

Result<Token> Tokens::For(AllocationId allocation, Ledger& /*ledger*/) {
  auto known = secrets_.find(allocation);
  if (known == secrets_.end()) {
    AMEM_ASSIGN(const auto secret, RandomSecret());
    known = secrets_.emplace(allocation, secret).first;
  }
  return Token{session_, allocation, known->second, 0, pid_};
}

const Secret* Tokens::SecretOf(AllocationId allocation, Ledger& /*ledger*/) const { return FindIn(secrets_, allocation); }

void Tokens::SetSecret(AllocationId imported, const Secret& secret, Ledger& /*ledger*/) { secrets_.emplace(imported, secret); }

void Tokens::Forget(AllocationId allocation, Ledger& /*ledger*/) {
  secrets_.erase(allocation);
  exported_.erase(allocation);
  held_for_ever_.erase(allocation);
}

// How many memfds may be open here: a fourth of what the process may open.
static std::size_t MostMemfds() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return ~std::size_t{0};
  return limit.rlim_cur / 4;
}

Result<UniqueFd> Tokens::CountedDescriptor(AllocationId allocation, const Token& token, Ledger& ledger) {
  if (const auto* const made = FindIn(exported_, allocation)) return OpenCounted(made->get());
  AMEM_ASSIGN(auto made, MakeTokenDescriptor(token));
  if (held_for_ever_.contains(allocation)) return made;
  if (exported_.size() >= MostMemfds()) {
    if (held_for_ever_.empty())
      ledger.Record(PassedThrough{"export", "too many descriptors of memory of tags are open (" +
                                                std::to_string(exported_.size()) +
                                                "): what is exported from now on is never given back; raise ulimit -n"});
    held_for_ever_.insert(allocation);
    ledger.Record(AllocationRetained{allocation, {}});
    return made;
  }
  AMEM_ASSIGN(auto descriptor, OpenCounted(made.get()));
  exported_.emplace(allocation, std::move(made));
  ledger.Record(AllocationRetained{allocation, {}});
  return descriptor;
}

std::vector<AllocationId> Tokens::TakeUnused(Ledger& ledger) {
  std::vector<AllocationId> unused;
  if (exported_.size() < std::min(many_, MostMemfds())) return unused;
  for (const auto& [id, token] : exported_) {
    const Allocation* const a = ledger.Find(id);
    const bool held = a != nullptr && (a->guest_references > 1 || a->mappings > 0 || !a->importers.empty());
    if (held && !AnyOpen(token.get())) unused.push_back(id);
  }
  for (const AllocationId id : unused) {
    exported_.erase(id);
    left_to_descriptors_.erase(id);
  }
  constexpr std::size_t kLeast = 64;
  many_ = std::max(kLeast, 2 * exported_.size());
  return unused;
}

bool Tokens::HasDescriptors(AllocationId allocation, Ledger& /*ledger*/) const {
  return exported_.contains(allocation) || held_for_ever_.contains(allocation);
}

void Tokens::LeaveToDescriptors(AllocationId allocation, Ledger& /*ledger*/) {
  if (exported_.contains(allocation)) left_to_descriptors_.insert(allocation);
}

void Tokens::LeaveAllToDescriptors(Ledger& /*ledger*/) {
  for (const auto& [id, token] : exported_) left_to_descriptors_.insert(id);
}

std::vector<AllocationId> Tokens::TakeClosed(Ledger& ledger) {
  std::vector<AllocationId> closed;
  std::erase_if(left_to_descriptors_, [&](AllocationId id) {
    ledger.AssertHeld();
    const auto* const token = FindIn(exported_, id);
    const Allocation* const a = ledger.Find(id);
    if (token == nullptr || a == nullptr) return true;
    if (a->guest_references > 1 || a->mappings > 0 || !a->importers.empty())
      return true;  // whoever gives that up leaves it here again
    if (AnyOpen(token->get())) return false;
    closed.push_back(id);
    return true;
  });
  return closed;
}

}  // namespace amem
