// Events for tests. Sample(kind) has a value that is not the default in every field of every struct, found by reflection: a
// field or a kind that is added needs nothing here.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "statemachine/event.h"

namespace amem::test {

template <class T, class Visit>
void VisitFields(T& object, const Visit& visit) {
  auto members = Members(object);
  [&]<std::size_t... i>(std::index_sequence<i...>) { (visit(std::get<i>(members)), ...); }
  (std::make_index_sequence<std::tuple_size_v<decltype(members)>>());
}

template <class T>
inline constexpr bool kIsId = false;
template <class Tag, class Rep>
inline constexpr bool kIsId<Id<Tag, Rep>> = true;
template <class T>
inline constexpr bool kIsVector = false;
template <class T>
inline constexpr bool kIsVector<std::vector<T>> = true;

// ---- every field gets another value than its default -------------------------------------------------------------------

class Filler {
 public:
  template <class T>
  void Fill(T& field) {
    if constexpr (kIsId<T>) {
      Fill(field.value);
    } else if constexpr (kIsVector<T>) {
      field.resize(3);
      for (auto& element : field) Fill(element);
    } else if constexpr (std::is_base_of_v<std::string, T>) {
      field = "text " + std::to_string(++n_) + std::string("\0 \xff", 3);  // any bytes
    } else if constexpr (std::is_same_v<T, bool>) {
      field = !field;
    } else if constexpr (std::is_enum_v<T>) {
      field = static_cast<T>(1);
    } else if constexpr (std::is_integral_v<T>) {
      // A large value of the right width, so that a field that is stored in fewer bits is noticed.
      field = static_cast<T>(static_cast<std::make_unsigned_t<T>>(~0ULL >> 1) - static_cast<std::make_unsigned_t<T>>(++n_));
    } else if constexpr (std::is_same_v<T, CallSite>) {
      for (auto& frame : field.frames) Fill(frame);
    } else {
      VisitFields(field, [this](auto& inner) { Fill(inner); });
    }
  }

 private:
  unsigned n_ = 0;
};

// Fails to fill nothing: true when no field has its default any more.
template <class T>
bool NothingIsDefault(const T& object) {
  bool all = true;
  const T fresh{};
  std::vector<const void*> defaults;
  VisitFields(fresh, [&](const auto& field) { defaults.push_back(&field); });
  std::size_t i = 0;
  VisitFields(object, [&](const auto& field) {
    all = all && !(field == *static_cast<std::remove_cvref_t<decltype(field)> const*>(defaults[i++]));
  });
  return all;
}

template <std::size_t... I>
EventBody DefaultBody(std::size_t kind, std::index_sequence<I...>) {
  EventBody body;
  ((I == kind ? (void)body.emplace<I>() : void()), ...);
  return body;
}
inline EventBody DefaultBody(std::size_t kind) { return DefaultBody(kind, std::make_index_sequence<kEventKinds>()); }

inline EventBody Sample(std::size_t kind) {
  EventBody body = DefaultBody(kind);
  std::visit([](auto& fields) { Filler().Fill(fields); }, body);
  return body;
}

// ---- a plain text of every field, which does not change when the words of ToText do ---------------------------------------

class Dumper {
 public:
  template <class T>
  void Dump(const T& field) {
    if constexpr (kIsId<T>) {
      Dump(field.value);
    } else if constexpr (kIsVector<T>) {
      Group("[", "]", [&] {
        for (const auto& element : field) Dump(element);
      });
    } else if constexpr (std::is_base_of_v<std::string, T>) {
      Word("\"" + Printable(field) + "\"");
    } else if constexpr (std::is_enum_v<T>) {
      Word(std::to_string(static_cast<std::uint64_t>(field)));
    } else if constexpr (std::is_integral_v<T>) {
      Word(std::to_string(field));
    } else if constexpr (std::is_same_v<T, CallSite>) {
      Group("<", ">", [&] {
        for (const auto frame : field.frames) Dump(frame);
      });
    } else {
      Group("(", ")", [&] { VisitFields(field, [this](const auto& inner) { Dump(inner); }); });
    }
  }
  std::string text;

 private:
  static std::string Printable(const std::string& bytes) {
    std::string out;
    for (const char c : bytes) out += c >= 0x20 && c < 0x7f && c != '\\' ? std::string(1, c) : "\\" + std::to_string(c & 0xff);
    return out;
  }
  template <class Body>
  void Group(const char* open, const char* close, const Body& body) {
    Word(open);
    first_ = true;
    body();
    text += close;
    first_ = false;
  }
  void Word(const std::string& word) {
    if (!first_) text += ' ';
    first_ = false;
    text += word;
  }
  bool first_ = true;
};

inline std::string Dump(const Event& event) {
  Dumper dumper;
  std::visit([&](const auto& body) { dumper.Dump(body); }, event.body);
  return std::to_string(event.seq.value) + " " + std::to_string(event.time_ns) + " " + std::to_string(event.thread) + " kind " +
         std::to_string(event.body.index()) + " " + dumper.text;
}

// ---- a stream of events whose contents follow from their number ------------------------------------------------------------

inline Event NumberedEvent(std::uint64_t seq) {
  Event event{SequenceNumber{seq}, seq * 1000 + 7, static_cast<std::uint32_t>(seq % 5 + 100), {}};
  const Address address{0x7f0000000000 + seq * (2 << 20)};
  const CallSite site{{seq, seq + 1, 3, 0, 0}};
  switch (seq % 6) {
    case 0:
      event.body = RangeReserved{address, 2 << 20, 2 << 20, {}, 0, site};
      break;
    case 1:
      event.body = AllocationCreated{
          AllocationId{seq}, 2 << 20, {1, 1, {LocationType::kDevice, 3}, 0, 1, 0, 0}, 0, DriverHandle{seq * 16}, site, {}};
      break;
    case 2:
      event.body = Mapped{address, 2 << 20, 0, AllocationId{seq}, 0};
      break;
    case 3:
      event.body = AccessSet{address, 2 << 20, std::vector(seq % 4, AccessDescriptor{{LocationType::kDevice, 3}, 3})};
      break;
    case 4:
      event.body = AllocationReleased{AllocationId{seq}};
      break;
    default:
      event.body =
          PassedThrough{"call " + std::to_string(seq), std::string(seq % 90, 'x'), static_cast<std::int32_t>(seq % 1000)};
  }
  return event;
}

// The same, for streams that can be folded: allocations come, are exported and go; a few are there at any time.
inline Event LegalEvent(std::uint64_t seq) {
  Event event{SequenceNumber{seq}, seq * 1000 + 7, 9, {}};
  if (seq == 1) {
    SessionOpened opened;
    opened.session = SessionId{0xabc};
    opened.host = "host";
    event.body = opened;
    return event;
  }
  const AllocationId id{(seq - 2) / 4 + 1};
  switch ((seq - 2) % 4) {
    case 0:
      event.body = AllocationCreated{id, 2 << 20, {1, 1, {LocationType::kDevice, 0}, 0, 1, 0, 0}, 0, DriverHandle{seq}, {}, {}};
      break;
    case 1:
      event.body = Exported{id, 1};
      break;
    case 2:
      event.body = PassedThrough{"cuMemGetAddressRange", "", 0};
      break;
    default:
      if (id.value > 8) {
        event.body = AllocationReleased{AllocationId{id.value - 8}};
      } else {
        event.body = GroupChanged{static_cast<std::int64_t>(seq)};
      }
  }
  return event;
}

}  // namespace amem::test
