#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <utility>

#include "replay/peers/unix/socket.h"
#include "replay/rerun/rank.h"
#include "statemachine/apply.h"

namespace amem {
namespace {

constexpr int kAnswerWithin_ms = 120'000;

using enum RerunQuestion::What;

bool Send(const UniqueFd& socket, const RerunQuestion& question) {
  return ::send(socket.get(), &question, sizeof question, MSG_NOSIGNAL) >= 0;
}

class RerunProcess final : public RerunRank {
 public:
  RerunProcess(pid_t pid, UniqueFd socket, State start) : pid_(pid), socket_(std::move(socket)), recorded_(std::move(start)) {}
  ~RerunProcess() override {
    if (!Send(socket_, {kEnd})) ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  Status BuildOwn() override { return Ask({kBuildOwn}).failure; }
  Status BuildImports() override { return Ask({kBuildImports}).failure; }
  Outcome Take(const Event& event, bool now) override {
    put_off_ = event.seq;
    const Status applied = Apply(recorded_, event);
    return now || !applied.ok() ? Settle() : Outcome{};  // what cannot follow here cannot follow there
  }
  Outcome Settle() override {
    if (!put_off_) return {};
    return Ask({kTake, std::exchange(put_off_, {}).value});
  }
  Status Compare() override { return Ask({kCompare, Digest(recorded_)}).failure; }
  Status LeaveOnly(DeviceOrdinal device, Bytes bytes) override { return Ask({kLeaveOnly, bytes, device}).failure; }
  [[nodiscard]] const State& recorded() const override { return recorded_; }
  [[nodiscard]] Counts counts() const override { return counts_; }

 private:
  Outcome Ask(const RerunQuestion& question) {
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

  const pid_t pid_;
  UniqueFd socket_;
  State recorded_;  // folded here from the same journal
  SequenceNumber put_off_;
  Counts counts_;
};

}  // namespace

Result<std::unique_ptr<RerunRank>> StartRerunProcess(const RerunProcessOptions& options, State start) {
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
  return std::unique_ptr<RerunRank>(new RerunProcess(pid, std::move(ours), std::move(start)));
}

}  // namespace amem
