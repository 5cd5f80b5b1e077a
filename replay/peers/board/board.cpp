#include "replay/peers/board/board.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "journal/base/clock.h"
#include "journal/base/file.h"
#include "statemachine/fnv1a.h"

namespace amem::board {

using agreement::Ballot;
using agreement::Cause;
using agreement::kBallots;
using agreement::Vote;

namespace words {
namespace {

constexpr int kRoundBits = 28, kKeepsBit = 30, kCheckBits = 12;
constexpr std::uint64_t Mask(int bits) { return (std::uint64_t{1} << bits) - 1; }

// The check sum takes the highest bits. A word of zeros says nothing, everywhere: nobody has written it.
std::uint64_t Checked(std::uint64_t payload, std::uint64_t board, std::uint64_t place) {
  Fnv1a sum(board ^ Fnv1a::kOffsetBasis);
  sum.Add(place);
  sum.Add(payload);
  return payload | (sum.value() ^ sum.value() >> 32) << (64 - kCheckBits);
}
std::optional<std::uint64_t> PayloadIn(std::uint64_t word, std::uint64_t board, std::uint64_t place) {
  const std::uint64_t payload = word & Mask(64 - kCheckBits);
  if (word != 0 && Checked(payload, board, place) != word) return {};
  return payload;
}

}  // namespace

std::uint64_t Encode(const VoteWord& vote, std::uint64_t board, std::uint64_t place) {
  const std::uint64_t keeps = vote.keeps ? 1 : 0;
  return Checked(vote.round | static_cast<std::uint64_t>(vote.vote) << kRoundBits | keeps << kKeepsBit, board, place);
}
std::uint64_t Encode(const CellWord& cell, std::uint64_t board, std::uint64_t place) {
  const auto cause = static_cast<std::uint64_t>(cell.decision.cause);
  return Checked(
      cell.round | cause << kRoundBits | cell.decision.by << (kRoundBits + 4) | cell.decision.culprit << (kRoundBits + 14),
      board, place);
}
std::optional<VoteWord> VoteIn(std::uint64_t word, std::uint64_t board, std::uint64_t place) {
  const auto payload = PayloadIn(word, board, place);
  if (!payload || *payload >> (kKeepsBit + 1) != 0) return {};
  const std::uint64_t vote = *payload >> kRoundBits & Mask(kKeepsBit - kRoundBits);
  if (vote > static_cast<std::uint64_t>(Vote::kNo)) return {};
  return VoteWord{static_cast<RoundNumber>(*payload & Mask(kRoundBits)), static_cast<Vote>(vote),
                  (*payload >> kKeepsBit & 1) != 0};
}
std::optional<CellWord> CellIn(std::uint64_t word, std::uint64_t board, std::uint64_t place) {
  const auto payload = PayloadIn(word, board, place);
  if (!payload) return {};
  const std::uint64_t cause = *payload >> kRoundBits & Mask(4);
  if (cause >= static_cast<std::uint64_t>(Cause::kSuperseded)) return {};
  return CellWord{static_cast<RoundNumber>(*payload & Mask(kRoundBits)),
                  {static_cast<Cause>(cause), static_cast<std::size_t>(*payload >> (kRoundBits + 4) & Mask(10)),
                   static_cast<std::size_t>(*payload >> (kRoundBits + 14) & Mask(10))}};
}

}  // namespace words

namespace {

constexpr std::uint64_t kBoardMagic = 0x0044524f424d4541;  // "AMEBORD"
constexpr std::uint32_t kBoardVersion = 2;
constexpr std::size_t kLine = 64;
constexpr RoundNumber kRoundsMost = (1U << 28) - 2;

// All atomics of this room are lock-free, so they mean the same in every process that maps them.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

struct alignas(kLine) Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t members;
  std::uint64_t id;
  std::uint64_t set;  // of scope and sessions
  std::uint64_t sum;  // of all that is before it
};
struct alignas(kLine) Shared {
  std::array<std::atomic<std::uint64_t>, kBallots> cells;
  std::atomic<std::uint32_t> changes;
};
struct StatementWords {
  std::atomic<std::uint64_t> tag;    // as a vote word: the round whose statement it is, when it is whole; 0 while it is written
  std::atomic<std::uint64_t> sum;    // of the text
  std::atomic<std::uint64_t> kind;   // code, driver result
  std::atomic<std::uint64_t> about;  // session that reported it
  std::atomic<std::uint64_t> length;
  std::array<std::atomic<std::uint64_t>, kStatementBytes / 8> text;
};

constexpr std::uint64_t PlaceOf(Ballot ballot) { return static_cast<std::uint64_t>(ballot); }
constexpr std::uint64_t PlaceOf(std::size_t seat, Ballot ballot) { return (seat + 1) * 16 + PlaceOf(ballot); }
constexpr std::uint64_t StatementPlaceOf(std::size_t seat, Ballot ballot) { return PlaceOf(seat, ballot) + 8; }

std::uint64_t SumOf(const Header& header) {
  Fnv1a sum;
  sum.Add({reinterpret_cast<const std::byte*>(&header), offsetof(Header, sum)});
  return sum.value();
}
std::uint64_t DigestOf(const std::string& scope, const std::vector<SessionId>& members) {
  Fnv1a sum;
  for (const char c : scope) sum.AddByte(static_cast<std::uint8_t>(c));
  for (const SessionId session : members) sum.Add(session.value);
  return sum.value();
}

}  // namespace

struct alignas(kLine) SeatWords {
  std::array<std::atomic<std::uint64_t>, kBallots> votes, at_ns;
  std::atomic<std::uint64_t> until_ns;
  std::array<StatementWords, kBallots> statements;
};

namespace {

constexpr Bytes BytesFor(std::size_t members) { return sizeof(Header) + sizeof(Shared) + members * sizeof(SeatWords); }

std::uint64_t SumOf(const StatementWords& s) {
  Fnv1a sum;
  for (const auto* word : {&s.kind, &s.about, &s.length}) sum.Add(word->load(std::memory_order_relaxed));
  for (const auto& word : s.text) sum.Add(word.load(std::memory_order_relaxed));
  return sum.value();
}

}  // namespace

agreement::View BoardReading::ViewOf(std::size_t seat, bool set_changed) const {
  agreement::View view{.seats = seats, .self = seat, .set_changed = set_changed};
  for (std::size_t b = 0; b < kBallots; ++b) view.decisions[b] = decisions[b].cause;
  return view;
}

Board::Board(SharedPages pages, std::vector<SessionId> members)
    : pages_(std::move(pages)), members_(std::move(members)), id_(reinterpret_cast<const Header*>(pages_.data())->id) {}

Result<Board> Board::Make(const std::string& scope, const std::vector<SessionId>& members) {
  const Bytes bytes = BytesFor(members.size());
  return MakeIn(SharedPages::Make("amem-board", bytes, SharedPages::Writers::kAll, bytes), scope, members);
}

Result<Board> Board::MakePrivate(const std::string& scope, const std::vector<SessionId>& members) {
  return MakeIn(SharedPages::MakePrivate(BytesFor(members.size())), scope, members);
}

Result<Board> Board::MakeIn(Result<SharedPages> made, const std::string& scope, const std::vector<SessionId>& members) {
  if (members.empty() || members.size() > kMembersMost || !std::ranges::is_sorted(members))
    return Status{Code::kInvalid,
                  fmt::format("a board for {} sessions; it has place for 1 to {}", members.size(), kMembersMost)};
  AMEM_ASSIGN(auto pages, std::move(made));
  Header header{kBoardMagic, kBoardVersion, static_cast<std::uint32_t>(members.size()), 0, DigestOf(scope, members), 0};
  if (::getentropy(&header.id, sizeof header.id) != 0) return Status{Code::kIo, "a board's id: " + ErrnoText(errno)};
  header.sum = SumOf(header);
  std::memcpy(pages.data(), &header, sizeof header);
  return Board(std::move(pages), members);
}

Result<Board> Board::Open(int fd, const std::string& scope, const std::vector<SessionId>& members) {
  AMEM_ASSIGN(auto pages, SharedPages::Open(fd, sizeof(Header), SharedPages::Writers::kAll));
  Header header;
  std::memcpy(&header, pages.data(), sizeof header);
  if (header.magic != kBoardMagic) return Status{Code::kCorrupt, fmt::format("descriptor {} is no board of AMem", fd)};
  if (header.version != kBoardVersion) {
    return Status{Code::kUnsupported,
                  fmt::format("a board of version {} (this build knows {}): use one version of AMem in the whole job",
                              header.version, kBoardVersion)};
  }
  if (header.sum != SumOf(header) || pages.bytes() < BytesFor(header.members))
    return Status{Code::kCorrupt, "a board whose header has been written over"};
  if (header.members != members.size() || header.set != DigestOf(scope, members))
    return Status{Code::kInvalid, "a board of other sessions, or of another scope"};
  return Board(std::move(pages), members);
}

bool Board::HeaderIsWhole() const {
  Header header;
  std::memcpy(&header, pages_.data(), sizeof header);
  return header.id == id_ && header.sum == SumOf(header);
}
std::atomic<std::uint64_t>& Board::CellOf(Ballot ballot) const {
  return reinterpret_cast<Shared*>(pages_.data() + sizeof(Header))->cells[static_cast<std::size_t>(ballot)];
}
std::atomic<std::uint32_t>& Board::ChangesWord() const {
  return reinterpret_cast<Shared*>(pages_.data() + sizeof(Header))->changes;
}
SeatWords& Board::Seat(std::size_t seat) const {
  return reinterpret_cast<SeatWords*>(pages_.data() + sizeof(Header) + sizeof(Shared))[seat];
}

std::optional<std::size_t> Board::SeatOf(SessionId session) const {
  const auto at = std::ranges::lower_bound(members_, session);
  if (at == members_.end() || *at != session) return {};
  return static_cast<std::size_t>(at - members_.begin());
}

Result<RoundNumber> Board::NextRound() const {
  const auto cell = words::CellIn(CellOf(Ballot::kCome).load(), id_, PlaceOf(Ballot::kCome));
  bool whole = cell && HeaderIsWhole();
  for (std::size_t b = 0; b < kBallots; ++b) {
    const auto ballot = static_cast<Ballot>(b);
    whole = whole && words::CellIn(CellOf(ballot).load(), id_, PlaceOf(ballot));
  }
  if (!whole || cell->round >= kRoundsMost)
    return Status{Code::kCorrupt, "the board of this set has been written over, or is used up"};
  return cell->round + 1;
}

void Board::ReadDecisions(RoundNumber round, BoardReading& reading) const {
  reading.round = round;
  const bool whole = HeaderIsWhole();
  for (std::size_t b = 0; b < kBallots; ++b) {
    const auto ballot = static_cast<Ballot>(b);
    const auto cell = words::CellIn(CellOf(ballot).load(), id_, PlaceOf(ballot));
    BallotDecision& decision = reading.decisions[b];
    decision = {};
    if (!whole || !cell || cell->decision.by >= members_.size() || cell->decision.culprit >= members_.size()) {
      decision.cause = Cause::kDamaged;
    } else if (cell->round == round) {
      decision = cell->decision;
    } else if (cell->round > round) {
      decision.cause = ballot == Ballot::kCome ? Cause::kSuperseded : Cause::kDamaged;
    }
  }
}

BoardReading Board::Read(RoundNumber round, const std::function<bool(std::size_t)>& ended) const {
  BoardReading reading;
  ReadAgain(round, ended, reading);
  return reading;
}

void Board::ReadAgain(RoundNumber round, const std::function<bool(std::size_t)>& ended, BoardReading& reading) const {
  if (reading.round != round || reading.seats.size() != members_.size()) {
    reading.seats.assign(members_.size(), {});
    reading.voted_at_ns.assign(members_.size(), {});
    reading.keeps.assign(members_.size(), false);
    reading.vote_words.assign(members_.size(), {});
  }
  reading.until_ns = 0;
  ReadDecisions(round, reading);
  for (std::size_t seat = 0; seat < members_.size(); ++seat) {
    reading.seats[seat].ended = ended(seat);
    for (std::size_t b = 0; b < kBallots; ++b) {
      const std::uint64_t word = Seat(seat).votes[b].load();
      if (std::exchange(reading.vote_words[seat][b], word) != word) ReadVote(seat, static_cast<Ballot>(b), word, reading);
    }
    const bool came = reading.seats[seat].votes[0] == Vote::kYes && reading.voted_at_ns[seat][0] != 0;  // to this round
    if (!came) continue;
    const std::uint64_t until = Seat(seat).until_ns.load(std::memory_order_relaxed);
    if (until != 0 && (reading.until_ns == 0 || until < reading.until_ns)) reading.until_ns = until;
  }
}

void Board::ReadVote(std::size_t seat, Ballot ballot, std::uint64_t word, BoardReading& reading) const {
  const auto b = static_cast<std::size_t>(ballot);
  const auto vote = words::VoteIn(word, id_, PlaceOf(seat, ballot));
  const bool of_this_round = vote && vote->round == reading.round;
  // Who votes in a later round had come to this one, or `come` was decided before it could: it is not absent.
  const bool went_on = vote && ballot == Ballot::kCome && vote->round > reading.round;
  reading.seats[seat].votes[b] = !vote ? Vote::kDamaged : went_on ? Vote::kYes : of_this_round ? vote->vote : Vote::kNone;
  reading.voted_at_ns[seat][b] = of_this_round ? Seat(seat).at_ns[b].load(std::memory_order_relaxed) : 0;
  if (ballot == Ballot::kCome) reading.keeps[seat] = of_this_round && vote->vote == Vote::kYes && vote->keeps;
}

void Board::WriteStatement(std::size_t seat, Ballot ballot, RoundNumber round, const Status& what) {
  StatementWords& s = Seat(seat).statements[static_cast<std::size_t>(ballot)];
  s.tag.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  std::array<char, kStatementBytes> text{};
  const std::string_view message = std::string_view(what.message()).substr(0, text.size());
  std::ranges::copy(message, text.begin());
  s.kind.store(static_cast<std::uint64_t>(what.code()) |
                   static_cast<std::uint64_t>(static_cast<std::uint32_t>(what.driver_result())) << 32,
               std::memory_order_relaxed);
  s.about.store(what.reported_by().value, std::memory_order_relaxed);
  s.length.store(message.size(), std::memory_order_relaxed);
  for (std::size_t i = 0; i < s.text.size(); ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + 8 * i, 8);
    s.text[i].store(word, std::memory_order_relaxed);
  }
  s.sum.store(SumOf(s), std::memory_order_relaxed);
  s.tag.store(words::Encode(words::VoteWord{round, Vote::kNo}, id_, StatementPlaceOf(seat, ballot)), std::memory_order_release);
}

std::optional<Status> Board::StatementOf(std::size_t seat, Ballot ballot, RoundNumber round) const {
  const StatementWords& s = Seat(seat).statements[static_cast<std::size_t>(ballot)];
  const std::uint64_t tag = s.tag.load(std::memory_order_acquire);
  const auto of = words::VoteIn(tag, id_, StatementPlaceOf(seat, ballot));
  if (!of || of->round != round) return {};
  const std::uint64_t kind = s.kind.load(std::memory_order_relaxed), about = s.about.load(std::memory_order_relaxed);
  const std::uint64_t length = s.length.load(std::memory_order_relaxed), sum = SumOf(s),
                      told = s.sum.load(std::memory_order_relaxed);
  std::array<char, kStatementBytes> text;
  for (std::size_t i = 0; i < s.text.size(); ++i) {
    const std::uint64_t word = s.text[i].load(std::memory_order_relaxed);
    std::memcpy(text.data() + 8 * i, &word, 8);
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  const std::uint64_t code = kind & 0xffffffff;
  if (s.tag.load(std::memory_order_relaxed) != tag || sum != told || length > text.size() ||
      code > static_cast<std::uint64_t>(Code::kNoDescriptors))
    return {};
  return Status{static_cast<Code>(code), std::string(text.data(), length),
                static_cast<int>(static_cast<std::uint32_t>(kind >> 32))}
      .ReportedBy(SessionId{about});
}

void Board::SetUntil(std::size_t seat, std::uint64_t until_ns) {
  Seat(seat).until_ns.store(until_ns, std::memory_order_relaxed);
}

void Board::CastVote(std::size_t seat, RoundNumber round, Ballot ballot, bool yes, const Status& why, bool keeps) {
  const auto b = static_cast<std::size_t>(ballot);
  if (!yes) WriteStatement(seat, ballot, round, why);
  Seat(seat).at_ns[b].store(MonotonicNs(), std::memory_order_relaxed);
  Seat(seat).votes[b].store(
      words::Encode(words::VoteWord{round, yes ? Vote::kYes : Vote::kNo, keeps}, id_, PlaceOf(seat, ballot)));
}

bool Board::Decide(std::size_t seat, RoundNumber round, Ballot ballot, Cause cause, std::size_t culprit, const Status& seen) {
  std::uint64_t before = CellOf(ballot).load();
  const auto cell = words::CellIn(before, id_, PlaceOf(ballot));
  if (!cell || cell->round >= round) return false;
  // A no that this member has voted has a statement already, which is the reason.
  if (IsFailure(cause) && cause != Cause::kVotedNo) WriteStatement(seat, ballot, round, seen);
  const std::uint64_t after = words::Encode(words::CellWord{round, {cause, seat, culprit}}, id_, PlaceOf(ballot));
  if (!CellOf(ballot).compare_exchange_strong(before, after)) return false;
  Nudge();
  return true;
}

void Board::AwaitChange(std::uint32_t ticket, Deadline until) const {
  const auto left = std::max(std::chrono::nanoseconds(0), std::chrono::nanoseconds(until - Now()));
  timespec time{};
  time.tv_sec = static_cast<std::time_t>(left.count() / 1'000'000'000);
  time.tv_nsec = static_cast<long>(left.count() % 1'000'000'000);
  ::syscall(SYS_futex, &ChangesWord(), FUTEX_WAIT, ticket, &time, nullptr, 0);
}

void Board::Nudge() {
  ++ChangesWord();
  ::syscall(SYS_futex, &ChangesWord(), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace amem::board
