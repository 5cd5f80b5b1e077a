// amem-replay: reads journals, also of live processes and without a GPU.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <exception>

#include "replay/tool/command.h"
#include "replay/tool/report.h"

namespace amem::tool {
namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 fine, 1 wrong usage, 2 something could not be read (what could be is printed), 3 a violation, failure or "
    "difference was found.";

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
    AddRun();
    AddDiff();
    AddRefs();
    AddTop();
    AddTail();
    AddTrace();
    AddPack();
    AddUnpack();
    AddCompletion();
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
    CLI::App* command =
        Add("why", "What went wrong with a job's last pause or resume: which rank, step and allocation, and what to do",
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

  void AddRun() {
    CLI::App* command =
        Add("run", "Does again what journals say, and compares each result; on the simulator, which needs no GPU",
            "  amem-replay run DIR                            all ranks of a job, up to the end\n"
            "  amem-replay run DIR --until 2:115              up to event 115 of rank 2\n"
            "  amem-replay run job.amem --memory 2=34GiB      others took the rest of device 2 while it was paused\n"
            "  amem-replay run DIR --processes                one process per rank, descriptors over Unix sockets\n"
            "  amem-replay run DIR --driver cuda              likewise, on this host's GPUs\n"
            "A failed resume for want of memory fails again with as little, and not with more.\n");
    AddDirectories(command, replay_.directories);
    command->add_option("--until", replay_.until, "Stop after this event: SEQ of the one journal, RANK:SEQ of a job")
        ->type_name("SEQ");
    command
        ->add_option("--memory", replay_.memory, "How much a device has once it was paused; by number or UUID, may be repeated")
        ->type_name("DEVICE=BYTES")
        ->allow_extra_args(false);
    command->add_flag("--processes", replay_.processes, "Each session in a process of its own, as in the job");
    command->add_option("--driver", replay_.driver, "What the calls are made to: sim, the simulator (default), or cuda")
        ->check(CLI::IsMember({"sim", "cuda"}))
        ->type_name("sim|cuda");
    command->add_flag("--json", replay_.json, "One JSON object");
    command->callback([this] { run_ = [this](Output& out) { return RunRun(replay_, out); }; });
  }

  void AddDiff() {
    CLI::App* command = Add("diff", "What changed between two points of a journal, or is different between two journals",
                            "  amem-replay diff DIR@100 @200\n"
                            "  amem-replay diff DIR_A DIR_B@1200 --json\n");
    command->add_option("A", diff_.a, "DIR or DIR@SEQ: the state at the end, or after that event")->required();
    command->add_option("B", diff_.b, "DIR, DIR@SEQ, or @SEQ of the same journal")->required();
    command->add_flag("--json", diff_.json, "One JSON object");
    command->callback([this] { run_ = [this](Output& out) { return RunDiff(diff_, out); }; });
  }

  void AddRefs() {
    CLI::App* command = Add("refs", "Who references whose memory, with how much",
                            "  amem-replay refs DIR\n"
                            "  amem-replay refs DIR --dot | dot -Tsvg > references.svg\n");
    AddDirectories(command, refs_.directories);
    command->add_flag("--dot", refs_.dot, "A graph for Graphviz");
    command->add_flag("--json", refs_.json, "One JSON object");
    command->callback([this] { run_ = [this](Output& out) { return RunRefs(refs_, out); }; });
  }

  void AddTop() {
    CLI::App* command = Add("top", "What holds the most memory, by call site, peer, size or age",
                            "  amem-replay top DIR                  by the place in libnccl that asked for it\n"
                            "  amem-replay top DIR --by peer --at 1200\n");
    AddDirectories(command, top_.directories);
    command->add_option("--by", top_.by, "site, peer, size or age")->check(CLI::IsMember({"site", "peer", "size", "age"}));
    command->add_option("--at", top_.at, "After this event; default: the last one")->type_name("SEQ");
    command->add_option("--limit", top_.limit, "So many lines")->type_name("N");
    command->add_flag("--json", top_.json, "One JSON array");
    command->callback([this] { run_ = [this](Output& out) { return RunTop(top_, out); }; });
  }

  void AddTail() {
    CLI::App* command = Add("tail", "What live sessions do, as they do it; ends when they do",
                            "  amem-replay tail 4711                            the session of that process\n"
                            "  amem-replay tail /tmp/amem-1000/journal          all that live\n"
                            "  amem-replay tail DIR --json | grep step-failed\n");
    command->add_option("PID|DIR", tail_.what, "A process, the directory of a session, or one that holds several")->required();
    command->add_option("--last", tail_.last, "Begin with the last N events")->type_name("N");
    command->add_option("--interval", tail_.interval_ms, "Look every so many milliseconds")->type_name("MS");
    command->add_flag("--json", tail_.json, "One JSON object a line");
    command->callback([this] { run_ = [this](Output& out) { return RunTail(tail_, out); }; });
  }

  void AddTrace() {
    CLI::App* command =
        Add("trace", "A job as a trace for ui.perfetto.dev or chrome://tracing", "  amem-replay trace DIR -o job.trace.json\n");
    AddDirectories(command, trace_.directories);
    command->add_option("-o,--output", trace_.file, "The file to write")->type_name("FILE")->required();
    command->callback([this] { run_ = [this](Output& out) { return RunTrace(trace_, out); }; });
  }

  void AddCompletion() {
    CLI::App* command = Add("completion", "Completion for a shell, to be sourced", "  source <(amem-replay completion bash)\n");
    command->add_option("SHELL", shell_, "bash")->required()->check(CLI::IsMember({"bash"}));
    command->callback([this] { run_ = [this](Output& out) { return PrintCompletion(out); }; });
  }

  // Made from the commands themselves, so that it cannot fall behind.
  int PrintCompletion(Output& out) {
    out << "_amem_replay() {\n  local word=\"${COMP_WORDS[COMP_CWORD]}\" options=\"\"\n  COMPREPLY=()\n"
           "  case \"$([ \"$COMP_CWORD\" = 1 ] || echo \"${COMP_WORDS[1]}\")\" in\n    \"\") options=\"--help --version";
    const std::vector<CLI::App*> commands = app_.get_subcommands({});
    for (const CLI::App* command : commands) out << " " << command->get_name();
    out << "\";;\n";
    for (const CLI::App* command : commands) {
      out << "    " << command->get_name() << ") options=\"";
      for (const CLI::Option* option : command->get_options()) {
        for (const std::string& name : option->get_lnames()) out << "--" << name << " ";
      }
      out << "\";;\n";
    }
    out << "  esac\n  if [ \"$COMP_CWORD\" = 1 ] || [[ \"$word\" == -* ]]; then\n"
           "    mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$word\")\n  else\n"
           "    mapfile -t COMPREPLY < <(compgen -o plusdirs -f -- \"$word\")\n  fi\n}\n"
           "complete -o filenames -F _amem_replay amem-replay\n";
    return kFine;
  }

  void AddPack() {
    CLI::App* command =
        Add("pack", "A job's journals as one compressed file, for a bug report; every command reads it like a directory",
            "  amem-replay pack /tmp/amem-1000/journal -o job.amem\n"
            "  amem-replay pack hostA/journal hostB/journal -o job.amem --anonymous\n"
            "  amem-replay why job.amem\n");
    AddDirectories(command, pack_.directories);
    command->add_option("-o,--output", pack_.file, "The file to write")->type_name("FILE")->required();
    command->add_flag("--anonymous", pack_.anonymous, "Without host names, GPU ids and paths");
    command->callback([this] { run_ = [this](Output& out) { return RunPack(pack_, out); }; });
  }

  void AddUnpack() {
    CLI::App* command =
        Add("unpack", "Directories of journals from a packed file", "  amem-replay unpack job.amem -o journals\n");
    command->add_option("FILE", unpack_.file, "What `amem-replay pack` wrote")->required();
    command->add_option("-o,--output", unpack_.directory, "Where the sessions' directories go")->type_name("DIR")->required();
    command->callback([this] { run_ = [this](Output& out) { return RunUnpack(unpack_, out); }; });
  }

  CLI::App app_{"Reads the journals of AMem: what happened to NCCL's GPU memory, and why a pause or resume failed."};
  WhyOptions why_;
  ListOptions list_;
  InfoOptions info_;
  LogOptions log_;
  StateOptions state_;
  VerifyOptions verify_;
  RunOptions replay_;
  DiffOptions diff_;
  RefsOptions refs_;
  TopOptions top_;
  TailOptions tail_;
  TraceOptions trace_;
  std::string shell_;
  PackCommandOptions pack_;
  UnpackOptions unpack_;
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
