// Structs as Cap'n Proto messages: how what is declared (layout.h) is written and read. For events and what peers say to each
// other.
#pragma once

#include <capnp/any.h>
#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "journal/layout.h"
#include "statemachine/texts.h"

namespace amem::codec {

using capnp::AnyPointer;
using capnp::AnyStruct;
using layout::BitsOf;
using layout::FlatMembers;
using layout::kLayout;
using layout::Number;

static_assert(std::endian::native == std::endian::little, "numbers in a message are little-endian");

// Ends the decoding of a message; whoever asked for it catches the reason.
[[noreturn]] inline void Reject(std::string message) { throw Status{Code::kCorrupt, std::move(message)}; }

// ---- writing ---------------------------------------------------------------------------------------------------------------

template <class T>
void Write(AnyStruct::Builder to, const T& from);

inline void WriteText(capnp::Text::Builder to, const std::string& from) { std::memcpy(to.begin(), from.data(), from.size()); }

// A Status, as far as it is told to others.
struct Outcome {
  Code code{};
  std::int32_t driver_result = 0;
  std::string message;
};

template <class T>
void Point(AnyPointer::Builder to, const T& from);
inline void Point(AnyPointer::Builder to, const Status& from) {
  Write(to.initAsAnyStruct(kLayout<Outcome>.words, kLayout<Outcome>.pointers),
        Outcome{from.code(), from.driver_result(), from.message()});
}
template <class T>
void Point(AnyPointer::Builder to, const std::optional<T>& from) {
  if (from) Point(to, *from);
}
// What is empty, or all zero, is left out, because that is the default.
inline void Point(AnyPointer::Builder to, const std::string& from) {
  if (!from.empty()) WriteText(to.initAs<capnp::Text>(static_cast<unsigned>(from.size())), from);
}
template <class What>
void Point(AnyPointer::Builder to, const Text<What>& from) {
  Point(to, static_cast<const std::string&>(from));
}
template <class T>
void Point(AnyPointer::Builder to, const std::vector<T>& from) {
  const auto size = static_cast<unsigned>(from.size());
  if constexpr (std::is_base_of_v<std::string, T>) {
    auto list = to.initAs<capnp::List<capnp::Text>>(size);
    for (unsigned i = 0; i < size; ++i) WriteText(list.init(i, static_cast<unsigned>(from[i].size())), from[i]);
  } else if constexpr (Number<T>) {
    auto list = to.initAs<capnp::List<decltype(BitsOf(T{}))>>(size);
    for (unsigned i = 0; i < size; ++i) list.set(i, BitsOf(from[i]));
  } else {
    auto list = to.initAsListOfAnyStruct(kLayout<T>.words, kLayout<T>.pointers, size);
    for (unsigned i = 0; i < size; ++i) Write(list[i], from[i]);
  }
}
template <class T>
void Point(AnyPointer::Builder to, const T& from) {
  if constexpr (std::is_same_v<T, CallSite>) {
    if (from == CallSite{}) return;
  }
  Write(to.initAsAnyStruct(kLayout<T>.words, kLayout<T>.pointers), from);
}

// A number is stored as its difference to the default, bit by bit.
template <Number T>
void PutNumber(kj::byte* data, std::uint16_t at, T value, T unset) {
  if constexpr (std::is_same_v<T, bool>) {
    if (value != unset) data[at / 8] = static_cast<kj::byte>(data[at / 8] | 1U << at % 8);
  } else {
    const auto bits = static_cast<decltype(BitsOf(value))>(BitsOf(value) ^ BitsOf(unset));
    std::memcpy(data + at * sizeof bits, &bits, sizeof bits);
  }
}

template <class T>
void Write(AnyStruct::Builder to, const T& from) {
  const T unset{};
  kj::byte* const data = to.getDataSection().begin();
  auto pointers = to.getPointerSection();
  const auto members = FlatMembers(from);
  const auto defaults = FlatMembers(unset);
  const auto write = [&]<std::size_t i>() {
    const auto& member = std::get<i>(members);
    if constexpr (Number<std::remove_cvref_t<decltype(member)>>) {
      PutNumber(data, kLayout<T>.at[i], member, std::get<i>(defaults));
    } else {
      Point(pointers[kLayout<T>.at[i]], member);
    }
  };
  [&]<std::size_t... i>(std::index_sequence<i...>) { (write.template operator()<i>(), ...); }
  (std::make_index_sequence<std::tuple_size_v<decltype(members)>>());
}

// ---- reading ---------------------------------------------------------------------------------------------------------------

template <class T>
void Read(AnyStruct::Reader from, T& to);

inline void Follow(AnyPointer::Reader from, std::string& to) {
  const auto text = from.getAs<capnp::Text>();
  to.assign(text.begin(), text.size());
}
template <class What>
void Follow(AnyPointer::Reader from, Text<What>& to) {
  Follow(from, static_cast<std::string&>(to));
}
template <class T>
void Follow(AnyPointer::Reader from, std::vector<T>& to) {
  if constexpr (std::is_base_of_v<std::string, T>) {
    for (const auto text : from.getAs<capnp::List<capnp::Text>>()) to.emplace_back().assign(text.begin(), text.size());
  } else if constexpr (Number<T>) {
    for (const auto number : from.getAs<capnp::List<decltype(BitsOf(T{}))>>()) to.push_back(T{number});
  } else {
    for (const auto element : from.getAs<capnp::AnyList>().as<capnp::List<AnyStruct>>()) Read(element, to.emplace_back());
  }
}
template <class T>
void Follow(AnyPointer::Reader from, T& to) {
  Read(from.getAs<AnyStruct>(), to);
}
inline void Follow(AnyPointer::Reader from, Status& to) {
  Outcome told;
  Follow(from, told);
  if (told.code != Code::kOk) to = Status{told.code, std::move(told.message), told.driver_result};
}
template <class T>
void Follow(AnyPointer::Reader from, std::optional<T>& to) {
  if (!from.isNull()) Follow(from, to.emplace());
}

// `to` has its default: that of a message from before there was this member, too.
template <Number T>
void TakeNumber(kj::ArrayPtr<const kj::byte> data, std::uint16_t at, T& to) {
  if constexpr (std::is_same_v<T, bool>) {
    if (at / 8U < data.size() && (data[at / 8] >> at % 8 & 1) != 0) to = !to;
  } else {
    auto bits = BitsOf(to);
    if ((at + 1) * sizeof bits > data.size()) return;
    decltype(bits) stored;
    std::memcpy(&stored, data.begin() + at * sizeof bits, sizeof bits);
    bits = static_cast<decltype(bits)>(bits ^ stored);
    if constexpr (requires { EnumeratorsOf(to); }) {
      constexpr auto known = EnumeratorsOf(T{});
      if (bits > BitsOf(known.last))
        Reject(fmt::format("it has {} {}, and this build knows none above {}", known.called, bits, BitsOf(known.last)));
    }
    to = static_cast<T>(bits);
  }
}

template <class T>
void Read(AnyStruct::Reader from, T& to) {
  const auto data = from.getDataSection();
  const auto pointers = from.getPointerSection();
  const auto members = FlatMembers(to);
  const auto read = [&]<std::size_t i>() {
    auto& member = std::get<i>(members);
    constexpr std::uint16_t at = kLayout<T>.at[i];
    if constexpr (Number<std::remove_cvref_t<decltype(member)>>) {
      TakeNumber(data, at, member);
    } else if (at < pointers.size()) {
      Follow(pointers[at], member);
    }
  };
  [&]<std::size_t... i>(std::index_sequence<i...>) { (read.template operator()<i>(), ...); }
  (std::make_index_sequence<std::tuple_size_v<decltype(members)>>());
}

template <class T>
T Made(AnyStruct::Reader from) {
  T value;
  Read(from, value);
  return value;
}

}  // namespace amem::codec
