#include "replay/tool/printer.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "replay/job/event_json.h"

namespace amem::tool {

EventPrinter::EventPrinter(Output& out, bool json, SessionId session, std::uint64_t opened_ns, std::string prefix)
    : out_(out), json_(json), session_(SessionText(session)), prefix_(std::move(prefix)), opened_ns_(opened_ns) {}

void EventPrinter::PrintText(const Event& event) {
  const bool before = event.time_ns < opened_ns_;
  const std::uint64_t us = (before ? opened_ns_ - event.time_ns : event.time_ns - opened_ns_) / 1000;
  out_ << prefix_;
  out_.Padded(event.seq.value, 6, ' ') << (before ? " -" : " +") << us / 1'000'000 << ".";
  out_.Padded(us % 1'000'000, 6, '0') << "s t" << event.thread << "  " << ToText(event.body) << "\n";
}

void EventPrinter::PrintJson(const Event& event) {
  nlohmann::ordered_json line = {{"session", session_}};
  line.update(ToJson(event));
  // Strings in a journal come from elsewhere; bytes that are not UTF-8 must not stop the log.
  out_.Verbatim(line.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)) << "\n";
}

}  // namespace amem::tool
