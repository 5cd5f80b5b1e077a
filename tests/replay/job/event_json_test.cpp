#include "replay/job/event_json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "statemachine/apply.h"
#include "tests/journal/samples.h"
#include "tests/replay/job/event_json_samples.h"
#include "tests/replay/job/scripted_journal.h"
#include "tests/replay/job/scripted_pool.h"

namespace amem {
namespace {

template <std::size_t... I>
std::vector<EventBody> OneOfEachKind(std::index_sequence<I...>) {
  return {std::variant_alternative_t<I, EventVariant>{}...};
}

TEST(EventJson, every_kind_names_itself_and_has_the_common_fields) {
  for (const EventBody& body : OneOfEachKind(std::make_index_sequence<kEventKinds>())) {
    const auto json = ToJson(Event{.seq = SequenceNumber{17}, .time_ns = 5, .thread = 9, .body = body});
    EXPECT_EQ(json["seq"], 17);
    EXPECT_EQ(json["time_ns"], 5);
    EXPECT_EQ(json["thread"], 9);
    EXPECT_EQ(json["kind"], KindWord(body.index()));
    EXPECT_EQ(KindWord(body.index()).find(' '), std::string::npos);
    EXPECT_GT(json.size(), 4u) << "no fields of " << KindName(body.index());
  }
}

TEST(EventJson, every_field_of_every_kind_is_shown_as_it_always_was) {
  ASSERT_EQ(std::size(test::kSampleEvents), kEventKinds);
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    const auto json = ToJson(Event{SequenceNumber{kind + 1}, 2, 3, test::Sample(kind)});
    EXPECT_EQ(json.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace), test::kSampleEvents[kind]);
  }
}

std::set<std::string> KeysOf(const nlohmann::ordered_json& json) {
  std::set<std::string> keys;
  for (const auto& [key, value] : json.items()) keys.insert(key);
  for (const char* common : {"seq", "time_ns", "thread", "kind"}) keys.erase(common);
  return keys;
}

// A sample has a value in every field, and a default in none: what both have is required, and what the sample has may be there.
TEST(EventJson, the_schema_of_every_kind_names_its_fields_and_requires_those_that_are_always_there) {
  const auto forms = EventForm()["allOf"];
  ASSERT_EQ(forms.size(), kEventKinds);
  for (std::size_t kind = 0; kind < kEventKinds; ++kind) {
    const auto& form = forms[kind]["then"];
    EXPECT_EQ(forms[kind]["if"]["properties"]["kind"]["const"], KindWord(kind));
    EXPECT_EQ(KeysOf(form["properties"]), KeysOf(ToJson(Event{{}, 0, 0, test::Sample(kind)}))) << KindName(kind);
    const auto required = form["required"].get<std::set<std::string>>();
    EXPECT_EQ(required, KeysOf(ToJson(Event{{}, 0, 0, test::DefaultBody(kind)}))) << KindName(kind);
  }
}

TEST(EventJson, numbers_that_do_not_fit_a_double_are_strings) {
  const Event event{.seq = SequenceNumber{1},
                    .body = Imported{.allocation = AllocationId{4},
                                     .remote = {SessionId{0x00c0ffee00c0ffee}, AllocationId{3}},
                                     .bytes = test::kMiB,
                                     .handle = DriverHandle{0xfedcba9876543210},
                                     .site = CallSite{{0x12, 0x34, 0, 0, 0}}}};
  const auto json = ToJson(event);
  EXPECT_EQ(json["owner"], "00c0ffee00c0ffee");
  EXPECT_EQ(json["handle"], "0xfedcba9876543210");
  EXPECT_EQ(json["bytes"], 1048576);
  EXPECT_EQ(json["site"], (nlohmann::ordered_json{"0x12", "0x34"}));
}

TEST(EventJson, a_failure_whose_code_was_not_recorded_has_none) {
  EXPECT_EQ(ToJson(Event{.body = CycleFailed{.message = "why"}})["code"], nullptr);
  EXPECT_EQ(ToJson(Event{.body = CycleFailed{.code = Code::kTimeout}})["code"], "timed out");
  EXPECT_EQ(ToJson(Event{.body = PhaseDecided{}})["code"], "ok");
}

TEST(EventJson, state_tells_allocations_holdings_and_digest) {
  test::Job job;
  job.Share();
  State state;
  for (const Event& event : job.owner.events()) ASSERT_TRUE(Apply(state, event).ok());
  const auto json = ToJson(state);
  EXPECT_EQ(json["digest"], Hex(Digest(state)));
  EXPECT_EQ(json["seq"], state.last.value);
  EXPECT_EQ(json["lifecycle"], "running");
  EXPECT_EQ(json["opened"]["rank"], 0);
  EXPECT_EQ(json["holdings"]["own_device_bytes"], 2 * test::kMiB);
  ASSERT_EQ(json["allocations"].size(), 1u);
  EXPECT_EQ(
      nlohmann::json(json["allocations"][0]),
      nlohmann::json::parse(
          R"({"allocation": 1, "bytes": 2097152, "own": true, "properties": {"type": 1, "handle_types": 1, "location": {"type": 1, "id": 0}, "compression": 0,
    "gpu_direct_rdma": 0, "usage": 0, "reserved": 0}, "flags": 0, "created_seq": 2, "backed": true, "saved": false, "stale": false, "kept": null,
    "multicast": false, "guest_references": 1, "mappings": 1, "exports": 1, "registrations": 0, "multicast_bindings": 0, "importers": [{"by":
    "0000000000000b0b", "as": 1, "count": 1}], "site": []})"));
  EXPECT_EQ(json["mappings"][0]["address"], "0x7f0010000000");
  EXPECT_EQ(json["events"]["reference-added"], 1);
}

TEST(EventJson, state_tells_how_far_a_tags_pause_has_come) {
  std::uint64_t clock = 1000;
  test::Story story(1, 0, &clock);
  test::ScriptedPool weights(story, "weights");
  weights.Chunk();
  weights.Begin(CycleKind::kPause);
  weights.Work(CycleKind::kPause, StepKind::kUnmap);
  const auto json = ToJson(test::FoldedState(story));
  ASSERT_EQ(json["pools"].size(), 1U);
  EXPECT_EQ(json["pools"][0]["lifecycle"], "pausing");
  EXPECT_EQ(json["pools"][0]["cycle"]["phase"], "pause: release");
}

TEST(EventJson, state_tells_the_memory_of_the_program_apart) {
  test::Job job;
  job.Share();
  State state;
  for (Event event : job.owner.events()) {
    if (auto* created = std::get_if<AllocationCreated>(&event.body)) created->tag = MemoryTag::kUser;
    ASSERT_TRUE(Apply(state, event).ok());
  }
  const auto json = ToJson(state);
  EXPECT_EQ(json["allocations"][0]["tag"], "user");
  EXPECT_EQ(json["allocations"][0]["kept"], "the program's own (ncclMemAlloc)");
  EXPECT_EQ(json["holdings"]["user_bytes"], 2 * test::kMiB);
  EXPECT_EQ(json["holdings"]["user_resident_bytes"], 2 * test::kMiB);
  EXPECT_EQ(json["holdings"]["kept_bytes"]["the program's own (ncclMemAlloc)"], 2 * test::kMiB);
}

}  // namespace
}  // namespace amem
