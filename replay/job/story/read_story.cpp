// Stories from journals: one from each, and what several of one job say of each other's processes.
#include <algorithm>
#include <tuple>

#include "journal/base/process_sight.h"
#include "journal/tail.h"
#include "replay/job/opening.h"
#include "replay/job/story/story.h"

namespace amem {

Result<SessionStory> ReadStory(JournalReader& reader, const Beside& beside) {
  SessionStory story;
  StoryBuilder builder(story);
  const std::unique_ptr<FoldObserver> other = beside ? beside(builder) : nullptr;
  const std::array<FoldObserver*, 2> observers = {&builder, other.get()};
  AMEM_ASSIGN(auto found, VerifyJournal(reader, std::span(observers).first(other == nullptr ? 1 : 2)));
  if (builder.Finish(!found.report.whole())) found.last_ns = story.last.time_ns;
  story.findings = std::move(found);
  AMEM_ASSIGN(const auto last, ReadEvent(reader, story.last.seq));
  if (last) story.last_text = ToText(last->body);
  return story;
}

Result<SessionStory> ReadAttempts(JournalReader& reader, std::size_t attempts, SequenceNumber last) {
  SessionStory story;
  StoryBuilder builder(story, attempts);
  AMEM_ASSIGN(auto folded, FoldJournal(reader, std::array<FoldObserver*, 1>{&builder}, last));
  builder.Finish(!folded.damage.whole());
  const SessionOpened& who = folded.state.session;
  story.findings.who = Completed(who.session ? who : story.findings.who, folded.info, story.first.time_ns);
  story.findings.info = std::move(folded.info);
  story.findings.report = std::move(folded.damage);
  story.findings.state = std::move(folded.state);
  return story;
}

Result<SessionStory> ReadStory(const std::filesystem::path& session_directory, const Beside& beside) {
  AMEM_ASSIGN(const auto reader, JournalReader::Open(session_directory));
  Result<SessionStory> story = ReadStory(*reader, beside);
  if (!story || story->findings.info.status != SessionStatus::kLive) return story;
  const std::int32_t pid = ProcessOfWriter(session_directory / "tail");  // 0: it cannot be seen from here
  if (pid != 0) story->process_now = StateOfProcess(pid);
  return story;
}

std::vector<std::filesystem::path> DropCopies(std::vector<SessionStory>& stories) {
  std::ranges::stable_sort(stories, std::greater{}, [](const SessionStory& story) {
    const ReadReport& read = story.findings.report;
    return std::tuple(story.last.seq, ~read.corrupt_records, read.whole());
  });
  std::vector<std::filesystem::path> dropped;
  std::set<SessionId> known;
  std::erase_if(stories, [&](const SessionStory& story) {
    if (known.insert(story.session()).second) return false;
    dropped.push_back(story.findings.info.directory);
    return true;
  });
  return dropped;
}

void CountTheDying(std::vector<SessionStory>& journals) {
  std::map<SessionId, SessionStory*> unsure;
  for (SessionStory& j : journals) {
    const SessionStatus status = j.findings.info.status;
    if (status == SessionStatus::kLive || status == SessionStatus::kCopied || status == SessionStatus::kUnknown)
      unsure[j.session()] = &j;
  }
  for (const SessionStory& other : journals) {
    for (const auto& [lost, at] : other.lost) {
      const auto found = unsure.find(lost.peer);
      if (found == unsure.end() || lost.reason != kPeerDied) continue;
      SessionStory& j = *found->second;
      if (!SameBoot(other.who(), j.who()) || at.time_ns < j.last.time_ns) continue;
      j.dying = j.findings.info.status == SessionStatus::kLive;
      j.findings.info.status = SessionStatus::kCrashed;
      unsure.erase(found);
    }
  }
}

}  // namespace amem
