// NCCL's own memory, that of ncclMemAlloc, and that of cuMemAlloc.
#include <fmt/format.h>

#include <algorithm>

#include "tests/world/action.h"
#include "tests/world/findings.h"

namespace amem::world {
namespace {

AllocationProperties PropertiesOf(const Rank& rank) {
  AllocationProperties properties;
  properties.handle_types = 1;
  properties.location = {LocationType::kDevice, rank.device.value};
  return properties;
}

bool Full(const Worker& worker) { return worker.places.size() >= 24; }

void Make(Worker& worker, Bytes bytes) {
  if (Full(worker)) return;
  Rank& rank = worker.rank;
  const bool user = worker.Pick(6) == 0;
  const auto allocation = rank.session->nccl().Create(bytes, PropertiesOf(rank), 0, {}, user);
  if (!rank.Ok(allocation.status(), "create")) return;
  auto place = std::make_unique<Place>();
  place->kind = user ? Kind::kUser : Kind::kNccl;
  place->memory = std::make_shared<Memory>(Memory{.bytes = bytes, .device = rank.device});
  if (!MapNew(worker, *place, *allocation)) return;
  worker.places.push_back(std::move(place));
  Use(worker, *worker.places.back(), true);
}

void FreeMapped(Rank& rank, const Place& place) {
  Session& session = *rank.session;
  const auto retained = session.nccl().Retain(place.address);
  if (!retained.ok()) Found(std::string("retain ") + ToText(place.kind) + ": " + retained.status().message());
  rank.Must("release", [&] { return session.nccl().Release(*retained); });
  rank.Must("unmap", [&] { return session.nccl().Unmap(place.base, place.span); });
  rank.Must("free the range", [&] { return session.nccl().FreeRange(place.base, place.span); });
  rank.Must("release", [&] { return session.nccl().Release(*retained); });
}

void FreeWindow(Rank& rank, const Place& place) {
  Session& session = *rank.session;
  rank.Must("unmap a window", [&] { return session.nccl().Unmap(place.base, place.span); });
  rank.Must("free a window's range", [&] { return session.nccl().FreeRange(place.base, place.span); });
  rank.Must("release a window", [&] { return session.nccl().Release(place.allocation); });
}

Status GiveBack(Rank& rank, const Place& place) {
  switch (place.kind) {
    case Kind::kLegacy:
      return rank.session->legacy().Free(place.address);
    case Kind::kLegacyImport:
      return rank.session->legacy().Close(place.address);
    case Kind::kTag:
      return rank.session->pools().Free(place.address, place.memory->tag->stream);
    default:
      return {};
  }
}

}  // namespace

bool HasMuch(const Worker& worker) {
  return std::ranges::any_of(worker.places, [](const auto& place) { return place->memory->bytes > Bytes{16} << 20; });
}

bool MapNew(Worker& worker, Place& place, AllocationId allocation) {
  Rank& rank = worker.rank;
  Session& session = *rank.session;
  const Bytes bytes = place.memory->bytes;
  const auto address = session.nccl().Reserve(bytes, 0, {}, 0, {});
  if (rank.Ok(address.status(), "reserve")) {
    const AccessDescriptor access{{LocationType::kDevice, rank.device.value}, 3};
    const bool mapped = rank.Ok(session.nccl().Map(*address, bytes, 0, allocation, 0), "map");
    if (mapped && rank.Ok(session.nccl().SetAccess(*address, bytes, std::span(&access, 1)), "set access")) {
      place.allocation = allocation;
      place.address = place.base = *address;
      place.span = bytes;
      return true;
    }
    if (mapped) rank.Must("unmap after a failure", [&] { return session.nccl().Unmap(*address, bytes); });
    rank.Must("free the range after a failure", [&] { return session.nccl().FreeRange(*address, bytes); });
  }
  rank.Must("release after a failure", [&] { return session.nccl().Release(allocation); });
  return false;
}

void MakeMemory(Worker& worker) { Make(worker, kPage * (1 + worker.Pick(48))); }
// More than one piece of pinned host memory.
void MakeMuchMemory(Worker& worker) {
  if (!HasMuch(worker)) Make(worker, (Bytes{17} << 20) + kPage * worker.Pick(100));
}

void MakeLegacy(Worker& worker) {
  if (Full(worker)) return;
  const Bytes bytes = worker.Pick(2) == 0 ? 8 + worker.Pick(3000) : kPage * (1 + worker.Pick(700));
  const auto address = worker.rank.session->legacy().Allocate(bytes, worker.rank.device, {});
  if (!worker.rank.Ok(address.status(), "cuMemAlloc")) return;
  auto place = std::make_unique<Place>();
  place->kind = Kind::kLegacy;
  place->address = *address;
  place->memory = std::make_shared<Memory>(Memory{.bytes = bytes, .device = worker.rank.device});
  worker.places.push_back(std::move(place));
  Use(worker, *worker.places.back(), true);
}

// As NCCL does it. Kernels on it have ended, as the stream of a tag sees to by itself.
void Free(Worker& worker, Place& place) {
  if (place.card) Deregister(worker, place);
  const bool of_tag = place.kind == Kind::kTag;
  if (!of_tag) (place.memory->tag != nullptr ? place.memory->tag->stream : worker.stream)->Await();
  Trace(fmt::format("free {} at {:#x}", ToText(place.kind), place.address.value));
  switch (place.kind) {
    case Kind::kNccl:
    case Kind::kUser:
    case Kind::kImport:
      FreeMapped(worker.rank, place);
      break;
    case Kind::kWindow:
      FreeWindow(worker.rank, place);
      break;
    default:
      if (of_tag) place.memory->freed = true;
      worker.rank.Must(std::string("free ") + ToText(place.kind), [&] { return GiveBack(worker.rank, place); });
  }
  if (place.kind == Kind::kLegacyImport) Closed(worker.rank, place);
  worker.Forget(&place);
}

void FreeSome(Worker& worker) {
  Place* const place = worker.Any([](const Place&) { return true; });
  if (place != nullptr && MayFree(worker.rank, *place)) Free(worker, *place);
}

// A wrong call fails, and changes nothing.
void UseWrongly(Worker& worker) {
  Session& session = *worker.rank.session;
  const Address nowhere{kPage};
  Status status;
  switch (worker.Pick(6)) {
    case 0:
      status = session.nccl().Release(AllocationId{1'000'000'000});
      break;
    case 1:
      status = session.nccl().Unmap(nowhere, kPage);
      break;
    case 2:
      status = session.nccl().FreeRange(nowhere, kPage);
      break;
    case 3:
      status = session.legacy().Free(nowhere);
      break;
    case 4:
      status = session.pools().Free(nowhere, nullptr);
      break;
    default:
      status = session.nccl().Map(nowhere, kPage, 0, AllocationId{1'000'000'000}, 0);
  }
  if (status.ok()) Found("a wrong call succeeded");
  if (status.message().empty()) Found("a wrong call failed without a word");
}

}  // namespace amem::world
