#include "replay/report/standing.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>

namespace amem {

Standing StandingOf(const Folded& folded, const SessionStory& story, SessionStatus status) {
  const State& state = folded.state;
  Standing now{.who = state.session, .status = status, .lifecycle = state.lifecycle};
  const Holdings holdings = Measure(state);
  const Bytes whole = holdings.own_device + holdings.slabs_free + holdings.pools;
  now.held = holdings.own_device_resident + holdings.pools_resident;
  now.released = whole - std::min(whole, now.held);
  for (const auto& [id, peer] : state.peers) (peer.connected ? now.peers : now.lost_peers).push_back(id);
  now.last_ns = story.last.time_ns;
  now.since_ns = story.since.time_ns;
  const auto ended = std::ranges::find_if(story.attempts.rbegin(), story.attempts.rend(), std::not_fn(&Attempt::open));
  if (ended != story.attempts.rend()) now.ended = *ended;
  if (folded.broken) {
    now.trouble = ToText(*folded.broken);
  } else if (const Attempt* attempt = story.OpenAttempt()) {
    now.attempt = *attempt;
    now.progress = ProgressOf(story, *attempt, state);
  }
  return now;
}

std::string Standing::failure() const {
  if (!ended || ended->end != Attempt::End::kFailed) return {};
  return ended->failure.empty() ? "failed" : ended->failure;
}

namespace {

class Waits {
 public:
  explicit Waits(std::span<const Standing> sessions) : sessions_(sessions) {
    for (const Standing& s : sessions) by_id_.emplace(s.who.session, &s);
  }

  [[nodiscard]] std::vector<SessionId> Of(const Standing& who) const {
    std::vector<SessionId> late;
    if (who.status != SessionStatus::kLive || !who.attempt || !who.progress.waits()) return late;
    for (const SessionId id : who.attempt->begun ? who.attempt->members : Connected(who)) {
      const auto it = by_id_.find(id);
      const bool known = it != by_id_.end() && id != who.who.session;
      if (known && !HasDoneItsPart(*it->second, who)) late.push_back(id);
    }
    return late;
  }

 private:
  // Those that share memory with it, directly or through others, and live.
  [[nodiscard]] std::vector<SessionId> Connected(const Standing& who) const {
    std::set<SessionId> seen{who.who.session};
    std::vector<SessionId> found{who.who.session};
    for (std::size_t i = 0; i < found.size(); ++i) {
      for (const auto& [id, other] : by_id_) {
        const auto knows = [](const Standing& s, SessionId peer) { return std::ranges::find(s.peers, peer) != s.peers.end(); };
        const bool linked = knows(*other, found[i]) || knows(*by_id_.at(found[i]), id);
        const bool counts = other->status == SessionStatus::kLive && other->who.group == who.who.group;
        if (linked && counts && seen.insert(id).second) found.push_back(id);
      }
    }
    return found;
  }

  // Whether `other` is as far as `who`, which waits: the members of a pause or resume take the same phases one after the other.
  [[nodiscard]] static bool HasDoneItsPart(const Standing& other, const Standing& who) {
    const Attempt& mine = *who.attempt;
    if (other.attempt && other.attempt->kind == mine.kind) {
      const Attempt& theirs = *other.attempt;
      if (!mine.begun || !theirs.begun) return theirs.begun || !mine.begun;
      if (theirs.phases.size() != mine.phases.size()) return theirs.phases.size() > mine.phases.size();
      return other.progress.decided || other.progress.waits();
    }
    // It may be through with it already. Members are of one host, and have one clock.
    return !other.attempt && other.ended && other.ended->kind == mine.kind && other.ended->ended.time_ns >= mine.came().time_ns;
  }

  std::span<const Standing> sessions_;
  std::map<SessionId, const Standing*> by_id_;
};

}  // namespace

std::vector<std::vector<SessionId>> WhoWaitsForWhom(std::span<const Standing> sessions) {
  const Waits waits(sessions);
  std::vector<std::vector<SessionId>> all;
  for (const Standing& s : sessions) all.push_back(waits.Of(s));
  return all;
}

}  // namespace amem
