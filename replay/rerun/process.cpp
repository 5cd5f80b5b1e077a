#include "replay/rerun/process.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <nlohmann/json.hpp>
#include <utility>

#include "replay/peers/unix/socket.h"
#include "statemachine/apply.h"

namespace amem {
namespace {

using RerunJson = nlohmann::json;

constexpr int kAnswerWithin_ms = 120'000;

Status StatusOf(const RerunJson& answer, const char* key) {
  const auto it = answer.find(key);
  if (it == answer.end()) return {};
  return {static_cast<Code>(it->value("code", 0)), it->value("message", "")};
}

}  // namespace

Result<std::unique_ptr<RerunProcess>> RerunProcess::Start(const RerunProcessOptions& options, State start) {
  std::array<int, 2> sockets{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets.data()) != 0)
    return Status{Code::kIo, "a socket to the process that replays " + ToText(options.self) + ": " + ErrnoText(errno)};
  UniqueFd ours(sockets[0]), theirs(sockets[1]);
  const pid_t pid = ::fork();
  if (pid < 0) return Status{Code::kIo, "a process that replays " + ToText(options.self) + ": " + ErrnoText(errno)};
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ours.Reset();
    ServeRerun(options, std::move(start), std::move(theirs));
    ::_exit(0);
  }
  return std::unique_ptr<RerunProcess>(new RerunProcess(pid, std::move(ours), std::move(start)));
}

RerunProcess::~RerunProcess() {
  constexpr std::string_view kEnd = R"({"do":"end"})";
  if (::send(socket_.get(), kEnd.data(), kEnd.size(), MSG_NOSIGNAL) < 0) ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

Result<RerunJson> RerunProcess::Ask(const std::string& question) {
  const auto failed = [&](const std::string& why) {
    ::kill(pid_, SIGKILL);
    return Status{Code::kPeerLost, "the process " + std::to_string(pid_) + " that replays it " + why};
  };
  if (::send(socket_.get(), question.data(), question.size(), MSG_NOSIGNAL) < 0) return failed("has ended");
  pollfd readable{socket_.get(), POLLIN, 0};
  int ready = 0;
  while ((ready = ::poll(&readable, 1, kAnswerWithin_ms)) < 0 && errno == EINTR) {
  }
  if (ready <= 0) return failed("has not answered for " + std::to_string(kAnswerWithin_ms / 1000) + " s");
  std::vector<char> bytes(std::size_t{1} << 16);
  const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
  if (got <= 0) return failed("has ended");
  const RerunJson answer = RerunJson::parse(bytes.data(), bytes.data() + got, nullptr, false);
  if (answer.is_discarded()) return failed("gave an answer that cannot be read");
  const auto counts = answer.value("counts", std::vector<std::uint64_t>{});
  if (counts.size() == 4) counts_ = {counts[0], counts[1], counts[2], counts[3]};
  return answer;
}

Status RerunProcess::AskFor(const std::string& question) {
  const auto answer = Ask(question);
  return answer ? StatusOf(*answer, "failure") : answer.status();
}

Status RerunProcess::BuildOwn() { return AskFor(R"({"do":"own"})"); }

Status RerunProcess::BuildImports() { return AskFor(R"({"do":"imports"})"); }

RerunRank::Outcome RerunProcess::Take(const Event& event, bool now) {
  put_off_ = event.seq;
  const Status applied = Apply(recorded_, event);
  return now || !applied.ok() ? Settle() : Outcome{};  // what cannot follow here cannot follow there
}

RerunRank::Outcome RerunProcess::Settle() {
  Outcome outcome;
  if (!put_off_) return outcome;
  const auto answer = Ask(RerunJson{{"do", "take"}, {"through", std::exchange(put_off_, {}).value}}.dump());
  if (!answer) {
    outcome.failure = answer.status();
    return outcome;
  }
  const RerunJson& json = *answer;
  outcome.failure = StatusOf(json, "failure");
  outcome.event = SequenceNumber{json.value("event", std::uint64_t{0})};
  outcome.mismatch = StatusOf(json, "mismatch");
  outcome.what = json.value("what", "");
  outcome.reproduced = json.value("reproduced", false);
  return outcome;
}

Status RerunProcess::Compare() { return AskFor(RerunJson{{"do", "compare"}, {"digest", Digest(recorded_)}}.dump()); }

Status RerunProcess::LeaveOnly(DeviceOrdinal device, Bytes bytes) {
  return AskFor(RerunJson{{"do", "leave"}, {"device", device.value}, {"bytes", bytes}}.dump());
}

}  // namespace amem
