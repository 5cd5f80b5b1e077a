// How a rank of a test starts its session: on a simulator, with a journal and peers that the test chooses.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <utility>

#include "journal/journal.h"
#include "replay/driver/simulator/simulator.h"
#include "replay/peers/unix/unix_peers.h"
#include "replay/session/session.h"
#include "tests/stand_ins/peers/local_peers.h"

namespace amem::test {

struct SimulatedRank {
  std::unique_ptr<Simulator> simulator;  // outlives the session
  std::unique_ptr<Session> session;
};

inline SessionOpened RankOf(int rank, SessionId session) {
  SessionOpened who;
  who.session = session;
  who.host = "localhost";
  who.boot_id = "boot";
  who.pid = ::getpid();
  who.rank = rank;
  return who;
}

// A rank among others of this process; `network` outlives it.
inline SimulatedRank StartInMemory(const SimulatorOptions& simulated, const SessionOpened& who, const SessionOptions& options,
                                   std::unique_ptr<JournalWriter> journal, LocalNetwork& network) {
  SimulatedRank rank;
  rank.simulator = *Simulator::Open(simulated);
  rank.session =
      *Session::Start(options, *rank.simulator, who, std::move(journal), [&](const PeerIdentity& self, PeerDelegate& delegate) {
        return Result<std::unique_ptr<Peers>>(network.Join(self, delegate));
      });
  return rank;
}

// A rank that is a process of its own. Its job has a directory, with the simulated world, the journals and the sockets in it.
struct RankProcessOptions {
  std::filesystem::path directory;
  SimulatorOptions simulated = {};
  JournalOptions journal = {};  // its directory: "journal" there, unless it is named
  SessionOptions session = {};
  std::uint32_t timeout_ms = 30'000;
  control::RequestServer* requests = nullptr;
  bool lasting = false;         // a journal that breaks begins anew, as in a job
  bool abstract_names = false;  // peers find each other by abstract sockets, too, as in a job
  // What the session gets in place of its journal, if anything.
  std::function<std::unique_ptr<JournalWriter>(std::unique_ptr<JournalWriter>)> wrap_journal = {};
};

inline Result<std::unique_ptr<Session>> StartOn(Simulator& simulator, RankProcessOptions options, SessionOpened who) {
  who.amem_version = AMEM_VERSION;
  who.driver_version = simulator.Version();
  who.nccl_version = "none";
  who.layout = options.session.layout == Layout::kSlab ? "slab" : "direct";
  who.content = "preserve";
  options.session.deadlines = Deadlines(std::chrono::milliseconds(options.timeout_ms));
  if (options.journal.directory.empty()) options.journal.directory = options.directory / "journal";
  using Opened = Result<std::unique_ptr<JournalWriter>>;
  auto journal = options.lasting ? Opened(JournalWriter::OpenLasting(options.journal, who.session))
                                 : JournalWriter::Open(options.journal, who.session);
  if (!journal.ok()) return journal.status();
  if (options.wrap_journal) journal = options.wrap_journal(*std::move(journal));
  const auto start_peers = [&](const PeerIdentity& self, PeerDelegate& delegate) -> Result<std::unique_ptr<Peers>> {
    UnixPeersOptions peers;
    peers.socket_directory = options.directory / "sockets";
    peers.abstract_names = options.abstract_names;
    peers.deadlines = options.session.deadlines;
    peers.requests = options.requests;
    auto started = UnixPeers::Start(self, peers, delegate);
    if (!started.ok()) return started.status();
    return std::unique_ptr<Peers>(*std::move(started));
  };
  return Session::Start(options.session, simulator, std::move(who), *std::move(journal), start_peers);
}

inline Result<SimulatedRank> StartProcess(RankProcessOptions options, SessionOpened who) {
  SimulatedRank rank;
  options.simulated.world = options.directory / "world";
  auto simulator = Simulator::Open(options.simulated);
  if (!simulator.ok()) return simulator.status();
  rank.simulator = *std::move(simulator);
  auto session = StartOn(*rank.simulator, std::move(options), std::move(who));
  if (!session.ok()) return session.status();
  rank.session = *std::move(session);
  return rank;
}

}  // namespace amem::test
