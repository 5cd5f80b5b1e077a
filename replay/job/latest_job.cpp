#include "replay/job/latest_job.h"

#include <algorithm>
#include <optional>

#include "journal/base/clock.h"
#include "journal/journal.h"
#include "replay/job/opening.h"

namespace amem {
namespace {

// Ranks start one after the other, and a rank that dies at once overlaps with no other.
constexpr std::uint64_t kSlack_ns = 5'000'000'000;

struct Span {
  std::filesystem::path directory;
  std::uint64_t from = 0, to = 0;  // wall clock
};

std::optional<Span> LifeOf(const std::filesystem::path& directory) {
  auto reader = JournalReader::Open(directory);
  if (!reader) return std::nullopt;
  const Result<Opening> opening = ReadOpening(**reader);
  if (!opening || !opening->info.last || opening->who.realtime_ns == 0) return std::nullopt;
  const std::uint64_t from = opening->who.realtime_ns;
  const std::uint64_t lasted = opening->last_ns - std::min(opening->last_ns, opening->who.monotonic_ns);
  Span span{directory, from, from + lasted};
  if (opening->info.status == SessionStatus::kLive) span.to = std::max(span.to, RealtimeNs());
  return span;
}

}  // namespace

JobSelection SelectLatestJob(std::span<const std::filesystem::path> sessions) {
  JobSelection selection;
  std::vector<Span> spans;
  for (const auto& session : sessions) {
    if (auto span = LifeOf(session)) {
      spans.push_back(*std::move(span));
    } else {
      selection.latest.push_back(session);
    }
  }
  std::ranges::sort(spans, {}, &Span::from);
  std::size_t begin = 0, best = 0, best_end = 0;
  std::uint64_t reach = 0, best_reach = 0;
  for (std::size_t i = 0; i <= spans.size(); ++i) {
    if (i == spans.size() || (i > begin && spans[i].from > reach + kSlack_ns)) {
      if (reach >= best_reach) {
        best = begin;
        best_end = i;
        best_reach = reach;
      }
      begin = i;
      reach = 0;
    }
    if (i < spans.size()) reach = std::max(reach, spans[i].to);
  }
  for (std::size_t i = 0; i < spans.size(); ++i) {
    (i >= best && i < best_end ? selection.latest : selection.earlier).push_back(spans[i].directory);
  }
  return selection;
}

}  // namespace amem
