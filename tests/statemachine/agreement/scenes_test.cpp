// Plays the scenes in scenes/: each is a text of commands and, after each, what the members then do. For people who want to see
// the agreement at work; AMEM_SCENES_WRITE=1 writes the files anew, and the difference is what a change of the rules does.
//
//   one I [COUNT]                  member I does COUNT things (1)
//   all                            all go on in turn until none of them has anything to do
//   stop I, go I, kill I           signals
//   late I                         the deadline of member I passes while it waits
//   fail I                         its next step of the driver fails
//   set I                          it sees another set
//   call I                         it makes its next call: a resume if it is paused
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/statemachine/agreement/world.h"

namespace amem::agreement::testing {
namespace {

constexpr int kMembers = 3;
using TheWorld = World<kMembers>;

class Scene {
 public:
  // What the members do upon a command, a line each.
  std::string Play(const std::string& command) {
    std::istringstream words(command);
    std::string verb;
    int who = 0, count = 1;
    words >> verb >> who;
    words >> count;
    text_.clear();
    if (verb == "all") {
      while (One(0) + One(1) + One(2) > 0) {
      }
    } else if (verb == "one") {
      for (int i = 0; i < count; ++i)
        if (One(who) == 0) return text_ + "! member " + std::to_string(who) + " waits\n";
    } else if (!Choose(who, [&](const TheWorld::Move& move) { return Fits(verb, move); })) {
      return text_ + "! that cannot happen now\n";
    }
    return text_;
  }

 private:
  static bool IsFault(const TheWorld::Move& move) {
    const std::string_view what = move.what;
    return what == "stops" || what == "is killed" || what == "fails in its work" || what.starts_with("has its vote") ||
           what.starts_with("calls") || what == "goes on";
  }
  static bool Fits(std::string_view verb, const TheWorld::Move& move) {
    const std::string_view what = move.what;
    return (verb == "stop" && what == "stops") || (verb == "kill" && what == "is killed") ||
           (verb == "go" && what == "goes on") || (verb == "fail" && what == "fails in its work") ||
           (verb == "call" && what.starts_with("calls")) || (verb == "late" && move.cause == Cause::kLate) ||
           (verb == "set" && move.cause == Cause::kSetChanged);
  }
  int One(int who) {
    return Choose(who,
                  [](const TheWorld::Move& move) {
                    return !IsFault(move) && move.cause != Cause::kLate && move.cause != Cause::kSetChanged;
                  })
               ? 1
               : 0;
  }
  template <class Wanted>
  bool Choose(int who, Wanted wanted) {
    std::vector<TheWorld::Move> moves;
    std::string wrong;
    world_.MovesOf(state_, who, moves, wrong);
    EXPECT_EQ(wrong, "");
    for (const auto& move : moves) {
      if (!wanted(move)) continue;
      text_ += TheWorld::Describe(move, who) + "\n";
      state_ = move.to;
      EXPECT_EQ(world_.Check(state_), "");
      return true;
    }
    return false;
  }

  const TheWorld world_{{.stops = 9, .kills = 9, .failures = 9, .set_changes = 9, .calls = 9}};
  State<kMembers> state_ = world_.Start();
  std::string text_;
};

std::string Played(const std::string& scene) {
  Scene world;
  std::istringstream lines(scene);
  std::string text, line;
  while (std::getline(lines, line)) {
    if (line.empty() || line[0] == ' ') continue;  // what was played before
    text += line + "\n";
    if (line[0] == '#') continue;
    std::istringstream played(world.Play(line));
    while (std::getline(played, line)) text += "    " + line + "\n";
  }
  return text;
}

TEST(Scenes, are_played_as_they_are_written) {
  int scenes = 0;
  for (const auto& file : std::filesystem::directory_iterator(AMEM_SCENES)) {
    std::ifstream in(file.path());
    const std::string before((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    const std::string now = Played(before);
    if (std::getenv("AMEM_SCENES_WRITE") != nullptr) std::ofstream(file.path()) << now;
    EXPECT_EQ(now, before) << file.path().filename() << "; AMEM_SCENES_WRITE=1 writes it anew";
    ++scenes;
  }
  EXPECT_GE(scenes, 5);
}

}  // namespace
}  // namespace amem::agreement::testing
