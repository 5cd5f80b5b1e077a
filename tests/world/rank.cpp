#include "tests/world/rank.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "journal/base/unique_fd.h"
#include "statemachine/apply.h"
#include "tests/replay/driver/simulated.h"
#include "tests/world/action.h"
#include "tests/world/findings.h"
#include "tests/world/shortages.h"

namespace amem::world {
namespace {

constexpr std::string_view kAsked = "a test asked for this failure";

// Pauses and resumes, of tags as well.
std::uint64_t Begun(const State& state) { return state.totals.events[*KindOf("cycle begun")]; }

thread_local bool in_cycle = false;  // this thread is in a pause or resume of NCCL

// Reasons that every program has to live with.
bool MustBeLivedWith(const Status& status, bool late) {
  if (late && (status.driver_result() == cuda::kTimeout || status.code() == Code::kTimeout)) return true;
  const bool not_now = status.driver_result() == cuda::kIllegalState || status.driver_result() == cuda::kNotReady ||
                       status.driver_result() == cuda::kCaptureUnsupported;
  return not_now || status.code() == Code::kOutOfMemory || status.message().find(kAsked) != std::string::npos ||
         status.message().find("AMEM_LAYOUT=direct") != std::string::npos;
}

}  // namespace

// ---- what a call answered --------------------------------------------------------------------------------------------------

bool Rank::Ok(const Status& status, const std::string& what) {
  if (!status.ok()) Trace(what + ": " + status.message());
  // Of a process that was stopped the time of its own waits, also for the driver, may be over when it goes on.
  if (status.ok() || MustBeLivedWith(status, settings.DeadlineMayBeTooShort() || settings.stops)) return status.ok();
  // The driver hangs in another thread, for longer than this call may take.
  if (settings.absences && status.message().find("a driver call of another thread has not returned") != std::string::npos)
    return false;
  if (settings.starves && WantsDescriptors(status)) return false;
  if (settings.shortages && NamesAShortage(status.code(), status.message())) return false;
  CheckNotBroken(what);
  Found(what + " failed: " + status.message());
}

void Rank::Must(const std::string& what, const std::function<Status()>& call) {
  for (int tries = 4;; --tries) {
    const Status status = call();
    if (status.ok()) return;
    Trace(what + ": " + status.message());
    CheckNotBroken(what);
    if ((settings.starves && WantsDescriptors(status)) || (settings.stops && status.code() == Code::kTimeout) ||
        (settings.shortages && NamesAShortage(status.code(), status.message()))) {
      ++tries;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      continue;
    }
    if (tries == 0 || status.message().find(kAsked) == std::string::npos) Found(what + " failed: " + status.message());
  }
}

void Rank::CheckNotBroken(const std::string& after) {
  const std::string broken = session->Inspect([](const State& state) { return state.broken; });
  // A journal for which there is no room begins anew once there is.
  if (settings.shortages && page->stage == kRunning && NamesAShortage(Code::kBroken, broken)) return;
  if (!broken.empty()) Found("the session is broken after " + after + ": " + broken);
}

void Rank::Submit(Stream& stream, const Place& place, bool write, std::uint64_t value) {
  stream.Submit([this, at = place.address, bytes = place.memory->bytes, kind = place.kind, write, value] {
    std::vector<std::byte> contents(bytes);
    const auto what = [&] { return fmt::format("{}, {} bytes at {:#x}", ToText(kind), bytes, at.value); };
    if (write) Fill(contents, value);
    const Status done = write ? simulator->KernelWrites(device, at, contents) : simulator->KernelReads(device, at, contents);
    if (!done.ok()) Found("a kernel on " + what() + ": " + done.message());
    const auto wrong = write ? std::nullopt : FirstWrong(contents, value);
    if (!wrong) return;
    const auto wrong_page = std::span(contents).subspan(*wrong, std::min(kPage, bytes - *wrong));
    Found(fmt::format("contents are lost: {}, page {} of {}, should hold value {} and holds {}", what(), *wrong / kPage,
                      (bytes + kPage - 1) / kPage, value, DescribePage(wrong_page)));
  });
}

// ---- a worker --------------------------------------------------------------------------------------------------------------

Worker::Worker(Rank& its, int index, std::uint64_t seed)
    : rank(its),
      number(index),
      stream(its.streams.Add()),
      random(seed * 31 + static_cast<std::uint64_t>(its.index * 8 + index)) {}

Place* Worker::Any(const std::function<bool(const Place&)>& fits) {
  std::vector<Place*> found;
  for (const auto& place : places) {
    if (fits(*place)) found.push_back(place.get());
  }
  return found.empty() ? nullptr : found[Pick(found.size())];
}

void Worker::Forget(const Place* place) {
  std::erase_if(places, [&](const auto& one) { return one.get() == place; });
}

void Worker::Act() {
  if (const std::uint64_t resumes = rank.resumes; std::exchange(checked_, resumes) != resumes) CheckAll();
  static const int all = [] {
    int sum = 0;
    for (const Action& action : Actions()) sum += action.weight;
    return sum;
  }();
  auto chance = static_cast<int>(Pick(static_cast<std::uint64_t>(all)));
  for (const Action& action : Actions()) {
    if ((chance -= action.weight) >= 0) continue;
    if (rank.settings.Without(action.name)) return;
    const Within within(action.name, rank.settings.CallLimit());
    action.run(*this);
    std::this_thread::sleep_for(std::chrono::microseconds(Pick(300)));
    return rank.CheckNotBroken(action.name);
  }
}

void Worker::CheckAll() {
  const Within within("check all contents", rank.settings.CallLimit());
  for (const auto& place : places) {
    if (place->card) CheckCard(*this, *place);
    Use(*this, *place, false);
  }
}

void Worker::FreeAll(bool imports_only) {
  for (std::size_t i = places.size(); i-- > 0;) {
    const Kind kind = places[i]->kind;
    if (!imports_only || kind == Kind::kImport || kind == Kind::kLegacyImport) Free(*this, *places[i]);
  }
}

// ---- a rank ----------------------------------------------------------------------------------------------------------------

Rank::Rank(const Settings& its, std::shared_ptr<Page> shared, int number, SimulatorOptions simulated, const StartSession& start)
    : settings(its), page(std::move(shared)), index(number), device{number} {
  simulated.granularity = kPage;
  simulator = *Simulator::Open(std::move(simulated));
  simulator->SetStreams(&streams);
  for (std::size_t i = 0; i < tags.size(); ++i) tags[i] = std::make_unique<Tag>();
  for (const auto& tag : tags) tag->stream = streams.Add();
  for (int i = 0; i < settings.threads; ++i) workers_.push_back(std::make_unique<Worker>(*this, i, settings.seed));
  auto started = start(*simulator);
  if (!started.ok()) Found("start a session: " + started.status().message());
  session = *std::move(started);
  for (std::size_t i = 0; i < tags.size(); ++i) {
    tags[i]->preserves = i == 0;
    const auto pool =
        session->pools().Open(i == 0 ? "weights" : "cache", i == 0 ? PoolPolicy::kPreserve : PoolPolicy::kDiscard);
    if (!pool.ok()) Found("open a tag: " + pool.status().message());
    tags[i]->id = *pool;
  }
  simulator->SetHook([this](std::string_view call, std::uint64_t) { return BeforeCall(call); });
}

// Any call of the driver may take its time, and one may hang.
int Rank::BeforeCall(std::string_view call) {
  static std::atomic<std::uint64_t> calls = 0;
  const std::uint64_t mixed = calls.fetch_add(0x9e3779b97f4a7c15U) >> 40;
  if (mixed % 24 == 0) std::this_thread::sleep_for(std::chrono::microseconds(mixed % 3000));
  for (Failure& failure : failures_)
    if (in_cycle && call == failure.call && failure.nth > 0 && --failure.nth == 0) return std::exchange(failure, {}).result;
  const char* const hangs = hang.call;
  if (hangs == nullptr || call != hangs || hang.of_program == in_cycle) return 0;
  const std::chrono::milliseconds time(hang.ms.exchange(0));
  if (time.count() == 0) return 0;
  Trace(fmt::format("{} of the driver hangs for {} ms", call, time.count()));
  AllowFor(time);
  std::this_thread::sleep_for(time);
  return 0;
}

Rank::~Rank() { streams.Await(); }

void Rank::Run() {
  std::vector<std::thread> threads;
  threads.emplace_back([this] {
    NameThread(fmt::format("{}/control", index));
    ObeyOrders();
  });
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    threads.emplace_back([this, i] {
      NameThread(fmt::format("{}/{}", index, i));
      RunWorker(*workers_[i]);
    });
  }
  if (settings.starves) threads.emplace_back([this] { Starve(); });
  page->begun[static_cast<std::size_t>(index)] = true;
  for (auto& thread : threads) thread.join();
  NameThread(fmt::format("{}/end", index));
  simulator->ForgetPlannedFailures();
  ResumeTags();
  for (const auto& worker : workers_) worker->CheckAll();
  EndStage(kStopping);
  for (const auto& worker : workers_) worker->FreeAll(true);
  EndStage(kFreeingImports);
  for (const auto& worker : workers_) worker->FreeAll(false);
  FlushLate();
  CheckNothingLeft();
  EndStage(kFreeingAll);
  const Within within("close the session", settings.CallLimit());
  const Status closed = session->Close("exit");  // its journal may not have begun anew yet
  if (!closed.ok() && !(settings.shortages && NamesAShortage(closed.code(), closed.message())))
    Found("close: " + closed.message());
  EndStage(kLeaving);
}

void Rank::RunWorker(Worker& worker) {
  while (page->stage == kRunning) worker.Act();
}

void Rank::ObeyOrders() {
  std::uint64_t obeyed = 0;
  while (page->stage == kRunning) {
    if (const std::uint64_t number = page->order_number; number != obeyed) Obey(page->order, obeyed = number);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// As a program that leaks descriptors until something in it closes them.
void Rank::Starve() {
  NameThread(fmt::format("{}/descriptors", index));
  std::mt19937_64 random(settings.seed * 613 + static_cast<std::uint64_t>(index));
  while (page->stage == kRunning) {
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 300));
    ++page->starving;
    {
      std::vector<UniqueFd> taken;
      for (int fd = 0; (fd = ::dup(STDERR_FILENO)) >= 0;) taken.emplace_back(fd);
      taken.resize(taken.size() - std::min<std::size_t>(random() % 5, taken.size()));
      const std::chrono::milliseconds time(random() % 100);
      Trace(fmt::format("no descriptors for {} ms", time.count()));
      std::this_thread::sleep_for(time);
    }
    ++page->starved;
    --page->starving;
  }
}

Rank::PinnedBefore::PinnedBefore(Rank& rank)
    : rank_(rank), before_(rank.simulator->PinnedBytes()), pauses_(++rank.pauses_), alone_(rank.pausing++ == 0) {}
Rank::PinnedBefore::~PinnedBefore() { --rank_.pausing; }

void Rank::PinnedBefore::Check(const Status& failed, bool away) {
  const auto alone = [&] { return alone_ && rank_.pauses_ == pauses_; };
  if (failed.ok() || away || !rank_.settings.CountsPinned()) return;
  // A worker that frees part of a slab or reads contents back has a buffer pinned for a moment, or longer where others use the
  // machine.
  const auto longest = 100 + rank_.settings.late / std::chrono::milliseconds(20);
  for (std::int64_t wait = 0; wait < longest && alone() && rank_.simulator->PinnedBytes() > before_; ++wait)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  if (const Bytes now = rank_.simulator->PinnedBytes(); alone() && now > before_)
    Found(
        fmt::format("a pause that failed keeps {} bytes of pinned host memory, {} before: {}", now, before_, failed.message()));
}

void Rank::Meet(const Fate& fate) {
  std::this_thread::sleep_for(std::chrono::milliseconds(fate.delay_ms));
  const std::string_view call = fate.call.data();
  if (call.empty()) return;
  Trace(fmt::format("{} {} of the driver {}", call, fate.nth, fate.hang_ms > 0 ? "will hang" : "fails"));
  if (fate.undo_too) failures_[1] = {"Create", 1, fate.result};
  // What a session cannot give back when the program frees it breaks the session, so these fail in the pause or resume alone.
  const bool gives_back = call == "Unmap" || call == "Release";
  if (fate.hang_ms == 0 && gives_back) return static_cast<void>(failures_[0] = {call, fate.nth, fate.result});
  if (fate.hang_ms == 0) return static_cast<void>(simulator->FailNext(call, fate.nth, fate.result));
  hang.of_program = fate.of_program;
  hang.call = fate.call.data();  // stays as it is until all have obeyed
  hang.ms = fate.hang_ms;
  if (fate.of_program) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

void Rank::TellEnd(Answer& answer, CycleKind kind, std::uint64_t begun_before, bool succeeded) const {
  session->Inspect([&](const State& state) {
    answer.lifecycle = state.lifecycle;
    answer.began = Begun(state) != begun_before;
    answer.carried_out = answer.began && succeeded;
    for (std::size_t other = 0; other < answer.with.size(); ++other)
      answer.with.at(other) =
          state.cycle.kind == kind && std::ranges::count(state.cycle.members, SessionId{page->sessions[other]}) > 0;
    return true;
  });
}

void Rank::Obey(const Order& order, std::uint64_t number) {
  const Fate& fate = order.fates[static_cast<std::size_t>(index)];
  Answer& answer = page->answers[static_cast<std::size_t>(index)];
  const bool to_pause = order.kind == CycleKind::kPause;
  const std::uint64_t begun = session->Inspect(Begun);
  Status status;
  std::uint32_t took = 0;
  if (!fate.absent) {
    PinnedBefore pinned(*this);
    Meet(fate);
    const auto began = std::chrono::steady_clock::now();
    {
      // A call that hangs in the pause itself takes its time beside.
      const std::chrono::milliseconds own(fate.of_program ? 0 : fate.hang_ms);
      Within within(to_pause ? "the pause" : "the resume", settings.CycleLimit() + own, fate.of_program);
      if (to_pause) within.EndsWithoutOthers();
      in_cycle = true;
      Trace(fmt::format("order {}: {}", number, to_pause ? "pause" : "resume"));
      status = to_pause ? session->Pause() : session->Resume();
      // The others wait for it, as long as it takes.
      while (!to_pause && settings.starves && WantsDescriptors(status)) {
        Trace(status.message());
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        status = session->Resume();
      }
      Trace(fmt::format("order {}: {}", number, status.ok() ? "done" : status.message()));
    }
    in_cycle = false;
    took = static_cast<std::uint32_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - began).count());
    hang.call = nullptr;
    if (fate.call[0] != 0) simulator->ForgetPlannedFailures();
    failures_ = {};
    CheckNotBroken(to_pause ? "a pause" : "a resume");
    pinned.Check(to_pause ? status : Status{}, session->paused());
    if (!to_pause && status.ok()) ++resumes;
  }
  TellEnd(answer, order.kind, begun, !fate.absent && status.ok());
  answer.code = status.code();
  answer.driver_result = status.driver_result();
  answer.took_ms = took;
  std::snprintf(answer.text.data(), answer.text.size(), "%s", status.message().c_str());
  answer.order = number;
}

Status Rank::PauseBesideProgram() {
  PinnedBefore pinned(*this);
  Status status;
  {
    Within within("the pause", settings.CycleLimit());
    within.EndsWithoutOthers();
    in_cycle = true;
    status = session->PauseBesideProgram();
    in_cycle = false;
  }
  Trace("a pause between launches: " + (status.ok() ? "done" : status.message()));
  CheckNotBroken("a pause between launches");
  pinned.Check(status, session->paused());
  return status;
}

Status Rank::ResumeAsAsked() {
  const Within within("the resume", settings.CycleLimit());
  in_cycle = true;
  const Status status = session->Resume();
  in_cycle = false;
  Trace("a resume from outside: " + (status.ok() ? "done" : status.message()));
  CheckNotBroken("a resume from outside");
  if (status.ok()) ++resumes;
  return status;
}

// ---- the end ---------------------------------------------------------------------------------------------------------------

void Rank::ResumeTags() {
  for (const auto& tag : tags) {
    const std::lock_guard lock(tag->use);
    tag->stream->SetCapturing(false);
    if (!tag->usable) ResumeTag(*this, *tag);
  }
}

// What was freed while its stream was captured is given back by the next allocation.
void Rank::FlushLate() {
  for (const auto& tag : tags) {
    const auto part = session->pools().Allocate(tag->id, kPage, device);
    if (!part.ok()) Found("allocate at the end: " + part.status().message());
    if (const Status freed = session->pools().Free(*part, tag->stream); !freed.ok()) Found("free: " + freed.message());
  }
}

void Rank::CheckNothingLeft() {
  const Within within("trim host memory", settings.CallLimit());
  session->devices().TrimPinned(0);
  SimulatorSnapshot left;
  for (int tries = 500; tries > 0; --tries) {  // references of other processes are dropped in their own time
    left = simulator->Snapshot();
    if (left.handles.empty() && left.ranges.empty() && left.mappings.empty()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const State state = session->CopyState();
  if (!left.handles.empty() || !left.ranges.empty() || !left.mappings.empty())
    Found(fmt::format("all is freed, and the driver still holds\n{}{} allocations are known", amem::ToText(left),
                      state.allocations.size()));
  if (!state.allocations.empty() || !state.ranges.empty() || !state.mappings.empty() || !state.legacy.empty())
    Found(fmt::format("all is freed, and the state knows {} allocations, {} ranges, {} mappings and {} pieces of cuMemAlloc",
                      state.allocations.size(), state.ranges.size(), state.mappings.size(), state.legacy.size()));
  if (const Status invariants = CheckInvariants(state); !invariants.ok()) Found("at the end: " + invariants.message());
  if (const Bytes pinned = simulator->PinnedBytes(); pinned != 0)
    Found(fmt::format("{} bytes of host memory are pinned after all were given back", pinned));
}

// Waits until all ranks have ended it as well.
void Rank::EndStage(Stage stage) {
  page->finished[static_cast<std::size_t>(index)] = stage;
  while (page->stage <= stage && stage != kLeaving) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace amem::world
