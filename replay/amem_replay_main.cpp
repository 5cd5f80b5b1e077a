// amem-replay: reads journals, also of live processes and without a GPU.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <exception>

#include "replay/amem_replay_command.h"
#include "replay/amem_replay_report.h"

namespace amem::tool {
namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 fine, 1 wrong usage, 2 something could not be read (what could be is printed), 3 a violation, failure or difference was found.";

// The command line: each command fills its options and says what to run.
class CommandLine {
 public:
  CommandLine() {
    app_.require_subcommand(1);
    app_.set_version_flag("--version", std::string("amem-replay " AMEM_VERSION));
    app_.footer(std::string("DIR is the directory of a session, or one that holds several.\n") + kExitCodes +
                "\n`amem-replay COMMAND --help` has the options and examples of a command.");
    AddWhy();
    AddList();
    AddInfo();
    AddLog();
    AddState();
    AddVerify();
    AddReport(Add("report", "One page for a browser: memory over time, pauses, allocations, references, events", kReportHelp),
              run_);
  }

  int Run(int argc, char** argv, Output& out) {
    try {
      app_.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
      return app_.exit(e) == 0 ? kFine : kUsage;
    }
    return run_(out);
  }

 private:
  CLI::App* Add(const char* name, const char* does, const char* examples) {
    CLI::App* command = app_.add_subcommand(name, does);
    command->footer(std::string("Examples:\n") + examples + kExitCodes);
    return command;
  }
  static void AddDirectories(CLI::App* command, Directories& directories) {
    command->add_option("DIR", directories, "Directories of sessions, or directories that hold several")->required();
  }

  void AddWhy() {
    CLI::App* command = Add("why", "What went wrong with a job's last pause or resume: which rank, step and allocation, and what to do",
                            "  amem-replay why /tmp/amem-1000/journal    the latest job of this host, running or dead\n"
                            "  amem-replay why hostA/journal hostB/journal\n"
                            "  amem-replay why --json DIR | jq -r .kind\n");
    AddDirectories(command, why_.directories);
    command->add_flag("--all", why_.all, "All sessions, not only those of the latest job");
    command->add_flag("--json", why_.json, "One JSON object");
    command->callback([this] { run_ = [this](Output& out) { return RunWhy(why_, out); }; });
  }

  void AddList() {
    CLI::App* command = Add("ls", "The sessions of a directory, newest first",
                            "  amem-replay ls                  sessions of this user on this host\n"
                            "  amem-replay ls /data/job17      journals that were copied from elsewhere\n");
    command->add_option("DIR", list_.directory, "Default: AMEM_JOURNAL_DIR, else /tmp/amem-UID/journal");
    command->add_flag("--json", list_.json, "One JSON array");
    command->callback([this] { run_ = [this](Output& out) { return RunList(list_, out); }; });
  }

  void AddInfo() {
    CLI::App* command = Add("info", "What a journal is: process, versions, events, memory held, last failure",
                            "  amem-replay info /tmp/amem-1000/journal/00c0ffee00c0ffee\n"
                            "  amem-replay info --json DIR | jq '.[].holdings'\n");
    AddDirectories(command, info_.directories);
    command->add_flag("--json", info_.json, "One JSON array");
    command->callback([this] { run_ = [this](Output& out) { return RunInfo(info_, out); }; });
  }

  void AddLog() {
    CLI::App* command = Add("log", "The events, one a line: number, seconds since the opening, thread, what happened",
                            "  amem-replay log DIR --last 20\n"
                            "  amem-replay log DIR --allocation 3           the life of one allocation\n"
                            "  amem-replay log DIR --kind step-failed --kind cycle-failed\n"
                            "  amem-replay log DIR --json --since 12.5 --until 13\n");
    AddDirectories(command, log_.directories);
    command->add_flag("--json", log_.json, "One JSON object a line");
    command->add_option("--kind", log_.kinds, "Only this kind of event, as in \"allocation-created\"; may be repeated")
        ->type_name("KIND")
        ->allow_extra_args(false)
        ->delimiter(',');
    command->add_option("--allocation", log_.allocation, "Only what is about this allocation, or an address while it is there")
        ->type_name("ID");
    command->add_option("--from", log_.from, "Only from this sequence number on")->type_name("SEQ");
    command->add_option("--to", log_.to, "Only up to this sequence number")->type_name("SEQ");
    command->add_option("--since", log_.since, "Only from so many seconds after the session's opening on")
        ->type_name("SECONDS");
    command->add_option("--until", log_.until, "Only up to so many seconds after the session's opening")->type_name("SECONDS");
    command->add_option("--last", log_.last, "Only the last N of those, of each session")->type_name("N");
    command->callback([this] { run_ = [this](Output& out) { return RunLog(log_, out); }; });
  }

  void AddState() {
    CLI::App* command = Add("state", "What AMem knew after an event: allocations, mappings, references, where a cycle stood",
                            "  amem-replay state DIR\n"
                            "  amem-replay state DIR --at 1200 --json\n");
    command->add_option("DIR", state_.directory, "The directory of one session")->required();
    command->add_option("--at", state_.at, "After this event; default: the last one")->type_name("SEQ");
    command->add_flag("--json", state_.json, "One JSON object");
    command->callback([this] { run_ = [this](Output& out) { return RunState(state_, out); }; });
  }

  void AddVerify() {
    CLI::App* command = Add("verify", "Checks journals, and the references between all journals given, best all of a job",
                            "  amem-replay verify /tmp/amem-1000/journal    all ranks that ran on this host\n"
                            "  amem-replay verify hostA/journal hostB/journal --json\n");
    AddDirectories(command, verify_.directories);
    command->add_flag("--json", verify_.json, "One JSON object");
    command->callback([this] { run_ = [this](Output& out) { return RunVerify(verify_, out); }; });
  }

  CLI::App app_{"Reads the journals of AMem: what happened to NCCL's GPU memory, and why a pause or resume failed."};
  WhyOptions why_;
  ListOptions list_;
  InfoOptions info_;
  LogOptions log_;
  StateOptions state_;
  VerifyOptions verify_;
  std::function<int(Output&)> run_;
};

int Main(int argc, char** argv) {
  // A reader that went away (head) then shows as EPIPE, which Output takes for a quiet end.
  std::signal(SIGPIPE, SIG_IGN);
  Output out(STDOUT_FILENO);
  CommandLine line;
  const int code = line.Run(argc, argv, out);
  if (const Status written = out.Finish(); !written) {
    Complain(written.message());
    return kCannotRead;
  }
  return code;
}

}  // namespace
}  // namespace amem::tool

int main(int argc, char** argv) {
  try {
    return amem::tool::Main(argc, argv);
  } catch (const std::exception& e) {  // out of memory, or a path that cannot be looked at
    amem::tool::Complain(e.what());
    return amem::tool::kCannotRead;
  }
}
