#include "replay/peers/unix/unix_peers.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "journal/base/file.h"
#include "journal/base/fork_guard.h"
#include "replay/peers/unix/owner.h"
#include "replay/peers/unix/round.h"
#include "replay/peers/unix/service.h"
#include "replay/peers/unix/socket.h"

namespace amem {

namespace {
constexpr std::chrono::milliseconds kLossPatience{1000};
constexpr std::chrono::milliseconds kStopPatience{2000};  // with a delegate's call that is under way
}  // namespace

class UnixPeers::Impl {
 public:
  Impl(const UnixPeersOptions& options, PeerDelegate& delegate, UniqueFd stop)
      : options_(options), delegate_(delegate), stop_(std::move(stop)) {}

  Status Start(const PeerIdentity& self) {
    PeerService::Listeners listeners;
    AMEM_TRY(Listen(self.session, listeners));
    context_ = {directory_.get(), options_.abstract_names ? &elsewhere_ : nullptr, stop_.get(),
                options_.expected_uid.value_or(::geteuid())};
    service_ = std::make_unique<PeerService>(context_, std::move(listeners), self, delegate_, options_.requests);
    Status started = service_->Start();
    if (!started.ok()) RemoveSocket(directory_.get(), self.session);
    return started;
  }

  void Stop() {
    if (stopped_.exchange(true)) return;
    const SessionId self = service_->sessions().Self().session;
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

  [[nodiscard]] bool in_forked_child() const { return guard_.InChild(); }
  [[nodiscard]] Deadline ForACall() const { return In(options_.deadlines.call()); }
  [[nodiscard]] PeerService& service() { return *service_; }
  [[nodiscard]] PeerDelegate& delegate() { return delegate_; }

  std::shared_ptr<OwnerConnection> Owner(SessionId session) {
    const std::lock_guard lock(owners_mutex_);
    auto& owner = owners_[session];
    if (owner == nullptr) owner = std::make_shared<OwnerConnection>(context_, *service_, session);
    return owner;
  }

  bool AwaitLoss(SessionId session) {
    const Deadline until = In(kLossPatience);
    const auto told = [&sessions = service_->sessions(), session] {
      return !sessions.IsConnected(session) && sessions.HasTold();
    };
    const auto has_told = service_->Run(told, until);
    if (!has_told || *has_told) return has_told.has_value();
    if (!IsGone(context_, session, kLossPatience)) return false;
    service_->Run([&sessions = service_->sessions(), session] { sessions.NoteGone(session); }, until);
    while (!service_->Run(told, until).value_or(false)) {
      if (Passed(until)) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  Result<std::unique_ptr<Round>> Arrive(const RoundCall& call, std::vector<PeerIdentity>* culprits) {
    const auto busy = BusyWith(call.tag);
    if (busy->exchange(true)) return Status{Code::kRefused, "another pause or resume of this session is under way"};
    return ArriveAtRound({context_, service_.get(), &delegate_, options_.deadlines, busy, options_.waiting}, call, culprits);
  }

 private:
  std::shared_ptr<std::atomic<bool>> BusyWith(const std::string& tag) {
    const std::lock_guard lock(busy_mutex_);
    auto& busy = busy_[tag];
    if (busy == nullptr) busy = std::make_shared<std::atomic<bool>>(false);
    return busy;
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
  ConnectionContext context_;
  const ForkGuard guard_;
  std::unique_ptr<PeerService> service_;
  std::mutex owners_mutex_;
  std::map<SessionId, std::shared_ptr<OwnerConnection>> owners_;
  std::mutex busy_mutex_;
  std::map<std::string, std::shared_ptr<std::atomic<bool>>> busy_;  // by tag: a round of this session is under way
  std::atomic<bool> stopped_{false};
};

UnixPeers::UnixPeers(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<UnixPeers>> UnixPeers::Start(const PeerIdentity& self, const UnixPeersOptions& options,
                                                    PeerDelegate& delegate) {
  UniqueFd stop(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop) return Status{CodeOfErrno(errno), "starting the service of peers: eventfd: " + ErrnoText(errno)};
  auto impl = std::make_unique<Impl>(options, delegate, std::move(stop));
  AMEM_TRY(impl->Start(self));
  return std::unique_ptr<UnixPeers>(new UnixPeers(std::move(impl)));
}

UnixPeers::~UnixPeers() {
  if (impl_->in_forked_child()) {
    (void)impl_.release();  // its thread, its sockets and its name are the parent's
  } else {
    impl_->Stop();
  }
}

void UnixPeers::Stop() {
  if (!impl_->in_forked_child()) impl_->Stop();
}

PeerIdentity UnixPeers::Self() const { return impl_->service().sessions().Self(); }

void UnixPeers::SetGroup(std::int64_t group) { impl_->service().sessions().SetGroup(group); }
void UnixPeers::KeepEverything() { impl_->service().sessions().KeepEverything(); }

Result<SharedAllocation> UnixPeers::Import(const Token& token, AllocationId as) {
  if (token.session != Self().session) return impl_->Owner(token.session)->Import(token, as, impl_->ForACall());
  const Deadline until = impl_->ForACall();
  return UntilFree(until, [&]() -> Result<SharedAllocation> {
    const auto import = [impl = impl_.get(), self = Self(), as, token]() -> Result<SharedAllocation> {
      AMEM_TRY(impl->service().Settled());
      return impl->delegate().OnImport(self, as, token);
    };
    auto own = impl_->service().Run(import, until);
    return own ? *std::move(own) : PeerService::NotServed();
  });
}

Result<std::vector<SharedAllocation>> UnixPeers::Reimport(SessionId owner, const std::vector<ShareRequest>& requests,
                                                          Deadline until) {
  using All = Result<std::vector<SharedAllocation>>;
  if (owner != Self().session) return impl_->Owner(owner)->Reimport(requests, until);
  return UntilFree(until, [&]() -> All {
    const auto reimport = [impl = impl_.get(), self = Self(), requests]() -> All {
      AMEM_TRY(impl->service().Settled());
      std::vector<SharedAllocation> all;
      for (const auto& request : requests) {
        AMEM_ASSIGN(auto shared, impl->delegate().OnReimport(self, request));
        all.push_back(std::move(shared));
      }
      return all;
    };
    auto own = impl_->service().Run(reimport, until);
    return own ? *std::move(own) : PeerService::NotServed();
  });
}

void UnixPeers::DropReference(const RemoteAllocation& remote, AllocationId as) {
  if (remote.owner != Self().session) return impl_->Owner(remote.owner)->Drop({remote.allocation, as});
  impl_->service().TellLater([impl = impl_.get(), self = Self(), remote, as] {
    return impl->delegate().OnReferenceDropped(self, remote.allocation, as);
  });
}

bool UnixPeers::AwaitLoss(SessionId session) { return impl_->AwaitLoss(session); }

Result<std::unique_ptr<Round>> UnixPeers::Arrive(const RoundCall& call, std::vector<PeerIdentity>* culprits) {
  return impl_->Arrive(call, culprits);
}

}  // namespace amem
