// What tests may do to a process of theirs: end it, stop it, or let one of its driver calls fail or never return.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/stand_ins/cuda/stand_in.h"

namespace amem::stand_in {
namespace {

struct Action {
  std::string name;  // before the equals sign
  int number = 0;    // behind it: an exit code, an error, or of a sleep and before a signal milliseconds
};

Action ParseAction(std::string_view text) {
  const auto equals = text.find('=');
  if (equals == std::string_view::npos) return {std::string(text), 0};
  return {std::string(text.substr(0, equals)), std::atoi(std::string(text.substr(equals + 1)).c_str())};
}

int SignalOf(std::string_view name) {
  for (const auto& [known, number] : {std::pair<std::string_view, int>{"KILL", SIGKILL},
                                      {"STOP", SIGSTOP},
                                      {"SEGV", SIGSEGV},
                                      {"ABRT", SIGABRT},
                                      {"TERM", SIGTERM}})
    if (name == known) return number;
  return 0;
}

// False: there is no such action.
bool Perform(const Action& action) {
  if (const int number = SignalOf(action.name); number != 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(action.number));
    ::kill(::getpid(), number);
    // The signal may be handled by another thread; this one must not go on before.
    if (number != SIGSTOP) std::this_thread::sleep_for(std::chrono::seconds(5));
  } else if (action.name == "exit") {
    std::exit(action.number);
  } else if (action.name == "_exit") {
    ::_exit(action.number);
  } else if (action.name == "hang") {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  } else if (action.name == "sleep") {
    std::this_thread::sleep_for(std::chrono::milliseconds(action.number));
  } else {
    return false;
  }
  return true;
}

struct Fault {
  std::string calls;
  std::uint64_t nth = 0;
  Action action;
  std::atomic<std::uint64_t> seen{0};
};
std::atomic<Fault*> g_fault{nullptr};  // never freed, because another thread may be in it

bool Concerns(const Fault& fault, std::string_view call) {
  return fault.calls == "*" || ("|" + fault.calls + "|").find("|" + std::string(call) + "|") != std::string::npos;
}

}  // namespace

int AskFault(std::string_view call) {
  Fault* const fault = g_fault.load();
  if (fault == nullptr || !Concerns(*fault, call)) return 0;
  const std::uint64_t count = ++fault->seen;
  if (fault->action.name == "fail") return count == fault->nth ? fault->action.number : 0;
  if (fault->action.name == "fail-all") return count >= fault->nth ? fault->action.number : 0;
  if (count == fault->nth) Perform(fault->action);
  return 0;
}

}  // namespace amem::stand_in

CUDA_CALL int stand_in_cuda_do(const char* action) {
  return amem::stand_in::Perform(amem::stand_in::ParseAction(action)) ? 0 : 1;
}

CUDA_CALL int stand_in_cuda_at(const char* call, std::uint64_t nth, const char* text) {
  amem::stand_in::StandIn* const stand_in = amem::stand_in::Get();
  if (stand_in == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
  const auto action = amem::stand_in::ParseAction(text);
  const bool fails = action.name == "fail" || action.name == "fail-all";
  if (!fails && amem::stand_in::SignalOf(action.name) == 0 && action.name != "exit" && action.name != "_exit" &&
      action.name != "hang" && action.name != "sleep")
    return 1;
  static auto& all = *new std::vector<std::unique_ptr<amem::stand_in::Fault>>;  // so that a leak checker knows of each
  auto* fault = all.emplace_back(std::make_unique<amem::stand_in::Fault>()).get();
  fault->calls = call;
  fault->nth = nth;
  fault->action = action;
  amem::stand_in::g_fault = fault;
  stand_in->simulator->SetHook([](std::string_view called, std::uint64_t) { return amem::stand_in::AskFault(called); });
  return 0;
}

bool amem::stand_in::PlanFault(std::string_view text) {
  const auto first = text.find(','), second = text.find(',', first + 1);
  if (first == std::string_view::npos || second == std::string_view::npos) return false;
  const std::string call(text.substr(0, first)), nth(text.substr(first + 1)), action(text.substr(second + 1));
  return stand_in_cuda_at(call.c_str(), std::strtoull(nth.c_str(), nullptr, 10), action.c_str()) == 0;
}
