// The process of one session of a rerun: replays its journal as far as it is told.
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <nlohmann/json.hpp>
#include <sstream>
#include <tuple>

#include "replay/driver/cuda/cuda_driver.h"
#include "replay/peers/unix/unix_peers.h"
#include "replay/rerun/session.h"

namespace amem {
namespace {

using RerunJson = nlohmann::json;

using AnswerFields = std::tuple<Code, std::string, std::uint64_t, Code, std::string, std::string, bool, std::uint64_t,
                                std::uint64_t, std::uint64_t, std::uint64_t>;

class RerunWorker final : public PeerDelegate {
 public:
  RerunWorker(const RerunProcessOptions& options, State start) : options_(options), first_{start.last.value + 1} {
    ready_ = Open(std::move(start));
  }
  ~RerunWorker() override {
    if (peers_) peers_->Stop();
  }

  RerunAnswer Answer(const RerunQuestion& asked) {
    const std::lock_guard lock(mutex_);
    RerunAnswer answer;
    answer.failure = ready_;
    if (!ready_.ok()) return answer;
    using enum RerunQuestion::What;
    if (asked.what == kBuildOwn) answer.failure = session_->BuildOwn();
    if (asked.what == kBuildImports) answer.failure = session_->BuildImports();
    if (asked.what == kTake) Take(asked.number, answer);
    if (asked.what == kCompare) answer.failure = Compare(asked.number);
    if (asked.what == kLeaveOnly) answer.failure = session_->LeaveOnly(asked.device, asked.number);
    answer.counts = session_->counts();
    return answer;
  }

  // PeerDelegate, on the peers' thread: processes of other sessions import from this one, whose main thread waits for a
  // question meanwhile.
  Result<SharedAllocation> OnImport(const PeerIdentity&, AllocationId, const Token& token) override {
    const std::lock_guard lock(mutex_);
    if (token.secret != options_.secret) return Status{Code::kRefused, "the secret of another replay"};
    return session_->Share(token.allocation);
  }
  Result<SharedAllocation> OnReimport(const PeerIdentity&, const ShareRequest&) override {
    return Status{Code::kUnsupported, "a replay imports each allocation anew"};
  }
  bool OnReferenceDropped(const PeerIdentity&, AllocationId, AllocationId) override { return true; }
  bool OnPeerConnected(const PeerIdentity&) override { return true; }
  bool OnPeerLost(const PeerIdentity&, const std::string&) override { return true; }
  Result<std::vector<SessionId>> Neighbours(const std::string&, Deadline) override { return std::vector<SessionId>(); }

 private:
  Status Open(State start) {
    AMEM_ASSIGN(reader_, JournalReader::Open(options_.journal));
    const auto export_remote = [this](const RemoteAllocation& remote, const Allocation& a) { return ExportRemote(remote, a); };
    if (options_.cuda) {
      AMEM_ASSIGN(auto driver, OpenCuda());
      absent_owner_ = AbsentOwner(*driver, false);
      session_ = std::make_unique<RerunSession>(std::move(driver), export_remote);
    } else {
      AMEM_ASSIGN(auto driver, OpenSimulator(options_.devices));
      AMEM_ASSIGN(absent_owners_driver_, OpenSimulator({options_.devices_of_host}));
      absent_owner_ = AbsentOwner(*absent_owners_driver_, true);
      session_ = std::make_unique<RerunSession>(std::move(driver), export_remote);
    }
    if (start.last) session_->StartFrom(std::move(start));
    session_->SetKilled(options_.killed);
    AMEM_ASSIGN(peers_, UnixPeers::Start(options_.self, {.socket_directory = options_.scratch, .expected_uid = {}}, *this));
    return {};
  }

  Result<std::unique_ptr<Simulator>> OpenSimulator(std::vector<std::int32_t> visible) const {
    return Simulator::Open({.world = options_.scratch / "world",
                            .in_memory = nullptr,
                            .devices = options_.devices_of_host + 1,
                            .capacity_per_device = kPlenty,
                            .visible = std::move(visible),
                            .granularity = 4096,
                            .physical = false});
  }

  // The devices of the job are those of this host in the same order, of which CUDA_VISIBLE_DEVICES may leave some out.
  Result<std::unique_ptr<Driver>> OpenCuda() const {
    std::vector<std::string> usable;
    std::istringstream visible(options_.visible.value_or(""));
    for (std::string one; std::getline(visible, one, ',');) usable.push_back(one);
    std::string mine;
    for (const std::int32_t device : options_.devices) {
      const auto index = static_cast<std::size_t>(device);
      if (options_.visible && index >= usable.size()) return TooFewDevices("device " + std::to_string(device));
      mine += (mine.empty() ? "" : ",") + (options_.visible ? usable[index] : std::to_string(device));
    }
    setenv("CUDA_VISIBLE_DEVICES", mine.c_str(), 1);  // before the driver is loaded
    AMEM_ASSIGN(auto driver, CudaDriver::LoadSystem());
    const auto count = driver->DeviceCount();
    if (!count && count.status().driver_result() != cuda::kNoDevice) return count.status();
    const auto there = static_cast<std::size_t>(count ? *count : 0);
    if (there < options_.devices.size()) return TooFewDevices("CUDA_VISIBLE_DEVICES=" + mine);
    return std::unique_ptr<Driver>(std::move(driver));
  }
  [[nodiscard]] Status TooFewDevices(const std::string& asked) const {
    return {Code::kInvalid, "the journals use " + std::to_string(options_.devices_of_host) +
                                " devices, and there are fewer here (asked for " + asked +
                                "): replay them on the simulator, or where there are as many"};
  }

  Result<UniqueFd> ExportRemote(const RemoteAllocation& remote, const Allocation& as_imported) {
    if (remote.owner == options_.self.session) return DescriptorOf(session_->Share(remote.allocation));
    if (options_.job.contains(remote.owner))
      return DescriptorOf(peers_->Import({remote.owner, remote.allocation, options_.secret}, AllocationId{++imports_}));
    return absent_owner_.Export(remote, as_imported);
  }

  void Take(std::uint64_t through, RerunRank::Outcome& told) {
    EventStream events(*reader_, first_, SequenceNumber{through});
    const Event* event = nullptr;
    for (; (event = events.Peek()) != nullptr; events.Pop()) {
      first_ = SequenceNumber{event->seq.value + 1};
      RerunRank::Outcome outcome = session_->Take(*event, true);
      if (outcome.mismatch.ok() && !outcome.reproduced) continue;
      told = std::move(outcome);
      if (!told.mismatch.ok()) return;
    }
    told.failure = events.status();
  }

  Status Compare(std::uint64_t digest) {
    const std::uint64_t own = Digest(session_->recorded());
    if (own != digest) return {Code::kInvalid, "digest " + Hex(own)};
    return session_->Compare();
  }

  const RerunProcessOptions& options_;
  SequenceNumber first_;  // of the events that were not replayed yet
  Status ready_;
  std::unique_ptr<JournalReader> reader_;
  std::unique_ptr<Simulator> absent_owners_driver_;
  std::mutex mutex_;  // over all below, because the peers' thread exports
  std::unique_ptr<RerunSession> session_;
  AbsentOwner absent_owner_;
  std::uint64_t imports_ = 0;
  std::unique_ptr<UnixPeers> peers_;
};

}  // namespace

std::string ToText(const RerunAnswer& a) {
  const RerunJson json =
      AnswerFields{a.failure.code(), a.failure.message(), a.event.value,  a.mismatch.code(), a.mismatch.message(), a.what,
                   a.reproduced,     a.counts.events,     a.counts.calls, a.counts.steps,    a.counts.elsewhere};
  return json.dump(-1, ' ', false, RerunJson::error_handler_t::replace);
}

std::optional<RerunAnswer> ReadAnswer(std::string_view text) {
  const auto json = RerunJson::parse(text, nullptr, false);
  if (json.is_discarded()) return std::nullopt;
  const auto [code, why, event, difference, replayed, what, again, events, calls, steps, elsewhere] = json.get<AnswerFields>();
  return RerunAnswer{{{code, why}, SequenceNumber{event}, {difference, replayed}, what, again},
                     {events, calls, steps, elsewhere}};
}

void ServeRerun(const RerunProcessOptions& options, State start, UniqueFd socket) {
  RerunWorker worker(options, std::move(start));
  RerunQuestion asked;
  for (;;) {
    const ssize_t bytes = ::recv(socket.get(), &asked, sizeof asked, 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes != sizeof asked || asked.what == RerunQuestion::What::kEnd) return;
    const std::string answer = ToText(worker.Answer(asked));
    if (::send(socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL) < 0) return;
  }
}

}  // namespace amem
