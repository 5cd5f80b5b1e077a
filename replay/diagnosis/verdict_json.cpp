#include "replay/diagnosis/verdict_json.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "replay/job/event_json.h"

namespace amem {

using Json = nlohmann::ordered_json;

Json ToJson(const Verdict& v) {
  const auto maybe = [](bool known, Json value) { return known ? std::move(value) : Json(nullptr); };
  Json j = {{"healthy", v.healthy()},
            {"kind", ToText(v.kind)},
            {"headline", v.headline},
            {"summary", v.summary},
            {"job", maybe(!v.job.empty(), v.job)},
            {"remedy_action", ToText(v.remedy.action)},
            {"remedy", maybe(v.remedy.action != Remedy::Action::kNone, ToText(v.remedy))},
            {"live", v.live}};
  j["session"] = maybe(v.session.has_value(), SessionText(v.session.value_or(SessionId{})));
  j["rank"] = maybe(v.rank >= 0, v.rank);
  j["ranks"] = v.ranks;
  j["process"] = maybe(!v.process.empty(), v.process);
  j["cycle_kind"] = maybe(v.cycle_kind.has_value(), ToText(v.cycle_kind.value_or(CycleKind::kPause)));
  j["cycle"] = maybe(v.cycle_kind.has_value(), v.cycle);
  j["tag"] = maybe(!v.tag.empty(), v.tag);
  j["phase"] = maybe(v.phase.has_value(), ToText(v.phase.value_or(PhaseKind::kPauseArrive)));
  j["step"] = v.step ? ToJson(*v.step) : Json(nullptr);
  j["allocation"] = maybe(v.allocation.has_value(), v.allocation.value_or(AllocationId{}).value);
  j["bytes"] = maybe(v.bytes != 0, v.bytes);
  j["code"] = maybe(v.code != Code::kOk, ToText(v.code));
  j["driver_result"] = maybe(v.driver_result != 0, v.driver_result);
  j["seq"] = maybe(static_cast<bool>(v.seq), v.seq.value);
  j["realtime_ns"] = maybe(v.wall_ns != 0, v.wall_ns);
  Json evidence = Json::array();
  for (const Evidence& e : v.evidence) {
    evidence.push_back({{"session", SessionText(e.session)},
                        {"rank", maybe(e.rank >= 0, e.rank)},
                        {"seq", maybe(static_cast<bool>(e.seq), e.seq.value)},
                        {"realtime_ns", maybe(e.wall_ns != 0, e.wall_ns)},
                        {"role", ToText(e.role)},
                        {"text", e.text}});
  }
  j["evidence"] = std::move(evidence);
  Json causes = Json::array();
  for (const ConsideredCause& c : v.causes) {
    causes.push_back({{"kind", ToText(c.kind)},
                      {"session", SessionText(c.session)},
                      {"rank", maybe(c.rank >= 0, c.rank)},
                      {"realtime_ns", maybe(c.wall_ns != 0, c.wall_ns)},
                      {"witness", maybe(c.witness.has_value(), SessionText(c.witness.value_or(SessionId{})))},
                      {"weight", c.weight},
                      {"text", c.text}});
  }
  j["causes"] = std::move(causes);
  j["contents"] = Json::array();
  for (const PauseContents& contents : v.contents) j["contents"].push_back(ToJson(contents));
  j["notes"] = v.notes;
  j["damage"] = v.damage;
  j["totals"] = {{"journals", v.totals.journals}, {"events", v.totals.events},          {"pauses", v.totals.pauses},
                 {"resumes", v.totals.resumes},   {"failures", v.totals.failures},      {"references", v.totals.references},
                 {"held_bytes", v.totals.held},   {"released_bytes", v.totals.released}};
  return j;
}

}  // namespace amem
