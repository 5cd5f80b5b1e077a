// AMEM_CHECK: what AMem believes about its own state, checked in release builds too.
//
// A failed check returns a Status (kInvalid) from the enclosing function. Its text has the expression, its operands' values and
// the place in the source. Nothing is thrown and nothing is aborted: the process belongs to somebody else. The state machine
// hands the Status to its caller, and the ledger latches the session as broken with that text.
//
// A check is for what no input can cause while AMem is right. What a caller or a journal may get wrong is refused in words.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

#include "statemachine/types.h"

namespace amem::check {

template <class T>
std::string Show(const T& value) {  // called as check::Show: other rooms have a Show of their own
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_null_pointer_v<T>) {
    return "null";
  } else if constexpr (std::is_convertible_v<T, std::string_view>) {
    return '"' + std::string(std::string_view(value)) + '"';
  } else if constexpr (std::is_pointer_v<T>) {
    return value == nullptr ? "null" : "not null";
  } else if constexpr (std::is_same_v<T, Address>) {
    return Hex(value);
  } else if constexpr (requires { value.value; }) {  // an id
    return Show(value.value);
  } else if constexpr (std::is_enum_v<T>) {
    return Show(static_cast<std::underlying_type_t<T>>(value));
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_string(value);
  } else {
    return "...";  // as an iterator: name what it was looked up by after the expression
  }
}

// The outcome of a comparison. Operands are worded only when it is false, while they are still alive.
struct Outcome {
  bool ok = true;
  std::string operands;
};

template <class Left>
struct LeftOperand {
  const Left& left;
  Outcome Is(bool ok) const { return ok ? Outcome{} : Outcome{false, check::Show(left)}; }
  template <class Right>
  Outcome Is(bool ok, const char* sign, const Right& right) const {
    return ok ? Outcome{} : Broken(sign, right);
  }
  template <class Right>
  [[gnu::cold, gnu::noinline]] Outcome Broken(const char* sign, const Right& right) const {
    return {false, check::Show(left) + sign + check::Show(right)};
  }
  operator Outcome() const { return Is(static_cast<bool>(left)); }  // NOLINT(google-explicit-constructor)
  friend Outcome operator==(const LeftOperand& l, const auto& r) { return l.Is(l.left == r, " == ", r); }
  friend Outcome operator!=(const LeftOperand& l, const auto& r) { return l.Is(l.left != r, " != ", r); }
  friend Outcome operator<(const LeftOperand& l, const auto& r) { return l.Is(l.left < r, " < ", r); }
  friend Outcome operator<=(const LeftOperand& l, const auto& r) { return l.Is(l.left <= r, " <= ", r); }
  friend Outcome operator>(const LeftOperand& l, const auto& r) { return l.Is(l.left > r, " > ", r); }
  friend Outcome operator>=(const LeftOperand& l, const auto& r) { return l.Is(l.left >= r, " >= ", r); }
  // Both sides would have to be worded: write two checks.
  friend Outcome operator&&(const LeftOperand&, const auto&) = delete;
  friend Outcome operator||(const LeftOperand&, const auto&) = delete;
};

// Binds more tightly than a comparison, and less tightly than arithmetic.
struct Start {
  template <class Left>
  LeftOperand<Left> operator<<(const Left& left) const {
    return {left};
  }
};

template <class... Values>
std::string ShowAll(const Values&... values) {
  std::string all;
  ((all += (all.empty() ? "" : ", ") + check::Show(values)), ...);
  return all;
}

Status Failed(std::string_view expression, std::string_view file, int line, const std::string& operands,
              std::string_view names = {}, const std::string& values = {});

}  // namespace amem::check

// AMEM_CHECK(a.mappings > 0); AMEM_CHECK(slab != nullptr, a.slab): more values to print may follow.
#define AMEM_CHECK(expression, ...)                                                                                      \
  do {                                                                                                                   \
    if (const ::amem::check::Outcome amem_check = ::amem::check::Start{} << expression; !amem_check.ok) [[unlikely]]     \
      return ::amem::check::Failed(#expression, __FILE__, __LINE__,                                                      \
                                   amem_check.operands __VA_OPT__(, #__VA_ARGS__, ::amem::check::ShowAll(__VA_ARGS__))); \
  } while (false)
