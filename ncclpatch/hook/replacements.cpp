#include "ncclpatch/hook/replacements.h"

#include <string_view>

namespace amem::replacements {
namespace {

constinit std::atomic<const Tables*> g_tables{nullptr};
constinit std::atomic<WrapPlugin> g_wrap_plugin{nullptr};

template <class Match>
const Replacement* FindIf(const Match& match) {
  const Tables* tables = g_tables.load(std::memory_order_acquire);
  if (tables == nullptr) return nullptr;
  for (const auto& table : *tables)
    for (const Replacement& replacement : table)
      if (match(replacement)) return &replacement;
  return nullptr;
}

std::string_view WithoutSuffix(std::string_view name, std::string_view suffix) {
  return name.ends_with(suffix) ? name.substr(0, name.size() - suffix.size()) : name;
}
std::string_view WithoutStream(std::string_view name) { return WithoutSuffix(WithoutSuffix(name, "_ptsz"), "_ptds"); }

void* BindTo(const Replacement* replacement, void* real, bool* replaced) {
  if (replaced != nullptr) *replaced = false;
  if (replacement == nullptr || real == nullptr) return real;
  for (std::size_t variant = 0; variant < kVariants; ++variant) {
    void* known = nullptr;
    if (real != replacement->entries[variant] && !replacement->reals[variant].compare_exchange_strong(known, real) &&
        known != real)
      continue;
    if (replaced != nullptr) *replaced = true;
    return replacement->entries[variant];
  }
  return real;  // no variant is left: this one passes, and is journaled as not replaced
}

}  // namespace

void Install(const Tables& tables) { g_tables.store(&tables, std::memory_order_release); }

void* Bind(const char* name, int cuda_version, void* real, bool* replaced) {
  const std::string_view asked(name), base = WithoutStream(asked);
  const Replacement* found =
      FindIf([&](const Replacement& r) { return r.exported == base && r.exported != std::string_view(r.name); });
  if (found == nullptr)
    found = FindIf([&](const Replacement& r) { return r.name == base && cuda_version >= r.since && cuda_version < r.before; });
  return BindTo(found, real, replaced);
}

void Install(WrapPlugin wrap) { g_wrap_plugin.store(wrap, std::memory_order_release); }

void* BindExported(const char* exported, void* real, bool* replaced) {
  if (std::string_view(exported).starts_with("nccl")) {
    const WrapPlugin wrap = g_wrap_plugin.load(std::memory_order_acquire);
    return wrap == nullptr || real == nullptr ? real : wrap(exported, real);
  }
  const std::string_view base = WithoutStream(exported);
  return BindTo(FindIf([&](const Replacement& r) { return r.exported == base; }), real, replaced);
}

}  // namespace amem::replacements
