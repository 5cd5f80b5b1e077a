// A world for the agreement: N members with memory of their own and imports of each other's, a board, and faults. Every member
// runs the Step that ships. A state is a plain value of a few dozen bytes, so that an explorer can have millions.
//
// A move is one atomic act of one member: a driver step, a vote, a compare-and-swap - or a fault: it is stopped, goes on, is
// killed, its driver step fails. Deadlines may pass at any wait, which is more than a clock would allow. With `stale`, a
// member's look at the board and what it does about it are two moves, so that anything may happen between them.
//
// A breach is a rule that a test breaks on purpose, to show that the explorer would find it.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "statemachine/agreement/agreement.h"

namespace amem::agreement::testing {

enum class Breach : std::uint8_t {
  kNone,
  kSaveBeforeIdle,       // the program saves before the ballot `idle`
  kReleaseBeforeSaved,   // the program releases before the ballot `saved`
  kVoteBeforeRestore,    // `open` is voted for before contents are back
  kVoteBeforeMake,       // `made` is voted for before own memory exists
  kBindBeforeJoined,     // memory is bound, and contents restored, before the ballot `joined`
  kNoUndo,               // after a failure of `gone` all run on
  kRunsAfterFailedUndo,  // after a failure of `open` all run on
  kDecisionChanges,      // the last decision counts, not the first
  kOwnDecision,          // who sees a failure goes by it without setting the decision
  kDeathNotCounted,      // a member that has ended is taken for late
  kStoppedTakenForDead,  // a member that is stopped is taken for one that has ended
  kAbsentTakenForYes,    // of a member that is stopped
  kFailureTakenForYes,   // a member whose work failed votes yes
  kVotesOfLastRound,     // a vote counts in later rounds
  kLaterRoundNotSeen,    // a `come` decided for a later round looks undecided
  kUndoTrustsImports,    // an undo makes only those imports anew that are not there
  kCopyDroppedTooEarly,  // the saved contents go when the memory is made, before `open`
  kDamageTakenForYes,    // what was written over a vote counts
};

struct Settings {
  int stops = 0, kills = 0, failures = 0, set_changes = 0, scribbles = 0;
  int wipes = 0;       // of decisions; then members may end differently, but nobody runs without its own memory, or loses it
  int calls = 1;       // of each member: a pause, then a resume if it is paused, or a pause again
  bool lates = true;   // deadlines may pass
  bool stale = false;  // what a member acts on may be old
  Breach breach = Breach::kNone;
};

enum class Memory : std::uint8_t { kLive, kReleased, kEmpty };  // kEmpty: made anew, contents not back yet
enum class Phase : std::uint8_t { kRunning, kPaused, kInCall };

template <int N>
struct State {
  struct Place {  // of a member
    // The member's own state, and what it has looked at and not done yet.
    std::uint8_t line = 0, failed = 0;  // `failed`: 0, or 1 + the ballot
    bool work_failed = false, again = false;
    bool late = false;       // its deadline has passed
    std::uint8_t doing = 0;  // 0 nothing; 1 a driver step; 2 + 2 * ballot + yes: a vote; 16 + 8 * ballot + cause: a decision
    std::uint8_t part = 0;   // driver steps of the present work that are done
    // Its memory.
    Memory own = Memory::kLive;
    bool copy = false, idle = false;
    std::uint8_t made = 0;  // how often it was made, modulo 2
    // Its life.
    Phase phase = Phase::kInCall;
    CycleKind kind = CycleKind::kPause;
    std::uint8_t calls = 0, round = 1;
    bool stopped = false, dead = false;
    // Its seat: of each ballot the round, and the vote in the two lowest bits.
    std::array<std::uint8_t, kBallots> votes{};
  };
  std::array<Place, N> members{};
  // What member i has imported of member k: 0 or 1, as the owner's `made`; 2 nothing; 3 zeros in place of a dead one's.
  std::array<std::array<std::uint8_t, N>, N> imports{};
  std::array<std::uint8_t, kBallots> cells{};  // of each ballot the round, and the cause in the three lowest bits
  std::uint8_t stops = 0, kills = 0, failures = 0, set_changes = 0, scribbles = 0, wipes = 0;

  friend bool operator==(const State& a, const State& b) { return std::memcmp(&a, &b, sizeof a) == 0; }
  [[nodiscard]] std::uint64_t Hash() const {
    std::uint64_t hash = 0x9e3779b97f4a7c15;
    const auto* bytes = reinterpret_cast<const unsigned char*>(this);
    for (std::size_t at = 0; at < sizeof *this; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + at, std::min<std::size_t>(8, sizeof *this - at));
      hash = (hash ^ word) * 0xff51afd7ed558ccd;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

template <int N>
class World {
 public:
  using S = State<N>;
  struct Move {
    S to;
    int who;
    const char* what;  // "stops", "saves", "votes yes on"
    int ballot = -1;   // that it is about
    Cause cause{};     // of a decision
  };

  explicit World(const Settings& settings) : settings_(settings) {
    for (const CycleKind kind : {CycleKind::kPause, CycleKind::kResume}) {
      const Program real = ProgramOf(kind);
      programs_[static_cast<int>(kind)].assign(real.begin(), real.end());
      Spoil(programs_[static_cast<int>(kind)]);
    }
  }

  [[nodiscard]] S Start() const {
    S s;
    for (int i = 0; i < N; ++i) {
      s.members[i].calls = static_cast<std::uint8_t>(settings_.calls - 1);
      for (int k = 0; k < N; ++k) s.imports[i][k] = k == i ? 2 : 0;
    }
    s.stops = static_cast<std::uint8_t>(settings_.stops);
    s.kills = static_cast<std::uint8_t>(settings_.kills);
    s.failures = static_cast<std::uint8_t>(settings_.failures);
    s.set_changes = static_cast<std::uint8_t>(settings_.set_changes);
    s.scribbles = static_cast<std::uint8_t>(settings_.scribbles);
    s.wipes = static_cast<std::uint8_t>(settings_.wipes);
    return s;
  }

  // What member i may do, or may happen to it. Sets `wrong` if that broke a rule.
  void MovesOf(const S& s, int i, std::vector<Move>& moves, std::string& wrong) const {
    const auto& m = s.members[i];
    if (m.dead) return;
    if (m.stopped) return Push(moves, s, i, "goes on", [&](S& to) { to.members[i].stopped = false; });
    const bool may_call = m.calls > 0 && m.phase != Phase::kInCall && NobodyDied(s) && s.cells[0] != kWiped;
    if (m.phase != Phase::kInCall && !may_call) return;
    if (s.stops > 0) {
      Push(moves, s, i, "stops", [&](S& to) {
        --to.stops;
        to.members[i].stopped = true;
      });
    }
    if (s.kills > 0) Push(moves, s, i, "is killed", [&](S& to) { Kill(to, i); });
    if (may_call)
      return Push(moves, s, i, m.phase == Phase::kPaused ? "calls resume" : "calls pause", [&](S& to) { Call(to, i); });
    if (m.doing != 0) return Do(s, i, moves, wrong);
    const Next next = Ask(s, i, {.late = m.late});
    Follow(s, i, {.late = m.late}, next, moves, wrong);
    for (const Moment moment : {Moment{.late = true}, Moment{.late = m.late, .set_changed = true}}) {
      if (moment.late && !moment.set_changed && (m.late || !settings_.lates)) continue;
      if (moment.set_changed && s.set_changes == 0) continue;
      const Next other = Ask(s, i, moment);
      if (other.action != next.action) Follow(s, i, moment, other, moves, wrong);
    }
    if (s.scribbles > 0) Scribble(s, i, moves);
    if (s.wipes > 0) Wipe(s, i, moves);
  }

  // What must hold in every state; empty: it does.
  [[nodiscard]] std::string Check(const S& s) const {
    bool in_call = false, runs = false, paused = false;
    for (int i = 0; i < N; ++i) {
      const auto& m = s.members[i];
      if (m.dead) continue;
      in_call = in_call || m.phase == Phase::kInCall;
      paused = paused || m.phase == Phase::kPaused;
      if (m.phase != Phase::kRunning) continue;
      runs = true;
      if (m.own != Memory::kLive) return Name(i) + " runs without its memory";
      for (int k = 0; k < N; ++k) {
        if (k == i || s.members[k].dead || settings_.wipes > 0) continue;
        if (s.imports[i][k] == 2) return Name(i) + " runs without what it imported of " + Name(k);
        if (s.members[k].own != Memory::kLive) return Name(i) + " runs while the memory of " + Name(k) + " is not there";
        if (s.imports[i][k] != s.members[k].made) return Name(i) + " runs with old memory of " + Name(k);
      }
    }
    return !in_call && runs && paused && settings_.wipes == 0 ? "some run, and others are paused" : "";
  }

  [[nodiscard]] static bool AllEnded(const S& s) {
    for (const auto& m : s.members)
      if (!m.dead && (m.phase == Phase::kInCall || m.stopped)) return false;
    return true;
  }
  [[nodiscard]] static bool NobodyDied(const S& s) {
    for (const auto& m : s.members)
      if (m.dead) return false;
    return true;
  }
  [[nodiscard]] static std::string Name(int i) { return "member " + std::to_string(i); }
  [[nodiscard]] static std::string Describe(const Move& move, int who) {
    std::string text = Name(who) + " " + move.what;
    if (move.ballot >= 0) text += " " + std::string(ToText(static_cast<Ballot>(move.ballot)));
    if (move.cause == Cause::kAllVoted) text += " passed";
    if (IsFailure(move.cause)) text += " failed (" + std::string(ToText(move.cause)) + ")";
    return text;
  }

  struct Moment {
    bool late = false, set_changed = false;
  };
  // What Step says to member i.
  [[nodiscard]] Next Ask(const S& s, int i, Moment moment) const {
    const auto& m = s.members[i];
    std::array<Seat, N> seats;
    for (int k = 0; k < N; ++k) {
      const auto& other = s.members[k];
      seats[k].ended = other.dead && breach() != Breach::kDeathNotCounted;
      if (breach() == Breach::kStoppedTakenForDead && other.stopped) seats[k].ended = true;
      for (std::size_t b = 0; b < kBallots; ++b) seats[k].votes[b] = VoteIn(s, i, k, b);
    }
    View view{.seats = seats, .self = static_cast<std::size_t>(i), .set_changed = moment.set_changed};
    for (std::size_t b = 0; b < kBallots; ++b) view.decisions[b] = DecisionIn(s.cells[b], m.round, b);
    constexpr std::uint64_t kUntil = 10, kUndo = 10;
    Member member{.until_ns = kUntil, .undo_ns = kUndo, .line = m.line, .work_failed = m.work_failed, .again = m.again};
    if (m.failed != 0) member.failed = static_cast<Ballot>(m.failed - 1);
    return Step(programs_[static_cast<int>(m.kind)], member, view, moment.late ? kUntil : kUntil - 1);
  }

 private:
  using Place = typename S::Place;
  static constexpr std::uint8_t kWiped = 0xff;
  [[nodiscard]] Breach breach() const { return settings_.breach; }

  // ---- the board

  [[nodiscard]] Vote VoteIn(const S& s, int viewer, int k, std::size_t ballot) const {
    const std::uint8_t slot = s.members[k].votes[ballot];
    auto vote = static_cast<Vote>(slot & 3);
    const std::uint8_t round = slot >> 2;
    if (round != s.members[viewer].round && (breach() != Breach::kVotesOfLastRound || k == viewer)) vote = Vote::kNone;
    if (breach() == Breach::kDamageTakenForYes && vote == Vote::kDamaged) vote = Vote::kYes;
    if (breach() == Breach::kAbsentTakenForYes && vote == Vote::kNone && s.members[k].stopped) vote = Vote::kYes;
    return vote;
  }
  [[nodiscard]] Cause DecisionIn(std::uint8_t cell, std::uint8_t round, std::size_t ballot) const {
    if (cell == kWiped) return Cause::kDamaged;
    const auto cause = static_cast<Cause>(cell & 7);
    const std::uint8_t of = cell >> 3;
    if (of == round) return cause;
    if (of < round) return Cause::kUndecided;
    if (breach() == Breach::kLaterRoundNotSeen) return Cause::kUndecided;
    return ballot == 0 ? Cause::kSuperseded : Cause::kDamaged;
  }

  // ---- a member's moves

  template <class Change>
  static void Push(std::vector<Move>& moves, const S& s, int who, const char* what, Change change, int ballot = -1,
                   Cause cause = {}) {
    moves.push_back({s, who, what, ballot, cause});
    change(moves.back().to);
  }

  void Kill(S& to, int i) const {
    --to.kills;
    Place& m = to.members[i];
    m = Place{.phase = Phase::kRunning, .calls = 0, .round = m.round, .dead = true, .votes = m.votes};
    for (int k = 0; k < N; ++k) to.imports[i][k] = 2;
  }
  void Call(S& to, int i) const {
    Place& m = to.members[i];
    --m.calls;
    m.kind = m.phase == Phase::kPaused ? CycleKind::kResume : CycleKind::kPause;
    Come(to, i);
  }
  void Come(S& to, int i) const {
    Place& m = to.members[i];
    m.phase = Phase::kInCall;
    m.line = m.failed = m.part = m.doing = 0;
    m.work_failed = m.again = m.late = m.idle = false;
    m.round = static_cast<std::uint8_t>((to.cells[0] >> 3) + 1);
  }
  void Scribble(const S& s, int i, std::vector<Move>& moves) const {
    for (std::size_t b = 0; b < kBallots; ++b) {
      const std::uint8_t slot = s.members[i].votes[b];
      if (slot >> 2 != s.members[i].round || DecisionIn(s.cells[b], s.members[i].round, b) != Cause::kUndecided) continue;
      Push(
          moves, s, i, "has its vote written over:",
          [&](S& to) {
            --to.scribbles;
            to.members[i].votes[b] = static_cast<std::uint8_t>(slot | 3);
          },
          static_cast<int>(b));
    }
  }

  // Does what Step said at that moment.
  void Follow(const S& s, int i, Moment moment, const Next& next, std::vector<Move>& moves, std::string& wrong) const {
    if (std::holds_alternative<Wait>(next.action)) return;
    S seen = s;
    Place& m = seen.members[i];
    m.late = moment.late;
    Store(next.member, m);
    if (moment.set_changed) --seen.set_changes;
    if (const auto* end = std::get_if<End>(&next.action)) return EndCall(seen, i, *end, moves);
    m.doing = Encode(next.action);
    if (settings_.stale) {
      moves.push_back({seen, i, "looks, and then", -1, {}});
    } else {
      Do(seen, i, moves, wrong);
    }
  }
  static void Store(const Member& member, Place& m) {
    if (member.line != m.line) m.part = 0;
    if (m.failed == 0 && member.failed) m.late = false;   // it has time of its own for the undo
    if (m.line == 0 && member.line != 0) m.late = false;  // and for what comes after `come`
    m.line = member.line;
    m.work_failed = member.work_failed;
    m.again = member.again;
    m.failed = static_cast<std::uint8_t>(member.failed ? 1 + static_cast<int>(*member.failed) : 0);
  }
  void Wipe(const S& s, int i, std::vector<Move>& moves) const {
    for (std::size_t b = 0; b < kBallots; ++b) {
      if (s.cells[b] == kWiped) continue;
      Push(
          moves, s, i, "sees a decision written over:",
          [&](S& to) {
            --to.wipes;
            to.cells[b] = kWiped;
          },
          static_cast<int>(b));
    }
  }
  static std::uint8_t Encode(const Action& action) {
    if (const auto* vote = std::get_if<CastVote>(&action))
      return static_cast<std::uint8_t>(2 + 2 * static_cast<int>(vote->ballot) + (vote->yes ? 1 : 0));
    if (const auto* decide = std::get_if<Decide>(&action))
      return static_cast<std::uint8_t>(16 + 8 * static_cast<int>(decide->ballot) + static_cast<int>(decide->cause));
    return 1;
  }
  void EndCall(const S& s, int i, const End& end, std::vector<Move>& moves) const {
    const bool runs = end.ending == Ending::kRunning;
    if (end.again && s.cells[0] != kWiped) return Push(moves, s, i, "comes again", [&](S& to) { Come(to, i); });
    Push(moves, s, i, runs ? "ends running" : "ends paused", [&](S& to) {
      Place& m = to.members[i];
      m.phase = runs ? Phase::kRunning : Phase::kPaused;
      m.line = m.failed = m.part = m.doing = 0;
      m.work_failed = m.again = m.late = false;
      if (runs) m.copy = m.idle = false;
    });
  }

  void Do(const S& s, int i, std::vector<Move>& moves, std::string& wrong) const {
    const std::uint8_t doing = s.members[i].doing;
    if (doing == 1) return DriverStep(s, i, moves, wrong);
    S to = s;
    Place& m = to.members[i];
    m.doing = 0;
    if (doing < 16) {
      const int ballot = (doing - 2) / 2;
      bool yes = (doing - 2) % 2 != 0;
      if (breach() == Breach::kFailureTakenForYes) yes = true;
      m.votes[ballot] = static_cast<std::uint8_t>(m.round << 2 | static_cast<int>(yes ? Vote::kYes : Vote::kNo));
      moves.push_back({to, i, yes ? "votes yes on" : "votes no on", ballot, {}});
      return;
    }
    const int ballot = (doing - 16) / 8;
    const auto cause = static_cast<Cause>((doing - 16) % 8);
    Set(to, i, ballot, cause);
    moves.push_back({to, i, "decides that", ballot, cause});
  }
  void Set(S& to, int i, int ballot, Cause cause) const {
    Place& m = to.members[i];
    std::uint8_t& cell = to.cells[ballot];
    if (breach() == Breach::kOwnDecision && cause == Cause::kLate) {
      const Line& vote = programs_[static_cast<int>(m.kind)][m.line];
      m.line = vote.if_failed;
      m.work_failed = false;
      return;
    }
    if (ballot != 0 && IsFailure(cause)) cause = Cause::kVotedNo;  // it makes no difference, but for states that look different
    const bool undecided = cell >> 3 < m.round && cell != kWiped;  // else the compare-and-swap fails
    if (undecided || breach() == Breach::kDecisionChanges)
      cell = static_cast<std::uint8_t>(m.round << 3 | static_cast<int>(cause));
  }

  // ---- the driver

  static void Finish(Place& m, bool succeeded) {
    const Member after = Finished(Member{.line = m.line, .work_failed = m.work_failed}, succeeded);
    m.line = after.line;
    m.work_failed = after.work_failed;
    m.part = m.doing = 0;
  }

  void DriverStep(const S& s, int i, std::vector<Move>& moves, std::string& wrong) const {
    const Work work = programs_[static_cast<int>(s.members[i].kind)][s.members[i].line].work;
    if (s.failures > 0) {
      Push(moves, s, i, "fails in its work", [&](S& to) {
        --to.failures;
        Finish(to.members[i], false);
      });
    }
    switch (work) {
      case Work::kQuiesce:
        return Push(moves, s, i, "is idle", [&](S& to) {
          Place& m = to.members[i];
          m.idle = true;
          Finish(m, true);
        });
      case Work::kSave:
        for (int k = 0; k < N; ++k)
          if (!s.members[k].idle && !s.members[k].dead && !NothingIsReleased(s, i) && settings_.wipes == 0)
            wrong = Name(i) + " saves while the device of " + Name(k) + " is not idle";
        return Push(moves, s, i, "saves", [&](S& to) {
          to.members[i].copy = true;
          Finish(to.members[i], true);
        });
      case Work::kRelease:
        return Release(s, i, moves, wrong);
      case Work::kMake:
        return Push(moves, s, i, "makes its memory", [&](S& to) {
          Place& m = to.members[i];
          if (m.own == Memory::kReleased) {
            m.own = Memory::kEmpty;
            m.made ^= 1;
            if (breach() == Breach::kCopyDroppedTooEarly) {
              m.copy = false;
              m.own = Memory::kLive;
            }
          }
          Finish(m, true);
        });
      case Work::kImport:
        return Import(s, i, moves, wrong);
      case Work::kRestore:
        if (s.members[i].own == Memory::kEmpty && !s.members[i].copy) wrong = Name(i) + " has lost its contents";
        if (!AllHaveImported(s) && !HasFailed(s, i, Ballot::kOpen) && settings_.wipes == 0)
          wrong = Name(i) + " binds memory before all have added their devices";
        return Push(moves, s, i, "restores", [&](S& to) {
          to.members[i].own = Memory::kLive;
          Finish(to.members[i], true);
        });
    }
  }
  [[nodiscard]] static bool HasFailed(const S& s, int i, Ballot ballot) {  // in the round of member i
    const std::uint8_t cell = s.cells[static_cast<int>(ballot)];
    return (cell & 7) > 1 && cell >> 3 == s.members[i].round;
  }
  [[nodiscard]] static bool NothingIsReleased(const S& s, int i) {
    return HasFailed(s, i, Ballot::kIdle) || HasFailed(s, i, Ballot::kSaved);
  }
  [[nodiscard]] static bool AllHaveImported(const S& s) {
    for (int i = 0; i < N; ++i)
      for (int k = 0; k < N; ++k)
        if (k != i && !s.members[i].dead && s.imports[i][k] == 2) return false;
    return true;
  }
  void Release(const S& s, int i, std::vector<Move>& moves, std::string& wrong) const {
    const Place& m = s.members[i];
    if (m.part == 0) {
      return Push(moves, s, i, "drops its imports", [&](S& to) {
        for (int k = 0; k < N; ++k) to.imports[i][k] = 2;
        to.members[i].part = 1;
        to.members[i].doing = 0;
      });
    }
    if (m.own != Memory::kReleased && !m.copy) wrong = Name(i) + " releases memory without a copy of its contents";
    Push(moves, s, i, "releases its memory", [&](S& to) {
      to.members[i].own = Memory::kReleased;
      Finish(to.members[i], true);
    });
  }
  // An owner whose memory is not there refuses; then the round has failed already.
  void Import(const S& s, int i, std::vector<Move>& moves, std::string& wrong) const {
    bool refused = false;
    for (int k = 0; k < N; ++k) refused = refused || (k != i && !s.members[k].dead && s.members[k].own == Memory::kReleased);
    if (refused) {
      if (settings_.wipes == 0 && !HasFailed(s, i, Ballot::kJoined))
        wrong = Name(i) + " is refused an import although nothing has failed";
      return Push(moves, s, i, "is refused an import", [&](S& to) { Finish(to.members[i], false); });
    }
    Push(moves, s, i, "imports", [&](S& to) {
      for (int k = 0; k < N; ++k) {
        if (k == i || (breach() == Breach::kUndoTrustsImports && to.imports[i][k] != 2)) continue;
        to.imports[i][k] = to.members[k].dead ? 3 : to.members[k].made;
      }
      Finish(to.members[i], true);
    });
  }

  // ---- programs that break a rule

  void Spoil(std::vector<Line>& program) const {
    const auto swap_work_and_vote = [&](Work work, Ballot ballot) {
      for (std::size_t at = 0; at + 1 < program.size(); ++at) {
        Line& a = program[at];
        Line& b = program[at + 1];
        const bool order = a.kind == Line::Kind::kWork && a.work == work && b.kind == Line::Kind::kVote && b.ballot == ballot;
        const bool other = b.kind == Line::Kind::kWork && b.work == work && a.kind == Line::Kind::kVote && a.ballot == ballot;
        if (order || other) return std::swap(a, b);
      }
    };
    const bool pause = program.size() > 11;
    switch (breach()) {
      case Breach::kSaveBeforeIdle:
        return swap_work_and_vote(Work::kSave, Ballot::kIdle);
      case Breach::kReleaseBeforeSaved:
        return swap_work_and_vote(Work::kRelease, Ballot::kSaved);
      case Breach::kVoteBeforeRestore:
        return swap_work_and_vote(Work::kRestore, Ballot::kOpen);
      case Breach::kBindBeforeJoined:
        return swap_work_and_vote(Work::kRestore, Ballot::kJoined);
      case Breach::kVoteBeforeMake:
        return swap_work_and_vote(Work::kMake, Ballot::kMade);
      default:
        break;
    }
    std::uint8_t runs = 0;
    for (std::size_t at = 0; at < program.size(); ++at)
      if (program[at].kind == Line::Kind::kEnd && program[at].ending == Ending::kRunning) runs = static_cast<std::uint8_t>(at);
    for (Line& line : program) {
      if (line.kind != Line::Kind::kVote) continue;
      if (breach() == Breach::kNoUndo && line.ballot == Ballot::kGone) line.if_failed = runs;
      if (breach() == Breach::kRunsAfterFailedUndo && pause && line.ballot == Ballot::kOpen) line.if_failed = runs;
    }
  }

  const Settings settings_;
  std::array<std::vector<Line>, 2> programs_;
};

}  // namespace amem::agreement::testing
