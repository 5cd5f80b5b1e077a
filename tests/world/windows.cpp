// Memory that is mapped a second time, as NCCL does it with what the program registers as a window, and memory that a network
// card has registered.
#include <fmt/format.h>

#include <shared_mutex>
#include <thread>

#include "tests/replay/driver/simulated.h"
#include "tests/world/action.h"
#include "tests/world/findings.h"

namespace amem::world {
namespace {

// While its tag is paused there may be nothing to map, which nobody has to like.
bool Mapped(Rank& rank, const Place& of, const Status& status, const char* what) {
  if (of.memory->tag == nullptr || status.ok() || status.code() == Code::kBroken) return rank.Ok(status, what);
  Trace(std::string(what) + ": " + status.message());
  return false;
}

bool MapWindow(Rank& rank, const Place& of, Place& window) {
  Session& session = *rank.session;
  const AccessDescriptor access{{LocationType::kDevice, rank.device.value}, 3};
  const auto range = session.nccl().Reserve(window.span, 0, {}, 0, {});
  if (!Mapped(rank, of, range.status(), "reserve a window")) return false;
  window.base = *range;
  const bool mapped = Mapped(rank, of, session.nccl().Map(*range, window.span, 0, window.allocation, 0), "map a window");
  if (mapped &&
      Mapped(rank, of, session.nccl().SetAccess(*range, window.span, std::span(&access, 1)), "set access to a window"))
    return true;
  if (mapped) rank.Must("unmap a window after a failure", [&] { return session.nccl().Unmap(*range, window.span); });
  rank.Must("free a window's range after a failure", [&] { return session.nccl().FreeRange(*range, window.span); });
  return false;
}

bool HasHandle(const Place& place) {
  return place.kind == Kind::kNccl || place.kind == Kind::kUser || (place.kind == Kind::kTag && !place.memory->freed);
}

}  // namespace

void MakeWindow(Worker& worker) {
  Rank& rank = worker.rank;
  Place* const of = worker.Any(HasHandle);
  if (of == nullptr || worker.places.size() >= 24) return;
  const auto retained = rank.session->nccl().Retain(of->address);
  if (!rank.Ok(retained.status(), std::string("retain ") + ToText(of->kind))) return;
  const auto range = rank.session->nccl().AddressRange(of->address);
  if (!rank.Ok(range.status(), "ask for the address range")) return;
  auto window = std::make_unique<Place>();
  window->kind = Kind::kWindow;
  window->memory = of->memory;
  window->allocation = *retained;
  window->span = range->second;
  if (!MapWindow(rank, *of, *window))
    return rank.Must("release a window after a failure", [&] { return rank.session->nccl().Release(*retained); });
  window->address = window->base + (of->address.value - range->first.value);
  Trace(fmt::format("window at {:#x} of {} at {:#x}", window->address.value, ToText(of->kind), of->address.value));
  worker.places.push_back(std::move(window));
}

// In the order of ncclpatch/intercept: the call waits for a pause, or is refused; the card's driver is called; then it is
// noted.
void RegisterWithCard(Worker& worker) {
  Rank& rank = worker.rank;
  Place* const place = worker.Any([](const Place& p) { return !p.card && (HasHandle(p) || p.kind == Kind::kLegacy); });
  if (place == nullptr) return;
  const Bytes bytes = place->memory->bytes;
  const auto entered = rank.session->calls().EnterLaunch("ibv_reg_mr");
  const auto tags = rank.session->calls().EnterTags({place->address, bytes}, "ibv_reg_mr");
  if (tags.away || (!entered.owns_lock() && rank.session->calls().TouchesPaused(place->address, bytes))) return;
  const auto physical = MemoryAt(*rank.simulator, place->address);
  if (!physical) return;  // the card's driver finds nothing there
  std::this_thread::sleep_for(std::chrono::milliseconds(worker.Pick(3)));
  if (!rank.session->records().NoteRegistration({place->address, bytes, "ibv_reg_mr"})) Found("a registration was not noted");
  place->card = physical;
  Trace(fmt::format("{} at {:#x} is registered", ToText(place->kind), place->address.value));
}

void CheckCard(Worker& worker, const Place& place) {
  if (MemoryAt(*worker.rank.simulator, place.address) != place.card)
    Found(fmt::format("a card writes to memory that is gone: {} at {:#x} has other memory since it was registered",
                      ToText(place.kind), place.address.value));
}

void Deregister(Worker& worker, Place& place) {
  CheckCard(worker, place);
  place.card.reset();
  Rank& rank = worker.rank;
  std::shared_lock<CallGate> entered;
  InTags tags;
  if (rank.settings.Without("ungated cards")) {
    entered = rank.session->calls().EnterLaunch("ibv_dereg_mr");
    tags = rank.session->calls().EnterTags({place.address, place.memory->bytes}, "ibv_dereg_mr");
  }
  rank.session->records().Note(Deregistered{place.address, place.memory->bytes});
}

void DeregisterFromCard(Worker& worker) {
  if (Place* const place = worker.Any([](const Place& p) { return p.card.has_value(); })) Deregister(worker, *place);
}

}  // namespace amem::world
