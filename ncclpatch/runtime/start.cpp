// Starts a session inside NCCL's process.
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "journal/base/clock.h"
#include "journal/base/process_sight.h"
#include "ncclpatch/hook/hook.h"
#include "ncclpatch/runtime/log.h"
#include "ncclpatch/runtime/runtime.h"
#include "replay/driver/cuda/cuda_driver.h"
#include "replay/peers/unix/unix_peers.h"

namespace amem {
namespace {

Result<SessionId> RandomSession() {
  std::uint64_t value = 0;
  while (value == 0)
    if (getrandom(&value, sizeof value, 0) != sizeof value)
      return Status{Code::kIo, "choosing a session id: getrandom gave nothing"};
  return SessionId{value};
}

// A UUID that cannot be read stays empty, because only people read it.
std::vector<std::string> DeviceUuids(Driver& driver) {
  std::vector<std::string> uuids;
  const Result<int> count = driver.DeviceCount();
  for (int device = 0; count.ok() && device < *count; ++device) {
    const Result<std::string> uuid = driver.DeviceUuid(DeviceOrdinal{device});
    uuids.push_back(uuid.ok() ? *uuid : std::string());
  }
  return uuids;
}

SessionOpened Describe(const Options& options, Driver& driver, SessionId session) {
  SessionOpened who;
  who.session = session;
  char host[256] = "unknown";
  gethostname(host, sizeof host - 1);
  who.host = host;
  who.pid = getpid();
  std::ifstream("/proc/sys/kernel/random/boot_id") >> who.boot_id;
  who.amem_version = AMEM_VERSION;
  who.driver_version = driver.Version();
  if (const auto libraries = hook::Libraries(); !libraries.empty())
    who.nccl_version = hook::Describe(libraries.front()).nccl_version;
  who.gpu_uuids = DeviceUuids(driver);
  who.group = options.group;
  who.rank = options.rank;
  who.realtime_ns = RealtimeNs();
  who.monotonic_ns = MonotonicNs();
  who.layout = options.layout == Layout::kSlab ? "slab" : "direct";
  who.launcher = options.launcher;
  who.program = OwnProgram();
  who.content = "preserve";
  return who;
}

}  // namespace

Result<std::unique_ptr<Session>> StartSession(const Options& options, control::RequestServer& requests) {
  AMEM_ASSIGN(const auto session, RandomSession());

  // If there is none, LoadSystem's message says so.
  const bool found = hook::DriverSymbol("cuGetProcAddress_v2") != nullptr;
  Result<std::unique_ptr<CudaDriver>> driver =
      found ? CudaDriver::Load([](const char* name) { return hook::DriverSymbol(name); }) : CudaDriver::LoadSystem();
  if (!driver) return driver.status();

  JournalOptions journaling = options.journal;
  journaling.report = [](const std::string& message) { log::Warn(message); };
  auto journal = JournalWriter::OpenLasting(journaling, session);

  const auto start_peers = [&](const PeerIdentity& self, PeerDelegate& delegate) -> Result<std::unique_ptr<Peers>> {
    UnixPeersOptions settings;
    settings.socket_directory = options.socket_directory;
    settings.deadlines = options.deadlines;
    settings.abstract_names = true;
    settings.report = journaling.report;
    settings.requests = &requests;
    // Tells whoever looks at a terminal why nothing goes on; otherwise the journals and `amem watch` tell.
    settings.waiting = [](const std::string& message) {
      ::isatty(STDERR_FILENO) == 1 ? log::Warn(message) : log::Info(message);
    };
    AMEM_ASSIGN(std::unique_ptr<Peers> peers, UnixPeers::Start(self, settings, delegate));
    return peers;
  };
  SessionOpened who = Describe(options, **driver, session);
  // The driver must outlive the session, which is never destroyed.
  SessionOptions settings = options;
  settings.pool_pinned_bytes = PinnedForPools(options);
  settings.pinned_bytes = std::min(options.pinned_bytes, settings.pool_pinned_bytes);
  // The directory may be on a shared file system.
  settings.host_claims = options.socket_directory / ("host-memory-" + who.boot_id);
  return Session::Start(settings, *(*std::move(driver)).release(), std::move(who), std::move(journal), start_peers);
}

}  // namespace amem
