#include "replay/peers/board/session_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <span>

#include "statemachine/fnv1a.h"

namespace amem::board {
namespace {

constexpr std::uint64_t kPageMagic = 0x0045474150454d41;  // "AMEPAGE"
constexpr std::uint32_t kPageVersion = 2;
constexpr std::size_t kFactWords = std::size_t{1} << 17;  // 1 MiB, which takes memory only where it is used

struct FactCopy {
  std::atomic<std::uint64_t> length, sum;
  std::array<std::atomic<std::uint64_t>, kFactWords> words;
};
struct PageWords {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint64_t session;
  LifeWords life;
  std::atomic<std::uint64_t> published;  // how often; the copy in force is that modulo 2. 0: none
  std::array<FactCopy, 2> copies;
};

PageWords& WordsIn(const SharedPages& pages) { return *reinterpret_cast<PageWords*>(pages.data()); }

std::uint64_t SumOfFacts(std::span<const std::uint64_t> words, std::uint64_t published) {
  Fnv1a sum;
  sum.Add(published);
  for (const std::uint64_t word : words) sum.Add(word);
  return sum.value();
}

// Facts as words, in their place in the page, or only counted. Takes no memory, for which a call might have none at its end.
class FactWriter {
 public:
  FactWriter() = default;
  FactWriter(FactCopy& copy, std::uint64_t published) : copy_(&copy) { sum_.Add(published); }
  void Add(std::uint64_t word) {
    if (copy_ != nullptr) copy_->words[count_].store(word, std::memory_order_relaxed);
    sum_.Add(word);
    ++count_;
  }
  void Add(const std::string& text) {
    Add(text.size());
    for (std::size_t at = 0; at < text.size(); at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min<std::size_t>(8, text.size() - at));
      Add(word);
    }
  }
  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] std::uint64_t sum() const { return sum_.value(); }  // as SumOfFacts

 private:
  FactCopy* copy_ = nullptr;
  std::size_t count_ = 0;
  Fnv1a sum_;
};

class FactReader {
 public:
  explicit FactReader(std::span<const std::uint64_t> words) : words_(words) {}
  std::uint64_t Word() {
    if (at_ < words_.size()) return words_[at_++];
    ok_ = false;
    return 0;
  }
  std::string Text() {
    const std::uint64_t size = Word();
    if (size > 8 * (words_.size() - at_)) ok_ = false;
    std::string text(ok_ ? size : 0, '\0');
    for (std::size_t at = 0; at < text.size(); at += 8) {
      const std::uint64_t word = Word();
      std::memcpy(text.data() + at, &word, std::min<std::size_t>(8, text.size() - at));
    }
    return text;
  }
  std::size_t Count() {  // of what follows, each at least a word
    const std::uint64_t count = Word();
    if (count > words_.size() - at_) ok_ = false;
    return ok_ ? count : 0;
  }
  template <class Enum>
  Enum Value() {
    const std::uint64_t word = Word();
    if (word > static_cast<std::uint64_t>(EnumeratorsOf(Enum{}).last)) ok_ = false;
    return ok_ ? static_cast<Enum>(word) : Enum{};
  }
  [[nodiscard]] bool AllRead() const { return ok_ && at_ == words_.size(); }

 private:
  std::span<const std::uint64_t> words_;
  std::size_t at_ = 0;
  bool ok_ = true;
};

void Write(const SessionFacts& facts, FactWriter& out) {
  out.Add(facts.host);
  out.Add(static_cast<std::uint32_t>(facts.pid));
  out.Add(static_cast<std::uint32_t>(facts.rank));
  out.Add(static_cast<std::uint64_t>(facts.group));
  out.Add(facts.keeps ? 1 : 0);
  out.Add(facts.scopes.size());
  for (const ScopeFacts& scope : facts.scopes) {
    out.Add(scope.tag);
    out.Add(static_cast<std::uint64_t>(scope.lifecycle));
    out.Add(scope.cycle);
    out.Add(scope.call ? 1 : 0);
    out.Add(static_cast<std::uint64_t>(scope.call.value_or(CycleKind{})));
    out.Add(scope.call_since_ns);
    out.Add(scope.lost.value);
    out.Add(static_cast<std::uint32_t>(scope.lost_rank));
    out.Add(static_cast<std::uint32_t>(scope.lost_pid));
    out.Add(scope.lost_ns);
    out.Add(scope.neighbours.size());
    for (const SessionId neighbour : scope.neighbours) out.Add(neighbour.value);
  }
}

std::optional<SessionFacts> FactsIn(std::span<const std::uint64_t> words) {
  FactReader in(words);
  SessionFacts facts;
  facts.host = in.Text();
  facts.pid = static_cast<std::int32_t>(in.Word());
  facts.rank = static_cast<std::int32_t>(in.Word());
  facts.group = static_cast<std::int64_t>(in.Word());
  facts.keeps = in.Word() != 0;
  for (std::size_t scopes = in.Count(); scopes > 0; --scopes) {
    ScopeFacts& scope = facts.scopes.emplace_back();
    scope.tag = in.Text();
    scope.lifecycle = in.Value<Lifecycle>();
    scope.cycle = in.Word();
    const bool in_call = in.Word() != 0;
    const auto kind = in.Value<CycleKind>();
    if (in_call) scope.call = kind;
    scope.call_since_ns = in.Word();
    scope.lost = SessionId{in.Word()};
    scope.lost_rank = static_cast<std::int32_t>(in.Word());
    scope.lost_pid = static_cast<std::int32_t>(in.Word());
    scope.lost_ns = in.Word();
    for (std::size_t neighbours = in.Count(); neighbours > 0; --neighbours) scope.neighbours.push_back(SessionId{in.Word()});
  }
  if (!in.AllRead()) return {};
  return facts;
}

}  // namespace

const ScopeFacts* SessionFacts::ScopeOf(const std::string& tag) const {
  const auto at = std::ranges::find(scopes, tag, &ScopeFacts::tag);
  return at == scopes.end() ? nullptr : &*at;
}

Result<SessionPage> SessionPage::Make(SessionId session) {
  AMEM_ASSIGN(auto pages, SharedPages::Make("amem-session", sizeof(PageWords), SharedPages::Writers::kMakerOnly,
                                            offsetof(PageWords, copies)));
  PageWords& words = WordsIn(pages);
  words.magic = kPageMagic;
  words.version = kPageVersion;
  words.session = session.value;
  return SessionPage(std::move(pages));
}

LifeWords& SessionPage::life() const { return WordsIn(pages_).life; }

Status SessionPage::Publish(const SessionFacts& facts) {
  FactWriter counted;
  Write(facts, counted);
  const std::size_t count = counted.count();
  if (count > kFactWords) {
    return {Code::kOutOfMemory,
            fmt::format("a session's page has place for {} words, and {} are needed: too many sessions share memory",
                        kFactWords, count)};
  }
  PageWords& page = WordsIn(pages_);
  const std::uint64_t published = page.published.load() + 1;
  FactCopy& copy = page.copies[published % 2];
  AMEM_TRY(pages_.Reserve(static_cast<Bytes>(reinterpret_cast<std::byte*>(&copy) - pages_.data()),
                          offsetof(FactCopy, words) + count * sizeof(std::uint64_t)));
  std::atomic_thread_fence(std::memory_order_release);  // who sees any of these words sees what was published before them
  FactWriter written(copy, published);
  Write(facts, written);
  copy.length.store(count, std::memory_order_relaxed);
  copy.sum.store(written.sum(), std::memory_order_relaxed);
  page.published.store(published);
  return {};
}

Result<PeerPage> PeerPage::Open(int fd, SessionId session) {
  AMEM_ASSIGN(auto pages, SharedPages::Open(fd, offsetof(PageWords, life), SharedPages::Writers::kMakerOnly));
  const PageWords& words = WordsIn(pages);
  if (words.magic != kPageMagic) return Status{Code::kCorrupt, fmt::format("descriptor {} is no session's page", fd)};
  if (words.version != kPageVersion) {
    return Status{Code::kUnsupported,
                  fmt::format("a session's page of version {} (this build knows {}): use one version of AMem in the "
                              "whole job",
                              words.version, kPageVersion)};
  }
  if (pages.bytes() < sizeof(PageWords)) return Status{Code::kCorrupt, "a session's page that is too small"};
  if (words.session != session.value)
    return Status{Code::kInvalid, "a page of " + ToText(SessionId{words.session}) + ", and not of " + ToText(session)};
  return PeerPage(std::move(pages));
}

// Its owner may publish while this reads: then what was read is of two moments, and is read again.
Result<SessionFacts> PeerPage::Facts() const {
  const PageWords& page = WordsIn(pages_);
  constexpr int kTriesMost = 1000;
  for (int tries = 0; tries < kTriesMost; ++tries) {
    const std::uint64_t published = page.published.load();
    if (published == 0) return Status{Code::kNotFound, "this session has not said what it shares"};
    const FactCopy& copy = page.copies[published % 2];
    const std::uint64_t length = std::min<std::uint64_t>(copy.length.load(std::memory_order_relaxed), kFactWords);
    std::vector<std::uint64_t> words(length);
    for (std::size_t i = 0; i < length; ++i) words[i] = copy.words[i].load(std::memory_order_relaxed);
    const std::uint64_t sum = copy.sum.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (page.published.load(std::memory_order_relaxed) != published) continue;
    if (sum != SumOfFacts(words, published)) break;
    if (auto facts = FactsIn(words)) return *std::move(facts);
    break;
  }
  return Status{Code::kCorrupt, "what this session says of itself has been written over"};
}

ProcessLife PeerPage::Life(int pidfd) const { return LifeIn(WordsIn(pages_).life, pidfd); }

SharingSet SetOf(SessionId self, const std::string& tag, const std::function<Sighted(SessionId)>& page) {
  SharingSet set;
  std::map<SessionId, bool> reached{{self, true}};  // whether it is a member
  std::vector<SessionId> next{self};
  while (!next.empty()) {
    const SessionId session = next.back();
    next.pop_back();
    const Sighted sighted = page(session);
    reached[session] = session == self || !sighted.ended;
    if (!reached[session]) continue;
    if (!sighted.facts) {
      set.unknown.push_back(session);
      continue;
    }
    const ScopeFacts* const scope = sighted.facts->ScopeOf(tag);
    if (scope == nullptr) continue;
    for (const SessionId neighbour : scope->neighbours)
      if (reached.try_emplace(neighbour, false).second) next.push_back(neighbour);
  }
  for (const auto& [session, is_member] : reached)
    if (is_member) set.members.push_back(session);
  std::ranges::sort(set.unknown);
  return set;
}

}  // namespace amem::board
