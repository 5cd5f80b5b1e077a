// The data connection to one owner: imports, imports anew in a resume or in the undo of a pause, and dropped references, in the
// order of the calls. If it breaks and the owner lives, the next request makes another.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "replay/peers/unix/connection.h"
#include "replay/peers/unix/service.h"

namespace amem {

// Asks again while the owner is busy.
template <class Ask>
auto UntilFree(Deadline until, const Ask& ask) {
  constexpr std::chrono::milliseconds kBetween{5};
  auto answer = ask();
  for (; IsBusy(answer.status()) && !Passed(until); answer = ask()) std::this_thread::sleep_for(kBetween);
  return answer;
}

class OwnerConnection final : public std::enable_shared_from_this<OwnerConnection> {
 public:
  OwnerConnection(const ConnectionContext& context, PeerService& service, SessionId owner)
      : context_(context), service_(service), owner_(owner) {}

  // Both wait, first for other threads that use this connection. Messages name the owner and what was wanted.
  Result<SharedAllocation> Import(const Token& token, AllocationId as, Deadline until);
  Result<std::vector<SharedAllocation>> Reimport(const std::vector<ShareRequest>& requests, Deadline until);
  // Does not wait: what finds no room is sent later, before anything else.
  void Drop(const ShareRequest& reference);
  // Sends drops that the end of a connection has held up. Waits; does nothing if there are none.
  void SendHeldUp(Deadline until);
  void Shut();  // this process stops serving

 private:
  class Turn;
  class Watched;
  template <class Work>
  std::invoke_result_t<Work&> InTurn(const std::string& doing, Deadline deadline, const Work& work);
  Status Connect(Deadline deadline);
  Status Send(MessageBody body, std::uint64_t request, Deadline deadline);
  Result<bool> SendDropsLocked();
  bool Flush();
  void Lost(const std::string& reason);
  void Broken(const PeerConnection& connection);
  [[nodiscard]] bool IsLost() const;
  Result<SharedAllocation> AwaitShared(std::uint64_t request, Deadline deadline);
  Status Failed(const std::string& doing, Deadline began, const Status& why) const;
  Result<std::vector<SharedAllocation>> Exchange(const std::vector<ShareRequest>& requests, Deadline deadline);

  const ConnectionContext context_;
  PeerService& service_;
  const SessionId owner_;

  std::mutex turn_mutex_;
  std::condition_variable turn_changed_;
  bool busy_ = false;  // a request is under way

  mutable std::mutex send_mutex_;  // guards all below, and the order of sending
  // The last one, or null; only the thread whose turn it is replaces it, and uses it without the mutex.
  std::shared_ptr<PeerConnection> connection_;
  bool connected_ = false;  // it is watched, and has not ended
  std::optional<std::string> lost_;
  std::vector<ShareRequest> drops_;  // waiting for room, or for a connection
};

}  // namespace amem
