// Memory that ranks share: offered by token, and imported by others.
#include <functional>
#include <optional>
#include <utility>

#include "replay/peers/token.h"
#include "tests/world/action.h"
#include "tests/world/findings.h"

namespace amem::world {
namespace {

// The owner may have freed it, may be paused, may have died, and may hang in the driver.
bool Imported(Rank& rank, const Status& status) {
  const bool all_live = Deaths(*rank.page) == 0 && !rank.page->found;  // who finds something ends
  if (status.code() == Code::kPeerLost && all_live) Found("an import takes an owner for dead that lives: " + status.message());
  const bool hangs = status.code() == Code::kTimeout && (rank.settings.absences || rank.settings.stops);
  if (!hangs && status.code() != Code::kNotFound && status.code() != Code::kPeerLost && status.code() != Code::kRefused)
    return rank.Ok(status, "import");
  Trace("import: " + status.message());
  return false;
}

std::optional<std::array<std::byte, kTokenBytes>> TokenOf(Rank& rank, const Place& place) {
  if (place.kind == Kind::kLegacy) {
    const auto handle = rank.session->legacy().Export(place.address);
    return rank.Ok(handle.status(), "get an IPC handle") ? std::optional(*handle) : std::nullopt;
  }
  const auto descriptor = rank.session->sharing().Export(place.allocation);
  if (!rank.Ok(descriptor.status(), "export")) return std::nullopt;
  const auto token = ReadTokenDescriptor(descriptor->get());
  if (!rank.Ok(token.status(), "read a token")) return std::nullopt;
  return Encode(*token);
}

bool IsOpen(const Offer& offer) { return offer.state == Offer::State::kOpen; }

// Its place in the table; -1: there is none.
int AnyOffer(Worker& worker, const std::function<bool(const Offer&)>& fits) {
  const auto& offers = worker.rank.page->offers;
  const std::size_t first = worker.Pick(offers.size());
  for (std::size_t i = 0; i < offers.size(); ++i) {
    const std::size_t at = (first + i) % offers.size();
    if (fits(offers[at])) return static_cast<int>(at);
  }
  return -1;
}

Offer& OfferAt(Rank& rank, int at) { return rank.page->offers[static_cast<std::size_t>(at)]; }

// An IPC handle is counted as open before it is.
std::optional<std::pair<int, Offer>> TakeOffer(Worker& worker) {
  Rank& rank = worker.rank;
  const OffersLock lock(*rank.page);
  const int at = AnyOffer(worker, [&](const Offer& one) { return IsOpen(one) && one.owner != rank.index; });
  if (at < 0) return std::nullopt;
  Offer& offer = OfferAt(rank, at);
  if (offer.legacy) ++offer.openings[static_cast<std::size_t>(rank.index)];
  return std::pair{at, offer};
}

bool Open(Worker& worker, const Offer& offer, Place& place) {
  const auto address = worker.rank.session->legacy().Import(offer.token, worker.rank.device, {});
  if (Imported(worker.rank, address.status())) {
    place.address = *address;
    return true;
  }
  Closed(worker.rank, place);
  return false;
}

bool Import(Worker& worker, const Offer& offer, Place& place) {
  const auto descriptor = MakeTokenDescriptor(*Decode(offer.token));
  if (!worker.rank.Ok(descriptor.status(), "make a token")) return false;
  const auto allocation = worker.rank.session->sharing().Import(descriptor->get(), {});
  return Imported(worker.rank, allocation.status()) && MapNew(worker, place, *allocation);
}

}  // namespace

bool MayFree(Rank& rank, const Place& place) {
  if (place.kind == Kind::kLegacyImport || place.offer < 0) return true;
  const OffersLock lock(*rank.page);
  Offer& offer = OfferAt(rank, place.offer);
  offer.state = Offer::State::kWithdrawn;
  for (std::size_t other = 0; other < offer.openings.size(); ++other) {
    if (offer.openings[other] > 0 && !rank.page->dead[other]) return false;
  }
  offer.state = Offer::State::kNone;
  return true;
}

void Closed(Rank& rank, const Place& place) {
  const OffersLock lock(*rank.page);
  --OfferAt(rank, place.offer).openings[static_cast<std::size_t>(rank.index)];
}

void OfferMemory(Worker& worker) {
  Rank& rank = worker.rank;
  Place* const place = worker.Any(
      [](const Place& p) { return (p.kind == Kind::kNccl || p.kind == Kind::kLegacy) && p.memory->value != 0 && p.offer < 0; });
  if (place == nullptr || rank.settings.ranks == 1) return;
  worker.stream->Await();
  const auto token = TokenOf(rank, *place);
  if (!token) return;
  const OffersLock lock(*rank.page);
  const int at = AnyOffer(worker, [](const Offer& one) { return one.state == Offer::State::kNone; });
  if (at < 0) return;
  place->memory->fixed = true;
  place->offer = at;
  OfferAt(rank, at) = {Offer::State::kOpen,  place->kind == Kind::kLegacy, {},    rank.index,
                       place->memory->bytes, place->memory->value,         *token};
}

void ImportOffer(Worker& worker) {
  if (worker.places.size() >= 24) return;
  const auto taken = TakeOffer(worker);
  if (!taken) return;
  const auto& [at, offer] = *taken;
  auto place = std::make_unique<Place>();
  place->kind = offer.legacy ? Kind::kLegacyImport : Kind::kImport;
  place->offer = offer.legacy ? at : -1;
  place->memory = std::make_shared<Memory>(
      Memory{.bytes = offer.bytes, .device = worker.rank.device, .value = offer.value, .fixed = true, .owner = offer.owner});
  if (!(offer.legacy ? Open(worker, offer, *place) : Import(worker, offer, *place))) return;
  Trace(std::string(ToText(place->kind)) + " from rank " + std::to_string(offer.owner));
  worker.places.push_back(std::move(place));
  Use(worker, *worker.places.back(), false);
}

}  // namespace amem::world
