// JSON told once: what an object shows, and the form of all that it may show in words of JSON Schema.
//
// `WriteFields(to, value)` names the fields of a value in their order. `to` is a Shown, which makes JSON of that value, or a
// Form, which makes the schema of any (of a value that was made without arguments): they cannot disagree. A struct with
// AMEM_STRUCT (statemachine/fields.h) is told by its fields; any other has a WriteFields in its own namespace. Schemas refer to
// "#/$defs/session" and "#/$defs/hex". Include <nlohmann/json.hpp> before.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "replay/job/event_json.h"
#include "statemachine/event.h"
#include "statemachine/fields.h"
#include "statemachine/state.h"

namespace amem {

using Json = nlohmann::ordered_json;

template <class To, Described T>
void WriteFields(To& to, const T& value) {
  ForEachField(value, to);
}

template <class T>
concept Word = std::is_enum_v<T> && !std::is_same_v<T, LocationType>;  // shown as one; a location's type as CUDA's number

// Not inlined into the hundreds of fields that events have, which would take long to compile; so are others below.
[[gnu::noinline]] inline void Set(Json& j, std::string_view name, Json value) { j[std::string(name)] = std::move(value); }

// A text that is one of a few words.
template <const auto& kWords>
struct OneOf {
  std::string_view word;

  OneOf() = default;
  explicit OneOf(std::string_view of) : word(of) {}
  explicit OneOf(const std::string&&) = delete;  // which would end before it is shown
};
// A number that the form says to be at least so much.
template <std::int64_t kLeast>
struct AtLeast {
  std::int64_t number = kLeast;
};
using RankOrNull = std::optional<AtLeast<0>>;  // null: no launcher gave it one
inline RankOrNull RankShown(std::int32_t rank) { return rank < 0 ? RankOrNull() : AtLeast<0>{rank}; }

// ---- a value as JSON -------------------------------------------------------------------------------------------------------

template <class T>
Json Show(const T& value);
template <class T>  // of containers in one another, whose namespace is not this one
Json Show(const std::optional<T>& value);
template <class T>
Json Show(const std::vector<T>& list);
template <class Key, class T>
Json Show(const std::map<Key, T>& map);
inline Json Show(const std::string& text) { return text; }
template <class What>
Json Show(const Text<What>& text) {
  return static_cast<const std::string&>(text);
}
inline Json Show(SessionId id) { return SessionText(id); }
inline Json Show(Address address) { return Hex(address.value); }
inline Json Show(DriverHandle handle) { return Hex(handle.value); }
inline Json Show(LocationType type) { return static_cast<std::uint32_t>(type); }
inline Json Show(const CallSite& site) {
  Json frames = Json::array();
  for (const std::uint64_t frame : site.frames) {
    if (frame == 0) break;
    frames.push_back(Hex(frame));
  }
  return frames;
}
template <class Tag, class Rep>
Json Show(Id<Tag, Rep> id) {
  return id.value;
}
template <const auto& kWords>
Json Show(const OneOf<kWords>& text) {
  return text.word;
}
template <std::int64_t kLeast>
Json Show(const AtLeast<kLeast>& value) {
  return value.number;
}
template <class T>
Json Show(const Hexadecimal<T>& hexadecimal) {
  return Hex(hexadecimal.field);
}
template <class T>
Json Show(const OrNull<T>& value) {
  return value.field != T{} ? Show(value.field) : Json(nullptr);
}
template <class T>
Json Show(const std::optional<T>& value) {
  return value ? Show(*value) : Json(nullptr);
}
template <class T>
Json Show(const std::vector<T>& list) {
  Json shown = Json::array();
  for (const T& element : list) shown.push_back(Show(element));
  return shown;
}
template <class Key, class T>
Json Show(const std::map<Key, T>& map) {
  Json shown = Json::object();
  for (const auto& [key, value] : map) {
    if constexpr (Word<Key>) {
      Set(shown, ToText(key), Show(value));
    } else {
      Set(shown, key, Show(value));
    }
  }
  return shown;
}

inline Json Show(const Totals& totals) {
  Json counts = Json::object();
  for (std::size_t kind = 0; kind < kEventKinds; ++kind)
    if (totals.events[kind] != 0) counts[KindWord(kind)] = totals.events[kind];
  return counts;
}

struct Shown {
  Json json = Json::object();

  template <class T>
  [[gnu::noinline]] void operator()(std::string_view name, const T& field, const char* /*description*/ = nullptr) {
    Set(json, name, Show(field));
  }
  template <class T>
  [[gnu::noinline]] void operator()(std::string_view name, const IfAny<T>& value) {
    If(value.field != T{}, name, value.field);
  }
  template <class T>
  void operator()(std::string_view, const Unlisted<T>&) {}
  void operator()(std::string_view, const RemoteAllocation& remote) { WriteFields(*this, remote); }
  // A field that is there only when something holds.
  template <class T>
  void If(bool told, std::string_view name, const T& field, const char* /*description*/ = nullptr) {
    if (told) Set(json, name, Show(field));
  }
  // A list of objects, pairs of a key and what is under it: `each` tells one.
  template <class List, class Each>
  void Rows(std::string_view name, const List& list, const Each& each, const char* /*description*/ = nullptr) {
    Json rows = Json::array();
    for (const auto& [key, value] : list) {
      Shown row;
      each(row, key, value);
      rows.push_back(std::move(row.json));
    }
    Set(json, name, std::move(rows));
  }
};

template <class T>
Json Object(const T& value) {
  Shown object;
  WriteFields(object, value);
  return std::move(object.json);
}
template <class T>
Json Show(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return ToText(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    return value;
  } else {
    return Object(value);
  }
}

// ---- the form of any value of a type, in words of JSON Schema --------------------------------------------------------------

inline constexpr const char* kSessionRef = "#/$defs/session";
inline constexpr const char* kHex = "#/$defs/hex";

template <class T>
Json FormOf(const T& any);
template <class T>
Json FormOf(const std::optional<T>&);
template <class T>
Json FormOf(const std::vector<T>&);
template <class Key, class T>
Json FormOf(const std::map<Key, T>&);
inline Json FormOf(const std::string&) { return {{"type", "string"}}; }
template <class What>
Json FormOf(const Text<What>& text) {
  return FormOf(static_cast<const std::string&>(text));
}
inline Json FormOf(SessionId) { return {{"$ref", kSessionRef}}; }
inline Json FormOf(Address) { return {{"$ref", kHex}}; }
inline Json FormOf(DriverHandle) { return {{"$ref", kHex}}; }
inline Json FormOf(const CallSite&) { return {{"type", "array"}, {"items", {{"$ref", kHex}}}}; }
template <class Tag, class Rep>
Json FormOf(Id<Tag, Rep>) {
  return FormOf(Rep{});
}
template <const auto& kWords>
Json FormOf(const OneOf<kWords>&) {
  Json words = Json::array();
  for (const std::string_view word : kWords) words.push_back(word);
  return {{"enum", std::move(words)}};
}
template <std::int64_t kLeast>
Json FormOf(const AtLeast<kLeast>&) {
  return {{"type", "integer"}, {"minimum", kLeast}};
}
template <class T>
Json FormOf(const Hexadecimal<T>&) {
  return {{"$ref", kHex}};
}
inline Json OrNothing(Json form) { return {{"anyOf", {std::move(form), {{"type", "null"}}}}}; }
template <class T>
Json FormOf(const OrNull<T>&) {
  return OrNothing(FormOf(T{}));
}
template <class T>
Json FormOf(const std::optional<T>&) {
  return OrNothing(FormOf(T{}));
}
template <class T>
Json FormOf(const std::vector<T>&) {
  return {{"type", "array"}, {"items", FormOf(T{})}};
}
template <class Key, class T>
Json FormOf(const std::map<Key, T>&) {
  return {{"type", "object"}, {"additionalProperties", FormOf(T{})}};
}

inline Json FormOf(const Totals&) { return {{"type", "object"}, {"additionalProperties", FormOf(std::uint64_t{})}}; }

struct Form {
  Json json = {{"type", "object"}, {"required", Json::array()}, {"properties", Json::object()}};

  template <class T>
  [[gnu::noinline]] void operator()(std::string_view name, const T& field, const char* description = nullptr) {
    Add(true, name, FormOf(field), description);
  }
  template <class T>
  [[gnu::noinline]] void operator()(std::string_view name, const IfAny<T>& value) {
    If(true, name, value.field);
  }
  template <class T>
  void operator()(std::string_view, const Unlisted<T>&) {}
  void operator()(std::string_view, const RemoteAllocation& remote) { WriteFields(*this, remote); }
  template <class T>
  void If(bool, std::string_view name, const T& field, const char* description = nullptr) {
    Add(false, name, FormOf(field), description);
  }
  template <class List, class Each>
  void Rows(std::string_view name, const List&, const Each& each, const char* description = nullptr) {
    Form row;
    const typename List::value_type any{};
    each(row, any.first, any.second);
    Add(true, name, {{"type", "array"}, {"items", std::move(row.json)}}, description);
  }

 private:
  [[gnu::noinline]] void Add(bool required, std::string_view name, Json form, const char* description) {
    if (description != nullptr) form["description"] = description;
    if (required) json["required"].push_back(name);
    Set(json["properties"], name, std::move(form));
  }
};

template <class T>
Json FormOf(const T& any) {
  if constexpr (Word<T>) {
    Json words = Json::array();
    for (unsigned i = 0; i <= static_cast<unsigned>(EnumeratorsOf(T{}).last); ++i) words.push_back(ToText(static_cast<T>(i)));
    return {{"enum", std::move(words)}};
  } else if constexpr (std::is_same_v<T, bool>) {
    return {{"type", "boolean"}};
  } else if constexpr (std::is_floating_point_v<T>) {  // a time that something took
    return {{"type", "number"}, {"minimum", 0}};
  } else if constexpr (std::is_enum_v<T> || std::is_unsigned_v<T>) {
    return {{"type", "integer"}, {"minimum", 0}};
  } else if constexpr (std::is_signed_v<T>) {
    return {{"type", "integer"}};
  } else {
    Form form;
    WriteFields(form, any);
    return std::move(form.json);
  }
}

}  // namespace amem
