// The JSON of a verdict: every field under its name, and null for what is not known.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "replay/diagnosis/verdict_form.h"

namespace amem {
namespace {

using Ordered = nlohmann::ordered_json;

const std::vector<std::string> kFields = {
    "healthy",       "kind",    "headline",    "summary",  "job",    "remedy_action", "remedy", "live",       "session", "rank",
    "ranks",         "process", "cycle_kind",  "cycle",    "tag",    "phase",         "step",   "allocation", "bytes",   "code",
    "driver_result", "seq",     "realtime_ns", "evidence", "causes", "contents",      "notes",  "damage",     "totals"};

Verdict Full() {
  Verdict v;
  v.kind = VerdictKind::kOutOfMemory;
  v.headline = "a headline";
  v.summary = "a summary";
  v.remedy.action = Remedy::Action::kReadMessage;
  v.live = true;
  v.session = SessionId{0xc0ffee};
  v.rank = 0;
  v.job = "2 sessions on host a";
  v.ranks = {0, 3};
  v.causes = {{VerdictKind::kOutOfMemory, SessionId{0xc0ffee}, 0, 1'700'000'000'000'000'000, SessionId{0xb0b}, "cause", "why"}};
  v.process = "rank 0 (pid 4711 on host a)";
  v.cycle_kind = CycleKind::kPause;
  v.cycle = 3;
  v.phase = PhaseKind::kPauseArrive;
  v.step = Step{StepKind::kCreate, AllocationId{7}, {}, 4096, DeviceOrdinal{2}};
  v.allocation = AllocationId{7};
  v.bytes = 8192;
  v.code = Code::kOutOfMemory;
  v.driver_result = 2;
  v.seq = SequenceNumber{17};
  v.wall_ns = 1'700'000'000'000'000'000;
  v.evidence = {{.session = SessionId{0xc0ffee},
                 .rank = 0,
                 .seq = SequenceNumber{17},
                 .wall_ns = 1'700'000'000'000'000'000,
                 .role = Evidence::Role::kCause,
                 .text = "step failed"},
                {.session = SessionId{0xb0b}, .role = Evidence::Role::kConsequence, .text = "gave up"},
                {.session = SessionId{0xb0b}, .text = "begun"}};
  v.contents = {{"", 3, 2, {10, 20, 30}}, {"weights", 1, 1, {0, 5, 0}}};
  v.notes = {"a note"};
  v.damage = {"a place: damaged"};
  v.totals = {.journals = 1, .events = 2, .pauses = 3, .resumes = 4, .failures = 5, .references = 6, .held = 7, .released = 8};
  return v;
}

TEST(VerdictJson, has_every_field_in_its_order) {
  for (const Verdict& verdict : {Full(), Verdict{}}) {
    const Ordered json = Object(verdict);
    std::vector<std::string> names;
    for (const auto& [name, value] : json.items()) names.push_back(name);
    EXPECT_EQ(names, kFields);
  }
}

TEST(VerdictJson, has_the_value_of_every_field) {
  const Ordered json = Object(Full());
  EXPECT_TRUE(json["healthy"].is_null()) << "a part could not be read";
  EXPECT_EQ(json["kind"], "out-of-memory");
  EXPECT_EQ(json["headline"], "a headline");
  EXPECT_EQ(json["summary"], "a summary");
  EXPECT_TRUE(json["remedy"].get<std::string>().starts_with("supply complete journals")) << json["remedy"];
  EXPECT_TRUE(
      json["remedy"].get<std::string>().ends_with("; then: remove the reason given above; `amem log` has the events before it"))
      << json["remedy"];
  Verdict whole = Full();
  whole.damage.clear();
  EXPECT_EQ(Object(whole)["healthy"], false);
  EXPECT_EQ(Object(whole)["remedy"], "remove the reason given above; `amem log` has the events before it");
  EXPECT_EQ(json["remedy_action"], "read-message");
  EXPECT_EQ(json["job"], "2 sessions on host a");
  EXPECT_EQ(json["ranks"], Ordered::array({0, 3}));
  EXPECT_EQ(json["contents"].dump(),
            R"([{"tag":null,"cycle":3,"processes":2,"contents":{"changed_bytes":10,"unchanged_bytes":20,)"
            R"("zero_bytes":30}},{"tag":"weights","cycle":1,"processes":1,"contents":{"changed_bytes":0,)"
            R"("unchanged_bytes":5,"zero_bytes":0}}])");
  EXPECT_EQ(json["causes"], Ordered::array({{{"kind", "out-of-memory"},
                                             {"session", "0000000000c0ffee"},
                                             {"rank", 0},
                                             {"realtime_ns", 1'700'000'000'000'000'000},
                                             {"witness", "0000000000000b0b"},
                                             {"weight", "cause"},
                                             {"text", "why"}}}));
  EXPECT_EQ(json["live"], true);
  EXPECT_EQ(json["session"], "0000000000c0ffee");
  EXPECT_EQ(json["rank"], 0);
  EXPECT_EQ(json["process"], "rank 0 (pid 4711 on host a)");
  EXPECT_EQ(json["cycle_kind"], "pause");
  EXPECT_EQ(json["cycle"], 3);
  EXPECT_EQ(json["phase"], "pause: arrive");
  EXPECT_EQ(json["step"]["kind"], "create");
  EXPECT_EQ(json["step"]["allocation"], 7);
  EXPECT_EQ(json["step"]["bytes"], 4096);
  EXPECT_EQ(json["step"]["device"], 2);
  EXPECT_EQ(json["allocation"], 7);
  EXPECT_EQ(json["bytes"], 8192);
  EXPECT_EQ(json["code"], "out of memory");
  EXPECT_EQ(json["driver_result"], 2);
  EXPECT_EQ(json["seq"], 17);
  EXPECT_EQ(json["realtime_ns"], 1'700'000'000'000'000'000);
  EXPECT_EQ(json["notes"], Ordered::array({"a note"}));
  EXPECT_EQ(json["damage"], Ordered::array({"a place: damaged"}));
  EXPECT_EQ(json["totals"], Ordered({{"journals", 1},
                                     {"events", 2},
                                     {"pauses", 3},
                                     {"resumes", 4},
                                     {"failures", 5},
                                     {"references", 6},
                                     {"held_bytes", 7},
                                     {"released_bytes", 8}}));
}

TEST(VerdictJson, has_null_for_what_is_not_known) {
  const Ordered json = Object(Verdict{});
  EXPECT_EQ(json["healthy"], true);
  EXPECT_EQ(json["kind"], "healthy");
  EXPECT_EQ(json["live"], false);
  EXPECT_EQ(json["remedy_action"], "none");
  for (const char* field : {"job", "remedy", "session", "rank", "process", "cycle_kind", "cycle", "tag", "phase", "step",
                            "allocation", "bytes", "code", "driver_result", "seq", "realtime_ns"}) {
    EXPECT_TRUE(json[field].is_null()) << field;
  }
  for (const char* list : {"ranks", "evidence", "causes", "notes", "damage"}) EXPECT_EQ(json[list], Ordered::array()) << list;
}

TEST(VerdictJson, evidence_has_its_role_and_null_for_no_rank_event_or_time) {
  const Ordered evidence = Object(Full())["evidence"];
  EXPECT_EQ(evidence[0], Ordered({{"session", "0000000000c0ffee"},
                                  {"rank", 0},
                                  {"seq", 17},
                                  {"realtime_ns", 1'700'000'000'000'000'000},
                                  {"role", "cause"},
                                  {"text", "step failed"}}));
  EXPECT_EQ(evidence[1]["role"], "consequence");
  EXPECT_EQ(evidence[2]["role"], "context");
  for (const char* field : {"rank", "seq", "realtime_ns"}) EXPECT_TRUE(evidence[1][field].is_null()) << field;
}

}  // namespace
}  // namespace amem
