#include "ncclpatch/hook/replacements.h"

#include <string_view>

namespace amem::replacements {
namespace {

constinit std::atomic<const Tables*> g_tables[2]{};  // by Caller
constinit std::atomic<WrapPlugin> g_wrap_plugin{nullptr};

std::atomic<const Tables*>& TablesOf(Caller caller) { return g_tables[static_cast<std::size_t>(caller)]; }

template <class Match>
const Replacement* FindIf(const Tables& tables, const Match& match) {
  for (const auto& table : tables)
    for (const Replacement& replacement : table)
      if (match(replacement)) return &replacement;
  return nullptr;
}
template <class Match>
const Replacement* FindIf(Caller caller, const Match& match) {
  const Tables* tables = TablesOf(caller).load(std::memory_order_acquire);
  return tables == nullptr ? nullptr : FindIf(*tables, match);
}

std::string_view WithoutSuffix(std::string_view name, std::string_view suffix) {
  return name.ends_with(suffix) ? name.substr(0, name.size() - suffix.size()) : name;
}
std::string_view WithoutStream(std::string_view name) { return WithoutSuffix(WithoutSuffix(name, "_ptsz"), "_ptds"); }

const Replacement* FindExported(const char* exported, Caller caller) {
  const std::string_view base = WithoutStream(exported);
  return FindIf(caller, [&](const Replacement& r) { return r.exported == base; });
}

void* BindTo(const Replacement* replacement, void* real, bool* replaced) {
  if (replaced != nullptr) *replaced = false;
  if (replacement == nullptr || real == nullptr || OwnLookUp::now > 0) return real;
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

void* Plain(void* function) {
  void* behind = nullptr;
  const auto has = [&](const Replacement& replacement) {
    for (std::size_t variant = 0; variant < kVariants && behind == nullptr; ++variant)
      if (replacement.entries[variant] == function) behind = replacement.reals[variant].load(std::memory_order_acquire);
    return behind != nullptr;
  };
  for (int depth = 0; depth < 4; ++depth) {  // NCCL's over another library's, say
    behind = nullptr;
    if (FindIf(Caller::kNccl, has) == nullptr && FindIf(Caller::kOther, has) == nullptr) return function;
    function = behind;
  }
  return function;
}

void Install(const Tables& tables, Caller caller) { TablesOf(caller).store(&tables, std::memory_order_release); }

void* Bind(const char* name, int cuda_version, void* real, bool* replaced, Caller caller) {
  const std::string_view asked(name), base = WithoutStream(asked);
  const Replacement* found =
      FindIf(caller, [&](const Replacement& r) { return r.exported == base && r.exported != std::string_view(r.name); });
  if (found == nullptr)
    found = FindIf(caller,
                   [&](const Replacement& r) { return r.name == base && cuda_version >= r.since && cuda_version < r.before; });
  return BindTo(found, real, replaced);
}

void Install(WrapPlugin wrap) { g_wrap_plugin.store(wrap, std::memory_order_release); }

void* BindExported(const char* exported, void* real, bool* replaced, Caller caller) {
  if (std::string_view(exported).starts_with("nccl")) {
    const WrapPlugin wrap = g_wrap_plugin.load(std::memory_order_acquire);
    return wrap == nullptr || real == nullptr ? real : wrap(exported, real);
  }
  return BindTo(FindExported(exported, caller), real, replaced);
}

bool Replaces(const char* exported, Caller caller) { return FindExported(exported, caller) != nullptr; }

bool Has(const Tables& tables, const char* exported) {
  const std::string_view base = WithoutStream(exported);
  return FindIf(tables, [&](const Replacement& r) { return r.exported == base; }) != nullptr;
}

}  // namespace amem::replacements
