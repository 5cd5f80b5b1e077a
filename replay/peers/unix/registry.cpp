#include "replay/peers/unix/registry.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "journal/base/file.h"
#include "journal/base/process_sight.h"

namespace amem {

constexpr auto kBetweenLooksMost = std::chrono::milliseconds(64);

Status SessionRegistry::Open() {
  change_.Reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return change_ ? Status{} : Status{CodeOfErrno(errno), "starting the service of peers: eventfd: " + ErrnoText(errno)};
}

// ---- from any thread -------------------------------------------------------------------------------------------------------

PeerIdentity SessionRegistry::Self() const {
  const std::lock_guard lock(mutex_);
  return self_;
}

void SessionRegistry::ChangeSelf(const std::function<void(PeerIdentity&)>& change) {
  {
    const std::lock_guard lock(mutex_);
    change(self_);
  }
  Changed();
}

std::optional<PeerIdentity> SessionRegistry::Known(SessionId session) const {
  const std::lock_guard lock(mutex_);
  const auto at = known_.find(session);
  return at == known_.end() ? std::nullopt : std::optional(at->second.identity);
}

SessionRegistry::Contact SessionRegistry::ContactWith(SessionId session) const {
  const std::lock_guard lock(mutex_);
  const auto at = known_.find(session);
  return at == known_.end() ? Contact() : at->second;
}

bool SessionRegistry::Contact::HasEnded() const {
  const auto process = start_ticks == 0 ? std::nullopt : ReadProcessStat(pid);
  return start_ticks != 0 && (!process || process->start_ticks != start_ticks || process->ended() || process->exiting);
}

bool SessionRegistry::IsGone(SessionId session, std::chrono::milliseconds patience) const {
  const Deadline until = In(patience), closing = In(kDyingPatience);
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(pause * 2, kBetweenLooksMost)) {
    const bool lost = ConnectTo(context_, session).status().code() == Code::kPeerLost;
    if ((lost && Hidden(session).ok()) || ContactWith(session).HasEnded()) return true;
    if (Passed(lost ? std::max(until, closing) : until)) return false;
    std::this_thread::sleep_for(pause);
  }
}

// A session that closes in order removes its socket and ends its connections; its process may go on. Others remove sockets too:
// what tidies a folder up takes those of the living.
Status SessionRegistry::Hidden(SessionId session) const {
  const Contact known = ContactWith(session);
  const bool removed = IsRemoved(context_.directory);
  if (!IsNameless(context_, session) || known.HasEnded() || (!known.connected && !removed)) return {};
  const std::string text = fmt::format(
      "it {}, but its socket {} has been removed from {}, so that nothing that it shares can be paused or resumed: end that "
      "process, or restart the job with its sockets where nothing tidies up (AMEM_SOCKET_DIR)",
      known.start_ticks != 0 ? "lives" : "may live", SocketName(session), PathOf(context_.directory));
  return removed ? Status{Code::kRefused, text} : Status{Code::kTimeout, text, kNotReady};
}

void SessionRegistry::SetLoss(const std::string& tag, const std::optional<PeerIdentity>& lost) {
  const std::lock_guard lock(mutex_);
  losses_[tag] = lost;
  if (lost) failed_by_.emplace(tag, lost->session);
}

std::optional<PeerIdentity> SessionRegistry::Loss(const std::string& tag) const {
  const std::lock_guard lock(mutex_);
  const auto loss = losses_.find(tag);
  return loss == losses_.end() ? std::nullopt : loss->second;
}

bool SessionRegistry::HasFailedBy(const std::string& tag, SessionId session) const {
  const std::lock_guard lock(mutex_);
  return failed_by_.contains({tag, session});
}

void SessionRegistry::Changed() { SignalEvent(change_.get()); }

void SessionRegistry::FlushLater(std::shared_ptr<WatchedConnection> connection) {
  loop_.Post([this, connection = std::move(connection)] {
    for (const auto& [session, record] : records_) {
      for (const auto& [key, watched] : record.watched)
        if (watched == connection) loop_.Modify(key, EPOLLRDHUP | EPOLLOUT);
    }
  });
}

// ---- on the service thread -------------------------------------------------------------------------------------------------

Status SessionRegistry::Connected(const PeerIdentity& peer, pid_t pid) {
  Record& record = records_[peer.session];
  if (record.lost) {
    return {Code::kPeerLost,
            ToText(peer) + " was lost before by " + ToText(Self()) + " (it " + *record.lost + "), its references are gone"};
  }
  const bool changed = record.connected && (record.identity.group != peer.group || record.identity.rank != peer.rank);
  record.identity = peer;
  {
    const std::lock_guard lock(mutex_);
    Contact& known = known_[peer.session];
    known.identity = peer;
    known.connected = true;
    if (pid != 0) known.start_ticks = StartTicks(known.pid = pid);
  }
  if (record.connected && !changed) return {};
  record.connected = true;
  notices_.Add([this, peer] { return delegate_.OnPeerConnected(peer); });
  return {};
}

void SessionRegistry::SeenAs(const PeerIdentity& peer) {
  const auto at = records_.find(peer.session);
  if (at != records_.end() && at->second.connected && !at->second.lost) static_cast<void>(Connected(peer, 0));
}

Status SessionRegistry::Watch(const PeerIdentity& peer, std::shared_ptr<WatchedConnection> connection) {
  const int fd = connection->fd();
  const auto peer_process = CredentialsOf(fd);
  AMEM_TRY(Connected(peer, peer_process ? peer_process->pid : 0));
  const SessionId session = peer.session;
  const auto key = loop_.Add(
      fd, EPOLLRDHUP, [this, session](ServiceLoop::Key ready, std::uint32_t events) { WatchedReady(session, ready, events); });
  if (key == 0) return {Code::kIo, "watching a connection: " + ErrnoText(errno)};
  Record& record = records_[session];
  record.watched.emplace(key, std::move(connection));
  if (peer_process && !record.process)
    record.process.Begin(loop_, peer_process->pid, [this, session] { Lose(session, HowItEnded(context_, session)); });
  Changed();
  return {};
}

void SessionRegistry::WatchedReady(SessionId session, ServiceLoop::Key key, std::uint32_t events) {
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) return Lose(session, HowItEnded(context_, session));
  if ((events & EPOLLOUT) != 0 && records_.at(session).watched.at(key)->Flush()) loop_.Modify(key, EPOLLRDHUP);
}

void SessionRegistry::AddReference(SessionId by, AllocationId allocation, AllocationId as) {
  records_[by].references.emplace(allocation, as);
}

bool SessionRegistry::RemoveReference(SessionId by, AllocationId allocation, AllocationId as) {
  return records_[by].references.erase({allocation, as}) != 0;
}

void SessionRegistry::Lose(SessionId session, const std::string& reason, std::optional<ProcessSeen> seen) {
  Record& record = records_[session];
  if (record.lost) return;
  if (!seen && record.process && reason == kPeerDied)
    seen = SeeProcessOf(record.identity, record.process.pid(), record.process.process(), {});
  record.lost = reason;
  {
    const std::lock_guard lock(mutex_);
    if (const auto at = known_.find(session); at != known_.end()) at->second.connected = false;
  }
  record.doubtful = record.connected && (!record.references.empty() || !record.watched.empty());
  for (const auto& [key, connection] : record.watched) {
    loop_.Remove(key);
    connection->Lost(reason);
  }
  record.watched.clear();
  record.process.End();
  lost_(session, reason);
  record.references.clear();
  if (record.connected) notices_.Add([this, who = record.identity, reason] { return delegate_.OnPeerLost(who, reason); });
  if (record.connected && seen) witness_(*std::move(seen));
  Changed();
}

bool SessionRegistry::IsConnected(SessionId session) const {
  const auto at = records_.find(session);
  return at != records_.end() && at->second.connected && !at->second.lost;
}

void SessionRegistry::NoteGone(SessionId session) {
  if (IsConnected(session)) Lose(session, HowItEnded(context_, session));
  if (const auto at = records_.find(session); at != records_.end()) at->second.doubtful = false;
}

std::vector<PeerIdentity> SessionRegistry::Doubtful() const {
  std::vector<PeerIdentity> doubtful;
  for (const auto& [session, record] : records_)
    if (record.doubtful) doubtful.push_back(record.identity);
  return doubtful;
}

void SessionRegistry::ForgetConnections() {
  for (auto& [session, record] : records_) record.watched.clear();
}

}  // namespace amem
