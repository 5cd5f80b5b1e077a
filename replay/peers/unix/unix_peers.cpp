#include "replay/peers/unix/unix_peers.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "journal/base/file.h"
#include "journal/base/fork_guard.h"
#include "replay/peers/unix/assembly.h"
#include "replay/peers/unix/entrance.h"
#include "replay/peers/unix/owner.h"
#include "replay/peers/unix/pages.h"
#include "replay/peers/unix/service.h"
#include "replay/peers/unix/socket.h"

namespace amem {

namespace {

constexpr std::chrono::milliseconds kStopPatience{2000};  // with a delegate's call that is under way

// The names under which peers find this session.
class SessionNames {
 public:
  // One way to be found is enough to go on with.
  Status Listen(SessionId self, const UnixPeersOptions& options, Entrance::Listeners& listeners) {
    self_ = self;
    auto directory = OpenSocketDirectory(options.socket_directory);
    Status in_directory = directory.status();
    if (directory) {
      SweepSockets(directory->get());
      auto listener = ListenAt(directory->get(), self);
      in_directory = listener.status().Within("socket directory " + options.socket_directory.string());
      if (listener) {
        listeners.in_directory = *std::move(listener);
        directory_ = *std::move(directory);
      }
    }
    if (!options.abstract_names) return in_directory;
    elsewhere_.emplace();
    auto listener = ListenByName(self);
    if (listener) listeners.by_name = *std::move(listener);
    if (!in_directory.ok() && !listener) return in_directory;
    if (!in_directory.ok() && options.report)
      options.report(in_directory.message() + "; peers find this process by an abstract socket, within its network namespace");
    return {};
  }
  // That is how peers see that the session ends in order.
  void Remove() {
    if (elsewhere_) {
      if (auto farewell = SayFarewell(self_)) farewell_ = *std::move(farewell);
    }
    RemoveSocket(directory_.get(), self_);
  }
  void RemoveUnserved() { RemoveSocket(directory_.get(), self_); }  // its service has not begun
  // In a forked child: they are the parent's, and the numbers of descriptors may be the child's own by now.
  void Abandon() {
    (void)new Listener(std::move(farewell_));
    (void)directory_.Release();
  }
  [[nodiscard]] int directory() const { return directory_.get(); }
  [[nodiscard]] Elsewhere* elsewhere() { return elsewhere_ ? &*elsewhere_ : nullptr; }  // null: without abstract names

 private:
  SessionId self_;
  UniqueFd directory_;
  Listener farewell_;
  std::optional<Elsewhere> elsewhere_;
};

// The connections that this session has made, one to each owner. Any thread.
class OwnerConnections {
 public:
  std::shared_ptr<OwnerConnection> To(SessionId owner, const ConnectionContext& context, PeerService& service) {
    const std::lock_guard lock(mutex_);
    auto& connection = by_owner_[owner];
    if (connection == nullptr) connection = std::make_shared<OwnerConnection>(context, service, owner);
    return connection;
  }
  std::vector<std::shared_ptr<OwnerConnection>> All() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<OwnerConnection>> all;
    for (const auto& [owner, connection] : by_owner_) all.push_back(connection);
    return all;
  }
  void Shut() {
    const std::lock_guard lock(mutex_);
    for (auto& [owner, connection] : by_owner_) connection->Shut();
  }
  void Abandon() {  // in a forked child
    for (auto& [owner, connection] : by_owner_) (void)new std::shared_ptr(std::move(connection));
  }

 private:
  std::mutex mutex_;
  std::map<SessionId, std::shared_ptr<OwnerConnection>> by_owner_;
};

class Serving final : public UnixPeers {
 public:
  Serving(const UnixPeersOptions& options, PeerDelegate& delegate, UniqueFd stop)
      : options_(options), delegate_(delegate), stop_(std::move(stop)) {}
  ~Serving() override {
    Stop();
    if (!guard_.InChild()) return;
    // The thread, the sockets and their names are the parent's.
    owners_.Abandon();
    names_.Abandon();
    (void)service_.release();
    (void)pages_.release();
    (void)stop_.Release();
  }

  Status Start(const PeerIdentity& self) {
    Entrance::Listeners listeners;
    AMEM_TRY(names_.Listen(self.session, options_, listeners));
    pages_ = std::make_unique<SharedPageTable>(self.session);
    static_cast<void>(pages_->Publish(self));
    context_ = {names_.directory(), names_.elsewhere(), stop_.get(), options_.expected_uid.value_or(::geteuid()), pages_.get()};
    service_ = std::make_unique<PeerService>(context_, std::move(listeners), self, delegate_, options_.requests,
                                             options_.hello_patience);
    Status started = service_->Start();
    if (!started.ok()) names_.RemoveUnserved();
    // Its first turn holds the page, which goes beside the first hello.
    if (started.ok()) static_cast<void>(service_->loop().Run([] { return true; }, In(kLossPatience)));
    return started;
  }

  void Stop() override {
    if (guard_.InChild() || service_ == nullptr || stopped_.exchange(true)) return;
    names_.Remove();  // first
    SignalEvent(stop_.get());
    service_->Stop(kStopPatience);
    owners_.Shut();
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
    for (const auto& owner : owners_.All()) owner->SendHeldUp(In(kDyingPatience));
    return std::make_unique<UnixAssembly>(context_, *service_, delegate_, options_.waiting, kind, tag);
  }

 private:
  std::shared_ptr<OwnerConnection> Owner(SessionId session) { return owners_.To(session, context_, *service_); }
  // As an owner is asked: on the service thread, and again while this process is busy.
  template <class Ask>
  std::invoke_result_t<Ask&> AskSelf(Deadline until, const Ask& ask) {
    return UntilFree(until, [&]() -> std::invoke_result_t<Ask&> {
      auto own = service_->loop().Run(ask, until);
      return own ? *std::move(own) : PeerService::NotServed();
    });
  }

  const UnixPeersOptions options_;
  PeerDelegate& delegate_;
  UniqueFd stop_;
  SessionNames names_;
  std::unique_ptr<SharedPageTable> pages_;
  ConnectionContext context_;
  const ForkGuard guard_;
  std::unique_ptr<PeerService> service_;
  OwnerConnections owners_;
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
