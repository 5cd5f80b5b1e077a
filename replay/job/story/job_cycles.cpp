#include "replay/job/story/job_cycles.h"

#include <algorithm>
#include <map>

#include "replay/job/clock.h"

namespace amem {
namespace {

// Clocks of two hosts are set to within this, or not at all.
constexpr std::int64_t kSkew_ns = 2'000'000'000;

class Joining {
 public:
  explicit Joining(std::span<const TimedStory> sessions) : sessions_(sessions) {}

  std::vector<JobCycle> Run() {
    struct Part {
      std::int64_t begin = 0;
      std::size_t session = 0, cycle = 0;
    };
    std::vector<Part> parts;
    for (std::size_t s = 0; s < sessions_.size(); ++s) {
      for (std::size_t c = 0; c < sessions_[s].attempts.size(); ++c) parts.push_back({Begin(s, c), s, c});
    }
    std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
    for (const Part& part : parts) Add(part.session, part.cycle);
    for (JobCycle& cycle : cycles_) FindAbsent(cycle);
    return std::move(cycles_);
  }

 private:
  [[nodiscard]] const Attempt& At(std::size_t s, std::size_t c) const { return sessions_[s].attempts[c]; }
  [[nodiscard]] std::int64_t Begin(std::size_t s, std::size_t c) const {
    return WrappedSum(At(s, c).came().time_ns, sessions_[s].offset_ns);
  }
  [[nodiscard]] std::int64_t End(std::size_t s, std::size_t c) const {
    return WrappedSum(At(s, c).last.time_ns, sessions_[s].offset_ns);
  }

  // A session is a part of a cycle once; they overlap in time, and where both have begun it is a member.
  [[nodiscard]] bool Fits(const JobCycle& cycle, std::size_t s, std::size_t c) const {
    const auto& [other, number] = cycle.parts.front();
    const Attempt &theirs = At(other, number), &mine = At(s, c);
    if (theirs.kind != mine.kind || theirs.tag != mine.tag) return false;
    for (const auto& [session, index] : cycle.parts) {
      if (session == s) return false;
    }
    const SessionOpened &me = *sessions_[s].who, &them = *sessions_[other].who;
    if (!mine.tag.empty()) {  // each session's own affair: those of one number are shown together
      if (theirs.cycle != mine.cycle) return false;
    } else if (theirs.begun && mine.begun) {
      if (std::ranges::find(theirs.members, me.session) == theirs.members.end()) return false;
    } else if (me.host != them.host && !me.host.empty() && !them.host.empty()) {  // no other host shares memory
      return false;
    }
    const std::int64_t slack = SameBoot(me, them) ? 0 : kSkew_ns;
    const auto until = [slack](std::int64_t end) { return WrappedSum(static_cast<std::uint64_t>(end), slack); };
    return Begin(s, c) <= until(End(other, number)) && Begin(other, number) <= until(End(s, c));
  }

  void Add(std::size_t s, std::size_t c) {
    const std::size_t look_back = std::min<std::size_t>(cycles_.size(), 64);
    for (std::size_t i = cycles_.size() - look_back; i < cycles_.size(); ++i) {
      if (Fits(cycles_[i], s, c)) return cycles_[i].parts.emplace_back(s, c), void();
    }
    cycles_.push_back({.kind = At(s, c).kind, .parts = {{s, c}}, .absent = {}});
  }

  void FindAbsent(JobCycle& cycle) {
    std::sort(cycle.parts.begin(), cycle.parts.end());
    if (!At(cycle.parts.front().first, cycle.parts.front().second).tag.empty()) return;
    const auto took_part = [&](SessionId session) {
      return std::any_of(cycle.parts.begin(), cycle.parts.end(),
                         [&](const auto& part) { return sessions_[part.first].who->session == session; });
    };
    for (const auto& [s, c] : cycle.parts) {
      for (const SessionId member : At(s, c).members) {
        const bool known = std::find(cycle.absent.begin(), cycle.absent.end(), member) != cycle.absent.end();
        if (!known && !took_part(member)) cycle.absent.push_back(member);
      }
      if (At(s, c).begun) return;  // it names all
    }
    // It never began, so no journal says for whom the others waited: presumably for the rest of the group.
    const auto& [first, number] = cycle.parts.front();
    for (std::size_t s = 0; s < sessions_.size(); ++s) {
      const TimedStory& other = sessions_[s];
      const bool there = WrappedSum(other.first_ns, other.offset_ns) <= End(first, number) &&
                         WrappedSum(other.last_ns, other.offset_ns) >= Begin(first, number);
      const bool same = other.who->group == sessions_[first].who->group;
      if (there && same && !took_part(other.who->session)) cycle.absent.push_back(other.who->session);
    }
  }

  std::span<const TimedStory> sessions_;
  std::vector<JobCycle> cycles_;
};

}  // namespace

std::vector<JobCycle> JoinAttempts(std::span<const TimedStory> sessions) { return Joining(sessions).Run(); }

std::vector<PauseContents> LastContents(std::span<const SessionStory> stories) {
  std::map<std::string, PauseContents> last;
  const auto take = [&last](const std::vector<Attempt>& attempts) {
    const auto it = std::ranges::find_if(attempts.rbegin(), attempts.rend(),
                                         [](const Attempt& a) { return static_cast<bool>(a.contents); });
    if (it == attempts.rend()) return;
    PauseContents& known = last[it->tag];
    if (it->cycle < known.cycle) return;
    if (it->cycle > known.cycle || known.processes == 0) known = {it->tag, it->cycle, 0, {}};
    ++known.processes;
    known.contents += it->contents;
  };
  for (const SessionStory& story : stories) {
    take(story.attempts);
    for (const auto& [id, attempts] : story.pools) take(attempts);
  }
  std::vector<PauseContents> all;
  for (auto& [tag, contents] : last) all.push_back(std::move(contents));
  return all;
}

}  // namespace amem
