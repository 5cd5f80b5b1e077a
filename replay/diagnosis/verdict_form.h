// What a verdict shows as JSON, and its form (replay/job/json_form.h). What is not known is null. Include <nlohmann/json.hpp>
// before.
#pragma once

#include "replay/diagnosis/verdict.h"
#include "replay/job/json_form.h"

namespace amem {

template <class To>
void WriteFields(To& to, const Evidence& e) {
  to("session", e.session);
  to("rank", RankShown(e.rank));
  to("seq", OrNull{e.seq}, "null: about the journal as a whole");
  to("realtime_ns", OrNull{e.wall_ns});
  to("role", std::string(ToText(e.role)), "\"context\", \"cause\" or \"consequence\"");
  to("text", e.text);
}

template <class To>
void WriteFields(To& to, const ConsideredCause& c) {
  to("kind", c.kind);
  to("session", c.session);
  to("rank", RankShown(c.rank));
  to("realtime_ns", OrNull{c.wall_ns});
  to("witness", c.witness, "Who recorded it, where it was another session");
  to("weight", std::string(c.weight));
  to("text", c.text);
}

template <class To>
void WriteFields(To& to, const Verdict::Totals& totals) {
  to("journals", totals.journals);
  to("events", totals.events);
  to("pauses", totals.pauses);
  to("resumes", totals.resumes);
  to("failures", totals.failures);
  to("references", totals.references);
  to("held_bytes", totals.held);
  to("released_bytes", totals.released);
}

template <class To>
void WriteFields(To& to, const Verdict& v) {
  const bool to_do = v.remedy.action != Remedy::Action::kNone;
  to("healthy", v.certain() ? std::optional(v.healthy()) : std::nullopt,
     "true: nothing is wrong; kind is \"healthy\" then, and the exit code 0. null: \"damage\" says what could not be read, and "
     "the "
     "verdict rests on the rest");
  to("kind", v.kind);
  to("headline", v.headline, "One sentence, without a full stop");
  to("summary", v.summary);
  to("job", OrNull{v.job}, "Which job it is about");
  to("remedy_action", std::string(ToText(v.remedy.action)));
  to("remedy", to_do ? std::optional(v.RemedyText()) : std::nullopt, "What to do, in words");
  to("live", v.live);
  to("session", v.session);
  to("rank", RankShown(v.rank));
  to("ranks", v.ranks, "All that are to blame");
  to("process", OrNull{v.process});
  to("cycle_kind", v.cycle_kind);
  to("cycle", v.cycle_kind ? std::optional(v.cycle) : std::nullopt);
  to("tag", OrNull{v.tag}, "Of the pool whose pause or resume it is; null: NCCL's");
  to("phase", v.phase);
  to("step", v.step);
  to("allocation", v.allocation);
  to("bytes", OrNull{v.bytes});
  to("code", OrNull{v.code});
  to("driver_result", OrNull{v.driver_result});
  to("seq", OrNull{v.seq});
  to("realtime_ns", OrNull{v.wall_ns});
  to("evidence", v.evidence, "In order of time");
  to("causes", v.causes, "What was considered as the cause");
  to("contents", v.contents,
     "What became of the contents that the last pauses of NCCL (tag null) and of tags saved, where it is recorded");
  to("notes", v.notes);
  to("damage", v.damage, "What could not be read");
  to("totals", v.totals);
}

}  // namespace amem
