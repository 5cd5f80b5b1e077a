#include "replay/peers/unix/registry.h"

#include <fmt/format.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "journal/base/file.h"
#include "replay/peers/unix/pages.h"

namespace amem {

constexpr auto kBetweenChecksFirst = std::chrono::milliseconds(1);
constexpr auto kBetweenChecksMost = std::chrono::milliseconds(64);
constexpr auto kBetweenIdleChecksMost = std::chrono::seconds(60);  // at a session that nobody asks for anything

// ---- from any thread -------------------------------------------------------------------------------------------------------

PeerIdentity SessionRegistry::Self() const {
  const std::lock_guard lock(mutex_);
  return self_;
}

void SessionRegistry::ChangeSelf(const std::function<void(PeerIdentity&)>& change) {
  const std::lock_guard lock(mutex_);
  change(self_);
  if (context_.pages != nullptr) static_cast<void>(context_.pages->Publish(self_));
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

bool SessionRegistry::HasEnded(SessionId session, bool* unserved) const {
  if (LifeOf(ContactWith(session).process).HasEnded() || HasSaidFarewell(context_, session)) return true;
  const bool refused = ConnectTo(context_, session).status().code() == Code::kPeerLost;
  if (unserved != nullptr) *unserved = refused;
  return refused && Hidden(session).ok();
}

bool SessionRegistry::IsGone(SessionId session, std::chrono::milliseconds patience) const {
  const Deadline until = In(patience), closing = In(kDyingPatience);
  for (auto pause = kBetweenChecksFirst;; pause = std::min(pause * 2, kBetweenChecksMost)) {
    bool unserved = false;
    if (HasEnded(session, &unserved)) return true;
    if (Passed(unserved ? std::max(until, closing) : until)) return false;
    std::this_thread::sleep_for(pause);
  }
}

// A process that has too many connections, or no descriptors or memory for them, ends one and lives.
Status SessionRegistry::WhyLost(SessionId session, const Status& why) const {
  if (why.code() != Code::kPeerLost || IsGone(session, kDyingPatience)) return why;
  const Status hidden = Hidden(session);
  return hidden.ok() ? Status{Code::kTimeout, "it lives and does not answer: it ends the connections to it", kNotReady}
                     : hidden;
}

// A session that closes in order removes its socket and ends its connections; its process may go on. Others remove sockets too:
// what tidies a folder up takes those of the living.
Status SessionRegistry::Hidden(SessionId session) const {
  const Contact known = ContactWith(session);
  const bool removed = IsRemoved(context_.directory);
  const ProcessLife life = LifeOf(known.process);
  if (!IsNameless(context_, session) || life.HasEnded() || (!known.open && !removed)) return {};
  const std::string text = fmt::format(
      "it {}, but its socket {} has been removed from {}, so that nothing that it shares can be paused or resumed: end that "
      "process, or restart the job with its sockets where nothing tidies up (AMEM_SOCKET_DIR)",
      life.IsAlive() ? "lives" : "may live", SocketName(session), PathOf(context_.directory));
  return removed ? Status{Code::kRefused, text} : Status{Code::kTimeout, text, kNotReady};
}

void SessionRegistry::FailedBy(const std::string& tag, SessionId lost) {
  const std::lock_guard lock(mutex_);
  failed_by_.emplace(tag, lost);
}

bool SessionRegistry::HasFailedBy(const std::string& tag, SessionId session) const {
  const std::lock_guard lock(mutex_);
  return failed_by_.contains({tag, session});
}

void SessionRegistry::FlushLater(SessionId owner) {
  loop_.Post([this, owner] {
    const auto record = records_.find(owner);
    if (record == records_.end()) return;
    for (const auto& [key, watched] : record->second.watched) loop_.Modify(key, EPOLLRDHUP | EPOLLOUT);
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
    if (pid != 0 && known.process.start_ticks == 0) known.process = {pid, StartTicks(pid)};
  }
  if (pid != 0 && !record.process) record.process.Begin(loop_, pid, [this, session = peer.session] { Lose(session); });
  if (record.connected && !changed) return {};
  record.connected = true;
  pending_.Add([this, peer] { return delegate_.OnPeerConnected(peer); });
  return {};
}

Status SessionRegistry::Greeted(const PeerIdentity& peer, pid_t pid) {
  AMEM_TRY(Connected(peer, pid));
  Record& record = records_[peer.session];
  ++record.greeted;
  ConnectionsChanged(peer.session, record);
  return {};
}

void SessionRegistry::GreetedEnded(SessionId session) {
  Record& record = records_[session];
  --record.greeted;
  ConnectionsChanged(session, record);
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
  ConnectionsChanged(session, record);
  return {};
}

void SessionRegistry::WatchedReady(SessionId session, ServiceLoop::Key key, std::uint32_t events) {
  Record& record = records_[session];
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
    if (HasEnded(session)) return Lose(session);
    loop_.Remove(key);
    record.watched.extract(key).mapped()->Broken();
    return ConnectionsChanged(session, record);
  }
  const auto watched = record.watched.find(key);
  const bool writable = (events & EPOLLOUT) != 0 && watched != record.watched.end();
  if (writable && watched->second->Flush()) loop_.Modify(key, EPOLLRDHUP);
}

void SessionRegistry::ConnectionsChanged(SessionId session, Record& record) {
  if (record.lost) return;
  const bool open = record.greeted > 0 || !record.watched.empty();
  {
    const std::lock_guard lock(mutex_);
    known_[session].open = open;
  }
  record.check_again.reset();
  record.between_checks = kBetweenChecksFirst;
  if (!open) LoseIfEnded(session, record);
}

// A dying process ends its connections a moment before anything else shows its end.
void SessionRegistry::LoseIfEnded(SessionId session, Record& record) {
  if (HasEnded(session)) return Lose(session);
  record.check_again = ServiceLoop::Clock::now() + record.between_checks;
  record.between_checks = std::min<ServiceLoop::Clock::duration>(record.between_checks * 2, kBetweenIdleChecksMost);
}

std::optional<ServiceLoop::Clock::time_point> SessionRegistry::NextCheck() const {
  std::optional<ServiceLoop::Clock::time_point> next;
  for (const auto& [session, record] : records_)
    if (record.check_again && (!next || *record.check_again < *next)) next = record.check_again;
  return next;
}

void SessionRegistry::CheckAgain(ServiceLoop::Clock::time_point now) {
  for (auto& [session, record] : records_)
    if (record.check_again && now >= *record.check_again) LoseIfEnded(session, record);
}

void SessionRegistry::AddReference(SessionId by, AllocationId allocation, AllocationId as) {
  records_[by].references.emplace(allocation, as);
}

bool SessionRegistry::RemoveReference(SessionId by, AllocationId allocation, AllocationId as) {
  return records_[by].references.erase({allocation, as}) != 0;
}

void SessionRegistry::Lose(SessionId session) {
  Record& record = records_[session];
  if (record.lost) return;
  const std::string reason = HowItEnded(context_, session);
  std::optional<ProcessSeen> seen;
  if (record.process && reason == kPeerDied)
    seen = SeeProcessOf(record.identity, record.process.pid(), record.process.process(), {});
  record.lost = reason;
  record.check_again.reset();
  {
    const std::lock_guard lock(mutex_);
    if (const auto at = known_.find(session); at != known_.end()) at->second.open = false;
  }
  for (const auto& [key, connection] : record.watched) {
    loop_.Remove(key);
    connection->Lost(reason);
  }
  record.watched.clear();
  record.process.End();
  lost_(session, reason);
  if (context_.pages != nullptr) context_.pages->NoteEnd(session);
  record.references.clear();
  if (record.connected) pending_.Add([this, who = record.identity, reason] { return delegate_.OnPeerLost(who, reason); });
  if (record.connected && seen) pending_.AddFact(*std::move(seen));
}

bool SessionRegistry::IsConnected(SessionId session) const {
  const auto at = records_.find(session);
  return at != records_.end() && at->second.connected && !at->second.lost;
}

void SessionRegistry::NoteGone(SessionId session) {
  if (IsConnected(session)) Lose(session);
}

void SessionRegistry::ForgetConnections() {
  for (auto& [session, record] : records_) record.watched.clear();
}

}  // namespace amem
