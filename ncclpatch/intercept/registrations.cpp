#include "ncclpatch/intercept/registrations.h"

#include <spdlog/fmt/fmt.h>

#include "ncclpatch/intercept/card_buffers.h"

namespace amem::intercept {

namespace {

// False: the memory is not AMem's, and is not recorded.
bool Note(Extent part, const std::string& how) {
  Session* session = Runtime::Get().started();
  if (session == nullptr || part.bytes == 0 || !session->NoteRegistration({part.address, part.bytes, how})) return false;
  Forever<CardBuffers>().Registered(*session, part.address);
  return true;
}

std::string ByDmaBuf(const char* how, unsigned long long flags) {
  return flags == 0 ? how : fmt::format("{}, flags {}", how, flags);
}

}  // namespace

void Registrations::Exported(int descriptor, Extent part, unsigned long long flags) {
  const std::lock_guard lock(mutex_);
  // What an earlier dma-buf of that number pins stays pinned: somebody may have registered it before it was closed.
  exported_[descriptor] = {part, flags, Note(part, ByDmaBuf("dma-buf", flags))};
}

void Registrations::Consumed(int descriptor) {
  const std::lock_guard lock(mutex_);
  auto* const found = FindIn(exported_, descriptor);
  if (found == nullptr || !std::exchange(found->pinned, false)) return;
  Forget({found->part});
}

Extent Registrations::ExportedAs(int descriptor) {
  const std::lock_guard lock(mutex_);
  auto* const found = FindIn(exported_, descriptor);
  return found == nullptr ? Extent{} : found->part;
}

void Registrations::Add(RegionKey key, Extent part, const char* how, int descriptor) {
  const bool by_nccl = OfAnother::now == 0;
  if (by_nccl && key.registrar != Registrar::kGdrCopy) CardBuffers::ThreadUsesCard();  // GDRCopy is no card
  const std::lock_guard lock(mutex_);
  Region& region = regions_[key];
  ++region.uses;
  const Export* const exported = FindIn(exported_, descriptor);
  if (Note(part, ByDmaBuf(how, exported == nullptr ? 0 : exported->flags))) region.parts.push_back(part);
}

std::vector<Extent> Registrations::Take(RegionKey key) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(key);
  if (found == regions_.end() || --found->second.uses > 0) return {};
  return std::move(regions_.extract(found).mapped().parts);
}

void Registrations::PutBack(RegionKey key, std::vector<Extent> parts) {
  const std::lock_guard lock(mutex_);
  Region& region = regions_[key];
  ++region.uses;
  region.parts.insert(region.parts.end(), parts.begin(), parts.end());
}

void Registrations::Forget(const std::vector<Extent>& parts) {
  Session* session = Runtime::Get().started();
  for (const Extent& part : parts)
    if (session != nullptr) session->Note(Deregistered{part.address, part.bytes});
}

Still HoldStill(const std::vector<Extent>& parts) {
  Session* session = Runtime::Get().started();
  if (session == nullptr || parts.empty()) return {};
  auto nccl = session->EnterCall();
  return {std::move(nccl), session->EnterTags(parts, "a deregistration")};
}

Registering::Registering(const char* call, Extent part) {
  Session* session = Runtime::Get().started();
  if (session == nullptr || part.bytes == 0) return;
  for (;; std::this_thread::yield()) {
    entered_ = session->EnterLaunch();
    if (entered_.owns_lock() || session->paused()) break;
  }
  tags_ = session->EnterTags(part, call);
  refused_ = tags_.away || (!entered_.owns_lock() && session->TouchesPaused(part.address, part.bytes));
  if (refused_) RefusedWhilePaused(call);
}

}  // namespace amem::intercept
