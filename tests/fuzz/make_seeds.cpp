// Writes the seeds of the fuzz targets: fuzz_make_seeds DIRECTORY. To be run again when a kind of event or message is added.
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "journal/codec.h"
#include "journal/journal.h"
#include "replay/peers/messages.h"
#include "replay/peers/token.h"
#include "tests/journal/samples.h"

namespace {

void Write(const std::filesystem::path& path, std::span<const std::byte> bytes, const std::string& prefix = {}) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file << prefix;
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

int main(int argc, char** argv) {
  using namespace amem;
  if (argc != 2) return 1;
  const std::filesystem::path seeds = argv[1];
  Encoder encoder;
  for (std::size_t kind = 0; kind < kEventKinds; kind += 3) {
    Event event{SequenceNumber{kind + 1}, 2, 3, test::Sample(kind)};
    Write(seeds / "event" / std::to_string(kind), encoder.Encode(event));
  }
  const PeerIdentity who{SessionId{1}, "host", 2, 3, 4};
  const std::vector<MessageBody> bodies = {HelloMessage{1, 1, Purpose::kRound, who, SessionId{2}},
                                           WelcomeMessage{1, who},
                                           FailureMessage{{Code::kDriver, "why", 2}},
                                           ImportMessage{AllocationId{3}, Token{SessionId{1}, AllocationId{2}, {}, 0}},
                                           ReimportMessage{{{AllocationId{1}, AllocationId{2}}}},
                                           SharedMessage{{{}}},
                                           AwaitingMessage{},
                                           AskBoardMessage{"weights", {SessionId{1}, SessionId{2}}, 3}};
  for (std::size_t i = 0; i < bodies.size(); ++i) Write(seeds / "message" / std::to_string(i), *EncodeMessage({i, bodies[i]}));
  Write(seeds / "token" / "0", Encode(Token{SessionId{1}, AllocationId{2}, {}, 3}));
  std::mt19937_64 random(7);
  for (int i = 0; i < 6; ++i) {
    std::string bytes;
    for (int n = 0; n < 200; ++n) bytes.push_back(static_cast<char>(random()));
    Write(seeds / "state" / std::to_string(i), std::as_bytes(std::span(bytes)));
  }
  // A journal of a few events that its writer left: the tail has them.
  const std::filesystem::path directory = seeds / "journal";
  std::string whole;
  JournalOptions options;
  options.directory = directory;
  options.tail_bytes = 8192;
  options.map_bytes = Bytes{1} << 20;
  {
    auto writer = JournalWriter::Open(options, SessionId{0xaa});
    if (!writer.ok()) return 2;
    for (std::uint64_t seq = 1; seq < 8; ++seq) {
      if (!(*writer)->Append({SequenceNumber{seq}, seq, 1, test::Sample(seq)}).ok()) return 3;
    }
    if (!(*writer)->Flush().ok()) return 4;
    for (std::uint64_t seq = 8; seq < 12; ++seq) {
      if (!(*writer)->Append({SequenceNumber{seq}, seq, 1, test::Sample(seq)}).ok()) return 3;
    }
    unsigned n = 0;
    for (const char* name : {"tail", "data.mdb"}) {
      std::ifstream file((*writer)->Directory() / name, std::ios::binary);
      std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      if (bytes.size() > 40'000) bytes.resize(40'000);
      Write(seeds / "reader" / name, std::as_bytes(std::span(bytes)), std::string(1, static_cast<char>(n++)));
      for (std::size_t at = 0; at < bytes.size(); at += 0xffff) {
        const std::string piece = bytes.substr(at, 0xffff);
        whole += {static_cast<char>(n % 2), static_cast<char>(piece.size()), static_cast<char>(piece.size() >> 8)};
        whole += piece;
      }
    }
  }
  Write(seeds / "directory" / "0", {}, whole);
  // A pack before it is compressed: a session, and events that can be folded.
  std::string blocks(1, '\0');
  const auto block = [&](std::uint32_t kind, std::string_view bytes) {
    const std::uint32_t header[2] = {kind, static_cast<std::uint32_t>(bytes.size())};
    blocks.append(reinterpret_cast<const char*>(header), sizeof header).append(bytes);
  };
  for (std::uint64_t session = 1; session < 3; ++session) {
    block(1, "{\"session\":" + std::to_string(session) + ",\"pid\":7,\"status\":\"live\",\"as_of_ns\":99000}");
    for (std::uint64_t seq = 1; seq < 20; ++seq) {
      const auto message = encoder.Encode(test::LegalEvent(seq));
      block(3, {reinterpret_cast<const char*>(message.data()), message.size()});
    }
  }
  block(4, "a sentence about damage");
  Write(seeds / "pack" / "0", {}, blocks);
  // Another, whose times are whatever fits into them.
  blocks.assign(1, '\0');
  const std::uint64_t times[] = {~0ULL, 1ULL << 63, 1, (1ULL << 63) - 1, 1ULL << 62, 2};
  for (std::uint64_t session = 1; session < 4; ++session) {
    block(1, "{\"session\":" + std::to_string(session) + ",\"pid\":7,\"status\":\"live\",\"as_of_ns\":18446744073709551615}");
    const SessionOpened opened{.session = SessionId{session},
                               .host = "h",
                               .boot_id = "boot " + std::to_string(session),
                               .realtime_ns = times[session],
                               .monotonic_ns = times[session + 1]};
    const EventBody events[] = {opened,
                                HostAllocated{Address{1}, ~0ULL >> 1, 0, false},
                                HostAllocated{Address{1ULL << 63}, ~0ULL >> 1, 0, false},
                                PeerConnected{SessionId{session % 3 + 1}, "h", 1, 0, 0},
                                PhaseBegun{PhaseKind::kPauseArrive},
                                CycleBegun{CycleKind::kPause, 1, {SessionId{1}, SessionId{2}}},
                                CycleDone{CycleKind::kPause, 1, ~0ULL},
                                PeerLost{SessionId{session % 3 + 1}, "died"}};
    for (std::uint64_t seq = 1; seq <= std::size(events); ++seq) {
      const auto message =
          encoder.Encode(Event{SequenceNumber{seq}, times[(seq + session) % std::size(times)], 3, events[seq - 1]});
      block(3, {reinterpret_cast<const char*>(message.data()), message.size()});
    }
  }
  Write(seeds / "pack" / "2", {}, blocks);
  std::filesystem::remove_all(directory);
  return 0;
}
