// The members of one call, as their pages show them, and the board on which they vote. One thread at a time.
//
//   Find publishes what this session is about to do, finds the set, and has the set's board. Nobody waits for another session's
//   service thread but at the first contact with it, and for a board's first descriptor.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "journal/base/deadline.h"
#include "replay/peers/board/board.h"
#include "replay/peers/board/session_page.h"
#include "replay/peers/peers.h"

namespace amem {

class Assembly {
 public:
  // From now on this session's page says that it is in no call; it is the last thing that a call does.
  virtual ~Assembly() = default;

  // The set as it is now, and its board. A session that has ended before this call saw it alive is no member. kRefused: a
  // member has another group. kInvalid: one waits in a call of the other kind. kTimeout: a member was to be asked for its page,
  // or for the board, and did not answer. Others: that session has no page, or it cannot be read. The message names it, and so
  // does Status::reported_by.
  virtual Status Find(Deadline until) = 0;

  // ---- after Find has succeeded
  [[nodiscard]] virtual board::Board& board() = 0;
  [[nodiscard]] virtual std::size_t seat() const = 0;
  [[nodiscard]] virtual std::vector<PeerIdentity> Members() const = 0;  // sorted by session; with this one
  // All have come. From now on this session's page says that it waits for nobody, so that its call is not taken for a mixture
  // with the next one of a member that is faster.
  virtual void Begun() = 0;
  // What RoundHooks asks. The set has not changed because a member ended: a call fails by that, and its caller is to know.
  [[nodiscard]] virtual bool SetHasChanged() = 0;
  [[nodiscard]] virtual bool HasEnded(SessionId session) = 0;
  // As its page says now, or said last.
  [[nodiscard]] virtual PeerIdentity IdentityOf(SessionId session) = 0;
  [[nodiscard]] virtual board::ScopeFacts FactsOf(SessionId session) = 0;
  // The board is damaged, or was of no use: Find has another one.
  virtual void Discard() = 0;
};

}  // namespace amem
