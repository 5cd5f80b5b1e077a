#include <gtest/gtest.h>

#include "replay/job/pack.h"

namespace amem {
namespace {

template <class Kind>
Kind Cleaned(Anonymizer& anonymizer, Kind kind) {
  EventBody body = std::move(kind);
  anonymizer.Clean(body);
  return std::get<Kind>(body);
}

TEST(PackAnonymous, the_launchers_ids_are_replaced_alike_and_sizes_stay) {
  Anonymizer anonymizer;
  SessionOpened who;
  who.host = "gpu-host-7";
  who.boot_id = "1b4e28ba-2fa1";
  who.gpu_uuids = {"GPU-77", "GPU-78"};
  who.launcher = {"SLURM_JOB_ID=4711", "TORCHELASTIC_RUN_ID=secret", "WORLD_SIZE=8", "LOCAL_RANK=3",
                  "TORCHELASTIC_RESTART_COUNT=1"};
  const SessionOpened opened = Cleaned(anonymizer, who);
  const std::vector<LauncherSetting> clean{"SLURM_JOB_ID=job-1", "TORCHELASTIC_RUN_ID=job-2", "WORLD_SIZE=8", "LOCAL_RANK=3",
                                           "TORCHELASTIC_RESTART_COUNT=1"};
  EXPECT_EQ(opened.launcher, clean);
  EXPECT_EQ(opened.host + " " + opened.boot_id, "host-1 boot-1");
  EXPECT_EQ(opened.gpu_uuids, (std::vector<GpuName>{"gpu-1", "gpu-2"}));
  EXPECT_EQ(Cleaned(anonymizer, who), opened) << "the same job is called the same in every journal";
}

TEST(PackAnonymous, the_program_is_called_the_same_in_every_rank) {
  Anonymizer anonymizer;
  const auto cleaned = [&](const char* program) { return Cleaned(anonymizer, SessionOpened{.program = program}).program; };
  EXPECT_EQ(cleaned("python3 secret_model.py"), "program-1");
  EXPECT_EQ(cleaned("python3 evaluate.py"), "program-2");
  EXPECT_EQ(cleaned("python3 secret_model.py"), "program-1");
  EXPECT_EQ(cleaned(""), "");
}

TEST(PackAnonymous, who_holds_memory_has_no_name) {
  Anonymizer anonymizer;
  const std::vector<MemoryHolder> holders = Cleaned(anonymizer, StepFailed{.holders = {{7, 1, "secret"}}}).holders;
  EXPECT_EQ(holders, (std::vector<MemoryHolder>{{7, 1, "program-1"}}));
}

TEST(PackAnonymous, paths_in_what_was_seen_are_cut) {
  Anonymizer anonymizer;
  const auto process = Cleaned(anonymizer, ProcessSeen{.where = "in /srv/ann/job.py", .answer = "at /srv/ann"});
  EXPECT_EQ(process.where, "in job.py");
  EXPECT_EQ(process.answer, "at ann");
  EXPECT_EQ(Cleaned(anonymizer, ThreadSeen{.stack = {"main (/srv/ann/exe+0x12)"}}).stack.at(0), "main (exe+0x12)");
  EXPECT_EQ(Cleaned(anonymizer, LegacyAllocated{.why = "held by /srv/ann/libheld.so"}).why, "held by libheld.so");
  EXPECT_EQ(Cleaned(anonymizer, SharedOutside{.library = "/srv/ann/libheld.so"}).library, "libheld.so");
}

TEST(PackAnonymous, a_pause_names_no_host_and_no_thread_its_program) {
  Anonymizer anonymizer;
  const CycleMember member{.session = SessionId{5}, .rank = 1, .pid = 7, .host = "gpu-host-7"};
  EXPECT_EQ(Cleaned(anonymizer, CycleBegun{.processes = {member}}).processes.at(0).host, "host-1");
  const auto failed = Cleaned(anonymizer, CycleFailed{.message = "rank 1 of gpu-host-8 did not come",
                                                      .culprits = {{.session = SessionId{6}, .host = "gpu-host-8"}}});
  EXPECT_EQ(failed.culprits.at(0).host, "host-2");
  EXPECT_EQ(failed.message, "rank 1 of host-2 did not come");
  EXPECT_EQ(Cleaned(anonymizer, ThreadSeen{.name = "secret_model.py"}).name, "thread-1");
  EXPECT_EQ(Cleaned(anonymizer, ThreadSeen{.name = "NCCL Progress"}).name, "NCCL Progress");
}

TEST(PackAnonymous, a_name_is_found_in_what_comes_before_it) {
  Anonymizer anonymizer;
  for (const char* host : {"node1", "node10"})
    anonymizer.Learn(SessionOpened{.host = host, .program = "python3 secret_model.py"});
  EXPECT_EQ(Cleaned(anonymizer, PeerLost{.reason = "on node10 and node1: python3 (secret_model.py) died"}).reason,
            "on host-2 and host-1: thread-1 (thread-2) died");
}

// Every text of every kind of event has a name in it.
struct Named {
  void operator()(FreeText& text) const { text = "on secret-host: /secret/secret.py"; }
  void operator()(FilePath& text) const { text = "/secret/lib.so"; }
  void operator()(LauncherSetting& text) const { text = "SLURM_JOB_NAME=secret"; }
  void operator()(PublicText&) const {}
  template <class What>
  void operator()(Text<What>& text) const {
    text = "secret-host";
  }
};

template <class T>
constexpr bool kIsList = false;
template <class T>
constexpr bool kIsList<std::vector<T>> = true;

template <class T, class Use>
void ForEachText(T& value, const Use& use) {
  if constexpr (std::is_base_of_v<std::string, T>) {
    use(value);
  } else if constexpr (kIsList<T>) {
    if constexpr (std::is_same_v<Use, Named>) value.resize(1);
    for (auto& element : value) ForEachText(element, use);
  } else if constexpr (Described<T>) {
    std::apply([&](auto&... members) { (ForEachText(members, use), ...); }, Members(value));
  }
}

TEST(PackAnonymous, no_text_of_any_kind_of_event_keeps_a_name) {
  Anonymizer anonymizer;
  std::size_t texts = 0;
  const auto check = [&]<class Kind>(Kind kind) {
    ForEachText(kind, Named{});
    anonymizer.Learn(kind);
    Kind clean = Cleaned(anonymizer, kind);
    ForEachText(clean, [&](const std::string& text) {
      ++texts;
      EXPECT_TRUE(text.find("secret-host") == text.npos && text.find("/secret") == text.npos && !text.ends_with("=secret"))
          << Kind::kKind << ": " << text;
    });
  };
  [&]<class... Kinds>(const std::variant<Kinds...>*) { (check(Kinds{}), ...); }(static_cast<const EventVariant*>(nullptr));
  EXPECT_GT(texts, 50U);
}

}  // namespace
}  // namespace amem
