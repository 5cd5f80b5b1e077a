#include "replay/report/report_facts.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "replay/job/clock.h"

namespace amem {

using FactsJson = nlohmann::ordered_json;

FactsJson StripJson(const JobTimeline& job) {
  FactsJson columns = {{"t", FactsJson::array()}, {"d", FactsJson::array()}, {"k", FactsJson::array()},
                       {"m", FactsJson::array()}, {"n", FactsJson::array()}, {"f", FactsJson::array()}};
  std::uint64_t most = 0;
  std::size_t longest = 0;
  for (std::size_t s = 0; s < job.sessions.size(); ++s) {
    std::uint64_t count = 0;
    for (const StripRecord& record : job.sessions[s].strip) count += record.count;
    if (count > most) most = count, longest = s;
  }
  if (most == 0) return columns;
  std::int64_t last = 0;
  for (const StripRecord& record : job.sessions[longest].strip) {
    const std::int64_t begin = WrappedSum(record.arrived_ns, job.offsets_ns[longest]);
    columns["t"].push_back(WrappedDifference(begin, last));
    columns["d"].push_back(record.ended_ns - std::min(record.ended_ns, record.arrived_ns));
    columns["k"].push_back(static_cast<int>(record.kind));
    columns["m"].push_back(record.number);
    columns["n"].push_back(record.count);
    columns["f"].push_back(record.failed);
    last = begin;
  }
  return columns;
}

FactsJson SeenJson(const JobTimeline& job, std::size_t session) {
  FactsJson others = FactsJson::array();
  for (std::size_t by = 0; by < job.sessions.size(); ++by) {
    for (const SeenRecord& seen : job.sessions[by].seen) {
      if (seen.of != job.sessions[session].info.session) continue;
      others.push_back({by, seen.at.seq.value, WrappedSum(seen.at.time_ns, job.offsets_ns[by]), seen.text, seen.dead});
    }
  }
  FactsJson threads = FactsJson::array();
  for (const auto& [thread, at] : job.sessions[session].story.threads) {
    const bool room = thread.stack.size() < SessionTimeline::kSeen && threads.size() < SessionTimeline::kSeen;
    if (room) threads.push_back(ToText(EventBody(thread)));
  }
  return {{"by", std::move(others)}, {"threads", std::move(threads)}};
}

FactsJson DeathJson(const JobTimeline& job, std::size_t session) {
  const auto death = job.deaths.find(session);
  if (death == job.deaths.end()) return nullptr;
  const DeathNotice& notice = death->second;
  return {notice.at_ns, notice.by, job.sessions[notice.by].seen[notice.record].at.seq.value};
}

FactsJson OutsideJson(const JobTimeline& job, std::size_t session) {
  FactsJson all = FactsJson::array();
  for (const auto& [text, at] : job.sessions[session].story.outside.results)
    all.push_back({at.seq.value, WrappedSum(at.time_ns, job.offsets_ns[session]), text});
  return all;
}

FactsJson ShortagesJson(const JobTimeline& job) {
  FactsJson all = FactsJson::array();
  for (const MemoryShortage& shortage : job.shortages) {
    FactsJson holders = FactsJson::array();
    for (const MemoryShortage::Holder& h : shortage.holders) holders.push_back({h.session, h.held, h.released, h.elsewhere});
    all.push_back({{"s", shortage.session},
                   {"q", shortage.seq.value},
                   {"device", shortage.device},
                   {"uuid", shortage.uuid},
                   {"holders", std::move(holders)}});
  }
  return all;
}

}  // namespace amem
