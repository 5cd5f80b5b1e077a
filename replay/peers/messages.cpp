#include "replay/peers/messages.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fmt/format.h>
#include <kj/exception.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>

#include "journal/codec.h"
#include "journal/struct_codec.h"

namespace amem {

// Aggregates with members that may be missing list them here.
template <class Item>
requires std::is_same_v<std::remove_const_t<Item>, SharedItem>
constexpr auto Members(Item& of) {
  return std::tie(of.bytes, of.properties, of.part, of.tag, of.incarnation, of.pool, of.pool_policy);
}

namespace {

using codec::Reject;

constexpr std::size_t kTextMax = 2000;
constexpr std::size_t kHostMax = 64;  // so that a list of kMembersMax identities fits into kMessageBytesMax

// What a message begins with, which then points to its body.
struct MessageHeader {
  std::uint64_t request = 0;
  std::uint16_t kind = 0;  // the index in MessageBody
};

// A note is an event as in journals.
struct NoteBytes {
  std::vector<std::uint8_t> event;
};

// ---- bounds ----------------------------------------------------------------------------------------------------------------

template <class T>
inline constexpr std::size_t kLongest = kMessageBytesMax;
template <>
inline constexpr std::size_t kLongest<SessionId> = kMembersMax;
template <>
inline constexpr std::size_t kLongest<SharedItem> = kDescriptorsMax;
template <>
inline constexpr std::size_t kLongest<ShareRequest> = kReferencesMax;

void Cut(std::string& text, std::size_t most) {
  if (text.size() > most) text.replace(most - 3, text.size(), "...");
}

// Cuts texts that are too long, and lists, if `own`; those of somebody else are refused, and so is any set of sessions, of
// which none may be left behind.
template <class T>
void Fit(T& value, bool own);

template <class T>
void FitOne(T& value, bool own) {
  if constexpr (!layout::Number<T> && !layout::kIsArray<T>)
    std::apply([own](auto&... members) { (Fit(members, own), ...); }, Members(value));
}
void FitOne(std::string& text, bool) { Cut(text, kTextMax); }
void FitOne(PeerIdentity& who, bool) { Cut(who.host, kHostMax); }
void FitOne(Status& status, bool) {
  std::string message = status.message();
  Cut(message, kTextMax);
  if (message.size() < status.message().size()) status = Status{status.code(), std::move(message), status.driver_result()};
}
template <class T>
void FitOne(std::vector<T>& list, bool own) {
  if (list.size() > kLongest<T> && (!own || std::is_same_v<T, SessionId>))
    Reject(fmt::format("a list of {} where at most {} are allowed", list.size(), kLongest<T>));
  list.resize(std::min(list.size(), kLongest<T>));
  for (T& one : list) Fit(one, own);
}
template <class T>
void FitOne(std::optional<T>& value, bool own) {
  if (value) Fit(*value, own);
}
template <class T>
void Fit(T& value, bool own) {
  FitOne(value, own);
}

// ---- bodies ----------------------------------------------------------------------------------------------------------------

// A body with one member that is no number is written as that member, an empty body not at all, any other as a struct.
template <class Body>
constexpr bool IsOneThing() {
  if constexpr (std::is_empty_v<Body>) {
    return false;
  } else {
    using All = decltype(Members(std::declval<Body&>()));
    return std::tuple_size_v<All> == 1 && !layout::Number<std::remove_cvref_t<std::tuple_element_t<0, All>>>;
  }
}

template <class Body>
void PutBody([[maybe_unused]] codec::AnyPointer::Builder to, Body body) {
  if constexpr (!std::is_empty_v<Body>) Fit(body, true);
  if constexpr (IsOneThing<Body>()) {
    codec::Point(to, std::get<0>(Members(body)));
  } else if constexpr (!std::is_empty_v<Body>) {
    codec::Point(to, body);
  }
}
void PutBody(codec::AnyPointer::Builder to, const NoteMessage& note) {
  Encoder encoder;
  const auto bytes = encoder.Encode(Event{{}, 0, 0, note.event});
  const auto* const begin = reinterpret_cast<const std::uint8_t*>(bytes.data());
  PutBody(to, NoteBytes{{begin, begin + bytes.size()}});
}

template <class Body>
Body GetBody([[maybe_unused]] codec::AnyPointer::Reader from) {
  Body body;
  if constexpr (IsOneThing<Body>()) {
    codec::Follow(from, std::get<0>(Members(body)));
  } else if constexpr (!std::is_empty_v<Body>) {
    codec::Follow(from, body);
  }
  if constexpr (!std::is_empty_v<Body>) Fit(body, false);
  return body;
}
template <>
ReimportMessage GetBody(codec::AnyPointer::Reader from) {
  DroppedMessage likewise = GetBody<DroppedMessage>(from);
  if (likewise.references.size() > kDescriptorsMax)
    Reject(fmt::format("a list of {} where at most {} are allowed", likewise.references.size(), kDescriptorsMax));
  return {std::move(likewise.references)};
}
template <>
NoteMessage GetBody(codec::AnyPointer::Reader from) {
  const NoteBytes note = GetBody<NoteBytes>(from);
  auto event = DecodeEvent(std::as_bytes(std::span(note.event)));
  if (!event) throw event.status();
  if (!std::holds_alternative<Frozen>(event->body) && !std::holds_alternative<FreezeStep>(event->body))
    Reject("an event that a tool does not record");
  return {std::move(event->body)};
}

template <class... Kinds>
MessageBody ReadBody(std::uint16_t kind, codec::AnyPointer::Reader from, const std::variant<Kinds...>*) {
  using Make = MessageBody (*)(codec::AnyPointer::Reader);
  static constexpr Make kMake[] = {[](codec::AnyPointer::Reader body) -> MessageBody { return GetBody<Kinds>(body); }...};
  if (kind >= sizeof...(Kinds)) Reject("a kind of message that this build does not know");
  return kMake[kind](from);
}

}  // namespace

MessageBody::MessageBody() = default;
MessageBody::MessageBody(const MessageBody& other) = default;
MessageBody::MessageBody(MessageBody&& other) noexcept = default;
MessageBody& MessageBody::operator=(const MessageBody& other) { return *this = MessageBody(other); }
MessageBody& MessageBody::operator=(MessageBody&& other) noexcept = default;
MessageBody::~MessageBody() = default;

Result<std::vector<std::byte>> EncodeMessage(const Message& message) {
  try {
    capnp::word scratch[512] = {};
    capnp::MallocMessageBuilder builder(kj::arrayPtr(scratch, std::size(scratch)));
    auto header = builder.getRoot<codec::AnyPointer>().initAsAnyStruct(codec::kLayout<MessageHeader>.words, 1);
    codec::Write(header, MessageHeader{message.request, static_cast<std::uint16_t>(message.body.index())});
    std::visit([to = header.getPointerSection()[0]](const auto& body) { PutBody(to, body); }, message.body);
    auto words = capnp::messageToFlatArray(builder);
    auto bytes = words.asBytes();
    if (bytes.size() > kMessageBytesMax) {
      return Status{Code::kInvalid,
                    fmt::format("a message to a peer of {} bytes, more than {}", bytes.size(), kMessageBytesMax)};
    }
    std::vector<std::byte> out(bytes.size());
    std::memcpy(out.data(), bytes.begin(), bytes.size());
    return out;
  } catch (const Status& refused) {
    return Status{Code::kInvalid, "encoding a message to a peer: " + refused.message()};
  } catch (const kj::Exception& e) {
    return Status{Code::kInvalid, std::string("encoding a message to a peer: ") + e.getDescription().cStr()};
  } catch (const std::exception& e) {
    return Status{Code::kInvalid, std::string("encoding a message to a peer: ") + e.what()};
  }
}

Result<Message> DecodeMessage(std::span<const std::byte> bytes) {
  const auto no_message = [&](std::string_view why) {
    return Status{Code::kCorrupt, fmt::format("{} bytes that are not a message of AMem: {}", bytes.size(), why)};
  };
  try {
    if (bytes.size() > kMessageBytesMax || bytes.size() % sizeof(capnp::word) != 0) return no_message("its size");
    auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));  // for alignment
    if (!bytes.empty()) std::memcpy(words.begin(), bytes.data(), bytes.size());
    capnp::ReaderOptions limits;
    limits.traversalLimitInWords = 4 * words.size() + 64;
    limits.nestingLimit = 8;
    capnp::FlatArrayMessageReader reader(words, limits);
    const auto root = reader.getRoot<codec::AnyStruct>();
    const auto header = codec::Made<MessageHeader>(root);
    const auto pointers = root.getPointerSection();
    return Message{header.request, ReadBody(header.kind, pointers.size() > 0 ? pointers[0] : codec::AnyPointer::Reader(),
                                            static_cast<const MessageBody*>(nullptr))};
  } catch (const Status& status) {
    return no_message(status.message());
  } catch (const kj::Exception& e) {
    return no_message(e.getDescription().cStr());
  } catch (const std::exception& e) {
    return no_message(e.what());
  }
}

}  // namespace amem
