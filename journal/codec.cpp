#include "journal/codec.h"

#include <capnp/message.h>
#include <fmt/format.h>
#include <kj/exception.h>

#include <cstring>
#include <exception>

#include "journal/journal.h"
#include "journal/record.h"
#include "journal/struct_codec.h"
#include "statemachine/apply.h"

namespace amem {
namespace codec {
namespace {

// What comes before the struct of an event's kind in a message, which is the one thing that it points to.
struct Header {
  SequenceNumber seq;
  std::uint64_t time_ns = 0;
  std::uint32_t thread = 0;
  std::uint16_t kind = 0;  // the index in EventBody
};

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
  if (message.empty() || message.size() % sizeof(capnp::word) != 0)
    return Status{Code::kCorrupt, fmt::format("it has {} bytes, not a multiple of 8", message.size())};
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

std::vector<std::byte> MetaRecord(SessionId session, std::int32_t pid, const WallClock& clock, std::uint64_t key) {
  Encoder encoder;
  const FileMeta meta{kJournalFormat, kJournalLeastReader, session, pid, clock.realtime_ns, clock.monotonic_ns};
  return Framed(RecordType::kMeta, key, encoder.Encode(meta));
}

Result<FileMeta> DecodeMeta(std::span<const std::byte> message) { return Parse<FileMeta>(message, Made<FileMeta>); }

Result<std::vector<std::byte>> EncodeSnapshot(const State& state, const std::function<void(EventBody&)>& change) {
  AMEM_ASSIGN(auto bodies, ToSnapshotEvents(state));
  std::vector<std::byte> payload;
  Encoder encoder;
  for (EventBody& body : bodies) {
    if (change) change(body);
    const auto message = encoder.Encode(Event{{}, 0, 0, std::move(body)});
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
    if (const Status applied = Apply(state, event); !applied)
      return Status{Code::kCorrupt, "the snapshot does not fold: " + applied.message()};
    payload = payload.subspan(length);
  }
  return state;
}

}  // namespace amem
