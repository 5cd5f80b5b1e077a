#include "journal/codec.h"

#include <capnp/message.h>
#include <fmt/format.h>
#include <kj/exception.h>

#include <cstring>
#include <exception>

#include "journal/codec_events.h"
#include "journal/journal.capnp.h"

namespace amem {
namespace codec {

// clang-format off
#define AMEM_EVENT_KINDS(X)                                                                                                    \
  X(SessionOpened, SESSION_OPENED) X(SessionClosed, SESSION_CLOSED) X(SessionBroken, SESSION_BROKEN)                           \
  X(GroupChanged, GROUP_CHANGED) X(LibraryAttached, LIBRARY_ATTACHED) X(DriverSymbolBound, DRIVER_SYMBOL_BOUND)                \
  X(RangeReserved, RANGE_RESERVED) X(RangeFreed, RANGE_FREED) X(AllocationCreated, ALLOCATION_CREATED)                         \
  X(AllocationRetained, ALLOCATION_RETAINED) X(AllocationReleased, ALLOCATION_RELEASED) X(Mapped, MAPPED)                      \
  X(Unmapped, UNMAPPED) X(AccessSet, ACCESS_SET) X(Exported, EXPORTED) X(Imported, IMPORTED)                                   \
  X(ReferenceAdded, REFERENCE_ADDED) X(ReferenceDropped, REFERENCE_DROPPED) X(PeerConnected, PEER_CONNECTED)                   \
  X(PeerLost, PEER_LOST) X(HostAllocated, HOST_ALLOCATED) X(HostFreed, HOST_FREED) X(LegacyAllocated, LEGACY_ALLOCATED)        \
  X(LegacyFreed, LEGACY_FREED) X(LegacyExported, LEGACY_EXPORTED) X(LegacyImported, LEGACY_IMPORTED)                           \
  X(LegacyClosed, LEGACY_CLOSED) X(AsyncAllocated, ASYNC_ALLOCATED) X(AsyncFreed, ASYNC_FREED)                                 \
  X(MulticastCreated, MULTICAST_CREATED) X(MulticastDeviceAdded, MULTICAST_DEVICE_ADDED) X(MulticastBound, MULTICAST_BOUND)    \
  X(MulticastUnbound, MULTICAST_UNBOUND) X(Registered, REGISTERED) X(Deregistered, DEREGISTERED)                               \
  X(PassedThrough, PASSED_THROUGH) X(CycleBegun, CYCLE_BEGUN) X(StepBegun, STEP_BEGUN) X(StepDone, STEP_DONE)                  \
  X(StepFailed, STEP_FAILED) X(PhaseBegun, PHASE_BEGUN) X(PhaseDecided, PHASE_DECIDED) X(CycleDone, CYCLE_DONE)                \
  X(CycleFailed, CYCLE_FAILED) X(Condensed, CONDENSED) X(SlabOpened, SLAB_OPENED) X(Placed, PLACED) X(Backed, BACKED)          \
  X(PartCleared, PART_CLEARED) X(CommunicatorBegun, COMMUNICATOR_BEGUN) X(CommunicatorReady, COMMUNICATOR_READY)               \
  X(CommunicatorEnded, COMMUNICATOR_ENDED) X(CommunicatorSuspended, COMMUNICATOR_SUSPENDED)                            \
  X(VoteCast, VOTE_CAST) X(MemberHeard, MEMBER_HEARD) X(ProcessSeen, PROCESS_SEEN) X(ThreadSeen, THREAD_SEEN)                  \
  X(LaunchRefused, LAUNCH_REFUSED)                                                                                             \
  X(PoolOpened, POOL_OPENED) X(PoolAllocated, POOL_ALLOCATED) X(PoolFreed, POOL_FREED)                                   \
  X(RequestSeen, REQUEST_SEEN) X(SafepointReached, SAFEPOINT_REACHED) X(RequestEnded, REQUEST_ENDED) X(Frozen, FROZEN) \
  X(EverythingKept, EVERYTHING_KEPT)
// clang-format on

#define AMEM_COUNT(Type, NAME) +1
static_assert(0 AMEM_EVENT_KINDS(AMEM_COUNT) == kEventKinds, "a kind of event is missing here and in journal.capnp");
#undef AMEM_COUNT
#define AMEM_SAME_NUMBER(Type, NAME)                                                                                         \
  static_assert(std::is_same_v<std::variant_alternative_t<static_cast<std::size_t>(wire::Event::NAME), EventVariant>, Type>, \
                "the place of " #Type " in the schema's union is not its index in EventBody");
AMEM_EVENT_KINDS(AMEM_SAME_NUMBER)
#undef AMEM_SAME_NUMBER

}  // namespace codec

namespace {

struct PutBody {
  wire::Event::Builder to;
#define AMEM_PUT(Type, NAME) \
  void operator()(const Type& from) { codec::Carry(to.init##Type(), from); }
  AMEM_EVENT_KINDS(AMEM_PUT)
#undef AMEM_PUT
};

template <class T>
T Made(auto message) {
  T value;
  codec::Carry(message, value);
  return value;
}

EventBody GetBody(wire::Event::Reader from) {
  switch (from.which()) {
#define AMEM_GET(Type, NAME) \
  case wire::Event::NAME:    \
    return Made<Type>(from.get##Type());
    AMEM_EVENT_KINDS(AMEM_GET)
#undef AMEM_GET
  }
  codec::Reject(fmt::format("it is of kind {}, and this build knows {} kinds: a newer AMem wrote it, read it with that one",
                            static_cast<unsigned>(from.which()), kEventKinds));
}

void Put(wire::Event::Builder to, const Event& from) {
  to.setSeq(from.seq.value);
  to.setTimeNs(from.time_ns);
  to.setThread(from.thread);
  std::visit(PutBody{to}, from.body);
}

constexpr std::size_t kScratchWords = 2048;

// Cap'n Proto does not read bytes beyond the message, does not follow pointers in circles for ever, and throws where a message
// does not fit the schema; no exception leaves this function. kj::Exception::what() would start addr2line in a process of its
// own, which a guest must not do to its host; getDescription() is only text.
template <class T, class Root, class Take>
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
    return take(reader.getRoot<Root>());
  } catch (const Status& status) {
    return status;
  } catch (const kj::Exception& e) {
    return Status{Code::kCorrupt, std::string("it is no message of this schema: ") + e.getDescription().cStr()};
  } catch (const std::exception& e) {
    return Status{Code::kCorrupt, std::string("it cannot be decoded: ") + e.what()};
  }
}

}  // namespace

Encoder::Encoder() : scratch_(kScratchWords, 0) {}

template <class Root, class Fill>
std::span<const std::byte> Encoder::Build(const Fill& fill) {
  try {
    // The builder's destructor zeroes what it used of the first segment, so the bytes are copied out before.
    capnp::MallocMessageBuilder builder(kj::arrayPtr(reinterpret_cast<capnp::word*>(scratch_.data()), scratch_.size()),
                                        capnp::AllocationStrategy::FIXED_SIZE);
    fill(builder.initRoot<Root>());
    const auto segments = builder.getSegmentsForOutput();
    if (segments.size() == 1) {
      const std::size_t words = segments[0].size();
      if (large_.size() < words) large_.resize(kScratchWords);
      std::memcpy(large_.data(), segments[0].begin(), words * sizeof(capnp::word));
      return std::as_bytes(std::span(large_).first(words));
    }
    const std::size_t words = builder.getRoot<Root>().totalSize().wordCount + 1;
    if (large_.size() < words) large_.resize(words);
    std::fill_n(large_.begin(), words, 0);
    capnp::FlatMessageBuilder flat(kj::arrayPtr(reinterpret_cast<capnp::word*>(large_.data()), words));
    flat.setRoot(builder.getRoot<Root>().asReader());
    return std::as_bytes(std::span(large_).first(words));
  } catch (const kj::Exception&) {
  } catch (const std::exception&) {
  }
  // The next builder needs zeroed scratch memory, whatever this one had written.
  std::fill(scratch_.begin(), scratch_.end(), 0);
  return {};
}

std::span<const std::byte> Encoder::Encode(const Event& event) {
  return Build<wire::Event>([&](wire::Event::Builder to) { Put(to, event); });
}
std::span<const std::byte> Encoder::Encode(const FileMeta& meta) {
  return Build<wire::Journal>([&](wire::Journal::Builder to) { codec::Carry(to, meta); });
}

Result<Event> DecodeEvent(std::span<const std::byte> message) {
  return Parse<Event, wire::Event>(message, [](wire::Event::Reader from) {
    return Event{SequenceNumber{from.getSeq()}, from.getTimeNs(), from.getThread(), GetBody(from)};
  });
}

Result<FileMeta> DecodeMeta(std::span<const std::byte> message) {
  return Parse<FileMeta, wire::Journal>(message, [](wire::Journal::Reader from) { return Made<FileMeta>(from); });
}

}  // namespace amem
