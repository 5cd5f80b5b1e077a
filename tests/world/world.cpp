#include "tests/world/world.h"

#include <fmt/format.h>

#include <thread>
#include <vector>

#include "tests/scenarios/start_session.h"
#include "tests/world/conductor.h"
#include "tests/world/findings.h"
#include "tests/world/rank.h"

namespace amem::world {

void RunThreads(const Settings& settings) {
  StartWatchdog();
  SetWorld(settings, -1);
  const auto page = OpenPage({});
  const auto memory = *SimulatorWorld::InMemory(kMostRanks, kCapacity);
  LocalNetwork network;
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int i = 0; i < settings.ranks; ++i) {
    SimulatorOptions simulated;
    simulated.in_memory = memory;
    ranks.push_back(std::make_unique<Rank>(settings, page, i, simulated, [&](Simulator& simulator) {
      const SessionId session{static_cast<std::uint64_t>(i) + 1};
      page->sessions[static_cast<std::size_t>(i)] = session.value;
      return Session::Start(settings.session, simulator, test::RankOf(i, session), nullptr,
                            [&](const PeerIdentity& self, PeerDelegate& delegate) {
                              return Result<std::unique_ptr<Peers>>(network.Join(self, delegate));
                            });
    }));
  }
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) threads.emplace_back([&rank] { rank->Run(); });
  Conductor(settings, page, [] {}).Run();
  for (auto& thread : threads) thread.join();
}

}  // namespace amem::world
