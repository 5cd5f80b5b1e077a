// Crash at every step: one rank of one to four is killed (SIGKILL, a process of its own) before each driver call and before
// each append to its journal, that is at every boundary of a step; or one call fails there, or all calls from there on, or the
// journal's disk is full, or the rank is stopped (SIGSTOP) and goes on; in each scope. Whatever happens to that rank, the
// others do not hang, agree on how it ended, hold exactly the memory that they should, and can try again; and the journals tell
// it.
//
// The expected memory is computed here from the scenario (rank_process.h), and not taken from AMem's own account.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <thread>

#include "journal/journal.h"
#include "replay/job/postmortem.h"
#include "tests/scenarios/rank_checks.h"
#include "tests/scenarios/rank_process.h"

namespace amem::test {
namespace {

constexpr std::uint64_t kVersion = 3;

// AMEM_MATRIX_STRIDE=1 walks every point (also under a sanitizer); the default leaves some out where that would take long.
std::uint64_t Stride(std::uint64_t otherwise) {
  const char* text = std::getenv("AMEM_MATRIX_STRIDE");
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

const char* Name(Op op) { return op == Op::kPause ? "pause" : "resume"; }

class Matrix : public ::testing::Test {
 protected:
  // ---- the model ----
  static Bytes Chunk(const RankProcesses& job) {
    return job.scope() == LibraryScope::kNccl ? 0 : kSharedChunk;
  }  // of the part that was opened
  static Bytes Owned(const RankProcesses& job, int rank) {
    if (job.layout() == Layout::kSlab) return kSlab;
    const bool left = job.ranks() == 1 || job.alive((rank + 1) % job.ranks());  // the next rank is all that holds it
    return kRing + kOwn + kBare + (left ? kLeft : 0) + (job.multicast() ? kObject : 0) + Chunk(job);
  }
  // What stands in for the multicast object once a rank has died: each rank has a piece of its own for one of rank 0's; for an
  // object that lacks another rank, rank 0 has a piece that all map.
  static Bytes ExpectedForObject(const RankProcesses& job, int device) {
    if (!job.multicast() || !job.alive(device)) return 0;
    if (!job.alive(0)) return device == 1 && job.layout() == Layout::kDirect ? 0 : kPage;  // rank 1 has that piece already
    bool all = true;
    for (int rank = 0; rank < job.ranks(); ++rank) all = all && job.alive(rank);
    return device == 0 && !all ? kPage : 0;
  }
  // What a device holds while all living ranks run. `replaced`: they have paused and resumed since the death. A rank that
  // undoes a cycle may have had the dead one's handles back before the death, and not its chunk, or the other way round.
  static Bytes Expected(const RankProcesses& job, int device, bool replaced) {
    return Expected(job, device, replaced, replaced);
  }
  static Bytes Expected(const RankProcesses& job, int device, bool replaced, bool chunk_too) {
    const int ranks = job.ranks(), before = (device + ranks - 1) % ranks, after = (device + 1) % ranks;
    const bool slab = job.layout() == Layout::kSlab;
    // A piece of memory, mapped as often as it is needed, stands in for all that the dead had shared.
    const Bytes piece = slab ? kSlab : kPage, chunk = Chunk(job);
    if (job.alive(device))
      return Owned(job, device) + (job.alive(before) ? 0 : (replaced ? piece : 0) + (chunk_too ? chunk : 0));
    if (!job.alive(after)) return 0;  // the dead rank's memory lives as long as it is mapped
    return (replaced ? 0 : slab ? kSlab : kRing + kLeft) + (chunk_too ? 0 : chunk);
  }
  static void ExpectMemory(const RankProcesses& job, bool paused, bool replaced, const std::string& where) {
    for (int device = 0; device < job.ranks(); ++device) {
      const Bytes expected = paused ? 0 : Expected(job, device, replaced) + (replaced ? ExpectedForObject(job, device) : 0);
      test::ExpectInUse(job, device, expected, where);
    }
  }
  static bool MemoryIs(const RankProcesses& job, bool replaced, bool chunk_too) {
    for (int device = 0; device < job.ranks(); ++device) {
      const Bytes used = job.InUse(device), expected = Expected(job, device, replaced, chunk_too);
      // The object may be the old one still: a rank's import and the object are replaced at different moments.
      if (used != expected && used != expected + ExpectedForObject(job, device) &&
          !(job.multicast() && used == expected + kPage && !job.alive(0) && job.alive(device)))
        return false;
    }
    return true;
  }
  static std::string Used(const RankProcesses& job) {
    std::string text = "; pages in use:";
    for (int device = 0; device < job.ranks(); ++device)
      text += " " + std::to_string(job.InUse(device) / kPage) + " (" + std::to_string(Expected(job, device, false) / kPage) +
              " or " + std::to_string(Expected(job, device, true) / kPage) + ")";
    return text;
  }
  // The memory that the dead rank had shared was replaced in this cycle, or was not yet; the kernel drops the dead rank's own
  // references a moment after its death.
  static bool MemoryIsOneOrTheOther(const RankProcesses& job) {
    for (int i = 0; i < kPatienceMs; ++i, ::usleep(1000)) {
      for (const bool replaced : {false, true})
        if (MemoryIs(job, replaced, replaced) || (Chunk(job) > 0 && MemoryIs(job, replaced, !replaced))) return true;
    }
    return false;
  }

  // ---- what all living ranks do together ----
  // A rank that could not release all again has ended as the others have, which are paused.
  static bool IsHalf(Lifecycle now) { return now == Lifecycle::kPausing || now == Lifecycle::kResuming; }
  static Lifecycle EndOf(Lifecycle now) { return IsHalf(now) ? Lifecycle::kPaused : now; }
  static bool AnyHalf(const std::vector<std::optional<Reply>>& replies) {
    return std::ranges::any_of(replies, [](const auto& reply) { return reply && IsHalf(reply->lifecycle); });
  }
  // All living ranks have the same lifecycle and either all succeeded or all failed. Gives the lifecycle, and the longest time.
  static std::optional<Lifecycle> Agreement(const std::vector<std::optional<Reply>>& replies, bool* all_ok,
                                            std::uint64_t* slowest_ms, const std::string& where) {
    std::optional<Lifecycle> agreed;
    *all_ok = true;
    bool any_ok = false;
    for (std::size_t rank = 0; rank < replies.size(); ++rank) {
      if (!replies[rank]) continue;
      const Reply& reply = *replies[rank];
      EXPECT_EQ(std::string(reply.text.data()).find("HANGS"), std::string::npos) << where << ", rank " << rank;
      const Lifecycle ended = EndOf(reply.lifecycle);
      if (agreed) {
        EXPECT_EQ(*agreed, ended) << where << ", rank " << rank << ": " << reply.text.data();
      }
      agreed = ended;
      *all_ok = *all_ok && reply.ok();
      any_ok = any_ok || reply.ok();
      *slowest_ms = std::max(*slowest_ms, reply.took_ms);
    }
    EXPECT_TRUE(*all_ok || !any_ok) << where << ": some ranks succeeded, others failed";
    return agreed;
  }

  void VerifyJournals(const RankProcesses& job, const std::string& where) {
    auto sessions = ListSessions(job.directory() / "journal");
    ASSERT_TRUE(sessions.ok());
    ASSERT_EQ(sessions->size(), static_cast<std::size_t>(job.ranks()));
    std::vector<JournalFindings> findings;
    for (const auto& path : *sessions) {
      auto reader = JournalReader::Open(path);
      ASSERT_TRUE(reader.ok()) << reader.status().message();
      auto found = VerifyJournal(**reader);
      ASSERT_TRUE(found.ok()) << found.status().message();
      EXPECT_TRUE(found->report.corruption.empty()) << where << ": " << found->report.corruption;
      for (const Violation& v : found->violations) ADD_FAILURE() << where << ": event " << v.seq.value << ": " << v.text;
      findings.push_back(*std::move(found));
    }
    for (const Violation& v : VerifyJob(findings).violations)
      ADD_FAILURE() << where << ": " << Hex(v.session.value) << " event " << v.seq.value << ": " << v.text;
    journals_ = std::move(findings);
  }
  const JournalFindings* JournalOf(int rank) const {
    for (const auto& journal : journals_) {
      if (journal.info.session == RankProcesses::SessionOf(rank)) return &journal;
    }
    return nullptr;
  }

  // How many driver calls and appends one rank makes in its first or second pause or resume, counted in a job in which nothing
  // fails. A first pause also pins memory and keeps no copy yet.
  struct Points {
    std::uint64_t calls = 0, appends = 0;
  };
  Points Survey(int ranks, int victim, Op op, bool second = false) const {
    RankProcesses job(ranks, layout_, kPatienceMs, multicast_, false, scope_);
    AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
    if (second) {
      AllOk(job, {.op = Op::kPause}, "first pause");
      AllOk(job, {.op = Op::kResume}, "first resume");
    }
    if (op == Op::kResume) AllOk(job, {.op = Op::kPause}, "pause");
    AllOk(job, {.op = Op::kArm}, "arm");
    AllOk(job, {.op = op}, Name(op));
    const auto reply = job.Do(victim, {.op = Op::kCheck, .version = kVersion});
    EXPECT_GT(reply->calls, 0U) << "no driver call was counted";
    EXPECT_GT(reply->appends, 0U) << "no append was counted";
    return {reply->calls, reply->appends};
  }

  // `failing`: another rank, whose last driver call fails, so that the victim dies in the cycle or in its undo; -1: none.
  // Counts in points_ how often the victim died, and in named_ at which steps.
  void KillAt(int ranks, int victim, Op op, Fault fault, std::uint64_t nth, int failing = -1, std::uint64_t failing_call = 0);
  void NameStep(int victim);
  void KillDuringUndo(int ranks, Op op, std::uint64_t stride);
  void StallDuringUndo(int ranks, std::uint64_t stride);
  enum class StopFor : std::uint8_t { kLess, kLonger };  // than the others wait
  void StopAnywhere(int ranks, int victim, Op op, StopFor how_long, std::uint64_t stride);
  void KillEverywhere(int ranks, Op op, std::uint64_t stride);
  void FailEverywhere(int ranks, Op op, Fault fault, std::uint64_t stride);

  Layout layout_ = Layout::kDirect;
  bool multicast_ = false;
  LibraryScope scope_ = LibraryScope::kNccl;
  std::vector<JournalFindings> journals_;
  std::uint64_t tried_ = 0, points_ = 0, slowest_ms_ = 0, undone_ = 0;
  std::map<StepKind, int> named_;  // the steps that journals of the dead leave open
};

void Matrix::KillAt(int ranks, int victim, Op op, Fault fault, std::uint64_t nth, int failing, std::uint64_t failing_call) {
  const std::string where = std::to_string(ranks) + " ranks, rank " + std::to_string(victim) + " killed before " +
                            (fault == Fault::kKillAtCall ? "driver call " : "append ") + std::to_string(nth) + " of the " +
                            Name(op) + (failing < 0 ? "" : ", which fails at rank " + std::to_string(failing));
  SCOPED_TRACE(where);
  RankProcesses job(ranks, layout_, kPatienceMs, multicast_, false, scope_);
  AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
  if (op == Op::kResume) AllOk(job, {.op = Op::kPause}, "first pause");
  job.Do(victim, {.op = Op::kArm, .fault = fault, .nth = nth});
  if (failing >= 0) job.Do(failing, {.op = Op::kArm, .fault = Fault::kFailCall, .nth = failing_call});
  const auto replies = job.All({.op = op});
  if (failing >= 0) job.Do(failing, {.op = Op::kArm});
  ++tried_;
  if (job.alive(victim)) return job.Do(victim, {.op = Op::kArm}), void();  // it did not get that far this time
  ++points_;
  EXPECT_EQ(job.Wait(victim), SIGKILL) << "status of the process that was to be killed";
  if (ranks == 1) {
    VerifyJournals(job, where);
    return NameStep(victim);
  }

  bool all_ok = true;
  auto now = Agreement(replies, &all_ok, &slowest_ms_, where);
  ASSERT_TRUE(now.has_value());
  EXPECT_LT(slowest_ms_, kPatienceMs / 2U) << where;
  const bool not_undone = AnyHalf(replies) || (op == Op::kPause && !all_ok && *now == Lifecycle::kPaused);
  if (not_undone && failing >= 0) {  // the call that failed belonged to the undo: all ranks stay where they are until a resume
    AllOk(job, {.op = Op::kResume}, "resume after an undo that failed");
    now = Lifecycle::kRunning;
  } else {
    const Lifecycle before = op == Op::kPause ? Lifecycle::kRunning : Lifecycle::kPaused;
    const Lifecycle after = op == Op::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
    EXPECT_EQ(*now, all_ok ? after : before) << where;
  }
  if (!all_ok) ++undone_;
  for (const auto& reply : replies) {
    if (!reply || reply->ok() || failing >= 0) continue;
    EXPECT_EQ(reply->code, Code::kPeerLost) << reply->text.data();
    EXPECT_NE(std::string(reply->text.data()).find("rank " + std::to_string(victim) + " (pid"), std::string::npos)
        << reply->text.data();
  }
  AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check after the death");
  if (*now == Lifecycle::kRunning) {
    EXPECT_TRUE(MemoryIsOneOrTheOther(job)) << where << Used(job);
    AllOk(job, {.op = Op::kPause}, "pause without the dead");
  }
  ExpectMemory(job, true, true, where);
  AllOk(job, {.op = Op::kResume}, "resume without the dead");
  ExpectMemory(job, false, true, where);
  AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check after a whole cycle");
  AllOk(job, {.op = Op::kFree}, "free");
  ExpectMemory(job, true, true, where + ", all freed");
  AllOk(job, {.op = Op::kClose}, "close");
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank != victim) {
      EXPECT_EQ(job.Wait(rank), 0) << "exit of rank " << rank;
    }
  }
  VerifyJournals(job, where);
  NameStep(victim);
}

void Matrix::NameStep(int victim) {
  const JournalFindings* dead = JournalOf(victim);
  ASSERT_NE(dead, nullptr);
  EXPECT_EQ(dead->info.status, SessionStatus::kCrashed);
  for (const PoolId scope : {PoolId{}, PoolId{1}}) {
    if (scope && scope_ == LibraryScope::kNccl) continue;
    const Cycle& cycle = dead->state.ScopeOf(scope).cycle;
    if (cycle.open_step) ++named_[cycle.open_step->kind];
  }
}

void Matrix::KillEverywhere(int ranks, Op op, std::uint64_t stride) {
  // Rank 0 has the lowest session, and so makes the board; one of the others stands for them all.
  std::vector<int> victims{0};
  if (ranks > 1) victims.push_back(ranks - 1);
  stride = Stride(stride);
  for (const int victim : victims) {
    const Points points = Survey(ranks, victim, op);
    for (const auto& [fault, count] :
         {std::pair(Fault::kKillAtCall, points.calls), std::pair(Fault::kKillAtAppend, points.appends)}) {
      for (std::uint64_t nth = 1; nth <= count && !HasFailure(); nth += stride) {
        const std::uint64_t died = points_;
        KillAt(ranks, victim, op, fault, nth);
        // A rank takes the same steps each time, but what it appends also depends on when it hears of the others' votes.
        EXPECT_TRUE(points_ > died || 2 * nth > count) << "rank " << victim << " lived on at point " << nth << " of " << count;
      }
    }
  }
  std::printf("%d ranks, %s: killed at %lu of %lu points, %lu undone by the others; slowest answer %lu ms\n", ranks, Name(op),
              points_, tried_, undone_, slowest_ms_);
  for (const auto& [step, times] : named_)
    std::printf("  %d journals end in step \"%s\"\n", times, std::string(ToText(step)).c_str());
  if (HasFailure()) return;
  EXPECT_GE(4 * points_, 3 * tried_) << "ranks that were to die lived on";
  if (stride > 1) return;
  std::vector<StepKind> always =
      op == Op::kPause ? std::vector{StepKind::kQuiesce, StepKind::kUnmap, StepKind::kReleaseOwn}
                       : std::vector{StepKind::kCheckMemory, StepKind::kCreate, StepKind::kMap, StepKind::kSetAccess};
  if (multicast_ && op == Op::kPause) always.push_back(StepKind::kUnbind);
  if (multicast_ && op == Op::kResume) always.insert(always.end(), {StepKind::kAddDevice, StepKind::kBind});
  for (const StepKind step : always) EXPECT_GT(named_[step], 0) << "nobody died in step \"" << ToText(step) << "\"";
}

void Matrix::KillDuringUndo(int ranks, Op op, std::uint64_t stride) {
  const int failing = 1;
  const Points of_failing = Survey(ranks, failing, op);
  for (const int victim : {0, ranks - 1}) {
    // Twice the appends: the undo is about as long as what it undoes.
    const std::uint64_t appends = 2 * Survey(ranks, victim, op).appends;
    for (std::uint64_t nth = 1; nth <= appends && !HasFailure(); nth += Stride(stride))
      KillAt(ranks, victim, op, Fault::kKillAtAppend, nth, failing, of_failing.calls);
  }
  if (!HasFailure()) {
    EXPECT_GE(2 * points_, tried_)
        << "ranks that were to die lived on, not only where the undo was shorter than what it undoes";
  }
  std::printf("%d ranks, %s that fails: killed at %lu points of it and of its undo, of %lu tried; slowest answer %lu ms\n",
              ranks, Name(op), points_, tried_, slowest_ms_);
}

// A rank is held up in a driver call of a pause that fails, or of its undo, for longer than the others wait. Whoever runs on
// has the right contents from that moment on, also in the memory of the one that is late.
void Matrix::StallDuringUndo(int ranks, std::uint64_t stride) {
  constexpr std::uint32_t kTimeoutMs = 600 * kSlower;
  constexpr int kFailing = 1, kTries = 20;
  const std::uint64_t of_failing = Survey(ranks, kFailing, Op::kPause, true).calls;
  std::uint64_t stalled = 0, kept = 0;
  for (const int victim : {0, ranks - 1}) {
    const std::uint64_t calls = Survey(ranks, victim, Op::kPause, true).calls;
    RankProcesses job(ranks, layout_, kTimeoutMs, multicast_, false, scope_);
    AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
    AllOk(job, {.op = Op::kPause}, "first pause");
    AllOk(job, {.op = Op::kResume}, "first resume");
    for (std::uint64_t nth = calls / 2; nth <= 3 * calls && !HasFailure(); nth += Stride(stride)) {
      const std::string where = "rank " + std::to_string(victim) + " stalls in driver call " + std::to_string(nth);
      SCOPED_TRACE(where);
      job.Do(victim, {.op = Op::kArm, .fault = Fault::kStallAtCall, .nth = nth, .stall_ms = 3 * kTimeoutMs});
      job.Do(kFailing, {.op = Op::kArm, .fault = Fault::kFailCall, .nth = of_failing});
      for (int rank = 0; rank < ranks; ++rank) job.Send(rank, {.op = Op::kPause});
      std::vector<std::optional<Reply>> replies(static_cast<std::size_t>(ranks));
      const auto receive = [&](int rank) {
        auto& reply = replies[static_cast<std::size_t>(rank)] = job.Receive(rank);
        ASSERT_TRUE(reply.has_value());
        if (reply->lifecycle != Lifecycle::kRunning) return;
        const auto checked = job.Do(rank, {.op = Op::kCheck, .version = kVersion});
        EXPECT_TRUE(checked->ok()) << "rank " << rank << " runs on: " << checked->text.data() << "\n" << reply->text.data();
      };
      for (int rank = 0; rank < ranks; ++rank)
        if (rank != victim) receive(rank);
      receive(victim);
      if (HasFailure()) return;
      bool all_ok = true;
      const auto now = Agreement(replies, &all_ok, &slowest_ms_, where);
      ASSERT_TRUE(now.has_value());
      if (replies[static_cast<std::size_t>(victim)]->fired) ++stalled;
      if (now != Lifecycle::kRunning) ++kept;
      job.Do(victim, {.op = Op::kArm});
      job.Do(kFailing, {.op = Op::kArm});
      bool running = now == Lifecycle::kRunning;
      for (int i = 0; i < kTries && !running; ++i) {  // a busy machine may need more than one
        running = true;
        for (const auto& reply : job.All({.op = Op::kResume})) running = running && reply->ok();
      }
      ASSERT_TRUE(running) << where;
      AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check after " + where);
      ExpectMemory(job, false, false, where);
    }
  }
  EXPECT_GT(kept, 0U) << "no owner was late with its contents";
  std::printf("%d ranks, pause that fails: stalled at %lu points of it and of its undo, of which %lu kept all ranks paused\n",
              ranks, stalled, kept);
}

// A rank is stopped whole, for less than the others wait or for longer, and goes on. For less, nothing fails. For longer, all
// end alike, as the others have decided meanwhile; their messages name it; and a resume of all ranks mends what is left.
void Matrix::StopAnywhere(int ranks, int victim, Op op, StopFor how_long, std::uint64_t stride) {
  const bool longer = how_long == StopFor::kLonger;
  const std::uint32_t timeout_ms = longer ? 600 * kSlower : kPatienceMs;
  constexpr int kTries = 20;
  const std::uint64_t appends = Survey(ranks, victim, op, true).appends;
  std::uint64_t stopped = 0, failed = 0;
  RankProcesses job(ranks, layout_, timeout_ms, multicast_, false, scope_);
  AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
  AllOk(job, {.op = Op::kPause}, "first pause");
  AllOk(job, {.op = Op::kResume}, "first resume");
  for (std::uint64_t nth = 1; nth <= appends && !HasFailure(); nth += Stride(stride)) {
    const std::string where =
        std::string(Name(op)) + ", rank " + std::to_string(victim) + " is stopped before append " + std::to_string(nth);
    SCOPED_TRACE(where);
    if (op == Op::kResume) AllOk(job, {.op = Op::kPause}, "pause");
    job.Do(victim, {.op = Op::kArm, .fault = Fault::kStopAtAppend, .nth = nth});
    for (int rank = 0; rank < ranks; ++rank) job.Send(rank, {.op = op});
    std::atomic<int> answered{0};
    std::atomic<bool> over{false};
    std::thread wakes([&] {  // a resume waits for a stopped rank that has not come; it may be stopped late, so again and again
      const std::uint32_t most_ms = longer ? 4 * timeout_ms : 60;
      for (std::uint32_t ms = 0; ms < most_ms && answered < ranks - 1; ms += 10) ::usleep(10'000);
      for (; !over; ::usleep(20'000)) job.Signal(victim, SIGCONT);
    });
    std::vector<std::optional<Reply>> replies(static_cast<std::size_t>(ranks));
    const auto receive = [&](int rank) {
      auto& reply = replies[static_cast<std::size_t>(rank)] = job.Receive(rank);
      EXPECT_TRUE(reply.has_value());
      ++answered;
      if (!reply || reply->lifecycle != Lifecycle::kRunning) return;
      const auto checked = job.Do(rank, {.op = Op::kCheck, .version = kVersion});
      EXPECT_TRUE(checked->ok()) << "rank " << rank << " runs on: " << checked->text.data() << "\n" << reply->text.data();
    };
    for (int rank = 0; rank < ranks; ++rank)
      if (rank != victim) receive(rank);
    receive(victim);
    job.Do(victim, {.op = Op::kArm});
    over = true;
    wakes.join();
    if (HasFailure()) return;
    bool all_ok = true;
    const auto now = Agreement(replies, &all_ok, &slowest_ms_, where);
    ASSERT_TRUE(now.has_value());
    if (replies[static_cast<std::size_t>(victim)]->fired) ++stopped;
    if (!all_ok) ++failed;
    EXPECT_TRUE(all_ok || longer) << replies[0]->text.data();
    for (const auto& reply : replies)
      EXPECT_TRUE(reply->ok() ||
                  std::string(reply->text.data()).find("rank " + std::to_string(victim) + " (pid") != std::string::npos)
          << reply->text.data();
    bool running = false;
    for (int i = 0; i < kTries && !running; ++i) {
      running = true;
      for (const auto& reply : job.All({.op = Op::kResume})) running = running && reply->ok();
    }
    ASSERT_TRUE(running) << where;
    AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check after " + where);
    ExpectMemory(job, false, false, where);
  }
  EXPECT_GT(stopped, 0U);
  EXPECT_TRUE(failed > 0 || !longer) << "nobody was late";
  VerifyJournals(job, Name(op));
  std::printf(
      "%d ranks, %s: rank %d was stopped at %lu points, for %s than the others wait; %lu failed; slowest answer %lu ms\n",
      ranks, Name(op), victim, stopped, longer ? "longer" : "less", failed, slowest_ms_);
}

// One job for all points: the ranks undo what failed and try again, and then the next point can be tried.
void Matrix::FailEverywhere(int ranks, Op op, Fault fault, std::uint64_t stride) {
  stride = Stride(stride);
  std::map<int, std::uint64_t> calls;  // that each victim makes when nothing fails
  for (int victim = 0; victim < ranks; victim += std::max(1, ranks - 1)) calls[victim] = Survey(ranks, victim, op, true).calls;
  RankProcesses job(ranks, layout_, kPatienceMs, multicast_, false, scope_);
  AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
  if (op == Op::kResume) AllOk(job, {.op = Op::kPause}, "first pause");
  const Lifecycle before = op == Op::kPause ? Lifecycle::kRunning : Lifecycle::kPaused;
  const Lifecycle after = op == Op::kPause ? Lifecycle::kPaused : Lifecycle::kRunning;
  for (const auto& [victim, all_calls] : calls) {
    for (std::uint64_t nth = 1; !HasFailure(); nth += stride) {
      const std::string where = std::to_string(ranks) + " ranks, " + Name(op) + ", rank " + std::to_string(victim) +
                                (fault == Fault::kFailCall ? ", driver call " : ", all driver calls from ") +
                                std::to_string(nth) + " on fail";
      SCOPED_TRACE(where);
      job.Do(victim, {.op = Op::kArm, .fault = fault, .nth = nth});
      const auto replies = job.All({.op = op});
      job.Do(victim, {.op = Op::kArm});
      bool all_ok = true;
      const auto now = Agreement(replies, &all_ok, &slowest_ms_, where);
      ASSERT_TRUE(now.has_value());
      const bool fired = replies[static_cast<std::size_t>(victim)]->fired;
      if (fired) ++points_;
      if (!all_ok) {
        ++undone_;
        EXPECT_TRUE(fired) << "a cycle failed although no fault was injected: " << replies[0]->text.data();
        for (const auto& reply : replies) {
          EXPECT_NE(std::string(reply->text.data()).find("rank " + std::to_string(victim)), std::string::npos)
              << reply->text.data();
        }
      }
      if (fault == Fault::kFailCall) {
        EXPECT_EQ(*now, all_ok ? after : before) << replies[0]->text.data();
        ExpectMemory(job, *now == Lifecycle::kPaused, false, where);
      }
      AllOk(job, {.op = Op::kCheck, .fault = fault, .version = kVersion}, "check");
      // Complete the cycle, so that the next point can be tried. Where the undo failed as well, a resume mends it.
      if (*now != Lifecycle::kRunning) AllOk(job, {.op = Op::kResume}, "resume after that");
      ExpectMemory(job, false, false, where);
      // A pause whose save fails is undone by going on; a mapping made for copies goes with the next call.
      const bool went_on = op == Op::kPause && *now == Lifecycle::kRunning;
      AllOk(job, {.op = Op::kCheck, .fault = went_on ? fault : Fault::kNone, .version = kVersion}, "check after the resume");
      if (op == Op::kResume || *now == Lifecycle::kRunning) {
        AllOk(job, {.op = Op::kPause}, "pause after that");
        ExpectMemory(job, true, false, where);
        if (op == Op::kPause) AllOk(job, {.op = Op::kResume}, "resume");
      }
      if (fired) continue;
      EXPECT_GE(nth + 1, all_calls) << "only the calls before this one were made to fail";
      break;  // the whole cycle was walked
    }
  }
  if (op == Op::kResume) AllOk(job, {.op = Op::kResume}, "resume");
  AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check at the end");
  AllOk(job, {.op = Op::kFree}, "free");
  ExpectMemory(job, true, false, "all freed");
  AllOk(job, {.op = Op::kClose}, "close");
  for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(job.Wait(rank), 0);
  VerifyJournals(job, "at the end");
  std::uint64_t named = 0;
  for (const auto& journal : journals_) named += journal.state.totals.events[*KindOf("step failed")];
  EXPECT_GT(undone_, 0U) << "no failure of a call made a cycle fail";
  EXPECT_GE(named, undone_) << "a failure whose step no journal names";
  std::printf("%d ranks, %s: %s at %lu points, %lu undone by all, %lu steps named in journals\n", ranks, Name(op),
              fault == Fault::kFailCall ? "a call failed" : "all calls from one on failed", points_, undone_, named);
}

#ifdef AMEM_SANITIZED
constexpr std::uint64_t kStride = 11;
#elif defined(AMEM_BY_NIGHT)
constexpr std::uint64_t kStride = 1;
#else
constexpr std::uint64_t kStride = 12;  // of one and two ranks; more are more of the same
#endif

#ifdef AMEM_BY_NIGHT
[[maybe_unused]] constexpr std::uint64_t kOfMany = 2, kOfAll = 1, kOfFailures = 1, kOfStalls = 2, kOfStops = 1,
                                         kOfLongStops = 1;
#else
[[maybe_unused]] constexpr std::uint64_t kOfMany = 6,
                                         kOfAll = 6;  // of many ranks, and of scope all, whose steps are those of the others
[[maybe_unused]] constexpr std::uint64_t kOfFailures = 4;
[[maybe_unused]] constexpr std::uint64_t kOfStalls = 4 + 5 * kSlower;  // each takes some seconds
[[maybe_unused]] constexpr std::uint64_t kOfStops = 5 * kSlower, kOfLongStops = 9 * kSlower;
#endif

#ifndef AMEM_MATRIX_NVLS
// ---- failures that are no crash
// -----------------------------------------------------------------------------------------------

void ExpectText(const std::optional<Reply>& reply, Code code, const std::vector<std::string>& parts) {
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->code, code) << reply->text.data();
  for (const std::string& part : parts)
    EXPECT_NE(std::string(reply->text.data()).find(part), std::string::npos) << "\"" << part << "\" in: " << reply->text.data();
}

TEST_F(Matrix, a_device_filled_by_another_process_fails_the_resume_of_all_until_there_is_room) {
  RankProcesses job(4);
  AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
  AllOk(job, {.op = Op::kPause}, "pause");
  ASSERT_TRUE(job.Do(2, {.op = Op::kHog, .version = 1})->ok());
  for (const auto& reply : job.All({.op = Op::kResume})) {
    ExpectText(reply, Code::kOutOfMemory, {"rank 2 (pid", "device 2 has 0 B free of 256 KiB, and 48 KiB must come back"});
    EXPECT_EQ(reply->driver_result, 2);
    EXPECT_LT(reply->took_ms, kPatienceMs / 2U);
    EXPECT_EQ(reply->lifecycle, Lifecycle::kPaused);
  }
  ASSERT_TRUE(job.Do(2, {.op = Op::kHog, .version = 0})->ok());
  AllOk(job, {.op = Op::kResume}, "resume");
  AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check");
}

// Without waiting, and as often as it is tried.
void ExpectNoJournal(const std::vector<std::optional<Reply>>& replies) {
  for (const auto& reply : replies) {
    ExpectText(reply, Code::kBroken, {"rank 1 (pid", "no space left on device"});
    EXPECT_EQ(reply->lifecycle, Lifecycle::kRunning);
    EXPECT_LT(reply->took_ms, kPatienceMs / 2U);
  }
}

// What is appended after a rank's last vote is of what others did, or of what is done: the pause goes on without it, and so
// does the resume, for which no journal is needed.
TEST_F(Matrix, a_full_disk_is_a_vote_against_the_pause_at_any_append_or_if_all_is_voted_against_the_next) {
  const std::uint64_t appends = Survey(2, 1, Op::kPause).appends;
  constexpr std::uint64_t kLast = 3;  // what the board showed, what was decided, that the pause is done
  ASSERT_GT(appends, kLast);
  std::uint64_t before = 0, after = 0;
  const auto next = [&](std::uint64_t nth) {
    return nth + kLast > appends ? nth + 1 : std::min(nth + Stride(4), appends + 1 - kLast);
  };
  for (std::uint64_t nth = 1; nth <= appends && !HasFailure(); nth = next(nth)) {
    const std::string where = "append " + std::to_string(nth) + " of " + std::to_string(appends) + " failed";
    SCOPED_TRACE(where);
    RankProcesses job(2);
    AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
    job.Do(1, {.op = Op::kArm, .fault = Fault::kFailAppend, .nth = nth});
    const auto replies = job.All({.op = Op::kPause});
    ASSERT_TRUE(replies[1].has_value());
    if (!replies[1]->fired) continue;  // readings of a wait are appended only where it takes a while
    if (replies[1]->fired_voted) {
      ++after;
      for (const auto& reply : replies) {
        ExpectText(reply, Code::kOk, {});
        EXPECT_EQ(reply->lifecycle, Lifecycle::kPaused);
      }
      ExpectMemory(job, true, false, where);
      AllOk(job, {.op = Op::kResume}, "resume without a journal");
    } else {
      ++before;
      ExpectNoJournal(replies);
    }
    for (int call = 0; call < 2; ++call) {
      AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check");
      ExpectMemory(job, false, false, where);
      ExpectNoJournal(job.All({.op = Op::kPause}));
    }
    AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check");
  }
  EXPECT_GT(before, 2 * kLast);
  EXPECT_GT(after, 0U);
  std::printf("2 ranks, pause: an append failed at %lu points before the last vote and at %lu after it\n", before, after);
}

TEST_F(Matrix, a_rank_that_does_not_call_is_told_from_one_that_is_stopped_and_from_one_that_died) {
  RankProcesses job(3, Layout::kDirect, 1000 * kSlower);
  AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
  ExpectText(job.Do(0, {.op = Op::kPause}), Code::kTimeout, {"rank 1 (pid", "is running and has not called ncclPause"});
  job.Signal(1, SIGSTOP);
  ExpectText(job.Do(0, {.op = Op::kPause}), Code::kTimeout, {"rank 1 (pid", "is stopped (SIGSTOP?)"});
  job.Signal(1, SIGCONT);
  AllOk(job, {.op = Op::kPause}, "pause");
  ExpectText(job.Do(2, {.op = Op::kResume}), Code::kTimeout, {"rank 1 (pid", "is paused and has not called ncclResume"});
  AllOk(job, {.op = Op::kResume}, "resume");
  job.Send(0, {.op = Op::kPause});
  ::usleep(300'000);
  job.Kill(1);
  ExpectText(job.Receive(0), Code::kPeerLost, {"rank 1 (pid", "died"});
  AllOk(job, {.op = Op::kPause}, "pause without the dead");
}

// What leaks grows in each ten cycles. Descriptors that come and go do not, nor do buffers once they have found their size: how
// many threads work at once differs from cycle to cycle, so that some dozen times one of them still finds a larger one.
TEST_F(Matrix, many_cycles_bring_the_same_bytes_and_leave_nothing) {
  for (const LibraryScope scope : {LibraryScope::kNccl, LibraryScope::kShared, LibraryScope::kAll}) {
    RankProcesses job(2, Layout::kDirect, kPatienceMs, false, false, scope);
    std::map<int, std::vector<Reply>> held;  // by rank, after each ten cycles
    constexpr std::uint64_t kCycles = 200;
    for (std::uint64_t cycle = 1; cycle <= kCycles; ++cycle) {
      AllOk(job, {.op = Op::kFill, .version = cycle}, "fill");
      AllOk(job, {.op = Op::kPause}, "pause");
      ExpectMemory(job, true, false, "paused");
      AllOk(job, {.op = Op::kResume}, "resume");
      ExpectMemory(job, false, false, "resumed");
      for (int rank = 0; rank < job.ranks(); ++rank) {
        const auto reply = job.Do(rank, {.op = Op::kCheck, .version = cycle});
        ASSERT_TRUE(reply && reply->ok()) << (reply ? reply->text.data() : "died");
        if (cycle % 10 == 0) held[rank].push_back(*reply);
      }
    }
    for (const auto& [rank, after] : held) {
      const auto least_growth = [&after = after](auto Reply::*of) {
        std::int64_t least = std::numeric_limits<std::int64_t>::max();
        for (std::size_t i = 1; i < after.size(); ++i)
          least = std::min(least, static_cast<std::int64_t>(after[i].*of) - static_cast<std::int64_t>(after[i - 1].*of));
        return least;
      };
      EXPECT_LT(least_growth(&Reply::heap), 1024) << "rank " << rank;
      EXPECT_LE(least_growth(&Reply::pinned), 0) << "rank " << rank;
      EXPECT_LE(least_growth(&Reply::descriptors), 0) << "rank " << rank;
    }
    AllOk(job, {.op = Op::kFree}, "free");
    ExpectMemory(job, true, false, "all freed");
    AllOk(job, {.op = Op::kClose}, "close");
    for (int rank = 0; rank < job.ranks(); ++rank) EXPECT_EQ(job.Wait(rank), 0);
    VerifyJournals(job, "at the end");
  }
}

TEST_F(Matrix, a_signal_during_a_wait_changes_nothing) {
  RankProcesses job(2);
  AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
  job.Send(0, {.op = Op::kPause});
  for (int i = 0; i < 50; ++i, ::usleep(2000)) job.Signal(0, SIGUSR1);  // a handler without SA_RESTART
  job.Send(1, {.op = Op::kPause});
  for (const int rank : {0, 1}) ExpectText(job.Receive(rank), Code::kOk, {});
  AllOk(job, {.op = Op::kResume}, "resume");
  AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check");
}

TEST_F(Matrix, a_rank_that_exits_while_paused_leaves_nothing_and_the_others_go_on) {
  RankProcesses job(3);
  AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
  AllOk(job, {.op = Op::kPause}, "pause");
  EXPECT_TRUE(job.Do(1, {.op = Op::kClose})->ok());
  EXPECT_EQ(job.Wait(1), 0);
  job.Kill(1);
  AllOk(job, {.op = Op::kResume}, "resume");
  ExpectMemory(job, false, true, "one rank has gone");
  AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check");
}

TEST_F(Matrix, processes_forked_while_running_or_paused_change_nothing) {
  RankProcesses job(2);
  AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
  for (int i = 0; i < 5; ++i) {
    AllOk(job, {.op = Op::kFork}, "fork while running");
    AllOk(job, {.op = Op::kPause}, "pause");
    AllOk(job, {.op = Op::kFork}, "fork while paused");
    AllOk(job, {.op = Op::kResume}, "resume");
    AllOk(job, {.op = Op::kCheck, .version = kVersion}, "check");
  }
  AllOk(job, {.op = Op::kFree}, "free");
  AllOk(job, {.op = Op::kClose}, "close");
  VerifyJournals(job, "forks");
}

// Each driver call of a resume belongs to a step: whoever dies in it, its journal says in which, copies of contents included.
TEST_F(Matrix, killed_in_any_driver_call_of_a_resume_the_journal_shows_the_open_step) {
  const Points points = Survey(1, 0, Op::kResume);
  ASSERT_GT(points.calls, 20U);
  for (std::uint64_t nth = 1; nth <= points.calls; ++nth) KillAt(1, 0, Op::kResume, Fault::kKillAtCall, nth);
  std::uint64_t named = 0;
  for (const auto& [step, times] : named_) named += static_cast<std::uint64_t>(times);
  EXPECT_EQ(named, points.calls) << "deaths that left a step open, of all";
  EXPECT_GT(named_[StepKind::kBeginRestore], 0);
  EXPECT_GT(named_[StepKind::kRestore], 0);
}

#endif

// ---- the matrix ------------------------------------------------------------------------------------------------------------

struct Where {
  int ranks;
  Layout layout;
  bool multicast = false;
  LibraryScope scope = LibraryScope::kNccl;
};
class OverRanks : public Matrix, public ::testing::WithParamInterface<Where> {
 protected:
  OverRanks() {
    layout_ = GetParam().layout;
    multicast_ = GetParam().multicast;
    scope_ = GetParam().scope;
  }
  static int ranks() { return GetParam().ranks; }
};
std::string NameOfWhere(const ::testing::TestParamInfo<Where>& info) {
  const char* const memory = info.param.scope == LibraryScope::kShared ? "_shared"
                             : info.param.scope == LibraryScope::kAll  ? "_all"
                             : info.param.layout == Layout::kSlab      ? "_slab"
                                                                       : "_direct";
  return std::to_string(info.param.ranks) + memory;
}
#ifdef AMEM_MATRIX_NVLS
// With a multicast object over all ranks, AMEM_NVLS=release: its steps are more of each kind, so fewer points do.
const auto kWhere =
    ::testing::Values(Where{2, Layout::kDirect, true}, Where{3, Layout::kDirect, true}, Where{4, Layout::kDirect, true},
                      Where{5, Layout::kDirect, true}, Where{6, Layout::kDirect, true}, Where{7, Layout::kDirect, true},
                      Where{8, Layout::kDirect, true}, Where{2, Layout::kSlab, true}, Where{4, Layout::kSlab, true});
std::uint64_t StrideFor(const Where& where) {
  return where.ranks == 2 ? kStride : static_cast<std::uint64_t>(where.ranks) * 3 * kStride;
}
#else
const auto kWhere = ::testing::Values(Where{1, Layout::kDirect}, Where{2, Layout::kDirect}, Where{3, Layout::kDirect},
                                      Where{4, Layout::kDirect}, Where{2, Layout::kSlab}, Where{4, Layout::kSlab},
                                      Where{2, Layout::kDirect, false, LibraryScope::kShared},
                                      Where{3, Layout::kDirect, false, LibraryScope::kShared},
#ifdef AMEM_BY_NIGHT
                                      Where{3, Layout::kDirect, false, LibraryScope::kAll},
#endif
                                      Where{2, Layout::kDirect, false, LibraryScope::kAll});
std::uint64_t StrideFor(const Where& where) {
  const std::uint64_t of_scope = where.scope == LibraryScope::kAll ? kOfAll : 1;  // of two ranks every point
  return kStride * (where.ranks > 2 ? kOfMany : of_scope);
}
#endif

class KillMatrix : public OverRanks {};
TEST_P(KillMatrix, pause) { KillEverywhere(ranks(), Op::kPause, StrideFor(GetParam())); }
TEST_P(KillMatrix, resume) { KillEverywhere(ranks(), Op::kResume, StrideFor(GetParam())); }
INSTANTIATE_TEST_SUITE_P(Ranks, KillMatrix, kWhere, NameOfWhere);

#ifndef AMEM_MATRIX_NVLS
TEST_F(Matrix, killed_while_a_pause_or_a_resume_in_a_wider_scope_is_undone) {
  for (const LibraryScope scope : {LibraryScope::kShared, LibraryScope::kAll}) {
    scope_ = scope;
    const std::uint64_t stride = 3 * kStride * (scope == LibraryScope::kAll ? kOfAll : 1);
    KillDuringUndo(3, Op::kPause, stride);
    KillDuringUndo(3, Op::kResume, stride);
  }
}
#endif

class UndoMatrix : public Matrix {
 protected:
#ifdef AMEM_MATRIX_NVLS
  UndoMatrix() { multicast_ = true; }
#endif
};
TEST_F(UndoMatrix, killed_while_a_pause_is_undone) { KillDuringUndo(3, Op::kPause, 3 * kStride); }
TEST_F(UndoMatrix, killed_while_a_resume_is_undone) { KillDuringUndo(4, Op::kResume, 3 * kStride); }
#ifndef AMEM_MATRIX_NVLS
TEST_F(UndoMatrix, late_while_a_pause_is_undone) { StallDuringUndo(3, kOfStalls); }
#endif

#ifndef AMEM_MATRIX_NVLS
// Few points take processor time, but each of the long ones takes the time of a deadline.
class StopMatrix : public OverRanks {
 protected:
  void StopAllInTurn(Op op, StopFor how_long) {
    for (const int victim : {0, ranks() - 1})
      StopAnywhere(ranks(), victim, op, how_long, how_long == StopFor::kLess ? kOfStops : kOfLongStops);
  }
};
TEST_P(StopMatrix, in_a_pause) { StopAllInTurn(Op::kPause, StopFor::kLess); }
TEST_P(StopMatrix, in_a_pause_for_longer_than_its_deadline) { StopAllInTurn(Op::kPause, StopFor::kLonger); }
TEST_P(StopMatrix, in_a_resume) { StopAllInTurn(Op::kResume, StopFor::kLess); }
TEST_P(StopMatrix, in_a_resume_for_longer_than_its_deadline) { StopAllInTurn(Op::kResume, StopFor::kLonger); }
const auto kStopped = ::testing::Values(Where{2, Layout::kDirect},
#ifdef AMEM_BY_NIGHT
                                        Where{8, Layout::kDirect}, Where{3, Layout::kDirect, false, LibraryScope::kShared},
#endif
                                        Where{4, Layout::kDirect});
INSTANTIATE_TEST_SUITE_P(Ranks, StopMatrix, kStopped, NameOfWhere);
#endif

class FailMatrix : public OverRanks {
 protected:
  static std::uint64_t stride() {
    return kOfFailures * (ranks() > 4 ? 5 : GetParam().scope == LibraryScope::kAll ? kOfAll : 1);
  }
};
TEST_P(FailMatrix, a_call_of_a_pause) { FailEverywhere(ranks(), Op::kPause, Fault::kFailCall, stride()); }
TEST_P(FailMatrix, a_call_of_a_resume) { FailEverywhere(ranks(), Op::kResume, Fault::kFailCall, stride()); }
TEST_P(FailMatrix, all_calls_of_a_pause_from_one_on) { FailEverywhere(ranks(), Op::kPause, Fault::kFailAllCalls, stride()); }
TEST_P(FailMatrix, all_calls_of_a_resume_from_one_on) { FailEverywhere(ranks(), Op::kResume, Fault::kFailAllCalls, stride()); }
INSTANTIATE_TEST_SUITE_P(Ranks, FailMatrix, kWhere, NameOfWhere);

#ifdef AMEM_MATRIX_NVLS
// A scenario as NCCL makes it, in processes of their own: one rank makes the object, the others import it over their sockets,
// all add their devices, bind, and map; then they pause and resume, and free all of it while running or while paused.
class NvlsJob : public Matrix, public ::testing::WithParamInterface<int> {
 protected:
  static void ExpectReached(RankProcesses& job, const std::string& what) {
    for (const auto& reply : job.All({.op = Op::kCheck, .version = kVersion})) {
      ASSERT_TRUE(reply && reply->ok()) << what << ": " << (reply ? reply->text.data() : "died");
      EXPECT_EQ(reply->reached, static_cast<std::uint32_t>(job.ranks())) << what;
    }
  }
};
TEST_P(NvlsJob, is_released_and_rebuilt_cycle_after_cycle_and_freed) {
  for (const Layout layout : {Layout::kDirect, Layout::kSlab}) {
    for (const bool paused : {false, true}) {
      RankProcesses job(GetParam(), layout, kPatienceMs, true);
      AllOk(job, {.op = Op::kFill, .version = kVersion}, "fill");
      ExpectReached(job, "before any pause");
      for (int cycle = 0; cycle < 3; ++cycle) {
        AllOk(job, {.op = Op::kPause}, "pause");
        ExpectMemory(job, true, false, "paused");
        AllOk(job, {.op = Op::kResume}, "resume");
        ExpectMemory(job, false, false, "resumed");
        ExpectReached(job, "after a cycle");
      }
      if (paused) AllOk(job, {.op = Op::kPause}, "last pause");
      AllOk(job, {.op = Op::kFree}, "free");
      if (paused) AllOk(job, {.op = Op::kResume}, "last resume");
      ExpectMemory(job, true, false, "all freed");
      AllOk(job, {.op = Op::kClose}, "close");
      for (int rank = 0; rank < job.ranks(); ++rank) EXPECT_EQ(job.Wait(rank), 0);
      VerifyJournals(job, "at the end");
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, NvlsJob, ::testing::Range(2, 9));
#endif

}  // namespace
}  // namespace amem::test
