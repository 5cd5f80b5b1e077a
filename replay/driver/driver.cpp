#include "replay/driver/driver.h"

#include <fmt/format.h>

#include <algorithm>

#include "statemachine/event.h"

namespace amem {

std::vector<MemoryHolder> Others(std::vector<MemoryHolder> holders, std::int32_t self) {
  std::erase_if(holders, [&](const MemoryHolder& holder) { return holder.pid == self; });
  std::ranges::stable_sort(holders, std::greater<>(), &MemoryHolder::bytes);
  return holders;
}

std::string ToText(std::vector<MemoryHolder> holders, std::int32_t self) {
  constexpr std::size_t kNamed = 5;
  holders = Others(std::move(holders), self);
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
  for (const Extent& extent : extents)
    for (Bytes done = 0; done < extent.bytes; done += kUnitBytes) all.pages.push_back(PagesOf(extent.bytes - done));
  return all;
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

Status NotIdle(DeviceOrdinal device, Deadline began, const std::string& details) {
  return {Code::kRefused,
          fmt::format("device {}: a kernel or copy that was submitted before the pause has not ended within {} ms{}; {}",
                      device.value, SinceThen(began).count(), details,
                      OrRaiseTheTimeout("let the device become idle before the pause")),
          cuda::kNotReady};
}

// Not a failure of this rank: the code says that another one has failed.
Status BrokenOff(DeviceOrdinal device) {
  return {Code::kTimeout,
          fmt::format("device {} was still busy when another rank ended the call; not waited for any longer", device.value)};
}

Status CopiesNotDone(DeviceOrdinal device, Deadline began) {
  return {Code::kDriver,
          fmt::format("device {}: copies of contents have not ended within {} ms; {}", device.value, SinceThen(began).count(),
                      OrRaiseTheTimeout("look whether the device hangs")),
          cuda::kTimeout};
}

std::string InRange(Address address, Bytes bytes) { return Hex(address) + ", " + std::to_string(bytes) + " bytes"; }
std::string OfHandle(DriverHandle handle) { return "handle " + Hex(handle); }
std::string OfBinding(const char* call, DriverHandle multicast, Bytes offset, Bytes bytes) {
  return fmt::format("{} {} bytes at {} of {}", call, bytes, offset, OfHandle(multicast));
}

}  // namespace amem
