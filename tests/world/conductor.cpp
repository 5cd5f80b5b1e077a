#include "tests/world/conductor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "replay/driver/driver.h"
#include "tests/world/findings.h"
#include "tests/world/shortages.h"

namespace amem::world {
namespace {

using Clock = std::chrono::steady_clock;

// The calls of the driver that a pause or resume makes.
constexpr std::array kCalls = {"Create",         "Map",          "SetAccess",   "Export",     "Import",
                               "Memory",         "Gather",       "Scatter",     "CopyToHost", "FindNonZero",
                               "AllocatePinned", "FinishCopies", "Synchronize", "Unmap",      "Release"};

// A journal that was full begins anew five seconds later.
constexpr auto kAfterShortage = std::chrono::seconds(6);

Lifecycle OppositeOf(Lifecycle stable) { return stable == Lifecycle::kRunning ? Lifecycle::kPaused : Lifecycle::kRunning; }

}  // namespace

Conductor::Conductor(const Settings& settings, std::shared_ptr<Page> page, std::function<void()> look)
    : settings_(settings),
      page_(std::move(page)),
      look_(std::move(look)),
      random_(settings.seed * 7919),
      tool_(settings_, page_, look_) {}

void Conductor::Found(const std::string& what) {
  page_->found = true;
  if (!settings_.directory.empty()) std::this_thread::sleep_for(std::chrono::seconds(3));  // the ranks say what they did
  world::Found(what);
}

void Conductor::Sleep(std::chrono::milliseconds time) {
  for (const auto until = Clock::now() + time; Clock::now() < until; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    look_();
}

void Conductor::AwaitAll(const char* what, std::chrono::milliseconds patience, const std::function<bool(std::size_t)>& done) {
  const auto stopped = [this] {
    std::uint64_t us = 0;
    for (const auto& of_rank : page_->stopped_us) us += of_rank;
    return std::chrono::microseconds(us);
  };
  const auto until = Clock::now() + patience - stopped();
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(settings_.ranks); ++rank) {
    while (!page_->dead[rank] && !done(rank)) {
      Sleep(std::chrono::milliseconds(1));
      if (Clock::now() > until + stopped()) Found(fmt::format("rank {} does not end {}:{}", rank, what, Answers()));
    }
  }
}

void Conductor::Run() {
  NameThread("conductor");
  if (settings_.between_launches) return RunBetweenLaunches();
  const auto until = Clock::now() + settings_.life;
  while (Clock::now() < until) {
    Sleep(std::chrono::milliseconds(Pick(60)));
    Bring(CycleKind::kPause);
    Sleep(std::chrono::milliseconds(Pick(20)));
    Bring(CycleKind::kResume);
  }
  End();
}

// What goes wrong with the call of a rank, if anything.
Fate Conductor::FateOf(CycleKind kind) {
  Fate fate;
  const auto name = [&](const char* call) { std::strncpy(fate.call.data(), call, fate.call.size() - 1); };
  const auto chance = Pick(8);
  if (chance == 0 && settings_.absences && kind == CycleKind::kPause) {
    fate.absent = true;
  } else if (chance == 1 && settings_.absences && kind == CycleKind::kPause && !settings_.directory.empty()) {
    fate.of_program = true;                     // peers of one process have no service that goes on
    fate.hang_ms = 3 * settings_.timeout_ms();  // longer than a call and its undo
    name(Pick(2) == 0 ? "Unmap" : "Release");
  } else if (chance == 2 && settings_.absences) {
    fate.hang_ms = settings_.timeout_ms() * static_cast<std::uint32_t>(1 + Pick(6)) / 4;
    name(kCalls.at(Pick(kCalls.size())));
  } else if (chance <= 4 && settings_.faults) {
    fate.nth = static_cast<std::uint32_t>(1 + Pick(3));
    fate.undo_too = kind == CycleKind::kPause && Pick(3) == 0;
    fate.result = Pick(2) == 0 ? cuda::kOutOfMemory : cuda::kOperatingSystem;
    name(kCalls.at(Pick(kCalls.size())));
  }
  return fate;
}

// False: some ranks failed, as they may.
bool Conductor::Give(CycleKind kind, bool faulty) {
  Order& order = page_->order;
  order.kind = kind;
  order.faulty = faulty;
  for (Fate& fate : order.fates) {
    fate = faulty ? FateOf(kind) : Fate{};
    if (Pick(4) == 0) fate.delay_ms = static_cast<std::uint32_t>(Pick(30));
  }
  for (const Fate& fate : order.fates) {
    if (fate.of_program) hangs_until_ = Clock::now() + std::chrono::milliseconds(fate.hang_ms) + settings_.CallLimit();
  }
  deaths_ = Count(page_->gone);  // who is ending may be met in this order
  starved_ = page_->starved;
  shortages_ = page_->shortages - (page_->short_of_something ? 1 : 0);
  stops_ = page_->stops_ended;
  const std::uint64_t number = ++page_->order_number;
  AwaitAll(kind == CycleKind::kPause ? "the pause" : "the resume", settings_.CycleLimit() + settings_.CallLimit(),
           [&](std::size_t rank) { return page_->answers[rank].order == number; });
  CheckAgreement(number);
  bool all = true;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(settings_.ranks); ++rank)
    all = all && (page_->dead[rank] || (page_->answers[rank].code == Code::kOk && !order.fates[rank].absent));
  if (!all && !faulty) Judge(kind);
  return all;
}

// Members of a pause or resume end alike, all running or all paused. And nobody is taken for dead who lives: all live until the
// conductor kills one.
void Conductor::CheckAgreement(std::uint64_t order) {
  const CycleKind kind = page_->order.kind;
  const Lifecycle otherwise = kind == CycleKind::kPause ? Lifecycle::kRunning : Lifecycle::kPaused;
  const auto has_answered = [&](std::size_t rank) { return !page_->dead[rank] && page_->answers[rank].order == order; };
  const auto differ = [&](std::size_t one, std::size_t other) {
    const Answer &first = page_->answers[one], &second = page_->answers[other];
    if (!first.with.at(other)) return false;
    if (first.carried_out) return second.lifecycle == otherwise;
    const bool both_ran = first.began && second.began && second.with.at(one);
    const bool stable = first.lifecycle == Lifecycle::kRunning || first.lifecycle == Lifecycle::kPaused;
    return both_ran && stable && second.lifecycle == OppositeOf(first.lifecycle);
  };
  for (std::size_t rank = 0; rank < kMostRanks; ++rank) {
    const Answer& answer = page_->answers[rank];
    if (!has_answered(rank)) continue;
    if (answer.code == Code::kPeerLost && Deaths(*page_) == 0 && !page_->found)
      Found(fmt::format("rank {} takes one for dead, and all live:{}", rank, Answers()));
    for (std::size_t other = 0; other < kMostRanks; ++other)
      if (has_answered(other) && differ(rank, other))
        Found(fmt::format("ranks {} and {} were members of one {}, and have ended it {} and {}:{}", rank, other, ToText(kind),
                          ToText(answer.lifecycle), ToText(page_->answers[other].lifecycle), Answers()));
  }
}

std::string Conductor::Answers() const {
  std::string text;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(settings_.ranks); ++rank) {
    const Answer& answer = page_->answers[rank];
    text += fmt::format("\n  rank {}{} after {} ms: {}", rank, page_->dead[rank] ? ", dead" : "", answer.took_ms,
                        answer.code == Code::kOk ? "OK" : answer.text.data());
  }
  return text;
}

// Nothing was made to fail in this pause or resume, but perhaps by a thread of the program, which may also have begun to share
// memory in this moment, or whose kernels outlast a short deadline. A rank whose peer has failed like this waits for it in
// vain.
void Conductor::Judge(CycleKind kind) {
  if (Deaths(*page_) != deaths_ || HangsStill() || Starved() || WasShort() || WasStopped()) return;
  const auto excused = [this](const Answer& answer) {
    const std::string_view text = answer.text.data();
    const bool late = answer.driver_result == cuda::kNotReady || answer.driver_result == cuda::kTimeout ||
                      text.find("a call that began before has not returned") != text.npos;  // behind such kernels
    return answer.driver_result == cuda::kCaptureUnsupported || text.find("a test asked for this failure") != text.npos ||
           text.find("began to share") != text.npos || (settings_.shortages && NamesAShortage(answer.code, text)) ||
           (late && settings_.DeadlineMayBeTooShort());
  };
  if (!std::ranges::any_of(page_->answers, [&](const Answer& one) { return one.code != Code::kOk && excused(one); }))
    Found(fmt::format("nothing went wrong, and a {} failed:{}", ToText(kind), Answers()));
}

// A thread may be kept long between the beginning and the end of its capture. If it is kept too long, the watchdog finds it.
bool Conductor::Capturing() const {
  return std::ranges::any_of(page_->answers, [](const Answer& one) { return one.driver_result == cuda::kCaptureUnsupported; });
}

// A rank has neither all memory nor none, because its undo failed and what it then released again, too. The others of its pause
// are paused, and it is told to call ncclResume on all ranks.
bool Conductor::IsHalf() const {
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(settings_.ranks); ++rank) {
    const Lifecycle now = page_->answers[rank].lifecycle;
    if (!page_->dead[rank] && (now == Lifecycle::kPausing || now == Lifecycle::kResuming)) return true;
  }
  return false;
}

bool Conductor::WasShort() const { return page_->shortages != shortages_; }

bool Conductor::WasStopped() const { return page_->stops != stops_; }

bool Conductor::Starved() const { return page_->starving != 0 || page_->starved != starved_; }

void Conductor::Bring(CycleKind kind) {
  if (Give(kind, Pick(3) == 0)) return;
  auto short_until = settings_.shortages ? Clock::now() + kAfterShortage : Clock::time_point::min();
  for (int tries = settings_.starves ? 400 : 40; tries > 0;
       tries -= HangsStill() || Capturing() || WasStopped() || Clock::now() < short_until ? 0 : 1) {
    Sleep(std::chrono::milliseconds(Pick(20)));
    if (kind == CycleKind::kPause && IsHalf()) Bring(CycleKind::kResume);
    if (Give(kind, false)) return;
    if (WasShort()) short_until = Clock::now() + kAfterShortage;
  }
  Found(fmt::format("all tries to {} failed:{}", ToText(kind), Answers()));
}

// ---- between launches ------------------------------------------------------------------------------------------------------

void Conductor::RunBetweenLaunches() {
  const auto until = Clock::now() + settings_.life;
  AllGoOn();
  // A communicator that has lost a rank is not stopped any more.
  while (Clock::now() < until && Deaths(*page_) == 0) StopOnce();
  if (Deaths(*page_) != 0) AllAreBack();
  End();
}

Tool::Answered Conductor::AskTool(const Asked& asked) {
  Tool::Answered answered = tool_.Ask(asked);
  if (!answered.fell.empty()) Found(answered.fell);
  return answered;
}

void Conductor::StopOnce() {
  Sleep(std::chrono::milliseconds(Pick(60)));
  stops_ = page_->stops_ended;
  const bool hurried = Pick(4) == 0;
  Asked asked{.what = Pick(3) == 0 ? Asked::What::kPark : Asked::What::kPause,
              .deadline = hurried ? std::chrono::milliseconds(1 + Pick(40)) : settings_.CycleLimit()};
  if (Pick(4) == 0) asked.killed_after = std::chrono::milliseconds(1 + Pick(40));
  const Tool::Answered answered = AskTool(asked);
  if (Deaths(*page_) != 0) return;
  if (answered.killed) return AllAreBack();
  if (!answered.status.ok()) {
    JudgeStop(answered.status, hurried);
    // Ranks that share no memory with the one that failed have paused, and are resumed by the tool. That, too, may fail.
    const bool stays_paused =
        answered.status.message().find("then not all that had paused could be resumed") != std::string::npos;
    return stays_paused ? AllAreBack() : AllGoOn();
  }
  if (const std::string who = WhoDoesNotStand(); !who.empty()) Found("all are said to stand between launches, but" + who);
  const auto before = page_->Launched();
  Sleep(std::chrono::milliseconds(Pick(30)));
  if (Deaths(*page_) == 0 && page_->Launched() != before) Found("something was launched while all ranks were stopped");
  AllAreBack();
}

// Who was given no time may fail, and so may a pause in which a call of the driver was made to, or a process was stopped.
void Conductor::JudgeStop(const Status& failed, bool hurried) {
  const std::string& why = failed.message();
  const bool asked_for = why.find("a test asked for this failure") != why.npos;
  const bool captures = why.find("a stream capture") != why.npos || failed.driver_result() == cuda::kCaptureUnsupported;
  const bool shares = why.find("began to share") != why.npos;
  if ((hurried && failed.code() == Code::kTimeout) || WasStopped()) return;
  if (!asked_for && !captures && !shares) Found("nothing went wrong, and a stop between launches failed: " + why);
}

// By a tool that is let alone, whatever one before it has left.
void Conductor::AllAreBack() {
  for (int tries = 40; tries > 0; --tries) {
    const Tool::Answered answered = AskTool({.what = Asked::What::kResume, .deadline = settings_.CycleLimit()});
    if (answered.status.ok() && !answered.killed) return AllGoOn();
    Trace("a resume from outside: " + answered.status.message());
    if (tries == 1) Found("all tries to resume from outside failed: " + answered.status.message());
    Sleep(std::chrono::milliseconds(Pick(20)));
  }
}

void Conductor::AllGoOn() {
  std::array<std::uint64_t, kMostRanks> before{};
  std::ranges::copy(page_->at, before.begin());
  AwaitAll("a launch after a stop", settings_.CallLimit(),
           [&](std::size_t rank) { return Deaths(*page_) != 0 || page_->at[rank] > before[rank] + 1; });
}

// The members of a communicator have launched as much on it as the first of them.
std::string Conductor::WhoDoesNotStand() const {
  std::string who;
  const auto ranks = static_cast<std::size_t>(settings_.ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t communicator = 0; communicator < kCommunicators; ++communicator) {
      const std::uint64_t launched = page_->launched[rank][communicator], ended = page_->ended[rank][communicator];
      const std::size_t first = communicator == 0 ? 0 : communicator == 1 ? rank % 2 : std::min<std::size_t>(rank, 1);
      const std::uint64_t expected = page_->launched[first][communicator];
      if (launched != expected || ended != launched)
        who += fmt::format("\n  rank {}, communicator {}: {} launched, rank {}: {}; {} have ended", rank, communicator,
                           launched, first, expected, ended);
    }
  }
  return who;
}

void Conductor::End() {
  for (const std::uint32_t stage : {kStopping, kFreeingImports, kFreeingAll, kLeaving}) {
    page_->stage = stage;
    AwaitAll("the world", 4 * settings_.CallLimit(), [&](std::size_t rank) { return page_->finished[rank] >= stage; });
  }
}

}  // namespace amem::world
