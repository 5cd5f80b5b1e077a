#include "ncclpatch/intercept/registrations.h"

#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "ncclpatch/intercept/card_buffers.h"
#include "ncclpatch/runtime/log.h"

namespace amem::intercept {

static std::string ByDmaBuf(const char* how, unsigned long long flags) {
  return flags == 0 ? how : fmt::format("{}, flags {}", how, flags);
}

RegionId Registrations::NewRegion() {
  static std::atomic<std::uint64_t> made{0};
  return RegionId{made.fetch_add(1) + 1};
}

DmaBufMaker DmaBufMaker::Of(int descriptor) {
  const auto device = Runtime::Get().CurrentDevice();
  return {Forever<Registrations>().ExportedAs(descriptor), device ? std::optional(*device) : std::nullopt};
}

bool DmaBufMaker::Again(const std::function<void(int descriptor)>& use) const {
  static const auto get = AMEM_DRIVER(cuMemGetHandleForAddressRange);
  int descriptor = -1;
  const auto ask = [&] {
    return get(&descriptor, made.part.address.value, made.part.bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, made.flags);
  };
  const CUcontext context = device ? PrimaryContext(*device) : nullptr;
  const CUresult result = get == nullptr ? CUDA_ERROR_NOT_SUPPORTED : context == nullptr ? ask() : InContext(context, ask);
  if (result != CUDA_SUCCESS) {
    log::Error(fmt::format("a dma-buf of {} at {} to register it again: CUresult {}", FormatBytes(made.part.bytes),
                           Hex(made.part.address), static_cast<int>(result)));
    return errno = EIO, false;
  }
  use(descriptor);
  const int why = errno;
  ::close(descriptor);
  return errno = why, true;
}

std::string OtherLibrary() { return OfAnother::now > 0 ? CallingLibrary() : std::string(); }

bool Registrations::Note(Extent part, const std::string& how, const std::string& library, Registered record) {
  record.address = part.address;
  record.bytes = part.bytes;
  record.how = how;
  record.library = library;
  Session* const session = Runtime::Get().started();
  if (session == nullptr || part.bytes == 0 || !session->NoteRegistration(record)) return false;
  if (library.empty()) Forever<CardBuffers>().Registered(*session, part.address);
  return true;
}

void Registrations::Exported(int descriptor, Extent part, unsigned long long flags) {
  Export made{.part = part, .flags = flags, .library = OtherLibrary()};
  struct stat now {};
  if (fstat(descriptor, &now) == 0) std::tie(made.device, made.file) = std::pair(now.st_dev, now.st_ino);
  made.pinned = Note(part, ByDmaBuf("dma-buf", flags), made.library);
  const std::lock_guard lock(mutex_);
  // What an earlier dma-buf of that number pins stays pinned, unless its registration was seen: somebody may have registered it
  // before it was closed. This thread is inside the gates, so that DropClosed does the rest.
  Export before = std::exchange(exported_[descriptor], std::move(made));
  if (before.pinned && before.consumed) closed_.push_back(std::move(before));
}

void Registrations::Consumed(int descriptor) {
  std::unique_lock lock(mutex_);
  auto* const found = FindIn(exported_, descriptor);
  if (found == nullptr || !found->pinned) return;
  found->consumed = true;
  if (!found->library.empty()) return;
  found->pinned = false;
  Forget({found->part});
}

void Registrations::DropClosed() {
  std::vector<Export> closed;
  {
    const std::lock_guard lock(mutex_);
    closed.swap(closed_);
    for (auto& [descriptor, one] : exported_) {
      struct stat now {};
      const bool open = fstat(descriptor, &now) == 0 && now.st_dev == one.device && now.st_ino == one.file;
      if (one.pinned && one.consumed && !open) closed.push_back(one), one.pinned = false;
    }
  }
  for (const Export& one : closed) {
    const Still still = HoldStill({one.part});
    Forget({one.part}, one.library);
  }
}

Registrations::Exporting Registrations::ExportedAs(int descriptor) {
  const std::lock_guard lock(mutex_);
  auto* const found = FindIn(exported_, descriptor);
  return found == nullptr ? Exporting{} : Exporting{found->part, found->flags};
}

void Registrations::Add(RegionKey key, Extent part, const char* how, int descriptor, Registered record) {
  const std::string library = OtherLibrary();
  if (library.empty() && key.registrar != Registrar::kGdrCopy) CardBuffers::ThreadUsesCard();  // GDRCopy is no card
  const std::lock_guard lock(mutex_);
  Region& region = regions_[key];
  ++region.uses;
  const Export* const exported = FindIn(exported_, descriptor);
  // Memory that is not AMem's is not recorded.
  const unsigned long long flags = exported == nullptr ? 0 : exported->flags;
  const RegionId id = record.region;
  if (id) record.flags = flags;
  if (!Note(part, ByDmaBuf(how, flags), library, std::move(record))) return;
  region.held.parts.push_back(part);
  region.held.library = library;
  region.held.region = id;
}

Registrations::Held Registrations::Take(RegionKey key) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(key);
  if (found == regions_.end() || --found->second.uses > 0) return {};
  return std::move(regions_.extract(found).mapped().held);
}

void Registrations::PutBack(RegionKey key, Held held) {
  const std::lock_guard lock(mutex_);
  Region& region = regions_[key];
  ++region.uses;
  if (held.parts.empty()) return;
  region.held.library = std::move(held.library);
  region.held.region = held.region;
  region.held.parts.insert(region.held.parts.end(), held.parts.begin(), held.parts.end());
}

void Registrations::Forget(const std::vector<Extent>& parts, const std::string& library, RegionId region) {
  Session* session = Runtime::Get().started();
  for (const Extent& part : parts)
    if (session != nullptr) session->Note(Deregistered{part.address, part.bytes, library, region});
}

Still HoldStill(const std::vector<Extent>& parts) {
  Session* session = Runtime::Get().started();
  if (session == nullptr || parts.empty()) return {};
  auto nccl = session->EnterCall();
  return {std::move(nccl), session->EnterTags(parts, "a deregistration")};
}

HandingOut::HandingOut(CUmemGenericAllocationHandle handle) {
  Session* const session = IsGuest(handle) ? nullptr : Runtime::Get().started();
  if (session == nullptr || !(allocation_ = session->AllocationOf(DriverHandle{handle}))) return;
  nccl_ = session->EnterCall();
  tag_ = session->EnterTagOf(allocation_);
}

CUresult HandingOut::Done(CUresult result, std::uint32_t handle_type) const {
  if (allocation_ && result == CUDA_SUCCESS)
    Runtime::Get().started()->NoteHandedOut(allocation_, handle_type, CallingLibrary());
  return result;
}

Registering::Registering(const char* call, Extent part) {
  Session* session = Runtime::Get().started();
  const bool another = OfAnother::now > 0;
  // From no address on: all that the process has now and later, of which nothing is pinned (on-demand paging).
  if (session == nullptr || part.bytes == 0 || !part.address || (another && !session->Manages(part))) return;
  concerns_ = true;
  for (;; std::this_thread::yield()) {
    // The contexts that NCCL launches in are waited for, and not those of others.
    entered_ = another ? session->EnterCall() : session->EnterLaunch();
    if (another && session->paused()) entered_.unlock();
    if (entered_.owns_lock() || session->paused()) break;
  }
  tags_ = session->EnterTags(part, call);
  refused_ = tags_.away || (!entered_.owns_lock() && session->TouchesPaused(part.address, part.bytes));
  if (refused_) RefusedWhilePaused(call);
}

}  // namespace amem::intercept
