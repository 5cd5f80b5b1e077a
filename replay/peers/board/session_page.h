// A session's page: what it says of itself to all that may share memory with it. Handed out as a descriptor with the hello, and
// written by its owner only (SharedPages::Writers::kMakerOnly).
//
//   header   magic, version, session        before it is handed out
//   life     LifeWords                      by the thread that holds it
//   facts    two copies, of which one is in force; the other one is written, and then put in force. So facts can be read at any
//            moment, also while their owner is stopped in the middle of writing some
//
// A call's set is computed from these pages: no session has to be asked.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "replay/peers/board/life_lock.h"
#include "replay/peers/board/shared_pages.h"
#include "statemachine/event_cycle.h"
#include "statemachine/state.h"

namespace amem::board {

struct ScopeFacts {  // NCCL's memory (no tag), or a tag's
  std::string tag;
  Lifecycle lifecycle{};
  std::uint64_t cycle = 0;          // the number of its last cycle
  std::optional<CycleKind> call{};  // what call it is in
  std::uint64_t call_since_ns = 0;  // CLOCK_MONOTONIC
  // The session whose end made its last call fail before all had come; zero: none, or it has called again since.
  SessionId lost{};
  std::int32_t lost_rank = -1, lost_pid = 0;
  std::uint64_t lost_ns = 0;            // CLOCK_MONOTONIC: when that call failed
  std::vector<SessionId> neighbours{};  // with which it shares memory of that scope, either way
  friend bool operator==(const ScopeFacts&, const ScopeFacts&) = default;
};
struct SessionFacts {
  std::string host;
  std::int32_t pid = 0;  // in its own pid namespace
  std::int32_t rank = -1;
  std::int64_t group = 0;
  bool keeps = false;  // all its memory stays in place
  std::vector<ScopeFacts> scopes{};
  [[nodiscard]] const ScopeFacts* ScopeOf(const std::string& tag) const;  // null: it has none
  friend bool operator==(const SessionFacts&, const SessionFacts&) = default;
};

// The owner's. One thread at a time publishes.
class SessionPage {
 public:
  static Result<SessionPage> Make(SessionId session);
  [[nodiscard]] int fd() const { return pages_.fd(); }
  [[nodiscard]] LifeWords& life() const;
  // kOutOfMemory: more scopes and neighbours than the page has place for; what was in force stays.
  Status Publish(const SessionFacts& facts);

 private:
  explicit SessionPage(SharedPages pages) : pages_(std::move(pages)) {}
  SharedPages pages_;
};

// Another session's. Any thread.
class PeerPage {
 public:
  // kUnsupported: of another version of AMem. kCorrupt: no page. kInvalid: another session's.
  static Result<PeerPage> Open(int fd, SessionId session);
  // kNotFound: it has published none. kCorrupt: something has written over them.
  [[nodiscard]] Result<SessionFacts> Facts() const;
  [[nodiscard]] ProcessLife Life(int pidfd = -1) const;

 private:
  explicit PeerPage(SharedPages pages) : pages_(std::move(pages)) {}
  SharedPages pages_;
};

// The set of `self` in a scope: the sessions that share memory of it, directly or through others, and have not ended.
struct SharingSet {
  std::vector<SessionId> members;  // sorted, with `self`
  std::vector<SessionId> unknown;  // of these nothing can be read, so the set may be larger; sorted
};
struct Sighted {
  bool ended = false;
  std::optional<SessionFacts> facts{};  // none: its page is not here, or is damaged
};
SharingSet SetOf(SessionId self, const std::string& tag, const std::function<Sighted(SessionId)>& page);

}  // namespace amem::board
