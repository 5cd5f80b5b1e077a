// A session as peers see it, without a ledger or a driver: allocations are memfds, references a set.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "replay/peers/peers.h"
#include "replay/peers/token.h"
#include "replay/peers/unix/unix_peers.h"

namespace amem::test {

#ifdef AMEM_SANITIZED
inline constexpr int kFew = 4;  // how much less is done
#else
inline constexpr int kFew = 1;
#endif

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    char name[] = "/tmp/amem-peers-test-XXXXXX";
    path_ = ::mkdtemp(name);
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] std::filesystem::path sockets() const { return path_ / "sockets"; }
  // As those do who tidy /tmp up: the folder goes, or what is in it.
  void RemoveSockets(bool folder = true) const {
    if (folder) std::filesystem::remove_all(sockets());
    if (!folder)
      for (const auto& socket : std::filesystem::directory_iterator(sockets())) std::filesystem::remove(socket);
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

class FakeSession : public PeerDelegate {
 public:
  explicit FakeSession(SessionId session) : session_(session) {}

  Token Export(AllocationId allocation, Bytes bytes = 4096) {
    const std::lock_guard lock(mutex_);
    auto& own = own_[allocation];
    own.descriptor.Reset(::memfd_create("amem-peers-test", MFD_CLOEXEC));
    (void)!::ftruncate(own.descriptor.get(), static_cast<off_t>(bytes));
    own.bytes = bytes;
    own.secret = *RandomSecret();
    return {session_, allocation, own.secret, 0};
  }
  void Add(SessionId neighbour) {
    const std::lock_guard lock(mutex_);
    neighbours_.insert(neighbour);
  }

  void Remove(SessionId neighbour) {
    const std::lock_guard lock(mutex_);
    neighbours_.erase(neighbour);
  }

  Result<SharedAllocation> OnImport(const PeerIdentity& by, AllocationId as, const Token& token) override {
    const auto pause = import_takes.load();
    if (pause.count() != 0) std::this_thread::sleep_for(pause);
    const std::lock_guard lock(mutex_);
    const auto at = own_.find(token.allocation);
    if (at == own_.end()) return Status{Code::kNotFound, "no such allocation"};
    if (!SameSecret(at->second.secret, token.secret)) return Status{Code::kRefused, "the secret is wrong"};
    references_.emplace(token.allocation, by.session, as);
    neighbours_.insert(by.session);
    return Share(at->second);
  }
  Result<SharedAllocation> OnReimport(const PeerIdentity& by, const ShareRequest& request) override {
    const std::lock_guard lock(mutex_);
    if (!references_.contains({request.allocation, by.session, request.as})) return Status{Code::kRefused, "no such reference"};
    return Share(own_.at(request.allocation));
  }
  bool OnReferenceDropped(const PeerIdentity& by, AllocationId allocation, AllocationId as) override {
    ++drops;
    const std::lock_guard lock(mutex_);
    references_.erase({allocation, by.session, as});
    changed_.notify_all();
    return true;
  }
  bool OnPeerConnected(const PeerIdentity& peer) override {
    const std::lock_guard lock(mutex_);
    connected_.push_back(peer);
    changed_.notify_all();
    return true;
  }
  bool OnPeerLost(const PeerIdentity& peer, const std::string& reason) override {
    const std::lock_guard lock(mutex_);
    lost_.emplace_back(peer, reason);
    std::erase_if(references_, [&](const auto& r) { return std::get<1>(r) == peer.session; });
    if (forget_lost) neighbours_.erase(peer.session);
    changed_.notify_all();
    return true;
  }
  Result<std::vector<SessionId>> Neighbours(const std::string&, Deadline until) override {
    std::unique_lock lock(mutex_);
    if (const auto before = before_neighbours_) {
      lock.unlock();
      before(until);
      lock.lock();
    }
    return std::vector<SessionId>(neighbours_.begin(), neighbours_.end());
  }

  CycleProgress Progress(const std::string&) override { return {lifecycle.load(), 1}; }

  bool OnWitnessed(std::span<const EventBody> facts, std::chrono::milliseconds /*patience*/) override {
    std::this_thread::sleep_for(witness_takes.load());
    if (busy_journal-- > 0) return false;
    const std::lock_guard lock(mutex_);
    facts_.insert(facts_.end(), facts.begin(), facts.end());
    changed_.notify_all();
    return true;
  }
  template <class Fact>
  std::vector<Fact> Facts() {
    const std::lock_guard lock(mutex_);
    std::vector<Fact> found;
    for (const EventBody& fact : facts_) {
      if (const auto* one = std::get_if<Fact>(&fact)) found.push_back(*one);
    }
    return found;
  }
  template <class Fact>
  std::vector<Fact> AwaitFacts(std::size_t count) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::seconds(5), [&] {
        return static_cast<std::size_t>(std::ranges::count_if(
                   facts_, [](const EventBody& fact) { return std::holds_alternative<Fact>(fact); })) >= count;
      });
    }
    return Facts<Fact>();
  }

  std::size_t references() {
    const std::lock_guard lock(mutex_);
    return references_.size();
  }
  std::vector<PeerIdentity> connected() {
    const std::lock_guard lock(mutex_);
    return connected_;
  }
  std::vector<std::pair<PeerIdentity, std::string>> lost() {
    const std::lock_guard lock(mutex_);
    return lost_;
  }
  bool WaitUntilLost(std::size_t count, std::chrono::milliseconds patience = std::chrono::seconds(5)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [&] { return lost_.size() >= count; });
  }
  bool WaitForReferences(std::size_t count, std::chrono::milliseconds patience = std::chrono::seconds(5)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [&] { return references_.size() == count; });
  }

  // `before` gets the caller's deadline. Any thread, also one beside the service's, which answers the others' questions.
  void BeforeNeighbours(std::function<void(Deadline until)> before) {
    const std::lock_guard lock(mutex_);
    before_neighbours_ = std::move(before);
  }
  std::atomic<std::chrono::milliseconds> witness_takes{std::chrono::milliseconds(0)};
  std::atomic<std::chrono::milliseconds> import_takes{std::chrono::milliseconds(0)};
  std::atomic<bool> forget_lost{false};
  std::atomic<Lifecycle> lifecycle{Lifecycle::kNew};
  std::atomic<int> drops{0};         // that reached this session
  std::atomic<int> busy_journal{0};  // so many times facts cannot be recorded

 private:
  struct Own {
    UniqueFd descriptor;
    Bytes bytes = 0;
    Secret secret{};
  };
  static Result<SharedAllocation> Share(const Own& own) {
    SharedAllocation shared;
    shared.descriptor.Reset(::fcntl(own.descriptor.get(), F_DUPFD_CLOEXEC, 0));
    shared.bytes = own.bytes;
    shared.properties.location = {LocationType::kDevice, 3};
    shared.properties.handle_types = 1;
    shared.tag = MemoryTag::kUser;
    return shared;
  }

  const SessionId session_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<AllocationId, Own> own_;
  std::set<std::tuple<AllocationId, SessionId, AllocationId>> references_;
  std::set<SessionId> neighbours_;
  std::vector<PeerIdentity> connected_;
  std::vector<std::pair<PeerIdentity, std::string>> lost_;
  std::vector<EventBody> facts_;
  std::function<void(Deadline until)> before_neighbours_;
};

inline PeerIdentity Identity(std::int32_t rank, std::int64_t group = 0) {
  return {SessionId{0x1000u + static_cast<unsigned>(rank)}, "testhost", ::getpid(), group, rank};
}

// One session with its peers.
struct Rank {
  Rank(const TemporaryDirectory& directory, std::int32_t rank, std::uint32_t timeout_ms = 20'000, std::int64_t group = 0,
       std::chrono::milliseconds hello_patience = std::chrono::seconds(5))
      : identity(Identity(rank, group)), session(identity.session), deadlines(std::chrono::milliseconds(timeout_ms)) {
    UnixPeersOptions options{directory.sockets(), deadlines, {}};
    options.hello_patience = hello_patience;
    auto started = UnixPeers::Start(identity, options, session);
    if (started) {
      peers = *std::move(started);
    } else {
      problem = started.status();
    }
  }
  // `this` imports allocation `allocation` of `owner`, as the id `as`.
  Result<SharedAllocation> ImportFrom(Rank& owner, AllocationId allocation, AllocationId as) {
    auto shared = peers->Import(owner.session.Export(allocation), as);
    if (shared) session.Add(owner.identity.session);
    return shared;
  }
  // The same on a busy host, where an answer may be late.
  Result<SharedAllocation> ImportPatiently(const Token& token, AllocationId as) const {
    auto shared = peers->Import(token, as);
    for (int i = 0; i < 50 && shared.status().code() == Code::kTimeout; ++i) shared = peers->Import(token, as);
    return shared;
  }
  Result<std::vector<SharedAllocation>> Reimport(SessionId owner, const std::vector<ShareRequest>& requests) const {
    return peers->Reimport(owner, requests, In(deadlines.call()));
  }

  PeerIdentity identity;
  FakeSession session;
  Deadlines deadlines;
  std::unique_ptr<UnixPeers> peers;
  Status problem;
};

inline std::size_t OpenDescriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// The service closes its ends a moment after the caller has what it wanted.
inline std::size_t DescriptorsAtRest() {
  std::size_t last = 0, now = OpenDescriptors();
  for (int i = 0; i < 200 && now != last; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20 * kFew));
    last = std::exchange(now, OpenDescriptors());
  }
  return now;
}

// A child process that runs `work` and exits with what it returns. Fork before starting threads.
class Child {
 public:
  explicit Child(const std::function<int()>& work) : pid_(::fork()) {
    if (pid_ == 0) ::_exit(work());
  }
  ~Child() { (void)Wait(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void Kill(int signal) const { ::kill(pid_, signal); }
  void StopRunning() const {  // and until it has stopped
    int status = 0;
    ::kill(pid_, SIGSTOP);
    ::waitpid(pid_, &status, WUNTRACED);
  }
  int Wait() {
    if (pid_ > 0) {
      int status = 0;
      ::waitpid(pid_, &status, 0);
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
      pid_ = 0;
    }
    return code_;
  }
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
  int code_ = -1;
};

// A byte from one process to another: "you may go on".
class Baton {
 public:
  Baton() { (void)!::pipe2(ends_, O_CLOEXEC); }
  ~Baton() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Baton(const Baton&) = delete;
  Baton& operator=(const Baton&) = delete;
  void Pass(int times = 1) const {
    for (int i = 0; i < times; ++i) (void)!::write(ends_[1], "x", 1);
  }
  void Await() const {
    char c = 0;
    (void)!::read(ends_[0], &c, 1);
  }

 private:
  int ends_[2] = {-1, -1};
};

}  // namespace amem::test
