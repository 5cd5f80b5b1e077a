#include "replay/job/latest_job.h"

#include <algorithm>
#include <optional>

#include "journal/base/clock.h"
#include "journal/journal.h"

namespace amem {
namespace {

// Ranks start one after the other, and one that dies at once overlaps with nobody.
constexpr std::uint64_t kSlack_ns = 5'000'000'000;

struct Span {
  std::filesystem::path directory;
  std::uint64_t from = 0, to = 0;  // wall clock
};

std::optional<Span> LifeOf(const std::filesystem::path& directory) {
  auto reader = JournalReader::Open(directory);
  if (!reader) return std::nullopt;
  const auto info = (*reader)->Info();
  if (!info || !info->last) return std::nullopt;
  SessionOpened who;
  if (info->first.value == 1) {
    const auto read = (*reader)->Read(info->first, info->first, [&who](const Event& event) {
      if (const auto* opened = std::get_if<SessionOpened>(&event.body)) who = *opened;
      return false;
    });
    if (!read) return std::nullopt;
  } else {
    const auto state = (*reader)->StateAt(info->first);
    if (!state) return std::nullopt;
    who = state->session;
  }
  std::uint64_t last_ns = who.monotonic_ns;
  const auto read = (*reader)->Read(info->last, info->last, [&last_ns](const Event& event) {
    last_ns = event.time_ns;
    return false;
  });
  if (!read || who.realtime_ns == 0) return std::nullopt;
  Span span{directory, who.realtime_ns, who.realtime_ns + (last_ns > who.monotonic_ns ? last_ns - who.monotonic_ns : 0)};
  if (info->status == SessionStatus::kLive) span.to = std::max(span.to, RealtimeNs());
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
