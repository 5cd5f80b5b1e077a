// Tries every interleaving of a world (world.h), breadth first, so that a counterexample is as short as one can be. States that
// differ only in which member is which are one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/statemachine/agreement/world.h"

namespace amem::agreement::testing {

template <int N>
class Explorer {
 public:
  using S = State<N>;
  struct Found {
    std::size_t states = 0;
    std::string wrong;              // empty: nothing
    std::vector<std::string> path;  // to what is wrong, move by move
    std::set<std::string> endings;  // "dead paused paused", each sorted
    std::vector<S> all_paused;      // ends in which all live and are paused
    [[nodiscard]] std::string Text() const {
      std::string text = wrong;
      for (const std::string& move : path) text += "\n  " + move;
      return text;
    }
  };

  explicit Explorer(const Settings& settings) : world_(settings) {}

  Found Run() { return Run(world_.Start()); }
  Found Run(const S& start) {
    Add(Canonical(start).first, 0);
    std::vector<typename World<N>::Move> moves;
    for (std::size_t at = 0; at < states_.size(); ++at) {
      const S state = states_[at];
      std::string wrong = world_.Check(state);
      moves.clear();
      for (int i = 0; i < N && wrong.empty(); ++i) world_.MovesOf(state, i, moves, wrong);
      const bool ended = World<N>::AllEnded(state);
      if (moves.empty() && !ended && wrong.empty()) wrong = "a member waits for ever";
      if (!wrong.empty()) {
        found_.wrong = wrong;
        Trace(at);
        break;
      }
      if (ended && moves.empty()) NoteEnd(state);
      for (const auto& move : moves) Add(Canonical(move.to).first, static_cast<std::uint32_t>(at));
    }
    found_.states = states_.size();
    return std::move(found_);
  }

 private:
  using Order = std::array<std::uint8_t, N>;  // which member is at each place

  static std::pair<S, Order> Canonical(const S& state) {
    Order order;
    std::iota(order.begin(), order.end(), std::uint8_t{0});
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return std::memcmp(&state.members[a], &state.members[b], sizeof state.members[a]) < 0; });
    S same = state;
    for (int i = 0; i < N; ++i) {
      same.members[i] = state.members[order[i]];
      for (int k = 0; k < N; ++k) same.imports[i][k] = state.imports[order[i]][order[k]];
    }
    return {same, order};
  }

  void Add(const S& state, std::uint32_t parent) {
    if (2 * (states_.size() + 1) > table_.size()) Grow();
    std::size_t at = state.Hash() & (table_.size() - 1);
    for (; table_[at] != 0; at = (at + 1) & (table_.size() - 1))
      if (states_[table_[at] - 1] == state) return;
    states_.push_back(state);
    parents_.push_back(parent);
    table_[at] = static_cast<std::uint32_t>(states_.size());
  }
  void Grow() {
    table_.assign(std::max<std::size_t>(1024, table_.size() * 2), 0);
    for (std::size_t i = 0; i < states_.size(); ++i) {
      std::size_t at = states_[i].Hash() & (table_.size() - 1);
      while (table_[at] != 0) at = (at + 1) & (table_.size() - 1);
      table_[at] = static_cast<std::uint32_t>(i + 1);
    }
  }

  void NoteEnd(const S& state) {
    std::vector<std::string> lives;
    bool all_paused = true;
    for (const auto& m : state.members) {
      lives.emplace_back(m.dead ? "dead" : m.phase == Phase::kPaused ? "paused" : "running");
      all_paused = all_paused && lives.back() == "paused";
    }
    std::sort(lives.begin(), lives.end());
    std::string text;
    for (const std::string& life : lives) text += (text.empty() ? "" : " ") + life;
    found_.endings.insert(text);
    if (all_paused) found_.all_paused.push_back(state);
  }

  // Members keep their names along the path, although their places change.
  void Trace(std::size_t to) {
    std::vector<std::size_t> way{to};
    while (way.back() != 0) way.push_back(parents_[way.back()]);
    std::reverse(way.begin(), way.end());
    Order names;
    std::iota(names.begin(), names.end(), std::uint8_t{0});
    std::vector<typename World<N>::Move> moves;
    for (std::size_t at = 0; at + 1 < way.size(); ++at) {
      moves.clear();
      std::string wrong;
      for (int i = 0; i < N; ++i) world_.MovesOf(states_[way[at]], i, moves, wrong);
      for (const auto& move : moves) {
        const auto [same, order] = Canonical(move.to);
        if (!(same == states_[way[at + 1]])) continue;
        found_.path.push_back(World<N>::Describe(move, names[move.who]));
        Order renamed;
        for (int i = 0; i < N; ++i) renamed[i] = names[order[i]];
        names = renamed;
        break;
      }
    }
    std::string text;
    for (std::size_t at = 0; at < found_.wrong.size(); ++at) {
      const bool name = at > 0 && found_.wrong[at - 1] == ' ' && found_.wrong[at] >= '0' && found_.wrong[at] <= '9';
      text += name ? std::to_string(names[found_.wrong[at] - '0']) : std::string(1, found_.wrong[at]);
    }
    found_.wrong = text;
  }

  const World<N> world_;
  std::deque<S> states_;                        // which takes no more memory than they need
  std::vector<std::uint32_t> parents_, table_;  // the table has 1 + the place of a state
  Found found_;
};

}  // namespace amem::agreement::testing
