// Where Cap'n Proto puts the members of a struct in a message, computed from the struct alone: the n-th member that it declares
// has the ordinal n, and its initializer is its default. No list of members and no schema is kept beside the struct.
//
// What was released stays as it is: members are only ever added, at the end. tests/journal/journal.capnp says in Cap'n Proto's
// own language what is on disk, and a test finds every member where Cap'n Proto's compiler has put it.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "statemachine/types.h"

namespace amem::layout {

template <class T>
inline constexpr bool kIsId = false;
template <class Tag, class Rep>
inline constexpr bool kIsId<Id<Tag, Rep>> = true;
template <class T>
inline constexpr bool kIsArray = false;
template <class T, std::size_t n>
inline constexpr bool kIsArray<std::array<T, n>> = true;

// A number lies in the data of a message; anything else is behind a pointer.
template <class T>
concept Number = kIsId<T> || std::is_arithmetic_v<T> || std::is_enum_v<T>;

template <Number T>
constexpr auto BitsOf(T value) {
  if constexpr (kIsId<T>) {
    return BitsOf(value.value);
  } else if constexpr (std::is_enum_v<T>) {
    return BitsOf(static_cast<std::underlying_type_t<T>>(value));
  } else if constexpr (std::is_same_v<T, bool>) {
    return value;
  } else {
    return static_cast<std::make_unsigned_t<T>>(value);
  }
}

// References to the members of a struct. Those of a location or an array stand in its place. Few structs have one, and
// std::apply and std::tuple_cat are a fifth of what compiling a codec costs.
template <class T>
inline constexpr bool kHasParts = std::is_same_v<std::remove_const_t<T>, Location> || kIsArray<std::remove_const_t<T>>;
template <class T>
constexpr auto Flat(T& member) {
  if constexpr (std::is_same_v<std::remove_const_t<T>, Location>) {
    return Members(member);
  } else if constexpr (kIsArray<std::remove_const_t<T>>) {
    return std::apply([](auto&... elements) { return std::tie(elements...); }, member);
  } else {
    return std::tie(member);
  }
}
template <class... Member>
constexpr auto Flattened(const std::tuple<Member&...>& members) {
  if constexpr ((kHasParts<Member> || ...)) {
    return std::apply([](auto&... each) { return std::tuple_cat(Flat(each)...); }, members);
  } else {
    return members;
  }
}
template <class T>
constexpr auto FlatMembers(T& of) {
  return Flattened(Members(of));
}

// Fills words with numbers as Cap'n Proto does: a number of 2^n bits goes to the hole of that size, or to half of a larger
// place, whose other half is a hole from then on.
class Packing {
 public:
  constexpr std::uint16_t Add(unsigned log_bits) {  // gives the place in units of the number's own size
    if (log_bits == kWord) return words_++;
    if (holes_[log_bits] != 0) return std::exchange(holes_[log_bits], std::uint16_t{0});
    const std::uint16_t first_half = static_cast<std::uint16_t>(2 * Add(log_bits + 1));
    holes_[log_bits] = static_cast<std::uint16_t>(first_half + 1);
    return first_half;
  }
  [[nodiscard]] constexpr std::uint16_t words() const { return words_; }

 private:
  static constexpr unsigned kWord = 6;
  std::array<std::uint16_t, kWord> holes_{};  // 0: none, for the first place is never a hole
  std::uint16_t words_ = 0;
};

template <std::size_t n>
struct Layout {
  std::array<std::uint16_t, n> at{};  // of each member: its place among numbers of its size, or among the pointers
  std::uint16_t words = 0, pointers = 0;
};

template <class... Member>
consteval auto LayOut(std::type_identity<std::tuple<Member&...>>) {
  Layout<sizeof...(Member)> made;
  Packing packing;
  const auto place = [&]<class T>(std::type_identity<T>) {
    if constexpr (std::is_same_v<T, bool>) {
      return packing.Add(0);
    } else if constexpr (Number<T>) {
      return packing.Add(static_cast<unsigned>(std::countr_zero(8 * sizeof(T))));
    } else {
      return made.pointers++;
    }
  };
  std::uint16_t* at = made.at.data();
  ((*at++ = place(std::type_identity<Member>())), ...);
  made.words = packing.words();
  return made;
}
template <class T>
inline constexpr auto kLayout = LayOut(std::type_identity<decltype(FlatMembers(std::declval<T&>()))>());

}  // namespace amem::layout
