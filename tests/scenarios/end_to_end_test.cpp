// The whole path without a GPU: real processes, the shared library, the stand-in for libcuda and a libnccl that behaves like
// NCCL.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "journal/journal.h"
#include "tests/scenarios/job.h"

namespace amem {
namespace {

using job::Job;
using job::Rank;
using Commands = std::vector<std::string>;

constexpr int kRanks = 4;
const Commands kCycle = {"cuda",   "load",    "init",    "reduce",  "barrier", "bytes",   "pause", "barrier",
                         "bytes",  "reduce",  "barrier", "resume",  "reduce",  "barrier", "pause", "resume",
                         "reduce", "barrier", "bytes",   "destroy", "barrier", "gone"};

std::string All(const std::vector<Rank>& ranks) {
  std::string text;
  for (const Rank& rank : ranks)
    text += "-- status " + std::to_string(rank.status) + "\n" + rank.out + "-- stderr\n" + rank.err + "\n";
  return text;
}

void ExpectWholeCycle(const std::vector<Rank>& ranks) {
  const std::string sum = ranks[0].Said("reduce", 0);
  EXPECT_TRUE(sum.starts_with("sum ")) << All(ranks);
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.status, 0) << All(ranks);
    EXPECT_EQ(rank.Said("init"), "0") << All(ranks);
    EXPECT_EQ(rank.Said("reduce", 0), sum);
    EXPECT_GT(std::stoull(rank.Said("bytes", 0)), 20U << 20);
    EXPECT_EQ(rank.Said("pause", 0), "0") << All(ranks);
    EXPECT_EQ(rank.Said("bytes", 1), "0") << "memory that a paused rank holds\n" << All(ranks);
    EXPECT_EQ(rank.Said("reduce", 1), "failed 1") << "a launch while paused must fail";
    EXPECT_NE(rank.err.find("ncclResume"), std::string::npos) << rank.err;
    EXPECT_EQ(rank.Said("resume", 0), "0") << All(ranks);
    EXPECT_EQ(rank.Said("reduce", 2), sum);
    EXPECT_EQ(rank.Said("pause", 1), "0") << All(ranks);
    EXPECT_EQ(rank.Said("resume", 1), "0") << All(ranks);
    EXPECT_EQ(rank.Said("reduce", 3), sum);
    EXPECT_EQ(rank.Said("bytes", 2), rank.Said("bytes", 0));
    EXPECT_EQ(rank.Said("destroy"), "0") << All(ranks);
    EXPECT_EQ(rank.Said("gone"), "0");
    EXPECT_EQ(rank.out.find("[amem"), std::string::npos) << "AMem wrote to stdout";
  }
}

std::string Patched(Job& job) {
  const auto copy = job.directory() / "patched";
  const Rank patch =
      job::RunProgram({AMEM_PATCH, std::string(AMEM_STAND_INS) + "/libnccl.so.2", "-o", copy}, {}, job.directory());
  EXPECT_EQ(patch.status, 0) << patch.out << patch.err;
  return copy / "libnccl.so.2";
}

struct JournalFacts {
  std::string way, nccl_version;
  int created = 0, with_call_site = 0, imported = 0, replaced_symbols = 0, passed_through = 0, with_communicator = 0;
  std::string communicators;  // what became of them
  SessionStatus status{};
};

void AddCommunicator(const Event& event, std::string& text) {
  if (const auto* begun = std::get_if<CommunicatorBegun>(&event.body)) text += begun->how;
  if (const auto* ready = std::get_if<CommunicatorReady>(&event.body))
    text += ", rank " + std::to_string(ready->rank) + " of " + std::to_string(ready->ranks) + " on device " +
            std::to_string(ready->device.value) + (ready->hash != 0 ? " with a name" : "");
  if (const auto* ended = std::get_if<CommunicatorEnded>(&event.body)) text += ", " + ended->how + "; ";
}

JournalFacts ReadOne(const std::filesystem::path& journals) {
  JournalFacts facts;
  const auto sessions = ListSessions(journals);
  if (!sessions.ok() || sessions->empty()) return facts;
  const auto reader = JournalReader::Open(sessions->front());
  if (!reader.ok()) return facts;
  if (const auto info = (*reader)->Info(); info.ok()) facts.status = info->status;
  const auto read = (*reader)->Read(SequenceNumber{1}, SequenceNumber{UINT64_MAX}, [&](const Event& event) {
    if (const auto* attached = std::get_if<LibraryAttached>(&event.body)) {
      facts.way = attached->way;
      facts.nccl_version = attached->nccl_version;
    } else if (const auto* created = std::get_if<AllocationCreated>(&event.body)) {
      ++facts.created;
      facts.with_call_site += created->site.frames[0] != 0 ? 1 : 0;
      facts.with_communicator += created->communicator == CommunicatorId{1} ? 1 : 0;
    } else if (const auto* bound = std::get_if<DriverSymbolBound>(&event.body)) {
      facts.replaced_symbols += bound->replaced ? 1 : 0;
    }
    if (const auto* imported = std::get_if<Imported>(&event.body))
      facts.with_communicator += imported->communicator == CommunicatorId{1} ? 1 : 0;
    AddCommunicator(event, facts.communicators);
    facts.imported += std::holds_alternative<Imported>(event.body) ? 1 : 0;
    facts.passed_through += std::holds_alternative<PassedThrough>(event.body) ? 1 : 0;
    return true;
  });
  EXPECT_TRUE(read.ok()) << read.status().message();
  return facts;
}

// Of the communicators that were made from a unique id, in all processes.
std::set<std::uint64_t> NamesIn(const std::filesystem::path& journals) {
  std::set<std::uint64_t> names;
  const auto sessions = ListSessions(journals);
  for (const auto& session : sessions.ok() ? *sessions : std::vector<std::filesystem::path>()) {
    const auto reader = JournalReader::Open(session);
    if (!reader.ok()) continue;
    const auto read = (*reader)->Read(SequenceNumber{1}, kToTheEnd, [&](const Event& event) {
      if (const auto* ready = std::get_if<CommunicatorReady>(&event.body)) names.insert(ready->hash);
      return true;
    });
    EXPECT_TRUE(read.ok()) << read.status().message();
  }
  return names;
}

void ExpectJournal(const Job& job, const std::string& way) {
  const JournalFacts facts = ReadOne(job.journals());
  EXPECT_EQ(facts.way, way);
  EXPECT_EQ(facts.nccl_version, "2.28.9");
  EXPECT_EQ(facts.created, 7);  // and the slab that they are parts of, which NCCL did not ask for
  EXPECT_EQ(facts.with_call_site, 6);
  EXPECT_EQ(facts.imported, 5);
  EXPECT_EQ(facts.with_communicator, 10) << "all that NCCL allocated and imported, and not the slabs that AMem did";
  EXPECT_NE(facts.communicators.find("init, rank "), std::string::npos) << facts.communicators;
  EXPECT_NE(facts.communicators.find(" of 4 on device "), std::string::npos) << facts.communicators;
  EXPECT_NE(facts.communicators.find(" with a name, destroyed; "), std::string::npos) << facts.communicators;
  EXPECT_EQ(NamesIn(job.journals()).size(), 1U) << "all ranks know it by one name";
  EXPECT_GE(facts.replaced_symbols, 15);
  EXPECT_EQ(facts.status, SessionStatus::kClosed);
}

// ---- three ways in -----------------------------------------------------------------------------------------------------

TEST(EndToEnd, patched_copy_pauses_and_resumes) {
  Job job;
  job.environment["LD_PRELOAD"] = Patched(job);
  ExpectWholeCycle(job.Run(kRanks, kCycle));
  ExpectJournal(job, "patched");
}

TEST(EndToEnd, preloaded_library_pauses_and_resumes) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  ExpectWholeCycle(job.Run(kRanks, kCycle));
  ExpectJournal(job, "preload");
}

TEST(EndToEnd, attached_library_pauses_and_resumes) {
  Job job;
  Commands commands = kCycle;
  commands.insert(commands.begin() + 2, "attach");
  const auto ranks = job.Run(kRanks, commands);
  EXPECT_EQ(ranks[0].Said("attach"), "0");
  ExpectWholeCycle(ranks);
  ExpectJournal(job, "attach");
}

TEST(EndToEnd, patched_copy_and_preload_together_are_harmless) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE + (":" + Patched(job));
  ExpectWholeCycle(job.Run(kRanks, kCycle));
}

TEST(EndToEnd, legacy_memory_pauses_and_resumes) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["NCCL_CUMEM_ENABLE"] = "0";
  ExpectWholeCycle(job.Run(kRanks, kCycle));
}

TEST(EndToEnd, communicators_come_and_go_between_cycles) {
  for (const char* cumem : {"1", "0"}) {
    Job job;
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job.environment["NCCL_CUMEM_ENABLE"] = cumem;
    const auto ranks =
        job.Run(kRanks, {"cuda",    "load",  "init",   "init",   "reduce",  "pause",   "resume",  "reduce",  "destroy",
                         "reduce",  "pause", "bytes",  "resume", "barrier", "init",    "reduce",  "barrier", "pause",
                         "barrier", "bytes", "resume", "reduce", "barrier", "destroy", "destroy", "gone"});
    for (const Rank& rank : ranks) {
      EXPECT_EQ(rank.status, 0) << All(ranks);
      for (int nth = 0; nth < 5; ++nth) EXPECT_EQ(rank.Said("reduce", nth), ranks[0].Said("reduce", 0)) << All(ranks);
      for (int nth = 0; nth < 3; ++nth) EXPECT_EQ(rank.Said("pause", nth) + rank.Said("resume", nth), "00") << All(ranks);
      EXPECT_EQ(rank.Said("bytes", 1), "0") << All(ranks);
      EXPECT_EQ(rank.Said("gone"), "0") << All(ranks);
    }
  }
}

TEST(EndToEnd, a_communicator_destroyed_while_paused_leaves_nothing_behind) {
  for (const char* cumem : {"1", "0"}) {
    Job job;
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job.environment["NCCL_CUMEM_ENABLE"] = cumem;
    const auto ranks = job.Run(kRanks, {"cuda", "load", "init", "init", "reduce", "barrier", "pause", "barrier", "destroy",
                                        "barrier", "resume", "reduce", "barrier", "destroy", "gone"});
    for (const Rank& rank : ranks) {
      EXPECT_EQ(rank.Said("destroy", 0), "0") << All(ranks);
      EXPECT_EQ(rank.Said("resume"), "0") << All(ranks);
      EXPECT_EQ(rank.Said("reduce", 1), ranks[0].Said("reduce", 0)) << All(ranks);
      EXPECT_EQ(rank.Said("gone"), "0") << All(ranks);
    }
  }
}

// ---- memory of the program ---------------------------------------------------------------------------------------------

TEST(UserMemory, is_used_by_the_program_while_nccl_is_paused) {
  for (const char* cumem : {"1", "0"}) {
    Job job;
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job.environment["NCCL_CUMEM_ENABLE"] = cumem;
    const auto ranks = job.Run(2, {"cuda",  "load",    "init", "malloc", "reduce",  "write",  "barrier", "pause",  "barrier",
                                   "read",  "write",   "read", "bytes",  "barrier", "resume", "read",    "reduce", "barrier",
                                   "pause", "barrier", "free", "bytes",  "barrier", "resume", "reduce"});
    for (const Rank& rank : ranks) {
      EXPECT_EQ(rank.status, 0) << All(ranks);
      for (int nth = 0; nth < 3; ++nth) EXPECT_EQ(rank.Said("read", nth), "as written") << All(ranks);
      EXPECT_EQ(rank.Said("bytes", 0), std::to_string(2 << 20)) << "NCCL's is gone\n" << All(ranks);
      EXPECT_EQ(rank.Said("free"), "0") << All(ranks);
      EXPECT_EQ(rank.Said("bytes", 1), "0") << All(ranks);
      for (int nth = 1; nth < 3; ++nth) EXPECT_EQ(rank.Said("reduce", nth), ranks[0].Said("reduce")) << All(ranks);
    }
  }
}

TEST(UserMemory, that_is_to_be_released_comes_back_as_it_was_and_is_freed_while_paused) {
  for (const char* cumem : {"1", "0"}) {
    Job job;
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job.environment["NCCL_CUMEM_ENABLE"] = cumem;
    job.environment["AMEM_USER_MEMORY"] = "release";
    const auto ranks = job.Run(
        2, {"cuda",   "load", "init",    "malloc", "reduce",  "write", "barrier", "pause",  "barrier", "bytes",   "barrier",
            "resume", "read", "barrier", "pause",  "barrier", "free",  "barrier", "resume", "reduce",  "destroy", "gone"});
    for (const Rank& rank : ranks) {
      EXPECT_EQ(rank.status, 0) << All(ranks);
      EXPECT_EQ(rank.Said("bytes"), "0") << All(ranks);
      EXPECT_EQ(rank.Said("read"), "as written") << All(ranks);
      EXPECT_EQ(rank.Said("free") + rank.Said("resume", 1), "00") << All(ranks);
      EXPECT_EQ(rank.Said("reduce", 1), ranks[0].Said("reduce")) << All(ranks);
      EXPECT_EQ(rank.Said("gone"), "0") << All(ranks);
    }
  }
}

// ---- addresses of NCCL's own choosing ----------------------------------------------------------------------------------

// What NCCL 2.32 allocates for a window has an address already, in a slab that peers may have imported by then.
TEST(EndToEnd, a_window_whose_flags_have_an_address_already_works_over_pauses) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["STAND_IN_WINDOW"] = "twice";
  const auto ranks = job.Run(2, {"cuda", "load", "init", "window", "symmetric", "barrier", "pause", "resume", "symmetric",
                                 "reduce", "barrier", "unwindow", "barrier", "destroy", "gone"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("window"), "0") << All(ranks);
    EXPECT_EQ(rank.Said("symmetric", 1), rank.Said("symmetric")) << All(ranks);
    EXPECT_EQ(rank.Said("unwindow"), "00") << All(ranks);
    EXPECT_EQ(rank.Said("gone"), "0") << All(ranks);
  }
}

TEST(EndToEnd, symmetric_windows_work_as_without_and_over_pauses) {
  for (const int count : {2, 3}) {
    Job stock;
    const Commands use = {"cuda", "load", "init", "window", "symmetric", "reduce", "unwindow", "destroy", "gone"};
    const auto expected = stock.Run(count, use);
    Job job;
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    const auto ranks =
        job.Run(count, {"cuda",   "load",      "init",   "window",  "symmetric", "reduce",  "barrier",   "pause",
                        "resume", "symmetric", "reduce", "barrier", "pause",     "barrier", "symmetric", "barrier",
                        "resume", "symmetric", "reduce", "barrier", "unwindow",  "barrier", "pause",     "barrier",
                        "bytes",  "resume",    "reduce", "barrier", "destroy",   "gone"});
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const Rank& rank = ranks[i];
      EXPECT_EQ(expected[i].Said("gone"), "0") << All(expected);
      EXPECT_EQ(rank.Said("window"), "0") << All(ranks);
      for (const int nth : {0, 1, 3})
        EXPECT_EQ(rank.Said("symmetric", nth), expected[i].Said("symmetric")) << nth << All(ranks);
      for (const int nth : {0, 1, 2, 3}) EXPECT_EQ(rank.Said("reduce", nth), expected[i].Said("reduce")) << nth << All(ranks);
      EXPECT_EQ(rank.Said("symmetric", 2), "failed 1") << "a launch while paused";
      EXPECT_EQ(rank.Said("unwindow"), "00") << All(ranks);
      EXPECT_EQ(rank.Said("bytes"), "0") << All(ranks);
      EXPECT_EQ(rank.Said("gone"), "0") << All(ranks);
    }
  }
}

TEST(EndToEnd, nccl_suspends_and_resumes_by_itself_between_pauses) {
  for (const int count : {2, 3}) {
    Job job;
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    const auto ranks =
        job.Run(count, {"cuda",   "load",      "init",      "init",    "reduce",  "barrier", "bytes",   "suspend", "unsuspend",
                        "reduce", "pause",     "resume",    "reduce",  "barrier", "suspend", "barrier", "pause",   "barrier",
                        "bytes",  "resume",    "unsuspend", "reduce",  "barrier", "bytes",   "destroy", "suspend", "barrier",
                        "gone",   "unsuspend", "reduce",    "barrier", "destroy", "gone"});
    for (const Rank& rank : ranks) {
      for (const int nth : {0, 1, 2, 3, 4}) EXPECT_EQ(rank.Said("reduce", nth), ranks[0].Said("reduce")) << nth << All(ranks);
      for (const int nth : {0, 1, 2})
        EXPECT_EQ(rank.Said("suspend", nth) + rank.Said("unsuspend", nth), "00") << nth << All(ranks);
      EXPECT_EQ(rank.Said("bytes", 1), "0") << All(ranks);
      EXPECT_EQ(rank.Said("bytes", 2), rank.Said("bytes", 0)) << All(ranks);
      EXPECT_EQ(rank.Said("gone", 0), "0") << "suspended, and nothing else is there" << All(ranks);
      EXPECT_EQ(rank.Said("gone", 1), "0") << All(ranks);
    }
  }
}

// ---- attaching ---------------------------------------------------------------------------------------------------------

TEST(Attach, after_the_first_driver_call_is_too_late_and_says_what_to_do) {
  Job job;
  const auto ranks = job.Run(1, {"cuda", "load", "malloc", "attach", "pause"});
  EXPECT_EQ(ranks[0].Said("attach").substr(0, 1), "5") << All(ranks);
  EXPECT_NE(ranks[0].Said("attach").find("too late"), std::string::npos) << All(ranks);
  EXPECT_NE(ranks[0].Said("attach").find("LD_PRELOAD"), std::string::npos) << All(ranks);
  EXPECT_EQ(ranks[0].Said("pause").substr(0, 1), "5") << "memory that is not under AMem cannot be paused\n" << All(ranks);
}

TEST(Attach, without_nccl_says_to_load_it_first) {
  Job job;
  const auto ranks = job.Run(1, {"attach"});
  EXPECT_NE(ranks[0].Said("attach").find("no NCCL is loaded"), std::string::npos) << All(ranks);
}

TEST(Attach, a_library_bound_at_load_is_told_by_what_it_holds) {
  Job job;
  job.environment["JOB_NCCL"] = AMEM_NCCL_BOUND_NOW;
  const auto early = job.Run(1, {"cuda", "load", "attach", "init", "pause", "bytes"});
  EXPECT_EQ(early[0].Said("attach"), "0") << All(early);
  EXPECT_EQ(early[0].Said("bytes"), "0") << All(early);
  const auto late = job.Run(1, {"cuda", "load", "malloc", "attach"});
  EXPECT_NE(late[0].Said("attach").find("too late"), std::string::npos) << All(late);
}

TEST(Attach, twice_is_harmless) {
  Job job;
  const auto ranks = job.Run(1, {"cuda", "load", "attach", "attach", "init", "attach", "pause", "resume"});
  for (int nth = 0; nth < 3; ++nth) EXPECT_EQ(ranks[0].Said("attach", nth), "0") << All(ranks);
  EXPECT_EQ(ranks[0].Said("resume"), "0") << All(ranks);
}

TEST(Preload, reaches_a_library_bound_at_load) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["JOB_NCCL"] = AMEM_NCCL_BOUND_NOW;
  const auto ranks = job.Run(1, {"cuda", "load", "init", "pause", "bytes", "resume", "reduce"});
  EXPECT_EQ(ranks[0].Said("pause"), "0") << All(ranks);
  EXPECT_EQ(ranks[0].Said("bytes"), "0") << All(ranks);
}

TEST(Preload, pauses_work_under_a_plugin_that_is_not_known_and_free_nothing) {
  for (const char* plugin : {"plugin", "0:plugin"}) {
    Job job;
    job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
    job.environment["PLUGIN"] = AMEM_NET_PLUGIN;
    const auto ranks = job.Run(2, {"cuda", "load", "init", "reduce", plugin, "barrier", "bytes", "pause", "barrier", "bytes",
                                   "barrier", "resume", "reduce"});
    for (const auto& rank : ranks) {
      EXPECT_EQ(rank.Said("pause"), "0") << plugin << All(ranks);
      EXPECT_NE(rank.Said("bytes", 0), "0") << plugin;
      EXPECT_EQ(rank.Said("bytes", 1), rank.Said("bytes", 0)) << plugin << " : a card may hold the pages";
      EXPECT_EQ(rank.Said("resume"), "0") << plugin << All(ranks);
      EXPECT_EQ(rank.Said("reduce", 1), rank.Said("reduce", 0)) << plugin;
    }
  }
}

TEST(Preload, leaves_everybody_elses_dlsym_alone) {
  Job job;
  const auto without = job.Run(1, {"cuda", "dlsym"});
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto with = job.Run(1, {"cuda", "dlsym"});
  EXPECT_EQ(without[0].Said("dlsym"), "not global, cuda's, libc's");
  EXPECT_EQ(with[0].Said("dlsym"), without[0].Said("dlsym"));
}

TEST(Patched, without_its_partner_the_loader_names_it) {
  Job job;
  const std::filesystem::path copy = Patched(job);
  std::filesystem::remove(copy.parent_path() / "libamem_nccl.so");
  job.environment["LD_PRELOAD"] = copy;
  const auto ranks = job.Run(1, {"load"});
  EXPECT_EQ(ranks[0].status, 127) << All(ranks);
  EXPECT_NE(ranks[0].err.find("libamem_nccl.so: cannot open shared object file"), std::string::npos) << All(ranks);
}

// ---- settings and what goes wrong --------------------------------------------------------------------------------------

TEST(Settings, an_unknown_value_switches_amem_off_and_every_call_says_why) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["AMEM_LAYOUT"] = "sometimes";
  const auto ranks = job.Run(1, {"cuda", "load", "init", "reduce", "pause", "resume", "stats", "attach"});
  EXPECT_EQ(ranks[0].status, 0) << All(ranks);
  EXPECT_TRUE(ranks[0].Said("reduce").starts_with("sum ")) << "NCCL must work as without AMem\n" << All(ranks);
  for (const char* command : {"pause", "resume", "stats", "attach"}) {
    EXPECT_EQ(ranks[0].Said(command).substr(0, 1), "5");
    EXPECT_NE(ranks[0].Said(command).find("AMEM_LAYOUT=sometimes is not understood; known: slab, direct"), std::string::npos)
        << All(ranks);
  }
  EXPECT_NE(ranks[0].err.find("AMEM_LAYOUT=sometimes"), std::string::npos) << ranks[0].err;
}

TEST(Settings, disabled_means_inert) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["AMEM_ENABLE"] = "0";
  const auto ranks = job.Run(2, {"cuda", "load", "init", "reduce", "pause", "destroy"});
  EXPECT_TRUE(ranks[0].Said("reduce").starts_with("sum ")) << All(ranks);
  EXPECT_EQ(ranks[0].Said("pause"), "0") << All(ranks);
  EXPECT_NE(ranks[0].err.find("AMEM_ENABLE=0"), std::string::npos) << All(ranks);
  EXPECT_FALSE(std::filesystem::exists(job.journals()));
}

TEST(Settings, a_job_of_which_one_rank_is_switched_off_is_told_which) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment_of[1]["AMEM_ENABLE"] = "0";
  const auto ranks = job.Run(2, {"cuda", "load", "init"});
  EXPECT_NE(ranks[0].Said("init"), "0") << "its import of the other one's memory failed\n" << All(ranks);
  const Rank why = job::RunProgram({AMEM_REPLAY, "why", "--json", job.journals()}, {}, job.directory());
  const auto verdict = nlohmann::json::parse(why.out, nullptr, false);
  ASSERT_TRUE(verdict.is_object()) << why.out << why.err;
  EXPECT_EQ(verdict["kind"], "not-under-amem") << why.out;
  EXPECT_EQ(verdict["ranks"], nlohmann::json({1})) << why.out;
}

TEST(Settings, a_misspelt_variable_is_pointed_out_once_a_job_and_not_by_processes_that_use_no_gpu) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["AMEM_TIMOUT_MS"] = "5";
  const auto ranks = job.Run(2, {"cuda", "load", "init"});
  EXPECT_NE(ranks[0].err.find("did you mean AMEM_TIMEOUT_MS?"), std::string::npos) << All(ranks);
  EXPECT_EQ(ranks[1].err, "") << All(ranks);
  const auto without = job.Run(1, {"load"});
  EXPECT_EQ(without[0].err, "") << All(without);
}

TEST(Settings, loading_starts_nothing) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks = job.Run(1, {"cuda", "load", "pause", "stats", "group"});
  EXPECT_FALSE(std::filesystem::exists(job.journals())) << All(ranks);
  EXPECT_EQ(ranks[0].Said("pause"), "0") << "nothing held: nothing to pause\n" << All(ranks);
  EXPECT_NE(ranks[0].Said("stats").find("\"session\":null"), std::string::npos) << All(ranks);
  EXPECT_EQ(ranks[0].Said("group"), "00 7") << All(ranks);
}

TEST(Journal, that_cannot_be_written_leaves_nccl_working_and_pause_says_why) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["AMEM_JOURNAL_DIR"] = "/proc/no-such-place";
  const auto ranks = job.Run(2, {"cuda", "load", "init", "reduce", "pause", "destroy"});
  for (const Rank& rank : ranks) {
    EXPECT_TRUE(rank.Said("reduce").starts_with("sum ")) << All(ranks);
    EXPECT_EQ(rank.Said("destroy"), "0") << All(ranks);
    EXPECT_EQ(rank.Said("pause").substr(0, 1), "3") << All(ranks);
    EXPECT_NE(rank.Said("pause").find("/proc/no-such-place"), std::string::npos) << All(ranks);
  }
}

// ---- ranks that are not alike -------------------------------------------------------------------------------------------

std::size_t Count(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Journal, of_one_rank_that_cannot_be_written_refuses_the_pause_of_all_and_names_it) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment_of[1]["AMEM_JOURNAL_DIR"] = "/proc/no-such-place";
  const auto ranks = job.Run(3, {"cuda", "load", "init", "reduce", "barrier", "pause", "barrier", "reduce", "destroy"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("init"), "0") << All(ranks);
    EXPECT_TRUE(rank.Said("reduce", 1).starts_with("sum ")) << All(ranks);
    EXPECT_NE(rank.Said("pause").find("/proc/no-such-place"), std::string::npos) << All(ranks);
    EXPECT_NE(rank.Said("pause").find("rank 1"), std::string::npos) << All(ranks);
    EXPECT_EQ(rank.Said("destroy"), "0") << All(ranks);
  }
  EXPECT_EQ(Count(ranks[1].err, "warning"), 1U) << All(ranks);
  EXPECT_EQ(Count(ranks[1].err, "there is no journal"), 1U) << All(ranks);
  EXPECT_EQ(Count(ranks[0].err, "warning"), 0U) << All(ranks);
}

TEST(Apart, ranks_with_a_tmp_each_pause_together) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto tmp = job.directory() / ("tmp" + std::to_string(rank));
    job.environment_of[rank] = {{"AMEM_JOURNAL_DIR", tmp / "journal"}, {"AMEM_SOCKET_DIR", tmp / "sockets"}};
  }
  const auto ranks = job.Run(kRanks, kCycle);
  ExpectWholeCycle(ranks);
  for (const Rank& rank : ranks) EXPECT_EQ(Count(rank.err, "warn"), 0U) << All(ranks);
}

TEST(Apart, a_shared_file_system_without_locks_is_good_enough) {
  Job job;
  job.environment["LD_PRELOAD"] = std::string(AMEM_SHARED_FILE_SYSTEM) + ":" + AMEM_LIBRARY_FILE;
  ExpectWholeCycle(job.Run(kRanks, kCycle));
  ExpectJournal(job, "preload");
}

// Another user was there first, and his link leads where he wants the journals and the sockets.
TEST(Apart, a_squatted_tmp_costs_the_pauses_and_says_so_and_nothing_else) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto tmp = job.directory() / "tmp", elsewhere = job.directory() / "elsewhere";
  std::filesystem::create_directory(tmp);
  std::filesystem::permissions(tmp, std::filesystem::perms::all | std::filesystem::perms::sticky_bit);
  std::filesystem::create_directory(elsewhere);
  std::filesystem::create_directory_symlink(elsewhere, tmp / "amem-1000");
  job.environment["AMEM_JOURNAL_DIR"] = tmp / "amem-1000/journal";
  job.environment["AMEM_SOCKET_DIR"] = tmp / "amem-1000/sockets";
  const auto ranks = job.Run(2, {"cuda", "load", "init", "reduce", "pause", "barrier", "reduce", "destroy"});
  for (const Rank& rank : ranks) {
    EXPECT_EQ(rank.Said("init"), "0") << All(ranks);
    EXPECT_TRUE(rank.Said("reduce", 1).starts_with("sum ")) << All(ranks);
    EXPECT_NE(rank.Said("pause").find("symbolic link"), std::string::npos) << All(ranks);
    EXPECT_EQ(Count(rank.err, "there is no journal"), 1U) << All(ranks);
    EXPECT_EQ(Count(rank.err, "abstract socket"), 1U) << All(ranks);
    EXPECT_EQ(rank.Said("destroy"), "0") << All(ranks);
  }
  EXPECT_TRUE(std::filesystem::is_empty(elsewhere));
}

TEST(Import, of_a_foreign_descriptor_fails_and_the_drivers_own_passes) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks = job.Run(1, {"cuda", "load", "init", "foreign", "drivers", "pause", "resume"});
  EXPECT_NE(ranks[0].Said("foreign"), "0") << All(ranks);
  EXPECT_EQ(ranks[0].Said("drivers"), "0") << All(ranks);
  EXPECT_EQ(ranks[0].Said("pause"), "0") << All(ranks);
  EXPECT_GE(ReadOne(job.journals()).passed_through, 1);
}

TEST(Fork, a_child_is_inert_and_the_parent_goes_on) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks = job.Run(1, {"cuda", "load", "init", "fork", "pause", "resume", "reduce"});
  EXPECT_NE(ranks[0].Said("child pause").find("forked"), std::string::npos) << All(ranks);
  EXPECT_EQ(ranks[0].Said("resume"), "0") << All(ranks);
  EXPECT_TRUE(ranks[0].Said("reduce").starts_with("sum ")) << All(ranks);
  EXPECT_EQ(ReadOne(job.journals()).status, SessionStatus::kClosed);
}

TEST(Pause, without_a_peer_times_out_names_it_and_leaves_everybody_running) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  job.environment["AMEM_TIMEOUT_MS"] = "800";
  const auto ranks = job.Run(3, {"cuda", "load", "init", "reduce", "barrier", "0:pause", "1:pause", "barrier", "reduce"});
  for (const int waiting : {0, 1}) {
    const std::string said = ranks[static_cast<std::size_t>(waiting)].Said("pause");
    EXPECT_EQ(said.substr(0, 1), "6") << All(ranks);
    EXPECT_NE(said.find("rank 2"), std::string::npos) << All(ranks);
  }
  for (const Rank& rank : ranks) EXPECT_EQ(rank.Said("reduce", 1), ranks[0].Said("reduce", 0)) << All(ranks);
}

TEST(Pause, that_a_peers_death_hits_says_who_died) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks = job.Run(3, {"cuda", "load", "init", "reduce", "barrier", "2:die", "pause"});
  EXPECT_EQ(ranks[2].status, 256 + 9);
  for (const std::size_t alive : {0U, 1U}) {
    const std::string said = ranks[alive].Said("pause");
    if (said == "0") continue;  // the death was known before
    EXPECT_TRUE(said.starts_with("6 ")) << All(ranks);
    EXPECT_NE(said.find("rank "), std::string::npos) << All(ranks);
  }
}

TEST(Stats, are_json_for_programs_and_text_on_stderr_for_people) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks = job.Run(1, {"cuda", "load", "init", "stats", "memstats"});
  EXPECT_EQ(ranks[0].Said("stats").substr(0, 1), "{") << All(ranks);
  EXPECT_NE(ranks[0].err.find("own device memory"), std::string::npos) << All(ranks);
}

TEST(Stats, for_people_say_how_long_each_phase_took_and_what_became_of_contents) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks = job.Run(2, {"cuda", "load", "init", "reduce", "barrier", "pause", "resume", "memstats"});
  for (const char* text :
       {"last pause", "last resume", "with 2 sessions: arrive ", ", release ", " create own ", " saved, ", " zero, "})
    EXPECT_NE(ranks[0].err.find(text), std::string::npos) << text << "\n" << All(ranks);
}

TEST(Trim, gives_pinned_host_memory_back_and_the_next_pause_works) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks =
      job.Run(1, {"cuda", "load", "trim", "init", "reduce", "pause", "resume", "trim", "stats", "pause", "resume", "trim"});
  for (const char* command : {"trim", "pause", "resume"}) EXPECT_EQ(ranks[0].Said(command), "0") << command << All(ranks);
  EXPECT_NE(ranks[0].Said("stats").find("\"pinned_bytes\":0,"), std::string::npos) << All(ranks);
}

TEST(Journal, of_a_killed_process_reads_as_crashed) {
  Job job;
  job.environment["LD_PRELOAD"] = AMEM_LIBRARY_FILE;
  const auto ranks = job.Run(1, {"cuda", "load", "init", "die"});
  EXPECT_EQ(ranks[0].status, 256 + 9);
  const JournalFacts facts = ReadOne(job.journals());
  EXPECT_EQ(facts.status, SessionStatus::kCrashed);
  EXPECT_EQ(facts.created, 7);
}

}  // namespace
}  // namespace amem
