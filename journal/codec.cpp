#include "journal/codec.h"

#include <capnp/any.h>
#include <capnp/message.h>
#include <fmt/format.h>
#include <kj/exception.h>

#include <cstring>
#include <exception>

#include "journal/layout.h"
#include "statemachine/apply.h"

namespace amem {
namespace codec {
namespace {

using capnp::AnyPointer;
using capnp::AnyStruct;
using layout::BitsOf;
using layout::FlatMembers;
using layout::kLayout;
using layout::Number;

static_assert(std::endian::native == std::endian::little, "numbers in a message are little-endian");

// What comes before the struct of an event's kind in a message, which is the one thing that it points to.
struct Header {
  SequenceNumber seq;
  std::uint64_t time_ns = 0;
  std::uint32_t thread = 0;
  std::uint16_t kind = 0;  // the index in EventBody
};

// Ends the decoding of a message; Parse() returns it as the reason.
[[noreturn]] void Reject(std::string message) { throw Status{Code::kCorrupt, std::move(message)}; }

// ---- writing ---------------------------------------------------------------------------------------------------------------

template <class T>
void Write(AnyStruct::Builder to, const T& from);

void WriteText(capnp::Text::Builder to, const std::string& from) { std::memcpy(to.begin(), from.data(), from.size()); }

// What is empty, or all zero, is left out, because that is the default.
void Point(AnyPointer::Builder to, const std::string& from) {
  if (!from.empty()) WriteText(to.initAs<capnp::Text>(static_cast<unsigned>(from.size())), from);
}
template <class T>
void Point(AnyPointer::Builder to, const std::vector<T>& from) {
  const auto size = static_cast<unsigned>(from.size());
  if constexpr (std::is_same_v<T, std::string>) {
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

void Follow(AnyPointer::Reader from, std::string& to) {
  const auto text = from.getAs<capnp::Text>();
  to.assign(text.begin(), text.size());
}
template <class T>
void Follow(AnyPointer::Reader from, std::vector<T>& to) {
  if constexpr (std::is_same_v<T, std::string>) {
    for (const auto text : from.getAs<capnp::List<capnp::Text>>()) to.emplace_back(text.begin(), text.size());
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

template <class... Kinds>
EventBody ReadBody(std::uint16_t kind, AnyPointer::Reader from, const std::variant<Kinds...>*) {
  using Make = EventBody (*)(AnyStruct::Reader);
  static constexpr Make kMake[] = {[](AnyStruct::Reader message) -> EventBody { return Made<Kinds>(message); }...};
  if (kind >= kEventKinds)
    Reject(fmt::format("it is of kind {}, and this build knows {} kinds: a newer AMem wrote it, read it with that one", kind,
                       kEventKinds));
  return kMake[kind](from.getAs<AnyStruct>());
}

constexpr std::size_t kScratchWords = 2048;

// Cap'n Proto does not read bytes beyond the message, does not follow pointers in circles for ever, and throws where a message
// does not fit what is asked of it; no exception leaves this function. kj::Exception::what() would start addr2line in a process
// of its own, which a guest must not do to its host; getDescription() is only text.
template <class T, class Take>
Result<T> Parse(std::span<const std::byte> message, const Take& take) {
  if (message.empty() || message.size() % sizeof(capnp::word) != 0) {
    return Status{Code::kCorrupt, fmt::format("it has {} bytes, not a multiple of 8", message.size())};
  }
  try {
    const std::size_t words = message.size() / sizeof(capnp::word);
    std::vector<std::uint64_t> aligned;
    const void* start = message.data();
    if (reinterpret_cast<std::uintptr_t>(start) % alignof(std::uint64_t) != 0) {
      aligned.resize(words);
      std::memcpy(aligned.data(), start, message.size());
      start = aligned.data();
    }
    const kj::ArrayPtr<const capnp::word> segment(static_cast<const capnp::word*>(start), words);
    const kj::ArrayPtr<const capnp::word> segments[] = {segment};
    capnp::ReaderOptions options;
    options.traversalLimitInWords = 2 * words + 64;  // every part is read once; bounds what a hostile message can make us build
    options.nestingLimit = 8;
    capnp::SegmentArrayMessageReader reader(kj::arrayPtr(segments, 1), options);
    return take(reader.getRoot<AnyStruct>());
  } catch (const Status& status) {
    return status;
  } catch (const kj::Exception& e) {
    return Status{Code::kCorrupt, std::string("it is no message of this schema: ") + e.getDescription().cStr()};
  } catch (const std::exception& e) {
    return Status{Code::kCorrupt, std::string("it cannot be decoded: ") + e.what()};
  }
}

}  // namespace
}  // namespace codec

using namespace codec;

Encoder::Encoder() : scratch_(kScratchWords, 0) {}

template <class Fill>
std::span<const std::byte> Encoder::Build(const Fill& fill) {
  try {
    // The builder's destructor zeroes what it used of the first segment, so the bytes are copied out before.
    capnp::MallocMessageBuilder builder(kj::arrayPtr(reinterpret_cast<capnp::word*>(scratch_.data()), scratch_.size()),
                                        capnp::AllocationStrategy::FIXED_SIZE);
    fill(builder.getRoot<AnyPointer>());
    const auto segments = builder.getSegmentsForOutput();
    if (segments.size() == 1) {
      const std::size_t words = segments[0].size();
      if (large_.size() < words) large_.resize(kScratchWords);
      std::memcpy(large_.data(), segments[0].begin(), words * sizeof(capnp::word));
      return std::as_bytes(std::span(large_).first(words));
    }
    const auto root = builder.getRoot<AnyStruct>().asReader();
    const std::size_t words = root.totalSize().wordCount + 1;
    if (large_.size() < words) large_.resize(words);
    std::fill_n(large_.begin(), words, 0);
    capnp::FlatMessageBuilder flat(kj::arrayPtr(reinterpret_cast<capnp::word*>(large_.data()), words));
    flat.setRoot(root);
    return std::as_bytes(std::span(large_).first(words));
  } catch (const kj::Exception&) {
  } catch (const std::exception&) {
  }
  // The next builder needs zeroed scratch memory, whatever this one had written.
  std::fill(scratch_.begin(), scratch_.end(), 0);
  return {};
}

std::span<const std::byte> Encoder::Encode(const Event& event) {
  return Build([&](AnyPointer::Builder root) {
    auto header = root.initAsAnyStruct(kLayout<Header>.words, 1);
    Write(header, Header{event.seq, event.time_ns, event.thread, static_cast<std::uint16_t>(event.body.index())});
    std::visit([to = header.getPointerSection()[0]](const auto& body) { Point(to, body); }, event.body);
  });
}
std::span<const std::byte> Encoder::Encode(const FileMeta& meta) {
  return Build([&](AnyPointer::Builder root) { Point(root, meta); });
}

Result<Event> DecodeEvent(std::span<const std::byte> message) {
  return Parse<Event>(message, [](AnyStruct::Reader from) {
    const auto header = Made<Header>(from);
    const auto pointers = from.getPointerSection();
    const auto body = pointers.size() > 0 ? pointers[0] : AnyPointer::Reader();
    return Event{header.seq, header.time_ns, header.thread,
                 ReadBody(header.kind, body, static_cast<const EventVariant*>(nullptr))};
  });
}

Result<FileMeta> DecodeMeta(std::span<const std::byte> message) { return Parse<FileMeta>(message, Made<FileMeta>); }

Result<std::vector<std::byte>> EncodeSnapshot(const State& state) {
  AMEM_ASSIGN(const auto bodies, ToSnapshotEvents(state));
  std::vector<std::byte> payload;
  Encoder encoder;
  for (const EventBody& body : bodies) {
    const auto message = encoder.Encode(Event{{}, 0, 0, body});
    if (message.empty()) return Status{Code::kInvalid, "snapshot: an event of it is too large to be stored"};
    const std::uint64_t length = message.size();
    const auto* bytes = reinterpret_cast<const std::byte*>(&length);
    payload.insert(payload.end(), bytes, bytes + sizeof length);
    payload.insert(payload.end(), message.begin(), message.end());
  }
  return payload;
}

Result<State> DecodeSnapshot(std::span<const std::byte> payload) {
  State state;
  while (!payload.empty()) {
    std::uint64_t length = 0;
    if (payload.size() < sizeof length) return Status{Code::kCorrupt, "the snapshot ends inside a length"};
    std::memcpy(&length, payload.data(), sizeof length);
    payload = payload.subspan(sizeof length);
    if (length > payload.size()) return Status{Code::kCorrupt, "the snapshot ends inside an event"};
    AMEM_ASSIGN(const auto event, DecodeEvent(payload.first(length)).Within("an event of the snapshot"));
    if (const Status applied = Apply(state, event); !applied) {
      return Status{Code::kCorrupt, "the snapshot does not fold: " + applied.message()};
    }
    payload = payload.subspan(length);
  }
  return state;
}

}  // namespace amem
