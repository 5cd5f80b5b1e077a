#include "replay/peers/unix/pages.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "journal/base/clock.h"
#include "journal/base/file.h"
#include "statemachine/check.h"

namespace amem {

using board::Board;
using board::PeerPage;

// So many before those go that belong to a set of which a session has ended. Boards of the living stay: if their maker made
// another one, some members would vote on the old one.
constexpr std::size_t kBoardsMost = 64;

SharedPageTable::SharedPageTable(SessionId self) : self_(self), made_ns_(MonotonicNs()) { Make(); }

void SharedPageTable::Make() {
  auto made = board::SessionPage::Make(self_);
  why_none_ = made.status();
  if (made) own_.emplace(*std::move(made));
}

// ---- this session's page ---------------------------------------------------------------------------------------------------

void SharedPageTable::Hold() {
  const std::lock_guard lock(mutex_);
  if (held_) return;
  if (!own_) Make();
  if (!own_) return;
  auto life = board::LifeHolder::Hold(own_->life());
  if (life) life_.emplace(*std::move(life));
  if (!life) why_none_ = life.status();
  held_ = life.ok();
}

void SharedPageTable::LetGo() {
  const std::lock_guard lock(mutex_);
  life_.reset();
  let_go_ = true;
}

bool SharedPageTable::HasLetGo() const {
  const std::lock_guard lock(mutex_);
  return let_go_;
}

int SharedPageTable::fd() const {
  const std::lock_guard lock(mutex_);
  return held_ ? own_->fd() : -1;
}

Status SharedPageTable::WhyNone() const {
  const std::lock_guard lock(mutex_);
  return why_none_;
}

Status SharedPageTable::PublishLocked() {
  if (!own_) return why_none_;
  return own_->Publish(facts_);
}

Status SharedPageTable::Publish(const PeerIdentity& self) {
  const std::lock_guard lock(mutex_);
  facts_.host = self.host;
  facts_.pid = self.pid;
  facts_.rank = self.rank;
  facts_.group = self.group;
  facts_.keeps = self.keeps;
  return PublishLocked();
}

Status SharedPageTable::Publish(board::ScopeFacts of_scope) {
  AMEM_CHECK(std::ranges::is_sorted(of_scope.neighbours), of_scope.tag);  // one that did not change is not written again
  AMEM_CHECK(!std::ranges::binary_search(of_scope.neighbours, self_), of_scope.tag);    // nobody is its own neighbour
  AMEM_CHECK((of_scope.lost == SessionId()) == (of_scope.lost_ns == 0), of_scope.tag);  // a loss has its time
  const std::lock_guard lock(mutex_);
  const auto at = std::ranges::find(facts_.scopes, of_scope.tag, &board::ScopeFacts::tag);
  if (at != facts_.scopes.end() && *at == of_scope) return {};
  if (at != facts_.scopes.end()) *at = std::move(of_scope);
  if (at == facts_.scopes.end()) facts_.scopes.push_back(std::move(of_scope));
  return PublishLocked();
}

board::SessionFacts SharedPageTable::OwnFacts() const {
  const std::lock_guard lock(mutex_);
  return facts_;
}

// ---- pages of others -------------------------------------------------------------------------------------------------------

// A session has one page for its life, so the first that can be read stays.
void SharedPageTable::Take(SessionId session, std::span<const UniqueFd> descriptors, bool descriptors_lost) {
  const std::lock_guard lock(mutex_);
  auto known = pages_.find(session);
  if (known != pages_.end() && known->second.ok()) return;
  const auto opened = [&]() -> Result<std::shared_ptr<const PeerPage>> {
    if (descriptors_lost) {
      return Status{Code::kNoDescriptors,
                    "this process had no room for the descriptor of its page: raise its limit of open files (ulimit -n)"};
    }
    if (descriptors.empty()) {
      return Status{Code::kUnsupported,
                    "it sent no page with its hello: it has no sealed memory or no descriptor left, which it says itself"};
    }
    AMEM_ASSIGN(auto page, PeerPage::Open(descriptors.front().get(), session));
    return std::make_shared<const PeerPage>(std::move(page));
  };
  pages_.insert_or_assign(session, opened());
}

Result<std::shared_ptr<const PeerPage>> SharedPageTable::PageOf(SessionId session) const {
  const std::lock_guard lock(mutex_);
  const auto known = pages_.find(session);
  if (known == pages_.end()) return Status{Code::kNotFound, "no hello has been exchanged with " + ToText(session)};
  return known->second;
}

// ---- boards ----------------------------------------------------------------------------------------------------------------

void SharedPageTable::Remember(const SetName& set, const std::shared_ptr<Board>& board) {
  boards_[set] = board;
  if (boards_.size() <= kBoardsMost) return;
  std::erase_if(boards_, [&](const auto& known) {  // a call is about to use this one, and may not have seen that end yet
    return known.second != board &&
           std::ranges::any_of(known.first.second, [&](SessionId session) { return ended_.contains(session); });
  });
}

Result<std::shared_ptr<Board>> SharedPageTable::HaveOwn(const std::string& scope, const std::vector<SessionId>& members,
                                                        SessionId requester, std::uint64_t instead_of) {
  if (!std::ranges::is_sorted(members) || members.empty() || members.front() != self_ ||
      !std::ranges::binary_search(members, requester)) {
    return Status{Code::kInvalid, "a board for a set in which " + ToText(self_) + " has not the lowest id, or which " +
                                      ToText(requester) + " is not in"};
  }
  const std::lock_guard lock(mutex_);
  const auto known = boards_.find({scope, members});
  if (known != boards_.end() && known->second->id() != instead_of) return known->second;
  AMEM_ASSIGN(auto made, Board::Make(scope, members));
  auto board = std::make_shared<Board>(std::move(made));
  Remember({scope, members}, board);
  return board;
}

Result<UniqueFd> SharedPageTable::HandOut(const std::string& scope, const std::vector<SessionId>& members, SessionId requester,
                                          std::uint64_t instead_of) {
  AMEM_ASSIGN(const auto board, HaveOwn(scope, members, requester, instead_of));
  UniqueFd fd(::fcntl(board->fd(), F_DUPFD_CLOEXEC, 0));
  if (!fd) return Status{CodeOfErrno(errno), "handing out a board: " + ErrnoText(errno)};
  return fd;
}

std::shared_ptr<Board> SharedPageTable::Find(const std::string& scope, const std::vector<SessionId>& members) const {
  const std::lock_guard lock(mutex_);
  const auto known = boards_.find({scope, members});
  return known == boards_.end() ? nullptr : known->second;
}

Result<std::shared_ptr<Board>> SharedPageTable::Adopt(int fd, const std::string& scope, const std::vector<SessionId>& members) {
  AMEM_ASSIGN(auto opened, Board::Open(fd, scope, members));
  auto board = std::make_shared<Board>(std::move(opened));
  const std::lock_guard lock(mutex_);
  Remember({scope, members}, board);
  return board;
}

void SharedPageTable::Forget(const std::shared_ptr<Board>& board) {
  const std::lock_guard lock(mutex_);
  std::erase_if(boards_, [&](const auto& known) { return known.second == board; });
}

void SharedPageTable::NoteEnd(SessionId session) {
  const std::lock_guard lock(mutex_);
  ended_.insert(session);
  for (auto& [set, board] : boards_)
    if (std::ranges::binary_search(set.second, session)) board->Nudge();
}

bool SharedPageTable::HasEnded(SessionId session) const {
  const std::lock_guard lock(mutex_);
  return ended_.contains(session);
}

}  // namespace amem
