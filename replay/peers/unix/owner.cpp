#include "replay/peers/unix/owner.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "journal/base/no_copies.h"

namespace amem {

static Result<std::vector<SharedAllocation>> Unpack(PeerConnection::Incoming incoming, std::size_t wanted) {
  if (const auto* failure = std::get_if<FailureMessage>(&incoming.message.body)) return failure->status;
  const auto* shared = std::get_if<SharedMessage>(&incoming.message.body);
  const auto whole = [](const SharedItem& item) { return !item.part; };
  if (shared == nullptr || shared->items.size() != wanted ||
      std::cmp_not_equal(std::ranges::count_if(shared->items, whole), incoming.descriptors.size()))
    return Status{Code::kCorrupt, "its answer lacks what was asked for"};
  std::vector<SharedAllocation> all;
  all.reserve(wanted);
  auto descriptor = incoming.descriptors.begin();
  for (const SharedItem& item : shared->items) all.push_back({item, item.part ? UniqueFd() : std::move(*descriptor++)});
  return all;
}

// The right to make a request: one at a time, so that answers are not mixed up.
class OwnerConnection::Turn : NoCopies {
 public:
  Turn(OwnerConnection& owner, Deadline deadline) : owner_(owner) {
    std::unique_lock lock(owner_.turn_mutex_);
    mine_ = owner_.turn_changed_.wait_until(lock, deadline, [&] { return !owner_.busy_; });
    if (mine_) owner_.busy_ = true;
  }
  ~Turn() {
    if (!mine_) return;
    const std::lock_guard lock(owner_.turn_mutex_);
    owner_.busy_ = false;
    owner_.turn_changed_.notify_one();
  }
  [[nodiscard]] bool mine() const { return mine_; }

 private:
  OwnerConnection& owner_;
  bool mine_ = false;
};

// One connection, as the service sees it; on the service thread.
class OwnerConnection::Watched final : public WatchedConnection {
 public:
  Watched(std::shared_ptr<OwnerConnection> owner, std::shared_ptr<PeerConnection> connection)
      : owner_(std::move(owner)), connection_(std::move(connection)) {}
  [[nodiscard]] int fd() const override { return connection_->fd(); }
  bool Flush() override { return owner_->Flush(); }
  void Lost(const std::string& reason) override {
    owner_->Lost(reason);
    connection_->HangUp();  // wakes the threads that wait
  }
  void Broken() override {
    owner_->Broken(*connection_);
    connection_->HangUp();
  }

 private:
  const std::shared_ptr<OwnerConnection> owner_;
  const std::shared_ptr<PeerConnection> connection_;
};

Status OwnerConnection::Failed(const std::string& doing, Deadline began, const Status& why) const {
  const auto known = service_.sessions().Known(owner_);
  const std::string text = doing + " from " + (known ? ToText(*known) : ToText(owner_)) + ": ";
  if (why.code() == Code::kTimeout && !IsBusy(why) && !why.reported_by()) {
    return {Code::kTimeout, text + "no answer in " + std::to_string(SinceThen(began).count()) +
                                OrRaiseTheTimeout(" ms: look at what that process is doing")};
  }
  return Status{why.code(), text + why.message(), why.driver_result()}.ReportedBy(why.reported_by());
}

Status OwnerConnection::Connect(Deadline deadline) {
  {
    const std::lock_guard lock(send_mutex_);
    if (lost_) return {Code::kPeerLost, "it " + *lost_};
    if (connected_) return {};
  }
  AMEM_ASSIGN(std::shared_ptr<PeerConnection> fresh,
              PeerConnection::Begin(context_, owner_, Purpose::kData, service_.sessions().Self(), deadline));
  AMEM_ASSIGN(const auto welcome, fresh->AwaitWelcome(deadline));
  {
    const std::lock_guard lock(send_mutex_);
    connection_ = fresh;
    connected_ = true;  // from now on its end is noted
  }
  const auto watch = [&sessions = service_.sessions(), peer = welcome,
                      watched = std::make_shared<Watched>(shared_from_this(), fresh)] { return sessions.Watch(peer, watched); };
  Status watched = service_.loop().Run(watch, deadline).value_or(PeerService::NotServed());
  if (!watched.ok()) {
    Broken(*fresh);
    fresh->HangUp();  // if it is watched after all, its end is noticed
  }
  return watched;
}

Status OwnerConnection::Send(MessageBody body, std::uint64_t request, Deadline deadline) {
  const Message message{request, std::move(body)};
  while (true) {
    {
      const std::lock_guard lock(send_mutex_);
      auto sent = SendDropsLocked();  // the owner must get earlier drops first
      if (sent && *sent) sent = connection_->TrySend(message);
      if (!sent) return sent.status();
      if (*sent) return {};
    }
    AMEM_TRY(connection_->Wait(POLLOUT, deadline));
  }
}

template <class Work>
std::invoke_result_t<Work&> OwnerConnection::InTurn(const std::string& doing, Deadline deadline, const Work& work) {
  const Deadline began = Now();
  auto result = UntilFree(deadline, [&]() -> std::invoke_result_t<Work&> {
    const Turn turn(*this, deadline);
    if (!turn.mine()) return Status{Code::kTimeout, ""};
    const Status connected = Connect(deadline);
    auto answer = connected.ok() ? work() : connected;
    // What the owner answered is its word. Else the connection may have broken; another is made then.
    if (answer || IsLost() || answer.status().reported_by()) return answer;
    const Status means = service_.sessions().WhyLost(owner_, answer.status());
    return means == answer.status() ? std::move(answer) : means;
  });
  if (!result) return Failed(doing, began, result.status());
  return result;
}

Result<SharedAllocation> OwnerConnection::AwaitShared(std::uint64_t request, Deadline deadline) {
  while (true) {
    AMEM_ASSIGN(auto incoming, connection_->Receive(deadline));
    if (incoming.message.request != request) continue;  // the answer to a request that gave up
    AMEM_ASSIGN(auto shared, Unpack(std::move(incoming), 1));
    return std::move(shared.front());
  }
}

Result<SharedAllocation> OwnerConnection::Import(const Token& token, AllocationId as, Deadline deadline) {
  return InTurn("import of " + ToText(token.allocation), deadline, [&]() -> Result<SharedAllocation> {
    const std::uint64_t request = connection_->NextRequest();
    AMEM_TRY(Send(ImportMessage{as, token}, request, deadline));
    auto shared = AwaitShared(request, deadline);
    // The owner may have noted a reference that nobody will use.
    if (!shared) Drop({token.allocation, as});
    return shared;
  });
}

Result<std::vector<SharedAllocation>> OwnerConnection::Reimport(const std::vector<ShareRequest>& requests, Deadline deadline) {
  if (requests.empty()) return std::vector<SharedAllocation>();
  return InTurn("importing " + std::to_string(requests.size()) + " allocations again", deadline,
                [&] { return Exchange(requests, deadline); });
}

// Sends all requests, as far as there is room, before it waits for answers: the owner exports while this side takes
// descriptors. After a failure it still takes the other answers, whose descriptors hold memory.
Result<std::vector<SharedAllocation>> OwnerConnection::Exchange(const std::vector<ShareRequest>& requests, Deadline deadline) {
  const std::size_t batches = (requests.size() + kDescriptorsMax - 1) / kDescriptorsMax;
  const auto batch_at = [&](std::size_t i) {
    const auto begin = requests.begin() + static_cast<std::ptrdiff_t>(i * kDescriptorsMax);
    return ReimportMessage{
        {begin, begin + static_cast<std::ptrdiff_t>(std::min(kDescriptorsMax, requests.size() - i * kDescriptorsMax))}};
  };
  std::vector<SharedAllocation> all;
  all.reserve(requests.size());
  Status failure;
  const std::uint64_t first = connection_->NextRequest();
  for (std::size_t i = 1; i < batches; ++i) (void)connection_->NextRequest();
  std::size_t sent = 0, received = 0;
  while (received < batches) {
    if (sent < batches) {
      const std::lock_guard lock(send_mutex_);
      auto room = SendDropsLocked();
      while (room && *room && sent < batches) {
        room = connection_->TrySend({first + sent, batch_at(sent)});
        if (room && *room) ++sent;
      }
      if (!room) return room.status();
    }
    AMEM_ASSIGN(auto incoming, connection_->TryReceive());
    if (!incoming.has_value()) {
      AMEM_TRY(connection_->Wait(sent < batches ? POLLIN | POLLOUT : POLLIN, deadline));
      continue;
    }
    if (incoming->message.request != first + received) continue;  // the answer to a request that gave up
    auto part = Unpack(std::move(*incoming), batch_at(received++).references.size());
    if (!part && failure.ok()) failure = part.status();
    if (part) std::move(part->begin(), part->end(), std::back_inserter(all));
  }
  if (!failure.ok()) return failure;
  return all;
}

// ---- drops -----------------------------------------------------------------------------------------------------------------

// True: none is left.
Result<bool> OwnerConnection::SendDropsLocked() {
  while (!drops_.empty()) {
    const std::size_t n = std::min(drops_.size(), kReferencesMax);
    DroppedMessage message{{drops_.begin(), drops_.begin() + static_cast<std::ptrdiff_t>(n)}};
    auto sent = connection_->TrySend({0, std::move(message)});
    if (!sent) connected_ = false;  // before the service has noticed
    if (!sent || !*sent) return sent;
    drops_.erase(drops_.begin(), drops_.begin() + static_cast<std::ptrdiff_t>(n));
  }
  return true;
}

void OwnerConnection::Drop(const ShareRequest& reference) {
  bool waits = false;
  {
    const std::lock_guard lock(send_mutex_);
    if (connection_ == nullptr || lost_) return;  // the owner has no reference of ours
    const bool behind = !drops_.empty();
    drops_.push_back(reference);
    if (behind || !connected_) return;  // sent with the earlier ones, or by the next connection
    auto sent = SendDropsLocked();
    waits = sent && !*sent;
  }
  if (waits) service_.sessions().FlushLater(owner_);
}

void OwnerConnection::SendHeldUp(Deadline until) {
  {
    const std::lock_guard lock(send_mutex_);
    if (drops_.empty() || connected_ || lost_) return;
  }
  static_cast<void>(InTurn("", until, [&]() -> Result<bool> {
    const std::lock_guard lock(send_mutex_);
    return SendDropsLocked();
  }));
}

bool OwnerConnection::Flush() {
  const std::lock_guard lock(send_mutex_);
  if (!connected_) return true;
  auto sent = SendDropsLocked();
  return !sent || *sent;
}

void OwnerConnection::Shut() {
  const std::lock_guard lock(send_mutex_);
  if (!connected_ || lost_) return;
  (void)SendDropsLocked();
  lost_ = "is not asked any more: this process has stopped serving its peers";
  (void)::shutdown(connection_->fd(), SHUT_RDWR);
}

void OwnerConnection::Lost(const std::string& reason) {
  const std::lock_guard lock(send_mutex_);
  lost_ = reason;
  drops_.clear();
}

bool OwnerConnection::IsLost() const {
  const std::lock_guard lock(send_mutex_);
  return lost_.has_value();
}

void OwnerConnection::Broken(const PeerConnection& connection) {
  const std::lock_guard lock(send_mutex_);
  if (connection_.get() == &connection) connected_ = false;
}

}  // namespace amem
