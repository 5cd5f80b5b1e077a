#include "replay/tool/events/printer.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "replay/job/clock.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/tool/command.h"

namespace amem::tool {

EventPrinter::EventPrinter(Output& out, const SessionOpened& who, PrinterOptions options)
    : out_(out), options_(std::move(options)), session_(SessionText(who.session)), rank_(who.rank) {}

bool EventPrinter::TakesBack(const EventBody& body) {
  const auto is_undo = [this](PoolId pool, PhaseKind phase) {
    const auto cycle = cycles_.find(pool);
    return cycle != cycles_.end() && IsUndo(phase, cycle->second);
  };
  if (const auto* begun = std::get_if<CycleBegun>(&body)) cycles_[begun->pool] = begun->kind;
  if (const auto* phase = std::get_if<PhaseBegun>(&body)) return is_undo(phase->pool, phase->phase);
  if (const auto* phase = std::get_if<PhaseDecided>(&body)) return is_undo(phase->pool, phase->phase);
  if (const auto* done = std::get_if<CycleDone>(&body)) cycles_.erase(done->pool);
  if (const auto* failed = std::get_if<CycleFailed>(&body)) cycles_.erase(failed->pool);
  return false;
}

void EventPrinter::PrintText(const Event& event) {
  if (options_.several) (out_.Left(options_.name, 8)) << " ";
  head_.clear();  // put together in one piece, because a log has a million such lines
  AppendPadded(head_, event.seq.value, 6, ' ');
  if (options_.wall) {
    head_ += ' ';
    head_ += PreciseText(static_cast<std::uint64_t>(WrappedSum(event.time_ns, options_.wall_offset_ns)));
  } else {
    const bool before = event.time_ns < options_.origin_ns;
    const std::uint64_t us = (before ? options_.origin_ns - event.time_ns : event.time_ns - options_.origin_ns) / 1000;
    head_ += before ? " -" : " +";
    AppendPadded(head_, us / 1'000'000, 1, '0');
    head_ += '.';
    AppendPadded(head_, us % 1'000'000, 6, '0');
    head_ += 's';
  }
  head_ += " t";
  AppendPadded(head_, event.thread, 1, '0');
  head_ += "  ";
  (out_.Verbatim(head_) << (TakesBack(event.body) ? "undo, " : "") << ToText(event.body)).Verbatim("\n");
}

void EventPrinter::PrintJson(const Event& event) {
  nlohmann::ordered_json line = {{"schema", "amem-replay/event"}, {"version", kSchemaVersion}, {"journal", session_}};
  if (options_.several) line["journal_rank"] = rank_ < 0 ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(rank_);
  if (options_.wall) line["wall_ns"] = static_cast<std::uint64_t>(WrappedSum(event.time_ns, options_.wall_offset_ns));
  line["session"] = session_;  // an event about another session has that one's id in its place
  line.update(ToJson(event));
  // Strings in a journal come from elsewhere; bytes that are not UTF-8 must not stop the log.
  out_.Verbatim(line.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)) << "\n";
}

}  // namespace amem::tool
