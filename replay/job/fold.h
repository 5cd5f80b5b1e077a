// Fold: a journal, read once from its beginning, as the states that its events lead to. What a command wants to know of a
// journal is an observer of this fold, so that all commands agree on where a journal stops making sense, and why.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "journal/journal.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

struct Folded;

class FoldObserver {
 public:
  virtual ~FoldObserver() = default;
  // The state that the first event follows; not empty where older events were let go.
  virtual void Begin(const State& /*before*/) {}
  // Around each event that has its number in the sequence. After is not called when the event cannot follow; its failure says
  // that the state has become impossible.
  virtual void Before(const Event& /*event*/, const State& /*before*/) {}
  virtual Status After(const Event& /*event*/, const State& /*after*/) { return {}; }
  // Behind a break, where the state is not known any more. False: no more of that; reading ends when no observer wants more.
  virtual bool Behind(const Event& /*event*/) { return false; }
  // Nothing of what follows is wanted: reading ends when that is so for all observers.
  [[nodiscard]] virtual bool Done() const { return false; }
  virtual void End(const Folded& /*folded*/) {}
};

struct Folded {
  JournalInfo info;
  ReadReport damage;  // what could not be read
  State state;        // after the last event that could follow
  std::uint64_t events = 0;
  std::uint64_t last_ns = 0;  // of the last of those

  // From here on the state is not known.
  struct Break {
    enum class Kind : std::uint8_t {
      kBeginning,  // the state before the first event cannot be read
      kSequence,   // events are missing (damage leaves such a gap, too), or come twice
      kOrder,      // the event cannot follow
      kState,      // an observer found the state after the event impossible
    };
    Kind kind{};
    SequenceNumber at;
    Status why;
  };
  std::optional<Break> broken;
};

// A fold that goes on as a journal grows.
class Folding {
 public:
  Folding(Folded& out, std::span<FoldObserver* const> observers) : out_(out), observers_(observers) {}
  // The state that the next event follows; a failure says that it is not known.
  void Begin(Result<State> before);
  // False: no observer wants more.
  bool Take(const Event& event);

 private:
  bool Follow(const Event& event);

  Folded& out_;
  std::span<FoldObserver* const> observers_;
};

// A failure means that nothing could be read. `last`: what follows that event is left out.
Result<Folded> FoldJournal(JournalReader& reader, std::span<FoldObserver* const> observers, SequenceNumber last = kToTheEnd);

// "event 17 does not fit what came before it: mapped: address 0x7f00 ...: there is no such allocation"; "events 3 to 4 are
// missing".
std::string ToText(const Folded::Break& broken);
// "3 damaged records were left out: ..."; empty if nothing is damaged.
std::string DamageText(const ReadReport& report);
// The same as sentences that name the journal or its pack: "the pack is incomplete: job.amem: it is cut short ...".
std::vector<std::string> DamageOf(const std::filesystem::path& session, const ReadReport& report);

}  // namespace amem
