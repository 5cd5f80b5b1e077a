#include "replay/peers/unix/unix_peers.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "journal/base/file.h"
#include "journal/base/fork_guard.h"
#include "replay/peers/unix/assembly.h"
#include "replay/peers/unix/owner.h"
#include "replay/peers/unix/pages.h"
#include "replay/peers/unix/service.h"
#include "replay/peers/unix/socket.h"

namespace amem {

namespace {

constexpr std::chrono::milliseconds kStopPatience{2000};  // with a delegate's call that is under way

class Serving final : public UnixPeers {
 public:
  Serving(const UnixPeersOptions& options, PeerDelegate& delegate, UniqueFd stop)
      : options_(options), delegate_(delegate), stop_(std::move(stop)) {}
  ~Serving() override {
    Stop();
    if (!guard_.InChild()) return;
    // The thread, the sockets and their names are the parent's, and the numbers of descriptors may be the child's own by now.
    for (auto& [session, owner] : owners_) (void)new std::shared_ptr(std::move(owner));
    (void)new Listener(std::move(farewell_));
    (void)service_.release();
    (void)pages_.release();
    (void)directory_.Release();
    (void)stop_.Release();
  }

  Status Start(const PeerIdentity& self) {
    PeerService::Listeners listeners;
    AMEM_TRY(Listen(self.session, listeners));
    pages_ = std::make_unique<SharedPageTable>(self.session);
    static_cast<void>(pages_->Publish(self));
    context_ = {directory_.get(), options_.abstract_names ? &elsewhere_ : nullptr, stop_.get(),
                options_.expected_uid.value_or(::geteuid()), pages_.get()};
    service_ = std::make_unique<PeerService>(context_, std::move(listeners), self, delegate_, options_.requests);
    Status started = service_->Start();
    if (!started.ok()) RemoveSocket(directory_.get(), self.session);
    // Its first turn holds the page, which goes beside the first hello.
    if (started.ok()) static_cast<void>(service_->loop().Run([] { return true; }, In(kLossPatience)));
    return started;
  }

  void Stop() override {
    if (guard_.InChild() || service_ == nullptr || stopped_.exchange(true)) return;
    const SessionId self = Self().session;
    // First: that is how peers see that it ends in order.
    if (options_.abstract_names) {
      if (auto farewell = SayFarewell(self)) farewell_ = *std::move(farewell);
    }
    RemoveSocket(directory_.get(), self);
    SignalEvent(stop_.get());
    service_->Stop(kStopPatience);
    const std::lock_guard lock(owners_mutex_);
    for (auto& [session, owner] : owners_) owner->Shut();
  }

  [[nodiscard]] PeerIdentity Self() const override { return service_->sessions().Self(); }
  void SetGroup(std::int64_t group) override {
    service_->sessions().ChangeSelf([group](PeerIdentity& self) { self.group = group; });
  }
  void SetReleasesNothing() override {
    service_->sessions().ChangeSelf([](PeerIdentity& self) { self.keeps = true; });
  }

  Result<SharedAllocation> Import(const Token& token, AllocationId as) override {
    const Deadline until = In(options_.deadlines.call());
    const PeerIdentity self = Self();
    if (token.session != self.session) return Owner(token.session)->Import(token, as, until);
    return AskSelf(until, [this, self, as, token]() -> Result<SharedAllocation> {
      AMEM_TRY(service_->DeliverNotices());
      return delegate_.OnImport(self, as, token);
    });
  }

  Result<std::vector<SharedAllocation>> Reimport(SessionId owner, const std::vector<ShareRequest>& requests,
                                                 Deadline until) override {
    const PeerIdentity self = Self();
    if (owner != self.session) return Owner(owner)->Reimport(requests, until);
    return AskSelf(until, [this, self, requests]() -> Result<std::vector<SharedAllocation>> {
      AMEM_TRY(service_->DeliverNotices());
      std::vector<SharedAllocation> all;
      for (const auto& request : requests) {
        AMEM_ASSIGN(auto shared, delegate_.OnReimport(self, request));
        all.push_back(std::move(shared));
      }
      return all;
    });
  }

  void DropReference(const RemoteAllocation& remote, AllocationId as) override {
    if (remote.owner != Self().session) return Owner(remote.owner)->Drop({remote.allocation, as});
    service_->CallDelegateLater(
        [this, self = Self(), remote, as] { return delegate_.OnReferenceDropped(self, remote.allocation, as); });
  }

  bool AwaitLoss(SessionId session, std::chrono::milliseconds patience) override {
    const Deadline until = In(kLossPatience);
    const auto told = [&sessions = service_->sessions(), session] {
      return !sessions.IsConnected(session) && sessions.HasDelivered();
    };
    const auto has_told = service_->loop().Run(told, until);
    if (!has_told || *has_told) return has_told.has_value();
    // Of a process that cannot be seen from here its page may say it.
    const auto page = pages_->PageOf(session);
    const bool ended = page.ok() && (*page)->Life().HasEnded();
    if (!ended && !service_->sessions().IsGone(session, patience)) return false;
    service_->loop().Run([&sessions = service_->sessions(), session] { sessions.NoteGone(session); }, until);
    while (!service_->loop().Run(told, until).value_or(false)) {
      if (Passed(until)) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  std::unique_ptr<Assembly> Assemble(CycleKind kind, const std::string& tag) override {
    for (const auto& owner : Owners()) owner->SendHeldUp(In(kDyingPatience));
    return std::make_unique<UnixAssembly>(context_, *service_, delegate_, options_.waiting, kind, tag);
  }

 private:
  std::shared_ptr<OwnerConnection> Owner(SessionId session) {
    const std::lock_guard lock(owners_mutex_);
    auto& owner = owners_[session];
    if (owner == nullptr) owner = std::make_shared<OwnerConnection>(context_, *service_, session);
    return owner;
  }
  std::vector<std::shared_ptr<OwnerConnection>> Owners() {
    const std::lock_guard lock(owners_mutex_);
    std::vector<std::shared_ptr<OwnerConnection>> all;
    for (const auto& [session, owner] : owners_) all.push_back(owner);
    return all;
  }
  // As an owner is asked: on the service thread, and again while this process is busy.
  template <class Ask>
  std::invoke_result_t<Ask&> AskSelf(Deadline until, const Ask& ask) {
    return UntilFree(until, [&]() -> std::invoke_result_t<Ask&> {
      auto own = service_->loop().Run(ask, until);
      return own ? *std::move(own) : PeerService::NotServed();
    });
  }
  // One way to be found is enough to go on with.
  Status Listen(SessionId self, PeerService::Listeners& listeners) {
    auto directory = OpenSocketDirectory(options_.socket_directory);
    Status in_directory = directory.status();
    if (directory) {
      SweepSockets(directory->get());
      auto listener = ListenAt(directory->get(), self);
      in_directory = listener.status().Within("socket directory " + options_.socket_directory.string());
      if (listener) {
        listeners.in_directory = *std::move(listener);
        directory_ = *std::move(directory);
      }
    }
    if (!options_.abstract_names) return in_directory;
    auto listener = ListenByName(self);
    if (listener) listeners.by_name = *std::move(listener);
    if (!in_directory.ok() && !listener) return in_directory;
    if (!in_directory.ok() && options_.report)
      options_.report(in_directory.message() + "; peers find this process by an abstract socket, within its network namespace");
    return {};
  }

  const UnixPeersOptions options_;
  PeerDelegate& delegate_;
  UniqueFd directory_, stop_;
  Listener farewell_;
  Elsewhere elsewhere_;
  std::unique_ptr<SharedPageTable> pages_;
  ConnectionContext context_;
  const ForkGuard guard_;
  std::unique_ptr<PeerService> service_;
  std::mutex owners_mutex_;
  std::map<SessionId, std::shared_ptr<OwnerConnection>> owners_;
  std::atomic<bool> stopped_{false};
};

}  // namespace

Result<std::unique_ptr<UnixPeers>> UnixPeers::Start(const PeerIdentity& self, const UnixPeersOptions& options,
                                                    PeerDelegate& delegate) {
  UniqueFd stop(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop) return Status{CodeOfErrno(errno), "starting the service of peers: eventfd: " + ErrnoText(errno)};
  auto serving = std::make_unique<Serving>(options, delegate, std::move(stop));
  AMEM_TRY(serving->Start(self));
  return std::unique_ptr<UnixPeers>(std::move(serving));
}

}  // namespace amem
