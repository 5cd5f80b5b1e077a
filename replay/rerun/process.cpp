#include "replay/rerun/process.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <string_view>
#include <utility>

#include "replay/peers/unix/socket.h"
#include "statemachine/apply.h"

namespace amem {
namespace {

constexpr int kAnswerWithin_ms = 120'000;

using enum RerunQuestion::What;

bool Send(const UniqueFd& socket, const RerunQuestion& question) {
  return ::send(socket.get(), &question, sizeof question, MSG_NOSIGNAL) >= 0;
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
  if (!Send(socket_, {kEnd})) ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

RerunRank::Outcome RerunProcess::Ask(const RerunQuestion& question) {
  const auto failed = [&](const std::string& why) {
    ::kill(pid_, SIGKILL);
    return Outcome{.failure = {Code::kPeerLost, "the process " + std::to_string(pid_) + " that replays it " + why}};
  };
  if (!Send(socket_, question)) return failed("has ended");
  pollfd readable{socket_.get(), POLLIN, 0};
  int ready = 0;
  while ((ready = ::poll(&readable, 1, kAnswerWithin_ms)) < 0 && errno == EINTR) {
  }
  if (ready <= 0) return failed("has not answered for " + std::to_string(kAnswerWithin_ms / 1000) + " s");
  std::vector<char> bytes(std::size_t{1} << 16);
  const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
  if (got <= 0) return failed("has ended");
  const auto answer = ReadAnswer({bytes.data(), static_cast<std::size_t>(got)});
  if (!answer) return failed("gave an answer that cannot be read");
  counts_ = answer->counts;
  return *answer;
}

Status RerunProcess::BuildOwn() { return Ask({kBuildOwn}).failure; }
Status RerunProcess::BuildImports() { return Ask({kBuildImports}).failure; }

RerunRank::Outcome RerunProcess::Take(const Event& event, bool now) {
  put_off_ = event.seq;
  const Status applied = Apply(recorded_, event);
  return now || !applied.ok() ? Settle() : Outcome{};  // what cannot follow here cannot follow there
}

RerunRank::Outcome RerunProcess::Settle() {
  if (!put_off_) return {};
  return Ask({kTake, std::exchange(put_off_, {}).value});
}

Status RerunProcess::Compare() { return Ask({kCompare, Digest(recorded_)}).failure; }
Status RerunProcess::LeaveOnly(DeviceOrdinal device, Bytes bytes) { return Ask({kLeaveOnly, bytes, device}).failure; }

}  // namespace amem
