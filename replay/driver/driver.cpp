#include "replay/driver/driver.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "statemachine/event.h"

namespace amem {

std::string ToText(std::vector<MemoryHolder> holders, std::int32_t self) {
  constexpr std::size_t kNamed = 5;
  std::erase_if(holders, [&](const MemoryHolder& holder) { return holder.pid == self; });
  std::ranges::stable_sort(holders, std::greater<>(), &MemoryHolder::bytes);
  std::string text;
  for (std::size_t i = 0; i < std::min(holders.size(), kNamed); ++i) {
    const MemoryHolder& holder = holders[i];
    text += (i == 0 ? " (pid " : "; pid ") + std::to_string(holder.pid) +
            (holder.name.empty() ? "" : ", " + holder.name + ",") + " holds " +
            (holder.bytes == 0 ? "some" : RoundedBytes(holder.bytes));
  }
  if (holders.size() > kNamed) text += "; and " + std::to_string(holders.size() - kNamed) + " more";
  return text.empty() ? text : text + ")";
}

NonZero Unscanned(std::span<const Extent> extents, std::string why) {
  NonZero all{{}, {}, std::move(why)};
  for (const Extent& extent : extents) {
    for (Bytes done = 0; done < extent.bytes; done += kUnitBytes) all.pages.push_back(PagesOf(extent.bytes - done));
  }
  return all;
}

Result<NonZero> Copier::FindNonZero(DeviceOrdinal, std::span<const Extent> extents, const ContentKey&, Deadline) {
  return Unscanned(extents, "the " + Name() + " driver does not look at contents");
}

Status Copier::Gather(DeviceOrdinal device, std::span<const Extent> extents) {
  for (const Extent& extent : extents) AMEM_TRY(CopyToHost(device, extent.host, extent.address, extent.bytes));
  return {};
}

Status Copier::Scatter(DeviceOrdinal device, std::span<const Extent> extents) {
  for (const Extent& extent : extents) AMEM_TRY(CopyToDevice(device, extent.address, extent.host, extent.bytes));
  return {};
}

Status Copier::ClearAll(DeviceOrdinal device, std::span<const Extent> extents) {
  for (const Extent& extent : extents) AMEM_TRY(Clear(device, extent.address, extent.bytes));
  return {};
}

namespace {

Status WithoutMulticast() { return {Code::kUnsupported, "this driver has no multicast objects", cuda::kNotSupported}; }

}  // namespace

Result<DriverHandle> Driver::CreateMulticast(const MulticastProperties&) { return WithoutMulticast(); }
Status Driver::AddDevice(DriverHandle, DeviceOrdinal) { return WithoutMulticast(); }
Status Driver::BindMemory(DriverHandle, Bytes, DriverHandle, Bytes, Bytes) { return WithoutMulticast(); }
Status Driver::BindAddress(DriverHandle, Bytes, Address, Bytes) { return WithoutMulticast(); }
Status Driver::Unbind(DriverHandle, DeviceOrdinal, Bytes, Bytes) { return WithoutMulticast(); }
Result<Bytes> Driver::MulticastGranularity() { return WithoutMulticast(); }

Result<std::uint64_t> Copier::Mark(DeviceOrdinal) { return std::uint64_t{0}; }
Status Copier::Await(DeviceOrdinal device, std::uint64_t, Deadline until) { return FinishCopies(device, until); }

Result<std::unique_ptr<StreamMoment>> Copier::MomentOf(DeviceOrdinal, void*) { return std::make_unique<StreamMoment>(); }
Status Copier::Follow(DeviceOrdinal, const StreamMoment&) { return {}; }
Status Copier::Lead(DeviceOrdinal device, void*, Deadline until) { return FinishCopies(device, until); }

Result<std::unique_ptr<Copier>> Driver::OpenLane() {
  return Status{Code::kUnsupported, "the " + Name() + " driver copies in one lane"};
}

Status NotIdle(DeviceOrdinal device, Deadline began, const std::string& details) {
  return {Code::kRefused,
          fmt::format("device {}: a kernel or copy that was submitted before the pause has not ended within {} ms{}; {}",
                      device.value, SinceThen(began).count(), details,
                      OrRaiseTheTimeout("let the device become idle before the pause")),
          cuda::kNotReady};
}

Status CopiesNotDone(DeviceOrdinal device, Deadline began) {
  return {Code::kDriver,
          fmt::format("device {}: copies of contents have not ended within {} ms; {}", device.value, SinceThen(began).count(),
                      OrRaiseTheTimeout("look whether the device hangs")),
          cuda::kTimeout};
}

std::string InRange(Address address, Bytes bytes) { return Hex(address.value) + ", " + std::to_string(bytes) + " bytes"; }
std::string OfHandle(DriverHandle handle) { return "handle " + Hex(handle.value); }

}  // namespace amem
