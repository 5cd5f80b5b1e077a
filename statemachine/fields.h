// The fields of a struct, told once and beside them: its comparison follows from that, and all that walks over its fields, such
// as JSON (replay/job/event_json.h), the text for people and the digest.
//
//   struct Mapped {
//     Address address;
//     PoolId pool;
//     AMEM_EVENT(Mapped, "mapped", address, IfAny{pool});
//   };
//   ForEachField(mapped, [](std::string_view name, const auto& field) { ... });
//
// A field's type says how it is shown. Where it does not, a wrapper does: Hexadecimal, IfAny, OrNull, Unlisted; As gives it
// another name. A field that is added to a struct and not told does not compile where it is walked over.
//
// What is on disk follows from the members as the struct declares them (Members): names and what is shown may change, and the
// order of declaration may not.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <tuple>

namespace amem {

template <class T>
struct Hexadecimal {  // an address that is a plain number
  explicit constexpr Hexadecimal(const T& value) : field(value) {}
  const T& field;
};
template <class T>
struct IfAny {  // left out when it is zero
  explicit constexpr IfAny(const T& value) : field(value) {}
  const T& field;
};
template <class T>
struct OrNull {  // null when it is zero, or the first of its enumerators
  explicit constexpr OrNull(const T& value) : field(value) {}
  const T& field;
};
template <class T>
struct Unlisted {  // only a snapshot or the digest has a use for it
  explicit constexpr Unlisted(const T& value) : field(value) {}
  const T& field;
};
template <class T>
struct As {  // under another name than the struct's: one that means the same in every kind of event
  constexpr As(const char* other, const T& value) : name(other), field(value) {}
  const char* name;
  const T& field;
};

// The last line of a struct: its own name, and its fields in the order in which they are shown.
#define AMEM_STRUCT(Type, ...)                         \
  static constexpr const char* kFields = #__VA_ARGS__; \
  template <class Use>                                 \
  void UseFields(Use&& use) const {                    \
    use(__VA_ARGS__);                                  \
  }                                                    \
  friend bool operator==(const Type&, const Type&) = default
// The same of a kind of event, with the kind's name for people and filters.
#define AMEM_EVENT(Type, name, ...)              \
  static constexpr std::string_view kKind{name}; \
  AMEM_STRUCT(Type, __VA_ARGS__)

template <class T>
concept Described = requires {
  T::kFields;
};

// How many fields a struct has: as many as its initializer takes.
struct AnyField {
  template <class T>
  operator T() const;  // NOLINT(google-explicit-constructor): only named, never called
};
template <class T, class... Init>
consteval std::size_t CountFields() {
  if constexpr (requires { T{Init{}..., AnyField{}}; }) {
    return CountFields<T, Init..., AnyField>();
  } else {
    return sizeof...(Init);
  }
}

// References to the members of a struct, in the order in which it declares them.
template <class T>
constexpr auto Members(T& of) {
  constexpr std::size_t n = CountFields<std::remove_const_t<T>>();
  static_assert(n >= 1 && n <= 18, "add a line below");
  // clang-format off
  if constexpr (n == 1) { auto& [a] = of; return std::tie(a); }
  if constexpr (n == 2) { auto& [a, b] = of; return std::tie(a, b); }
  if constexpr (n == 3) { auto& [a, b, c] = of; return std::tie(a, b, c); }
  if constexpr (n == 4) { auto& [a, b, c, d] = of; return std::tie(a, b, c, d); }
  if constexpr (n == 5) { auto& [a, b, c, d, e] = of; return std::tie(a, b, c, d, e); }
  if constexpr (n == 6) { auto& [a, b, c, d, e, f] = of; return std::tie(a, b, c, d, e, f); }
  if constexpr (n == 7) { auto& [a, b, c, d, e, f, g] = of; return std::tie(a, b, c, d, e, f, g); }
  if constexpr (n == 8) { auto& [a, b, c, d, e, f, g, h] = of; return std::tie(a, b, c, d, e, f, g, h); }
  if constexpr (n == 9) { auto& [a, b, c, d, e, f, g, h, i] = of; return std::tie(a, b, c, d, e, f, g, h, i); }
  if constexpr (n == 10) { auto& [a, b, c, d, e, f, g, h, i, j] = of; return std::tie(a, b, c, d, e, f, g, h, i, j); }
  if constexpr (n == 11) { auto& [a, b, c, d, e, f, g, h, i, j, k] = of; return std::tie(a, b, c, d, e, f, g, h, i, j, k); }
  if constexpr (n == 12) { auto& [a, b, c, d, e, f, g, h, i, j, k, l] = of; return std::tie(a, b, c, d, e, f, g, h, i, j, k, l); }
  if constexpr (n == 13) { auto& [a, b, c, d, e, f, g, h, i, j, k, l, m] = of; return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m); }
  if constexpr (n == 14) { auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, o] = of; return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, o); }
  if constexpr (n == 15) { auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, o, p] = of; return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, o, p); }
  if constexpr (n == 16) { auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, o, p, q] = of; return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, o, p, q); }
  if constexpr (n == 17) { auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, o, p, q, r] = of; return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, o, p, q, r); }
  if constexpr (n == 18) { auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, o, p, q, r, s] = of; return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, o, p, q, r, s); }
  // clang-format on
}

// Of `address, IfAny{pool}, As{"cycle_kind", kind}`: the words address, pool, cycle_kind.
template <Described T>
consteval auto FieldNames() {
  std::array<std::string_view, CountFields<T>()> names;
  std::string_view rest = T::kFields;
  for (std::string_view& name : names) {
    std::size_t end = 0;
    for (int braces = 0; end < rest.size() && (rest[end] != ',' || braces > 0); ++end)
      braces += (rest[end] == '{' ? 1 : 0) - (rest[end] == '}' ? 1 : 0);
    name = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 2, rest.size()));
    const bool renamed = name.find('"') != name.npos;
    name.remove_prefix((renamed ? name.find('"') : name.rfind('{')) + 1);
    name = name.substr(0, name.find(renamed ? '"' : '}'));
  }
  return names;
}

template <class Visit, class T>
void VisitField(Visit& visit, std::string_view name, const T& field) {
  visit(name, field);
}
template <class Visit, class T>
void VisitField(Visit& visit, std::string_view, const As<T>& renamed) {
  visit(renamed.name, renamed.field);
}

template <Described T, class Visit>
void ForEachField(const T& value, Visit&& visit) {
  value.UseFields([&visit]<class... Fields>(const Fields&... fields) {
    static_assert(sizeof...(Fields) == CountFields<T>(), "a field of this struct is missing in its AMEM_STRUCT");
    static constexpr auto kNames = FieldNames<T>();
    const std::string_view* name = kNames.data();
    (VisitField(visit, *name++, fields), ...);
  });
}

}  // namespace amem
