#include "ncclpatch/runtime/options.h"

#include <gtest/gtest.h>

#include <map>

#include "ncclpatch/runtime/read_on.h"

namespace amem {
namespace {

using Variables = std::map<std::string, std::string>;

Result<Options> Parse(const Variables& variables) {
  return ParseOptions([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(Options, defaults_need_no_variable) {
  const auto options = Parse({});
  ASSERT_TRUE(options.ok());
  EXPECT_TRUE(options->enable);
  EXPECT_EQ(options->group, 0);
  EXPECT_EQ(options->rank, -1);
  EXPECT_EQ(options->deadlines.call().count(), 60'000);
  EXPECT_EQ(options->layout, Layout::kSlab);
  EXPECT_EQ(options->slab_bytes, Bytes{256} << 20);
  EXPECT_EQ(options->log_level, "warn");
  EXPECT_TRUE(options->journal.directory.string().starts_with("/tmp/amem-"));
}

TEST(Options, values_are_taken) {
  const auto options = Parse({{"AMEM_GROUPID", "-4"},
                              {"AMEM_TIMEOUT_MS", "250"},
                              {"AMEM_JOURNAL_DIR", "/data/j"},
                              {"AMEM_JOURNAL_KEEP", "7,3G"},
                              {"AMEM_SOCKET_DIR", "/data/s"},
                              {"AMEM_LOG", "debug"},
                              {"AMEM_LAYOUT", "direct"},
                              {"RANK", "12"}});
  ASSERT_TRUE(options.ok()) << options.status().message();
  EXPECT_EQ(options->group, -4);
  EXPECT_EQ(options->deadlines.call().count(), 250);
  EXPECT_EQ(options->journal.directory, "/data/j");
  EXPECT_EQ(options->journal.keep_sessions, 7U);
  EXPECT_EQ(options->journal.keep_bytes, Bytes{3} << 30);
  EXPECT_EQ(options->socket_directory, "/data/s");
  EXPECT_EQ(options->log_level, "debug");
  EXPECT_EQ(options->layout, Layout::kDirect);
  const auto sized = Parse({{"AMEM_LAYOUT", "slab,64M"}});
  EXPECT_EQ(sized->layout, Layout::kSlab);
  EXPECT_EQ(sized->slab_bytes, Bytes{64} << 20);
  EXPECT_EQ(options->rank, 12);
}

TEST(Options, an_unknown_value_names_variable_value_and_known_ones) {
  for (const auto& [name, value] : Variables{{"AMEM_ENABLE", "yes"},
                                             {"AMEM_GROUPID", "one"},
                                             {"AMEM_TIMEOUT_MS", "0"},
                                             {"AMEM_LAYOUT", "slabs"},
                                             {"AMEM_LAYOUT", "slab,100M"},
                                             {"AMEM_LAYOUT", "slab,1M"},
                                             {"AMEM_LAYOUT", "slab,64"},
                                             {"AMEM_LAYOUT", "slab,8192M"},
                                             {"AMEM_LAYOUT", "direct,64M"},
                                             {"AMEM_LOG", "loud"},
                                             {"AMEM_TIMEOUT_MS", "10s"},
                                             {"AMEM_JOURNAL_DIR", "relative"},
                                             {"AMEM_SOCKET_DIR", "relative"},
                                             {"AMEM_JOURNAL_KEEP", "many"},
                                             {"AMEM_JOURNAL_KEEP", "-1"},
                                             {"AMEM_JOURNAL_KEEP", "3,2X"},
                                             {"AMEM_JOURNAL_KEEP", "3,99999999999T"}}) {
    const auto options = Parse({{name, value}});
    ASSERT_FALSE(options.ok()) << name;
    EXPECT_EQ(options.status().code(), Code::kInvalid);
    EXPECT_TRUE(options.status().message().starts_with(name + "=" + value + " is not understood; known: "))
        << options.status().message();
  }
}

TEST(Options, what_is_kept_of_journals_can_be_given_in_part) {
  const auto of = [](const char* value) { return Parse({{"AMEM_JOURNAL_KEEP", value}})->journal; };
  const JournalOptions otherwise;
  EXPECT_EQ(of("9").keep_sessions, 9U);
  EXPECT_EQ(of("9").keep_bytes, otherwise.keep_bytes);
  EXPECT_EQ(of(",512M").keep_sessions, otherwise.keep_sessions);
  EXPECT_EQ(of(",512M").keep_bytes, Bytes{512} << 20);
  EXPECT_EQ(of("0,1024").keep_bytes, 1024U);
  EXPECT_FALSE(Parse({{"AMEM_JOURNAL_KEEP", "9,16777216T"}}).ok()) << "2^64 bytes";
}

TEST(Options, disabled_ignores_all_other_mistakes) {
  const auto options = Parse({{"AMEM_ENABLE", "0"}, {"AMEM_LAYOUT", "nonsense"}});
  ASSERT_TRUE(options.ok());
  EXPECT_FALSE(options->enable);
}

TEST(Options, memory_of_the_program_is_kept_unless_it_is_to_be_released) {
  EXPECT_EQ(Parse({})->user_memory, UserMemory::kKeep);
  EXPECT_EQ(Parse({{"AMEM_USER_MEMORY", "keep"}})->user_memory, UserMemory::kKeep);
  EXPECT_EQ(Parse({{"AMEM_USER_MEMORY", "release"}})->user_memory, UserMemory::kRelease);
  const Status unknown = Parse({{"AMEM_USER_MEMORY", "yes"}}).status();
  EXPECT_EQ(unknown.message(), "AMEM_USER_MEMORY=yes is not understood; known: keep, release");
}

TEST(Options, suspend_is_served_unless_it_is_to_be_nccls_own) {
  EXPECT_EQ(Parse({})->suspend, Suspend::kServe);
  EXPECT_EQ(Parse({{"AMEM_SUSPEND", "native"}})->suspend, Suspend::kNative);
  EXPECT_EQ(Parse({})->scope, LibraryScope::kNccl);
  EXPECT_EQ(Parse({{"AMEM_SCOPE", "shared"}})->scope, LibraryScope::kShared);
  EXPECT_EQ(Parse({{"AMEM_SCOPE", "all"}})->scope, LibraryScope::kAll);
  EXPECT_EQ(Parse({{"AMEM_SCOPE", "none"}}).status().message(), "AMEM_SCOPE=none is not understood; known: nccl, shared, all");
  EXPECT_EQ(Parse({{"AMEM_SUSPEND", "no"}}).status().message(), "AMEM_SUSPEND=no is not understood; known: serve, native");
}

TEST(Options, multicast_objects_stay_unless_they_are_to_be_released) {
  EXPECT_EQ(Parse({})->nvls, Nvls::kKeep);
  EXPECT_EQ(Parse({{"AMEM_NVLS", "keep"}})->nvls, Nvls::kKeep);
  EXPECT_EQ(Parse({{"AMEM_NVLS", "release"}})->nvls, Nvls::kRelease);
  const Status unknown = Parse({{"AMEM_NVLS", "on"}}).status();
  EXPECT_EQ(unknown.message(), "AMEM_NVLS=on is not understood; known: keep, release");
}

TEST(Options, what_network_cards_hold_stays_unless_it_is_to_be_renewed) {
  EXPECT_FALSE(Parse({})->renews);
  EXPECT_FALSE(Parse({{"AMEM_NETWORK", "keep"}})->renews);
  EXPECT_TRUE(Parse({{"AMEM_NETWORK", "renew"}})->renews);
  EXPECT_EQ(Parse({{"AMEM_NETWORK", "1"}}).status().message(), "AMEM_NETWORK=1 is not understood; known: keep, renew");
}

TEST(Options, contents_are_compared_only_if_somebody_doubts) {
  EXPECT_FALSE(Parse({})->compare);
  EXPECT_TRUE(Parse({{"AMEM_VERIFY", "1"}})->compare);
  EXPECT_EQ(Parse({{"AMEM_VERIFY", "yes"}}).status().message(), "AMEM_VERIFY=yes is not understood; known: 0, 1");
}

TEST(Options, ranks_of_one_host_share_what_tags_may_pin) {
  const Bytes alone = PinnedForPools(*Parse({})), of_eight = PinnedForPools(*Parse({{"LOCAL_WORLD_SIZE", "8"}}));
  EXPECT_GT(of_eight, 0U);
  EXPECT_LE(of_eight, alone / 4) << "what is available changes from one moment to the next";
}

TEST(Options, the_rank_comes_from_the_first_launcher_that_says_it) {
  EXPECT_EQ(Parse({{"SLURM_PROCID", "3"}, {"PMI_RANK", "4"}})->rank, 3);
  EXPECT_EQ(Parse({{"RANK", "x"}})->rank, -1);
}

TEST(Options, misspelt_variables_are_found_with_the_likely_meaning) {
  const char* const environment[] = {"AMEM_LAYUOT=slab", "AMEM_ENABLE=1", "PATH=/bin", "AMEM_COMPLETELY_DIFFERENT=1", nullptr};
  const auto warnings = UnknownVariables(environment);
  ASSERT_EQ(warnings.size(), 2U);
  EXPECT_NE(warnings[0].find("did you mean AMEM_LAYOUT?"), std::string::npos);
  EXPECT_EQ(warnings[1].find("did you mean"), std::string::npos);
}

TEST(Options, what_kubernetes_sets_beside_a_service_named_amem_is_nobodys_mistake) {
  const char* const environment[] = {"AMEM_SERVICE_HOST=10.0.0.1",
                                     "AMEM_SERVICE_PORT=80",
                                     "AMEM_SERVICE_PORT_HTTP=80",
                                     "AMEM_PORT=tcp://10.0.0.1:80",
                                     "AMEM_PORT_80_TCP=tcp://10.0.0.1:80",
                                     "AMEM_PORT_80_TCP_PROTO=tcp",
                                     "AMEM_PORT_80_TCP_PORT=80",
                                     "AMEM_PORT_80_TCP_ADDR=10.0.0.1",
                                     "AMEM_METRICS_SERVICE_HOST=10.0.0.2",
                                     "AMEM_METRICS_PORT_9400_UDP_PORT=9400",
                                     nullptr};
  EXPECT_TRUE(UnknownVariables(environment).empty()) << UnknownVariables(environment).front();
  const char* const mistakes[] = {"AMEM_PORT=9400", "AMEM_PORT_=1",   "AMEM_PORT_X_TCP=1",
                                  "AMEM_PORT_80=1", "AMEM_SERVICE=1", nullptr};
  EXPECT_EQ(UnknownVariables(mistakes).size(), 5U);
}

TEST(Options, every_variable_that_is_read_is_known_and_those_that_were_given_up_are_not) {
  const char* const known[] = {"AMEM_NVLS=keep", "AMEM_REPLAY=/r", "AMEM_JOURNAL_KEEP=1", "AMEM_LIBRARY=/l", nullptr};
  EXPECT_TRUE(UnknownVariables(known).empty());
  const char* const gone[] = {"AMEM_CONTENT=discard", "AMEM_NCCL_OFFLOAD_FREE_TAG=7", "AMEM_JOURNAL_SYNC=full", nullptr};
  EXPECT_EQ(UnknownVariables(gone).size(), 3U);
}

TEST(Options, what_launchers_say_is_kept_as_they_said_it) {
  EXPECT_TRUE(Parse({})->launcher.empty());
  const auto options = Parse({{"WORLD_SIZE", "8"},
                              {"LOCAL_RANK", "3"},
                              {"SLURM_JOB_ID", "17"},
                              {"TORCHELASTIC_RUN_ID", "run"},
                              {"TORCHELASTIC_RESTART_COUNT", "2"},
                              {"RAY_JOB_ID", ""},
                              {"PMIX_NAMESPACE", std::string(1000, 'n')},
                              {"HOME", "/root"}});
  const std::vector<std::string> expected{"SLURM_JOB_ID=17",
                                          "TORCHELASTIC_RUN_ID=run",
                                          "TORCHELASTIC_RESTART_COUNT=2",
                                          "PMIX_NAMESPACE=" + std::string(256, 'n'),
                                          "WORLD_SIZE=8",
                                          "LOCAL_RANK=3"};
  EXPECT_EQ(options->launcher, expected);
}

TEST(Options, a_variable_that_is_gone_is_named_with_what_to_do_instead) {
  const char* const environment[] = {"AMEM_ON_FAILURE=mail me", nullptr};
  const auto warnings = UnknownVariables(environment);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("AMEM_ON_FAILURE is set, but AMem has no such variable any more"), std::string::npos)
      << warnings[0];
  EXPECT_NE(warnings[0].find("|| amem pack -o"), std::string::npos) << warnings[0];
}

TEST(WhereToReadOn, ends_with_a_command_that_a_shell_takes) {
  EXPECT_EQ(WhereToReadOn("/tmp/amem-0/journal/00ff"),
            "; journal /tmp/amem-0/journal/00ff; to see why: amem-replay why /tmp/amem-0/journal");
  EXPECT_EQ(WhereToReadOn("/data/it's here/00ff"),
            "; journal /data/it's here/00ff; to see why: amem-replay why '/data/it'\\''s here'");
}

}  // namespace
}  // namespace amem
