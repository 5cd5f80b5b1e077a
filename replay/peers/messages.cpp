#include "replay/peers/messages.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fmt/format.h>
#include <kj/exception.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "journal/codec.h"
#include "replay/peers/peer.capnp.h"
#include "replay/peers/token.h"

namespace amem {
namespace {

constexpr std::size_t kTextMax = 2000;
constexpr std::size_t kHostMax = 64;  // keeps a list of kMembersMax identities inside kMessageBytesMax

struct OutOfBounds {  // thrown and caught in this file only
  std::string what;
};

std::string Cut(const std::string& text, std::size_t most = kTextMax) {
  return text.size() <= most ? text : text.substr(0, most - 3) + "...";
}

std::string GetText(capnp::Text::Reader text) { return Cut(std::string(text.begin(), text.size())); }

unsigned Bounded(std::size_t size, std::size_t most) { return static_cast<unsigned>(std::min(size, most)); }

template <class List>
const List& Within(const List& list, std::size_t most) {
  if (list.size() > most)
    throw OutOfBounds{fmt::format("a list of {} where at most {} are allowed", static_cast<std::size_t>(list.size()), most)};
  return list;
}

template <class Enum>
Enum Known(std::uint8_t value, Enum last) {
  if (value > static_cast<std::uint8_t>(last))
    throw OutOfBounds{fmt::format("a value of {} that this build does not know", value)};
  return static_cast<Enum>(value);
}

// ---- values, both ways -----------------------------------------------------------------------------------------------------

void Put(wire::Identity::Builder to, const PeerIdentity& from) {
  to.setSession(from.session.value);
  to.setHost(Cut(from.host, kHostMax));
  to.setPid(from.pid);
  to.setGroup(from.group);
  to.setRank(from.rank);
  to.setKeeps(from.keeps);
}
PeerIdentity Get(wire::Identity::Reader from) {
  return {
      SessionId{from.getSession()}, GetText(from.getHost()), from.getPid(), from.getGroup(), from.getRank(), from.getKeeps()};
}

void Put(wire::Outcome::Builder to, const Status& from) {
  to.setCode(static_cast<std::uint8_t>(from.code()));
  to.setDriverResult(from.driver_result());
  to.setMessage(Cut(from.message()));
}
Status Get(wire::Outcome::Reader from) {
  const Code code = Known(from.getCode(), Code::kNoDescriptors);
  return code == Code::kOk ? Status{} : Status{code, GetText(from.getMessage()), from.getDriverResult()};
}

void Put(wire::SharedItem::Builder to, const SharedItem& from) {
  to.setBytes(from.bytes);
  to.setTag(static_cast<std::uint8_t>(from.tag));
  to.setIncarnation(from.incarnation.number);
  to.setStandsIn(from.incarnation.stands_in);
  if (!from.pool.empty()) to.setPool(Cut(from.pool));
  to.setPoolPolicy(static_cast<std::uint8_t>(from.pool_policy));
  auto p = to.initProperties();
  p.setType(from.properties.type);
  p.setHandleTypes(from.properties.handle_types);
  p.setLocationType(static_cast<std::uint32_t>(from.properties.location.type));
  p.setLocationId(from.properties.location.id);
  p.setCompression(from.properties.compression);
  p.setGpuDirectRdma(from.properties.gpu_direct_rdma);
  p.setUsage(from.properties.usage);
  p.setReserved(from.properties.reserved);
  if (!from.part) return;
  to.setSlab(from.part->slab.value);
  to.setSlabSecret(kj::arrayPtr(from.part->secret.data(), from.part->secret.size()));
  to.setOffset(from.part->offset);
}
SharedItem Get(wire::SharedItem::Reader from) {
  auto p = from.getProperties();
  SharedItem to;
  to.bytes = from.getBytes();
  to.tag = Known(from.getTag(), MemoryTag::kMulticastReleased);
  to.incarnation = {from.getIncarnation(), from.getStandsIn()};
  to.pool = GetText(from.getPool());
  to.pool_policy = Known(from.getPoolPolicy(), PoolPolicy::kDiscard);
  to.properties.type = p.getType();
  to.properties.handle_types = p.getHandleTypes();
  to.properties.location = {static_cast<LocationType>(p.getLocationType()), p.getLocationId()};
  to.properties.compression = p.getCompression();
  to.properties.gpu_direct_rdma = p.getGpuDirectRdma();
  to.properties.usage = p.getUsage();
  to.properties.reserved = p.getReserved();
  if (from.getSlab() == 0) return to;
  SharedPart part{AllocationId{from.getSlab()}, {}, from.getOffset()};
  const auto secret = from.getSlabSecret();
  if (secret.size() != part.secret.size()) throw OutOfBounds{fmt::format("a secret of {} bytes", secret.size())};
  std::copy(secret.begin(), secret.end(), part.secret.begin());
  to.part = part;
  return to;
}

void Put(wire::Reference::Builder to, const ShareRequest& from) {
  to.setAllocation(from.allocation.value);
  to.setAs(from.as.value);
}
ShareRequest Get(wire::Reference::Reader from) { return {AllocationId{from.getAllocation()}, AllocationId{from.getAs()}}; }

void Put(wire::Order::Builder to, const control::Order& from) {
  to.setRequest(from.request);
  to.setAsk(static_cast<std::uint8_t>(from.ask));
  to.setStage(static_cast<std::uint8_t>(from.stage));
  to.setAllTags(from.all_tags);
  to.setTarget(from.target);
  to.setByPid(from.by_pid);
  to.setToldFirst(from.told_first.value);
}
control::Order Get(wire::Order::Reader from) {
  return {from.getRequest(),
          Known(from.getAsk(), control::Ask::kResume),
          Known(from.getStage(), control::Stage::kNccl),
          from.getAllTags(),
          from.getTarget(),
          from.getByPid(),
          SessionId{from.getToldFirst()}};
}

void Put(wire::Standing::Builder to, const control::Standing& from) {
  to.setSteps(from.steps);
  to.setLastStepNs(from.last_step_ns);
  to.setOwnPause(static_cast<std::uint8_t>(from.own_pause));
  to.setPhase(static_cast<std::uint8_t>(from.phase));
  to.setStageDone(static_cast<std::uint8_t>(from.stage_done));
  to.setAbout(from.about);
  to.setAt(from.at);
  to.setAtNs(from.at_ns);
  Put(to.initFailure(), from.failure);
  to.setFreed(from.freed);
  to.setHeld(from.held);
  Put(to.initAsked(), from.asked);
  to.setLastRequest(from.last_request);
}
control::Standing Get(wire::Standing::Reader from) {
  control::Standing to;
  to.steps = from.getSteps();
  to.last_step_ns = from.getLastStepNs();
  to.own_pause = Known(from.getOwnPause(), control::OwnPause::kResuming);
  to.phase = Known(from.getPhase(), control::Phase::kFailed);
  to.stage_done = Known(from.getStageDone(), control::Stage::kNccl);
  to.about = from.getAbout();
  to.at = from.getAt();
  to.at_ns = from.getAtNs();
  to.failure = Get(from.getFailure());
  to.freed = from.getFreed();
  to.held = from.getHeld();
  to.asked = Get(from.getAsked());
  to.last_request = from.getLastRequest();
  return to;
}

template <class ListBuilder, class T>
void PutAll(ListBuilder to, const std::vector<T>& from) {
  for (unsigned i = 0; i < to.size(); ++i) Put(to[i], from[i]);
}
template <class T, class ListReader>
std::vector<T> GetAll(const ListReader& from, std::size_t most) {
  std::vector<T> to;
  to.reserve(Within(from, most).size());
  for (auto item : from) to.push_back(Get(item));
  return to;
}

// ---- bodies ----------------------------------------------------------------------------------------------------------------

void PutBody(wire::Message::Builder to, const HelloMessage& m) {
  auto b = to.initHello();
  b.setVersion(m.version);
  b.setLeastVersion(m.least_version);
  b.setPurpose(static_cast<std::uint8_t>(m.purpose));
  Put(b.initSelf(), m.self);
  b.setTo(m.to.value);
}
void PutBody(wire::Message::Builder to, const WelcomeMessage& m) {
  auto b = to.initWelcome();
  b.setVersion(m.version);
  Put(b.initSelf(), m.self);
}
void PutBody(wire::Message::Builder to, const FailureMessage& m) { Put(to.initFailure(), m.status); }

void PutBody(wire::Message::Builder to, const ImportMessage& m) {
  auto b = to.initImport();
  b.setAs(m.as.value);
  const auto token = Encode(m.token);
  b.setToken(kj::arrayPtr(reinterpret_cast<const kj::byte*>(token.data()), token.size()));
}
void PutBody(wire::Message::Builder to, const ReimportMessage& m) {
  PutAll(to.initReimport(Bounded(m.references.size(), kDescriptorsMax)), m.references);
}
void PutBody(wire::Message::Builder to, const SharedMessage& m) {
  PutAll(to.initShared(Bounded(m.items.size(), kDescriptorsMax)), m.items);
}
void PutBody(wire::Message::Builder to, const DroppedMessage& m) {
  PutAll(to.initDropped(Bounded(m.references.size(), kReferencesMax)), m.references);
}

void PutBody(wire::Message::Builder to, const AskNeighboursMessage& m) { to.setAskNeighbours(Cut(m.tag)); }
void PutBody(wire::Message::Builder to, const NeighbourhoodMessage& m) {
  auto b = to.initNeighbourhood();
  Put(b.initSelf(), m.self);
  PutAll(b.initNeighbours(Bounded(m.neighbours.size(), kMembersMax)), m.neighbours);
  b.setLifecycle(static_cast<std::uint8_t>(m.progress.lifecycle));
  b.setCycle(m.progress.cycle);
  if (m.lost) Put(b.initLost(), *m.lost);
}

void PutBody(wire::Message::Builder to, const ArriveMessage& m) {
  auto b = to.initArrive();
  b.setKind(static_cast<std::uint8_t>(m.kind));
  b.setCycle(m.cycle);
  PutAll(b.initSet(Bounded(m.set.size(), kMembersMax)), m.set);
  b.setLeftMs(m.left_ms);
  if (!m.tag.empty()) b.setTag(Cut(m.tag));
}
void PutBody(wire::Message::Builder to, const BegunMessage& m) {
  auto b = to.initBegun();
  b.setRound(m.round);
  PutAll(b.initMembers(Bounded(m.members.size(), kMembersMax)), m.members);
  b.setLeftMs(m.left_ms);
}
void PutBody(wire::Message::Builder to, const WithdrawMessage&) { to.setWithdraw(); }
void PutBody(wire::Message::Builder to, const WithdrawnMessage& m) {
  PutAll(to.initWithdrawn(Bounded(m.missing.size(), kMembersMax)), m.missing);
}

void PutBody(wire::Message::Builder to, const VoteMessage& m) {
  auto b = to.initVote();
  b.setRound(m.round);
  b.setIndex(m.index);
  b.setPhase(static_cast<std::uint8_t>(m.phase));
  b.setLeftMs(m.left_ms);
  Put(b.initOutcome(), m.status);
}
void PutBody(wire::Message::Builder to, const DecisionMessage& m) {
  auto b = to.initDecision();
  b.setRound(m.round);
  b.setIndex(m.index);
  b.setCulprit(m.culprit.value);
  Put(b.initOutcome(), m.status);
}
void PutBody(wire::Message::Builder to, const LeaveMessage& m) { to.setLeave(m.round); }

void PutBody(wire::Message::Builder to, const OrderMessage& m) { Put(to.initOrder(), m.order); }
void PutBody(wire::Message::Builder to, const LookMessage&) { to.setLook(); }
void PutBody(wire::Message::Builder to, const StandingMessage& m) { Put(to.initStanding(), m.standing); }
void PutBody(wire::Message::Builder to, const NoteMessage& m) {
  Encoder encoder;
  const auto bytes = encoder.Encode(Event{{}, 0, 0, m.event});
  to.setNote(kj::arrayPtr(reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()));
}

ImportMessage GetImport(wire::Import::Reader from) {
  auto bytes = from.getToken();
  auto token = Decode(std::as_bytes(std::span(bytes.begin(), bytes.size())));
  if (!token) throw OutOfBounds{token.status().message()};
  return {AllocationId{from.getAs()}, *token};
}

NeighbourhoodMessage GetNeighbourhood(wire::Neighbourhood::Reader from) {
  const bool known = from.getLifecycle() <= static_cast<std::uint8_t>(Lifecycle::kClosed);
  return {Get(from.getSelf()),
          GetAll<PeerIdentity>(from.getNeighbours(), kMembersMax),
          {known ? static_cast<Lifecycle>(from.getLifecycle()) : Lifecycle::kNew, from.getCycle()},
          from.hasLost() ? std::optional(Get(from.getLost())) : std::nullopt};
}

NoteMessage GetNote(capnp::Data::Reader bytes) {
  auto event = DecodeEvent(std::as_bytes(std::span(bytes.begin(), bytes.size())));
  if (!event) throw OutOfBounds{event.status().message()};
  if (!std::holds_alternative<Frozen>(event->body) && !std::holds_alternative<FreezeStep>(event->body))
    throw OutOfBounds{"an event that a tool does not record"};
  return {std::move(event->body)};
}

MessageBody GetBody(wire::Message::Reader from) {
  switch (from.which()) {
    case wire::Message::HELLO: {
      auto b = from.getHello();
      return HelloMessage{b.getVersion(), b.getLeastVersion(), Known(b.getPurpose(), Purpose::kRequest), Get(b.getSelf()),
                          SessionId{b.getTo()}};
    }
    case wire::Message::WELCOME:
      return WelcomeMessage{from.getWelcome().getVersion(), Get(from.getWelcome().getSelf())};
    case wire::Message::FAILURE:
      return FailureMessage{Get(from.getFailure())};
    case wire::Message::IMPORT:
      return GetImport(from.getImport());
    case wire::Message::REIMPORT:
      return ReimportMessage{GetAll<ShareRequest>(from.getReimport(), kDescriptorsMax)};
    case wire::Message::SHARED:
      return SharedMessage{GetAll<SharedItem>(from.getShared(), kDescriptorsMax)};
    case wire::Message::DROPPED:
      return DroppedMessage{GetAll<ShareRequest>(from.getDropped(), kReferencesMax)};
    case wire::Message::ASK_NEIGHBOURS:
      return AskNeighboursMessage{GetText(from.getAskNeighbours())};
    case wire::Message::NEIGHBOURHOOD:
      return GetNeighbourhood(from.getNeighbourhood());
    case wire::Message::ARRIVE: {
      auto b = from.getArrive();
      return ArriveMessage{Known(b.getKind(), CycleKind::kResume), b.getCycle(), GetAll<PeerIdentity>(b.getSet(), kMembersMax),
                           b.getLeftMs(), GetText(b.getTag())};
    }
    case wire::Message::BEGUN:
      return BegunMessage{from.getBegun().getRound(), GetAll<PeerIdentity>(from.getBegun().getMembers(), kMembersMax),
                          from.getBegun().getLeftMs()};
    case wire::Message::WITHDRAW:
      return WithdrawMessage{};
    case wire::Message::WITHDRAWN:
      return WithdrawnMessage{GetAll<PeerIdentity>(from.getWithdrawn(), kMembersMax)};
    case wire::Message::VOTE: {
      auto b = from.getVote();
      return VoteMessage{b.getRound(), b.getIndex(), Known(b.getPhase(), PhaseKind::kResumeOpen), b.getLeftMs(),
                         Get(b.getOutcome())};
    }
    case wire::Message::DECISION: {
      auto b = from.getDecision();
      return DecisionMessage{b.getRound(), b.getIndex(), SessionId{b.getCulprit()}, Get(b.getOutcome())};
    }
    case wire::Message::LEAVE:
      return LeaveMessage{from.getLeave()};
    case wire::Message::ORDER:
      return OrderMessage{Get(from.getOrder())};
    case wire::Message::LOOK:
      return LookMessage{};
    case wire::Message::STANDING:
      return StandingMessage{Get(from.getStanding())};
    case wire::Message::NOTE:
      return GetNote(from.getNote());
  }
  throw OutOfBounds{"a kind of message that this build does not know"};
}

}  // namespace

Result<std::vector<std::byte>> EncodeMessage(const Message& message) {
  try {
    capnp::word scratch[512] = {};
    capnp::MallocMessageBuilder builder(kj::arrayPtr(scratch, std::size(scratch)));
    auto root = builder.initRoot<wire::Message>();
    root.setRequest(message.request);
    std::visit([&](const auto& body) { PutBody(root, body); }, message.body);
    auto words = capnp::messageToFlatArray(builder);
    auto bytes = words.asBytes();
    if (bytes.size() > kMessageBytesMax) {
      return Status{Code::kInvalid,
                    fmt::format("a message to a peer of {} bytes, more than {}", bytes.size(), kMessageBytesMax)};
    }
    std::vector<std::byte> out(bytes.size());
    std::memcpy(out.data(), bytes.begin(), bytes.size());
    return out;
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
    auto root = reader.getRoot<wire::Message>();
    return Message{root.getRequest(), GetBody(root)};
  } catch (const OutOfBounds& e) {
    return no_message(e.what);
  } catch (const kj::Exception& e) {
    return no_message(e.getDescription().cStr());
  } catch (const std::exception& e) {
    return no_message(e.what());
  }
}

}  // namespace amem
