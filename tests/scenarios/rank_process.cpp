#include "tests/scenarios/rank_process.h"

#include <malloc.h>
#include <poll.h>
#ifdef AMEM_SANITIZED
#include <sanitizer/allocator_interface.h>
#endif
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <thread>

#include "tests/replay/driver/simulated.h"
#include "tests/scenarios/multicast_calls.h"
#include "tests/scenarios/start_session.h"

namespace amem::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr Bytes kCapacity = 64 * kPage;

// The fault of this rank and when it happens. Calls of the rank's service thread are counted as well.
struct Trigger {
  std::atomic<Fault> fault{Fault::kNone};
  std::atomic<std::uint64_t> nth{0}, calls{0}, appends{0};
  std::atomic<std::uint32_t> stall_ms{0};
  std::atomic<bool> fired{false}, voted{false}, fired_voted{false};

  bool Due(bool append) {
    const std::uint64_t count = ++(append ? appends : calls);
    const Fault now = fault;
    const bool of_append = now == Fault::kKillAtAppend || now == Fault::kFailAppend || now == Fault::kStopAtAppend;
    const bool due =
        now != Fault::kNone && of_append == append && (count == nth || (now == Fault::kFailAllCalls && count > nth));
    if (!due) return false;
    fired = true;
    fired_voted = voted.load();
    if (now == Fault::kKillAtCall || now == Fault::kKillAtAppend) ::raise(SIGKILL);
    if (now == Fault::kStallAtCall) std::this_thread::sleep_for(std::chrono::milliseconds(stall_ms));
    if (now == Fault::kStopAtAppend) ::raise(SIGSTOP);  // all threads, until a SIGCONT
    return now != Fault::kStallAtCall && now != Fault::kStopAtAppend;
  }
};

class TriggeredJournal final : public JournalWriter {
 public:
  TriggeredJournal(std::unique_ptr<JournalWriter> real, Trigger& trigger) : real_(std::move(real)), trigger_(trigger) {}
  Status Append(const Event& event) override {
    if (trigger_.Due(true)) return {Code::kIo, "append to journal: no space left on device"};
    const auto* const vote = std::get_if<VoteCast>(&static_cast<const EventVariant&>(event.body));
    Status appended = real_->Append(event);
    if (vote != nullptr && vote->phase == PhaseKind::kPauseGone && vote->ok && appended.ok()) trigger_.voted = true;
    return appended;
  }
  Status Flush() override { return real_->Flush(); }
  bool SnapshotDue() const override { return real_->SnapshotDue(); }
  Status Snapshot(const State& state) override { return real_->Snapshot(state); }
  Status Close() override { return real_->Close(); }
  std::filesystem::path Directory() const override { return real_->Directory(); }

 private:
  std::unique_ptr<JournalWriter> real_;
  Trigger& trigger_;
};

Bytes HeapInUse() {
#ifdef AMEM_SANITIZED
  return __sanitizer_get_current_allocated_bytes();
#else
  const struct mallinfo2 counts = ::mallinfo2();
  return counts.uordblks + counts.hblkhd;
#endif
}

class RankSession {
 public:
  RankSession(int rank, int ranks, Layout layout, bool multicast, bool tag, LibraryScope scope, std::filesystem::path directory,
              std::uint32_t timeout_ms, bool abstract_names)
      : rank_(rank),
        ranks_(ranks),
        layout_(layout),
        multicast_(multicast),
        tag_(tag),
        scope_(scope),
        directory_(std::move(directory)),
        timeout_ms_(timeout_ms),
        abstract_names_(abstract_names) {}

  Status Start() {
    RankProcessOptions options{.directory = directory_, .timeout_ms = timeout_ms_, .abstract_names = abstract_names_};
    options.simulated.devices = ranks_;
    options.simulated.capacity_per_device = kCapacity;
    options.simulated.granularity = kPage;
    options.journal.map_bytes = Bytes{16} << 20;
    options.journal.tail_bytes = Bytes{1} << 20;
    options.session.layout = layout_;
    options.session.slab_bytes = kSlab;
    options.session.nvls = Nvls::kRelease;
    options.wrap_journal = [this](std::unique_ptr<JournalWriter> real) {
      return std::make_unique<TriggeredJournal>(std::move(real), trigger_);
    };
    auto started = StartProcess(std::move(options), RankOf(rank_, RankProcesses::SessionOf(rank_)));
    if (!started.ok()) return started.status();
    simulator_ = std::move(started->simulator);
    session_ = std::move(started->session);
    calls_.emplace(*session_, *simulator_);
    return {};
  }

  Reply Answer(const Command& command) {
    Reply reply;
    const auto begun = Clock::now();
    const Status status = Obey(command, reply);
    reply.took_ms =
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begun).count());
    reply.code = status.code();
    reply.driver_result = status.driver_result();
    std::snprintf(reply.text.data(), reply.text.size(), "%s", status.message().c_str());
    session_->Inspect([&](const State& state) {
      reply.tag = state.LifecycleOf(pool_);
      reply.lifecycle = scope_ == LibraryScope::kShared ? reply.tag : state.lifecycle;
      if (scope_ == LibraryScope::kAll && reply.tag != reply.lifecycle) reply.lifecycle = Lifecycle::kPausing;  // half of it
      return 0;
    });
    reply.calls = trigger_.calls;
    reply.appends = trigger_.appends;
    reply.fired = trigger_.fired;
    reply.fired_voted = trigger_.fired_voted;
    return reply;
  }

 private:
  struct Buffer {
    AllocationId allocation;
    Address address;
    Bytes bytes = 0;
    bool nccls = true;
  };

  Status Obey(const Command& command, Reply& reply) {
    switch (command.op) {
      case Op::kBuild:
        return Build(reply);
      case Op::kImport:
        return Import(command);
      case Op::kBind:
        return multicast_ ? BindAll() : Status{};
      case Op::kFill:
        Fill(command.version);
        return {};
      case Op::kCheck:
        return Check(command.version, command.fault != Fault::kFailAllCalls, reply);
      case Op::kArm:
        Arm(command);
        return {};
      case Op::kPause:
      case Op::kResume:
        return Cycle(command.op == Op::kPause);
      case Op::kPauseTag:
        return session_->pools().Pause(pool_, {});
      case Op::kResumeTag:
        return session_->pools().Resume(pool_, {});
      case Op::kFree:
        return Free();
      case Op::kHog:
        return Hog(command.version != 0);
      case Op::kFork:
        return Fork();
      case Op::kClose:
        return session_->Close("exit");
    }
    return {Code::kInvalid, "no such command"};
  }

  // As amem_pause does it with several tags.
  Status Cycle(bool pause) {
    const auto of_tag = [this](bool pauses) {
      return pauses ? session_->pools().Pause(pool_, {}) : session_->pools().Resume(pool_, {.patient = false});
    };
    if (scope_ != LibraryScope::kNccl) AMEM_TRY(of_tag(pause));
    if (scope_ == LibraryScope::kShared) return {};
    const Status done = pause ? session_->Pause() : session_->ResumeInTime();
    if (!done.ok() && scope_ == LibraryScope::kAll) static_cast<void>(of_tag(!pause));
    return done;
  }

  AllocationProperties Properties(bool shareable = true) const {
    AllocationProperties properties;
    properties.handle_types = shareable ? 1 : 0;
    properties.location = {LocationType::kDevice, rank_};
    return properties;
  }
  Result<Buffer> Place(AllocationId id, Bytes bytes, bool nccls) {
    auto address = nccls ? session_->nccl().Reserve(bytes, 0, {}, 0, {}) : simulator_->Reserve(bytes, 0, {}, 0);
    if (!address.ok()) return address.status();
    AMEM_TRY(session_->nccl().Map(*address, bytes, 0, id, 0));
    const AccessDescriptor access{{LocationType::kDevice, rank_}, 3};
    AMEM_TRY(session_->nccl().SetAccess(*address, bytes, std::span(&access, 1)));
    return Buffer{id, *address, bytes, nccls};
  }
  Result<Buffer> New(Bytes bytes, bool shared = false) {
    auto id = Make(bytes, shared);
    if (!id.ok()) return id.status();
    return Place(*id, bytes, IsNccls(shared));
  }
  Result<AllocationId> Make(Bytes bytes, bool shared = false) {
    const AllocationProperties properties = Properties(shared || scope_ != LibraryScope::kAll);
    return session_->nccl().Create(bytes, properties, 0, {}, false, IsNccls(shared) ? "" : Tag());
  }
  bool IsNccls(bool shared) const { return scope_ == LibraryScope::kNccl || (shared && scope_ == LibraryScope::kAll); }
  const char* Tag() const { return scope_ == LibraryScope::kAll ? "program" : "libone_shot"; }
  Status Token(AllocationId id, std::array<std::byte, kTokenBytes>& bytes) {
    auto descriptor = session_->sharing().Export(id);
    if (!descriptor.ok()) return descriptor.status();
    auto token = ReadTokenDescriptor(descriptor->get());
    if (!token.ok()) return token.status();
    bytes = Encode(*token);
    return {};
  }
  Status Build(Reply& reply) {
    simulator_->SetHook([this](std::string_view, std::uint64_t) { return trigger_.Due(false) ? cuda::kUnknown : 0; });
    auto ring = New(kRing, true), own = New(kOwn), left = New(kLeft, true);
    auto bare = Make(kBare);
    for (const Status& made : {ring.status(), own.status(), left.status(), bare.status()}) AMEM_TRY(made);
    ring_ = *ring;
    own_ = *own;
    left_ = *left;
    bare_ = *bare;
    AMEM_TRY(Token(ring_.allocation, reply.tokens[0]));
    AMEM_TRY(Token(left_.allocation, reply.tokens[1]));
    if (tag_) AMEM_TRY(BuildPool());
    if (scope_ != LibraryScope::kNccl) AMEM_TRY(BuildPart(reply));
    return multicast_ ? BuildMulticast(reply) : Status{};
  }
  Status BuildPool() {
    auto pool = session_->pools().Open("weights", PoolPolicy::kPreserve);
    if (!pool.ok()) return pool.status();
    pool_ = *pool;
    for (Buffer* part : {&first_part_, &second_part_}) {
      part->bytes = part == &first_part_ ? kFirstPart : kSecondPart;
      auto address = session_->pools().Allocate(pool_, part->bytes, DeviceOrdinal{rank_});
      if (!address.ok()) return address.status();
      part->address = *address;
    }
    return {};
  }
  Status BuildMulticast(Reply& reply) {
    auto bound = New(kBound), bound_at = New(kBoundAt);
    for (const Status& made : {bound.status(), bound_at.status()}) AMEM_TRY(made);
    bound_ = *bound;
    bound_at_ = *bound_at;
    if (rank_ != 0) return {};
    auto object = calls_->Create(kObject, static_cast<std::uint32_t>(ranks_));
    if (!object.ok()) return object.status();
    object_.allocation = *object;
    return Token(object_.allocation, reply.tokens[2]);
  }
  Status ImportMulticast(const Command& command) {
    if (rank_ != 0) {
      auto id = ImportOne(command.tokens[2]);
      if (!id.ok()) return id.status();
      object_.allocation = *id;
    }
    return calls_->AddDevice(object_.allocation, DeviceOrdinal{rank_});
  }
  Status BindAll() {
    AMEM_TRY(calls_->Bind(object_.allocation, 0, bound_.allocation, 0, kBound));
    AMEM_TRY(calls_->BindAddress(object_.allocation, kBound, bound_at_.address, kBoundAt));
    auto placed = Place(object_.allocation, kObject, true);
    if (placed.ok()) object_ = *placed;
    return placed.status();
  }
  Result<AllocationId> ImportOne(const std::array<std::byte, kTokenBytes>& bytes) {
    auto token = Decode(bytes);
    if (!token.ok()) return token.status();
    auto descriptor = MakeTokenDescriptor(*token);
    if (!descriptor.ok()) return descriptor.status();
    return session_->sharing().Import(descriptor->get(), {});
  }
  Status Import(const Command& command) {
    if (ranks_ > 1) {
      for (std::size_t i = 0; i < 2; ++i) {
        auto id = ImportOne(command.tokens[i]);
        if (!id.ok()) return id.status();
        auto placed = Place(*id, i == 0 ? kRing : kLeft, IsNccls(true));
        if (!placed.ok()) return placed.status();
        (i == 0 ? from_ring_ : from_left_) = *placed;
      }
    }
    if (scope_ != LibraryScope::kNccl && ranks_ > 1) {
      auto opened = session_->legacy().Import(command.tokens[2], DeviceOrdinal{rank_}, {}, true);
      if (!opened.ok()) return opened.status();
      from_part_ = {session_->CopyState().legacy_imports.at(*opened).allocation, *opened, kFirstPart};
    }
    return multicast_ ? ImportMulticast(command) : Status{};
  }
  // In a chunk that is small, because the device has little left.
  Status BuildPart(Reply& reply) {
    AMEM_ASSIGN(pool_, session_->pools().Open(Tag(), PoolPolicy::kPreserve));
    AMEM_ASSIGN(const auto memory, simulator_->Memory(DeviceOrdinal{rank_}));
    AMEM_ASSIGN(const auto hog, simulator_->Create(memory.free - kSharedChunk, Properties(), 0));
    AMEM_ASSIGN(const auto address, session_->pools().Allocate(pool_, kFirstPart, DeviceOrdinal{rank_}));
    AMEM_TRY(simulator_->Release(hog));
    AMEM_ASSIGN(reply.tokens[2], session_->legacy().ExportPart(address));
    first_part_ = {session_->CopyState().pools.at(pool_).parts.at(address).backing, address, kFirstPart};
    return {};
  }

  static std::byte Pattern(int rank, int what, std::uint64_t version, Bytes at) {
    if (at / kPage == 1) return std::byte{0};  // holes, as they are skipped in the backup
    return static_cast<std::byte>((static_cast<std::uint64_t>(rank) * 31 + static_cast<std::uint64_t>(what) * 7 + version) * 5 +
                                  at * 13 + 1);
  }
  static void Write(const Buffer& buffer, int rank, int what, std::uint64_t version) {
    auto* data = reinterpret_cast<std::byte*>(buffer.address.value);  // NOLINT(performance-no-int-to-ptr)
    for (Bytes at = 0; at < buffer.bytes; ++at) data[at] = Pattern(rank, what, version, at);
  }
  int previous() const { return (rank_ + ranks_ - 1) % ranks_; }
  void Fill(std::uint64_t version) {
    Write(ring_, rank_, 0, version);
    Write(own_, rank_, 1, version);
    if (ranks_ > 1) static_cast<void>(FreeOne(left_));  // from now on only the next rank has it
    if (from_left_.allocation) Write(from_left_, previous(), 2, version);
    if (tag_) Write(first_part_, rank_, 5, version);
    if (tag_) Write(second_part_, rank_, 6, version);
    if (scope_ != LibraryScope::kNccl) Write(first_part_, rank_, 5, version);
    if (!multicast_) return;
    Write(bound_, rank_, 3, version);
    Write(bound_at_, rank_, 4, version);
  }
  // The contents are as written; memory of a dead owner is all zero after a resume.
  // Its owner died before it had copied the contents back. That death may be recorded a moment after the undo has ended.
  bool IsOrphaned(AllocationId allocation) {
    for (int i = 0; i < kPatienceMs; ++i, ::usleep(1000)) {
      const bool orphaned = session_->Inspect([&](const State& state) {
        const auto at = state.allocations.find(allocation);
        return at != state.allocations.end() && state.Orphaned(at->second);
      });
      if (orphaned) return true;
    }
    return false;
  }

  Status Compare(const Buffer& buffer, const char* name, int rank, int what, std::uint64_t version) {
    const State state = session_->CopyState();
    const auto at = state.allocations.find(buffer.allocation);
    if (at == state.allocations.end()) return {Code::kCorrupt, std::string(name) + " is gone"};
    const auto* data = reinterpret_cast<const std::byte*>(buffer.address.value);  // NOLINT(performance-no-int-to-ptr)
    bool same = true, zero = true;
    for (Bytes i = 0; i < buffer.bytes; ++i) {
      same = same && data[i] == Pattern(rank, what, version, i);
      zero = zero && data[i] == std::byte{0};
    }
    if (same || (zero && IsOrphaned(buffer.allocation))) return {};
    return {Code::kCorrupt, std::string("the contents of ") + name + " differ"};
  }
  // `settled` false: the driver has just refused to take something back, which is tried again with the next pause or resume.
  Status Check(std::uint64_t version, bool settled, Reply& reply) {
    reply.heap = HeapInUse();
    reply.pinned = simulator_->PinnedBytes();
    const std::filesystem::directory_iterator descriptors("/proc/self/fd");
    reply.descriptors = static_cast<std::uint32_t>(std::distance(begin(descriptors), end(descriptors)));
    const Status books = session_->Inspect([&](const State& state) -> Status {
      if (!state.broken.empty() && trigger_.fault != Fault::kFailAppend) return {Code::kBroken, state.broken};
      AMEM_TRY(CheckInvariants(state));
      // The simulator's own books: one handle for each allocation that has memory, and no range or mapping besides.
      std::size_t resident = 0;
      Bytes present = 0, mapped = 0;  // replacements of lost memory are mapped in pieces
      for (const auto& [id, a] : state.allocations) resident += a.resident && !a.placed() ? 1 : 0;
      for (const auto& [address, m] : state.mappings) present += m.present ? m.bytes : 0;
      const SimulatorSnapshot real = simulator_->Snapshot();
      for (const auto& m : real.mappings) mapped += m.bytes;
      if (settled && (real.handles.size() != resident || real.ranges.size() != state.ranges.size() || mapped != present)) {
        return {Code::kCorrupt, "the driver holds other things than the state says: " + ToText(real)};
      }
      return {};
    });
    AMEM_TRY(books);
    if (tag_) AMEM_TRY(CheckPool(version));
    if (scope_ != LibraryScope::kNccl && session_->CopyState().LifecycleOf(pool_) != Lifecycle::kRunning) return {};
    if (session_->paused()) return {};
    if (scope_ != LibraryScope::kNccl) AMEM_TRY(Compare(first_part_, "the part", rank_, 5, version));
    if (from_part_.address) AMEM_TRY(Compare(from_part_, "the other's part", previous(), 5, version));
    AMEM_TRY(Compare(ring_, "ring", rank_, 0, version));
    AMEM_TRY(Compare(own_, "own", rank_, 1, version));
    if (multicast_) AMEM_TRY(CheckMulticast(version, reply));
    if (!from_ring_.allocation) return {};
    AMEM_TRY(Compare(from_ring_, "the other's ring", previous(), 0, version));
    return Compare(from_left_, "the other's left", previous(), 2, version);
  }

  // The contents of the pool's parts, unless it is paused, whatever NCCL's memory does.
  Status CheckPool(std::uint64_t version) {
    const Lifecycle lifecycle = session_->Inspect([&](const State& state) { return state.LifecycleOf(pool_); });
    if (lifecycle != Lifecycle::kRunning || !first_part_.address) return {};
    for (const Buffer* part : {&first_part_, &second_part_}) {
      const auto* data = reinterpret_cast<const std::byte*>(part->address.value);  // NOLINT(performance-no-int-to-ptr)
      for (Bytes i = 0; i < part->bytes; ++i) {
        if (data[i] != Pattern(rank_, part == &first_part_ ? 5 : 6, version, i))
          return {Code::kCorrupt, "the contents of the pool's part at " + Hex(part->address.value) + " differ"};
      }
    }
    return {};
  }

  // As long as the state says that memory is bound, a store to the object reaches that memory of this rank.
  Status CheckMulticast(std::uint64_t version, Reply& reply) {
    AMEM_TRY(Compare(bound_, "what is bound", rank_, 3, version));
    AMEM_TRY(Compare(bound_at_, "what is bound by address", rank_, 4, version));
    const bool bound = session_->Inspect([&](const State& state) {
      const auto object = state.multicasts.find(object_.allocation);
      return object != state.multicasts.end() && !object->second.bindings.empty();
    });
    reply.reached = static_cast<std::uint32_t>(Reach(*simulator_, object_.address).size());
    if (!bound) return {};
    AMEM_TRY(Reaches(object_.address, bound_.address));
    return Reaches(object_.address + kBound, bound_at_.address);
  }
  Status Reaches(Address object, Address memory) {
    const auto mapping = simulator_->MappingAt(memory);
    if (!mapping.ok()) return mapping.status();
    const Reached mine{rank_, *MemoryAt(*simulator_, memory), memory.value - mapping->address.value};
    const auto reached = Reach(*simulator_, object);
    if (std::find(reached.begin(), reached.end(), mine) != reached.end()) return {};
    return {Code::kCorrupt, "a store to the multicast object does not reach the memory that is bound"};
  }

  void Arm(const Command& command) {
    trigger_.fault = Fault::kNone;
    trigger_.calls = 0;
    trigger_.appends = 0;
    trigger_.fired = trigger_.voted = trigger_.fired_voted = false;
    trigger_.nth = command.nth;
    trigger_.stall_ms = command.stall_ms;
    trigger_.fault = command.fault;
  }

  // The calls by which NCCL destroys a communicator; they are allowed while paused, too.
  Status FreeOne(Buffer& buffer) {
    if (!buffer.allocation) return {};
    AMEM_TRY(session_->nccl().Unmap(buffer.address, buffer.bytes));
    AMEM_TRY(buffer.nccls ? session_->nccl().FreeRange(buffer.address, buffer.bytes)
                          : simulator_->FreeRange(buffer.address, buffer.bytes));
    AMEM_TRY(session_->nccl().Release(buffer.allocation));
    buffer = {};
    return {};
  }
  Status Free() {
    if (multicast_ && object_.allocation) {
      AMEM_TRY(calls_->Unbind(object_.allocation, DeviceOrdinal{rank_}, 0, kBound));
      AMEM_TRY(calls_->Unbind(object_.allocation, DeviceOrdinal{rank_}, kBound, kBoundAt));
    }
    for (Buffer* buffer : {&from_left_, &from_ring_, &ring_, &own_, &left_, &bound_, &bound_at_, &object_})
      AMEM_TRY(FreeOne(*buffer));
    if (from_part_.address) AMEM_TRY(session_->legacy().Close(from_part_.address));
    from_part_ = {};
    for (Buffer* part : {&first_part_, &second_part_}) {
      if (part->address) AMEM_TRY(session_->pools().Free(part->address, nullptr));
      *part = {};
    }
    if (bare_) AMEM_TRY(session_->nccl().Release(bare_));
    bare_ = {};
    return {};
  }
  Status Hog(bool take) {
    if (!take) return simulator_->Release(hog_);
    auto memory = simulator_->Memory(DeviceOrdinal{rank_});
    if (!memory.ok()) return memory.status();
    auto hog = simulator_->Create(memory->free, Properties(), 0);
    if (hog.ok()) hog_ = *hog;
    return hog.status();
  }

  // A forked child that uses the session by mistake, and then runs its destructors.
  Status Fork() {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      const bool refused = !simulator_->Memory(DeviceOrdinal{rank_}).ok();
      session_.reset();
      simulator_.reset();
      ::_exit(refused ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return status == 0 ? Status{} : Status{Code::kInvalid, "the forked child ended with " + std::to_string(status)};
  }

  const int rank_, ranks_;
  const Layout layout_;
  const bool multicast_, tag_;
  const LibraryScope scope_;
  const std::filesystem::path directory_;
  const std::uint32_t timeout_ms_;
  const bool abstract_names_;
  Trigger trigger_;
  std::unique_ptr<Simulator> simulator_;
  std::unique_ptr<Session> session_;
  std::optional<MulticastCalls> calls_;
  Buffer ring_, own_, left_, from_ring_, from_left_, bound_, bound_at_, object_;
  PoolId pool_;
  Buffer first_part_, second_part_, from_part_;
  AllocationId bare_;
  DriverHandle hog_;
};

void Serve(int socket, int rank, int ranks, Layout layout, bool multicast, bool tag, LibraryScope scope,
           const std::filesystem::path& directory, std::uint32_t timeout_ms, bool abstract_names) {
  struct sigaction interrupting {};
  interrupting.sa_handler = [](int) {};
  ::sigaction(SIGUSR1, &interrupting, nullptr);
  RankSession session(rank, ranks, layout, multicast, tag, scope, directory, timeout_ms, abstract_names);
  if (const Status started = session.Start(); !started.ok()) {
    std::fprintf(stderr, "rank %d: %s\n", rank, started.message().c_str());
    ::_exit(9);
  }
  Command command;
  while (true) {
    const ssize_t n = ::recv(socket, &command, sizeof(command), MSG_WAITALL);
    if (n < 0 && errno == EINTR) continue;
    if (n != sizeof(command)) return;
    const Reply reply = session.Answer(command);
    if (::send(socket, &reply, sizeof(reply), MSG_NOSIGNAL) != sizeof(reply)) break;
    if (command.op == Op::kClose) return;
  }
}

std::filesystem::path NewDirectory() {
  for (std::string name : {"/dev/shm/amem-ranks-XXXXXX", "/tmp/amem-ranks-XXXXXX"}) {
    if (::mkdtemp(name.data()) != nullptr) return name;
  }
  return {};
}

}  // namespace

RankProcesses::RankProcesses(int ranks, Layout layout, std::uint32_t timeout_ms, bool multicast, bool tag, LibraryScope scope,
                             const RankProcessesIn& enter)
    : layout_(layout), multicast_(multicast), scope_(scope), directory_(NewDirectory()) {
  world_ = *SimulatorWorld::Open(directory_ / "world", ranks, kCapacity);
  std::filesystem::create_directory(directory_ / "sockets");
  std::filesystem::permissions(directory_ / "sockets", std::filesystem::perms::owner_all);
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    const pid_t parent = ::getpid(), pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(8);
      for (Child& other : children_) other.socket.Reset();
      ::close(ends[0]);
      if (enter && !enter(directory_)) ::_exit(7);
      Serve(ends[1], rank, ranks, layout_, multicast_, tag, scope_, directory_, timeout_ms, enter != nullptr);
      ::_exit(0);
    }
    ::close(ends[1]);
    children_.push_back({pid, UniqueFd(ends[0]), true, 0});
  }
  const auto built = All({.op = Op::kBuild});
  std::vector<std::optional<Reply>> imported;
  for (int rank = 0; rank < ranks; ++rank) {
    Command command{.op = Op::kImport};
    const auto& from = built[static_cast<std::size_t>((rank + ranks - 1) % ranks)];
    if (!from || !from->ok()) std::fprintf(stderr, "building: %s\n", from ? from->text.data() : "died");
    if (from) command.tokens = from->tokens;
    if (built[0] && multicast_) command.tokens[2] = built[0]->tokens[2];
    const auto reply = Do(rank, command);
    if (!reply || !reply->ok()) std::fprintf(stderr, "importing: %s\n", reply ? reply->text.data() : "died");
  }
  if (!multicast_) return;
  for (const auto& bound : All({.op = Op::kBind})) {
    if (!bound || !bound->ok()) std::fprintf(stderr, "binding: %s\n", bound ? bound->text.data() : "died");
  }
}

RankProcesses::~RankProcesses() {
  for (int rank = 0; rank < ranks(); ++rank) {
    Kill(rank);
    Wait(rank);
  }
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

std::optional<Reply> RankProcesses::Receive(Child& child) {
  Reply reply;
  auto* at = reinterpret_cast<char*>(&reply);
  std::size_t got = 0;
  const auto deadline = Clock::now() + std::chrono::seconds(30) * kSlower;
  while (got < sizeof(reply)) {
    pollfd polled{child.socket.get(), POLLIN, 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0 || ::poll(&polled, 1, static_cast<int>(left)) <= 0) {
      reply.code = Code::kTimeout;  // a rank that hangs
      std::snprintf(reply.text.data(), reply.text.size(), "HANGS: no answer to a command in 30 s");
      return reply;
    }
    const ssize_t n = ::recv(child.socket.get(), at + got, sizeof(reply) - got, 0);
    if (n <= 0) {
      child.alive = false;
      return std::nullopt;
    }
    got += static_cast<std::size_t>(n);
  }
  return reply;
}

std::optional<Reply> RankProcesses::Do(int rank, const Command& command) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  if (!child.alive || ::send(child.socket.get(), &command, sizeof(command), MSG_NOSIGNAL) != sizeof(command)) return {};
  return Receive(child);
}

std::vector<std::optional<Reply>> RankProcesses::All(const Command& command) {
  for (Child& child : children_) {
    if (child.alive) (void)!::send(child.socket.get(), &command, sizeof(command), MSG_NOSIGNAL);
  }
  std::vector<std::optional<Reply>> replies;
  for (Child& child : children_) replies.push_back(child.alive ? Receive(child) : std::nullopt);
  return replies;
}

void RankProcesses::Send(int rank, const Command& command) {
  (void)!::send(children_[static_cast<std::size_t>(rank)].socket.get(), &command, sizeof(command), MSG_NOSIGNAL);
}

std::optional<Reply> RankProcesses::Receive(int rank) { return Receive(children_[static_cast<std::size_t>(rank)]); }

void RankProcesses::Signal(int rank, int signal) { ::kill(children_[static_cast<std::size_t>(rank)].pid, signal); }

void RankProcesses::Kill(int rank) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  if (child.pid > 0) ::kill(child.pid, SIGKILL);
  child.alive = false;
}

int RankProcesses::Wait(int rank) {
  Child& child = children_[static_cast<std::size_t>(rank)];
  if (child.pid > 0) ::waitpid(child.pid, &child.status, 0);
  child.pid = 0;
  return child.status;
}

}  // namespace amem::test
