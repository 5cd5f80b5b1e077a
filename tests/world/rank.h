// A rank of a world: a session on the simulator, threads that act on it by chance, and one that pauses and resumes with the
// other ranks.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "replay/driver/simulator/simulator.h"
#include "replay/session/session.h"
#include "tests/world/model.h"
#include "tests/world/page.h"
#include "tests/world/settings.h"

namespace amem::world {

class Launches;
class Rank;

// A thread of the program. What it holds is its own.
class Worker {
 public:
  Worker(Rank& rank, int index, std::uint64_t seed);
  void Act();       // one action of the table
  void CheckAll();  // the contents of all that it holds
  void FreeAll(bool imports_only);
  [[nodiscard]] std::uint64_t Pick(std::uint64_t below) { return random() % below; }
  // A place that fits, by chance; null: there is none.
  Place* Any(const std::function<bool(const Place&)>& fits);
  void Forget(const Place* place);

  Rank& rank;
  const int number;
  Stream* const stream;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Place>> places;

 private:
  std::uint64_t checked_ = 0;  // the number of resumes then
};

class Rank {
 public:
  // How a session is started on a simulator; of threads and of processes.
  using StartSession = std::function<Result<std::unique_ptr<Session>>(Simulator& simulator)>;
  Rank(const Settings& settings, std::shared_ptr<Page> page, int index, SimulatorOptions simulated, const StartSession& start);
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // Until the page says that the world ends; then everything is given back and looked at.
  void Run();

  // Over a pause. A failed one must leave no more host memory pinned than there was, unless its undo failed too: then the
  // contents are away, and are kept there. Nobody can tell while others pin, too.
  class PinnedBefore {
   public:
    explicit PinnedBefore(Rank& rank);
    ~PinnedBefore();
    PinnedBefore(const PinnedBefore&) = delete;
    PinnedBefore& operator=(const PinnedBefore&) = delete;
    void Check(const Status& failed, bool away);

   private:
    Rank& rank_;
    const Bytes before_;
    const std::uint64_t pauses_;
    const bool alone_;
  };

  // What a call answered. False: it failed for a reason that the program has to live with; another failure is a finding.
  bool Ok(const Status& status, const std::string& what);
  // The same of what must not fail but by a fault that was asked for: it is tried again then.
  void Must(const std::string& what, const std::function<Status()>& call);
  void Submit(Stream& stream, const Place& place, bool write, std::uint64_t value);
  void CheckNotBroken(const std::string& after);
  [[nodiscard]] std::uint64_t NewValue() { return values.fetch_add(kMostRanks) + static_cast<std::uint64_t>(index) + 1; }
  Tag& AnyTag(Worker& worker) { return *tags[worker.Pick(tags.size())]; }
  [[nodiscard]] bool OwnerDied(const Memory& memory) const {
    return memory.owner >= 0 && page->dead[static_cast<std::size_t>(memory.owner)];
  }

  // As a request from outside has it, by a thread of its own.
  Status PauseBesideProgram();
  Status ResumeAsAsked();

  const Settings settings;
  const std::shared_ptr<Page> page;
  Launches* launches = nullptr;  // null: this world has none
  const int index;
  const DeviceOrdinal device;
  struct Hang {  // of the next call by that name
    std::atomic<const char*> call = nullptr;
    std::atomic<bool> of_program = false;
    std::atomic<std::uint32_t> ms = 0;
  };
  Hang hang;
  std::unique_ptr<Simulator> simulator;
  Streams streams;
  std::unique_ptr<Session> session;
  std::array<std::unique_ptr<Tag>, 2> tags;
  std::atomic<std::uint64_t> resumes = 0, values = 1;
  std::atomic<int> pausing = 0;  // scopes that may pin host memory now

 private:
  void RunWorker(Worker& worker);
  void ObeyOrders();
  void Starve();
  void Obey(const Order& order, std::uint64_t number);
  void TellEnd(Answer& answer, CycleKind kind, std::uint64_t begun_before,
               bool succeeded) const;  // how it ended, and with whom
  void Meet(const Fate& fate);
  int BeforeCall(std::string_view call);
  void ResumeTags();
  void FlushLate();
  void CheckNothingLeft();
  void EndStage(Stage stage);

  struct Failure {  // of a call that the thread of orders makes for a pause or resume
    std::string_view call;
    std::uint32_t nth = 0;
    int result = 0;
  };

  std::vector<std::unique_ptr<Worker>> workers_;
  std::array<Failure, 2> failures_;
  std::atomic<std::uint64_t> pauses_ = 0;  // that began, of all scopes
};

}  // namespace amem::world
