#include <gtest/gtest.h>

#include "replay/job/pack.h"

namespace amem {
namespace {

TEST(PackAnonymous, the_launchers_ids_are_replaced_alike_and_sizes_stay) {
  Anonymizer anonymizer;
  SessionOpened who;
  who.host = "gpu-host-7";
  who.boot_id = "1b4e28ba-2fa1";
  who.gpu_uuids = {"GPU-77", "GPU-78"};
  who.launcher = {"SLURM_JOB_ID=4711", "TORCHELASTIC_RUN_ID=secret", "WORLD_SIZE=8", "LOCAL_RANK=3",
                  "TORCHELASTIC_RESTART_COUNT=1"};
  const Event first = anonymizer.Clean(Event{.body = who});
  const std::vector<std::string> clean{"SLURM_JOB_ID=job-1", "TORCHELASTIC_RUN_ID=job-2", "WORLD_SIZE=8", "LOCAL_RANK=3",
                                       "TORCHELASTIC_RESTART_COUNT=1"};
  const auto& opened = std::get<SessionOpened>(first.body);
  EXPECT_EQ(opened.launcher, clean);
  EXPECT_EQ(opened.host + " " + opened.boot_id, "host-1 boot-1");
  EXPECT_EQ(opened.gpu_uuids, (std::vector<std::string>{"gpu-1", "gpu-2"}));
  EXPECT_EQ(anonymizer.Clean(Event{.body = who}), first) << "the same job is called the same in every journal";
}

TEST(PackAnonymous, the_program_is_called_the_same_in_every_rank) {
  Anonymizer anonymizer;
  const auto cleaned = [&](const char* program) {
    const Event clean = anonymizer.Clean(Event{.body = SessionOpened{.program = program}});
    return std::get<SessionOpened>(clean.body).program;
  };
  EXPECT_EQ(cleaned("python3 secret_model.py"), "program-1");
  EXPECT_EQ(cleaned("python3 evaluate.py"), "program-2");
  EXPECT_EQ(cleaned("python3 secret_model.py"), "program-1");
  EXPECT_EQ(cleaned(""), "");
}

TEST(PackAnonymous, who_holds_memory_has_no_name) {
  Anonymizer anonymizer;
  const Event clean = anonymizer.Clean(Event{.body = StepFailed{.holders = {{7, 1, "secret"}}}});
  EXPECT_EQ(std::get<StepFailed>(clean.body).holders, (std::vector<MemoryHolder>{{7, 1, "program-1"}}));
}

TEST(PackAnonymous, paths_in_what_was_seen_are_cut) {
  Anonymizer anonymizer;
  const Event process = anonymizer.Clean(Event{.body = ProcessSeen{.where = "in /srv/ann/job.py", .answer = "at /srv/ann"}});
  EXPECT_EQ(std::get<ProcessSeen>(process.body).where, "in job.py");
  EXPECT_EQ(std::get<ProcessSeen>(process.body).answer, "at ann");
  const Event thread = anonymizer.Clean(Event{.body = ThreadSeen{.stack = {"main (/srv/ann/exe+0x12)"}}});
  EXPECT_EQ(std::get<ThreadSeen>(thread.body).stack.at(0), "main (exe+0x12)");
  State state;
  state.legacy[Address{1}].why = "held by /srv/ann/libheld.so";
  EXPECT_EQ(anonymizer.Clean(state).legacy.at(Address{1}).why, "held by libheld.so");
}

}  // namespace
}  // namespace amem
