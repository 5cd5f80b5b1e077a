#include "ncclpatch/intercept/registrations.h"

#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <set>
#include <tuple>

#include "journal/base/file.h"
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
  if (session == nullptr || part.bytes == 0 || !session->records().NoteRegistration(record)) return false;
  if (library.empty())
    static_cast<void>(OrNoMemory([&] { return Forever<CardBuffers>().Registered(*session, part.address), Status(); }));
  return true;
}

void Registrations::Exported(int descriptor, Extent part, unsigned long long flags) {
  Export made{.part = part, .flags = flags, .library = OtherLibrary()};
  struct stat now {};
  if (fstat(descriptor, &now) == 0) std::tie(made.device, made.file) = std::pair(now.st_dev, now.st_ino);
  made.pinned = Note(part, ByDmaBuf("dma-buf", flags), made.library);
  const std::lock_guard lock(mutex_);
  // What an earlier dma-buf of that number pins stays pinned, unless its registration was seen or it was NCCL's: somebody may
  // have registered it before it was closed. This thread is inside the gates, so that DropClosed does the rest.
  Export before = std::exchange(exported_[descriptor], std::move(made));
  if (before.pinned && (before.consumed || before.library.empty())) closed_.push_back(std::move(before));
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

namespace {

// The files that this process has open or mapped, as of the first question. Reading them takes tens of milliseconds in a
// process with many mappings.
class OwnFiles {
 public:
  // Also if that cannot be read.
  [[nodiscard]] bool Have(dev_t device, ino_t file) {
    if (!asked_) Read();
    asked_ = true;
    const std::string place = fmt::format(" {:02x}:{:02x} {} ", major(device), minor(device), file);
    return maps_.empty() || maps_.size() == kMapsMost || open_.contains({device, file}) ||
           maps_.find(place) != std::string::npos;
  }

 private:
  static constexpr std::size_t kMapsMost = std::size_t{16} << 20;  // of 65 530 mappings, the most that Linux allows unasked
  void Read() {
    std::error_code failed;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", failed)) {
      struct stat now {};
      if (stat(entry.path().c_str(), &now) == 0) open_.emplace(now.st_dev, now.st_ino);
    }
    if (!failed) maps_ = ReadSmallFile("/proc/self/maps", kMapsMost);
  }
  bool asked_ = false;
  std::set<std::pair<dev_t, ino_t>> open_;
  std::string maps_;
};

}  // namespace

bool Registrations::HaveRenewable(const Extent& part) {
  return std::ranges::any_of(regions_, [&](const auto& region) {
    const Held& held = region.second.held;
    return held.region && held.parts.size() == 1 && held.parts[0] == part;
  });
}

void Registrations::DropClosed() {
  std::vector<Export> closed;
  OwnFiles files;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [descriptor, one] : exported_) {
      struct stat now {};
      const bool open = fstat(descriptor, &now) == 0 && now.st_dev == one.device && now.st_ino == one.file;
      if (one.pinned && (one.consumed || one.library.empty()) && !open) closed_.push_back(one), one.pinned = false;
    }
    const auto stays = std::partition(closed_.begin(), closed_.end(), [&](const Export& one) {
      return one.consumed || (HaveRenewable(one.part) && !files.Have(one.device, one.file));
    });
    closed.assign(closed_.begin(), stays);
    closed_.erase(closed_.begin(), stays);
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
  std::string library = OtherLibrary();
  if (library.empty() && key.registrar != Registrar::kGdrCopy) CardBuffers::ThreadUsesCard();  // GDRCopy is no card
  const std::lock_guard lock(mutex_);
  Region& region = regions_[key];
  const Export* const exported = FindIn(exported_, descriptor);
  const unsigned long long flags = exported == nullptr ? 0 : exported->flags;
  const RegionId id = record.region;
  if (id) record.flags = flags;
  bool noted = false;
  try {
    region.held.parts.reserve(region.held.parts.size() + 1);  // once it is recorded no memory is needed
    noted = Note(part, ByDmaBuf(how, flags), library, std::move(record));
  } catch (...) {
    if (region.uses == 0) regions_.erase(key);
    throw;
  }
  ++region.uses;
  if (!noted) return;  // memory that is not AMem's is not recorded
  region.held.parts.push_back(part);
  region.held.library = std::move(library);
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
    if (session != nullptr) session->records().Note(Deregistered{part.address, part.bytes, library, region});
}

Still HoldStill(const std::vector<Extent>& parts) {
  Session* session = Runtime::Get().started();
  if (session == nullptr || parts.empty()) return {};
  Still still{session->calls().EnterCall(), {}};
  static_cast<void>(OrNoMemory([&] {
    still.tags = session->calls().EnterTags(parts, "a deregistration");
    return Status();
  }));
  return still;
}

HandingOut::HandingOut(CUmemGenericAllocationHandle handle) {
  Session* const session = IsGuest(handle) ? nullptr : Runtime::Get().started();
  if (session == nullptr || !(allocation_ = session->records().AllocationOf(DriverHandle{handle}))) return;
  nccl_ = session->calls().EnterCall();
  tag_ = session->calls().EnterTagOf(allocation_);
}

CUresult HandingOut::Done(CUresult result, std::uint32_t handle_type) const {
  if (allocation_ && result == CUDA_SUCCESS)
    Runtime::Get().started()->records().NoteHandedOut(allocation_, handle_type, CallingLibrary());
  return result;
}

Registering::Registering(const char* call, Extent part) {
  Session* session = Runtime::Get().started();
  const bool another = OfAnother::now > 0;
  // From no address on: all that the process has now and later, of which nothing is pinned (on-demand paging).
  if (session == nullptr || part.bytes == 0 || !part.address || (another && !session->records().Manages(part))) return;
  concerns_ = true;
  for (;; std::this_thread::yield()) {
    // The contexts that NCCL launches in are waited for, and not those of others.
    entered_ = another ? session->calls().EnterCall() : session->calls().EnterLaunch();
    if (another && session->paused()) entered_.unlock();
    if (entered_.owns_lock() || session->paused()) break;
  }
  tags_ = session->calls().EnterTags(part, call);
  refused_ = tags_.away || (!entered_.owns_lock() && session->calls().TouchesPaused(part.address, part.bytes));
  if (refused_) RefusedWhilePaused(call);
}

}  // namespace amem::intercept
