#include "replay/cycle/coordinator.h"

#include <algorithm>
#include <set>
#include <utility>

#include "replay/cycle/cycle_journal.h"

namespace amem {
namespace {

// A program fills its tags, so the contents are dense: copy engines move them, and host memory is prepared for all of them.
// NCCL's are sparse.
BackupOptions OptionsFor(const CycleContext& context, PoolId pool) {
  if (!pool) return {.compare = context.compare, .without_copy = 15};
  return {.first_guess = 1, .dense = 0.9, .compare = context.compare};
}

}  // namespace

Coordinator::Coordinator(const CycleContext& context, CallGate& gate) : Coordinator(context, gate, PoolId{}, {}, nullptr) {}

Coordinator::Coordinator(const CycleContext& context, CallGate& gate, PoolId pool, std::string tag,
                         std::unique_ptr<Copier> lane)
    : context_(context),
      gate_(gate),
      pool_(pool),
      tag_(std::move(tag)),
      lane_(std::move(lane)),
      backup_(copier(), context.pinned, OptionsFor(context, pool)),
      executor_(context.ledger, context.driver, context.peers, backup_, pool, pool ? nullptr : context.network),
      host_memory_(context.ledger, context.pinned, backup_, pool) {}

Result<std::unique_ptr<Coordinator>> Coordinator::OfTag(const CycleContext& context, CallGate& gate, PoolId pool,
                                                        std::string tag) {
  AMEM_ASSIGN(auto lane, context.driver.OpenLane());
  return std::unique_ptr<Coordinator>(new Coordinator(context, gate, pool, std::move(tag), std::move(lane)));
}

Status Coordinator::MakeStreamWaitForCopies(void* stream) {
  const Deadline until = In(context_.deadlines.call());
  AMEM_ASSIGN(const auto devices, Devices(until));
  for (const DeviceOrdinal device : devices) AMEM_TRY(copier().MakeStreamWaitForCopies(device, stream, until));
  return {};
}

Result<std::unique_ptr<StreamMoment>> Coordinator::MomentOf(void* stream) {
  AMEM_ASSIGN(const auto devices, Devices(In(context_.deadlines.call())));
  if (devices.empty()) return std::make_unique<StreamMoment>();  // waiting must open no context on a device
  return copier().MomentOf(devices.front(), stream);
}

Result<std::vector<DeviceOrdinal>> Coordinator::Devices(Deadline until) {
  std::set<DeviceOrdinal> devices;
  if (!context_.ledger.TryLockUntil(until)) return LedgerIsHeld(context_.ledger);
  const LedgerLock lock(context_.ledger, std::adopt_lock);
  for (const auto& [id, a] : context_.ledger.state().allocations)
    if (a.own() && a.pool == pool_ && a.on_device()) devices.insert(DeviceOrdinal{a.properties.location.id});
  return std::vector<DeviceOrdinal>(devices.begin(), devices.end());
}

Result<std::unique_ptr<Assembly>> Coordinator::Assemble(CycleKind kind) {
  Peers& peers = context_.peers;
  {
    if (!context_.ledger.TryLockUntil(executor_.until())) return LedgerIsHeld(context_.ledger);
    const LedgerLock lock(context_.ledger, std::adopt_lock);
    if (pool_ && !IsShared()) {
      if (own_board_ == nullptr) {
        AMEM_ASSIGN(auto made, board::Board::MakePrivate(tag_, {peers.Self().session}));
        own_board_ = std::make_shared<board::Board>(std::move(made));
      }
      return std::unique_ptr<Assembly>(std::make_unique<LoneAssembly>(peers.Self(), own_board_));
    }
  }
  return peers.Assemble(kind, tag_);
}

bool Coordinator::IsShared() const {
  return std::ranges::any_of(context_.ledger.state().allocations, [&](const auto& item) {
    return item.second.pool == pool_ && (item.second.remote || !item.second.importers.empty());
  });
}

Status Coordinator::CallerMessage(CycleKind kind, const Status& why, const Status& undone) const {
  const std::string who = pool_ ? "the tag" : "the session";
  std::string after = who + (kind == CycleKind::kPause ? " runs on as before" : " stays paused, with its contents kept");
  if (!undone.ok())
    after = "undoing it failed too: " + undone.message() +
            "; contents are kept: " + (pool_ ? "resume the tag again" : "call ncclResume on all ranks") +
            " once the cause is gone";
  if (followed_) after = "a stream of the program goes on behind it, so the memory stays where it is; resume the tag again";
  const std::string doing = pool_ ? std::string(ToText(kind)) + " of tag " + tag_ + ": " : std::string();
  return {undone.ok() ? why.code() : Code::kBroken, doing + why.message() + "; " + after, why.driver_result()};
}

}  // namespace amem
