#include "replay/tool/events/printer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "replay/job/clock.h"
#include "replay/job/event_json.h"
#include "replay/job/names.h"
#include "replay/tool/command.h"

namespace amem::tool {

EventPrinter::EventPrinter(Output& out, const SessionOpened& who, PrinterOptions options)
    : out_(out), options_(std::move(options)), session_(SessionText(who.session)), rank_(who.rank) {}

namespace {

// What stands before the sentence of an event, put together in one piece: a log has a million such lines.
class LineHead {
 public:
  LineHead& operator<<(std::string_view text) {
    end_ = std::ranges::copy(text, end_).out;
    return *this;
  }
  LineHead& operator<<(std::uint64_t number) { return Padded(number, 1, ' '); }
  LineHead& Padded(std::uint64_t number, std::size_t width, char fill) {
    std::array<char, 20> digits;
    const auto length = static_cast<std::size_t>(std::to_chars(digits.begin(), digits.end(), number).ptr - digits.data());
    if (length < width) end_ = std::fill_n(end_, width - length, fill);
    return *this << std::string_view(digits.data(), length);
  }
  [[nodiscard]] std::string_view view() const { return {text_.data(), static_cast<std::size_t>(end_ - text_.data())}; }

 private:
  std::array<char, 128> text_;  // four numbers of 20 digits at most, a date and some blanks
  char* end_ = text_.data();
};

}  // namespace

void EventPrinter::PrintText(const Event& event) {
  if (options_.several) (out_.Left(options_.name, 8)) << " ";
  LineHead head;
  head.Padded(event.seq.value, 6, ' ');
  if (options_.wall) {
    head << " " << PreciseText(static_cast<std::uint64_t>(WrappedSum(event.time_ns, options_.wall_offset_ns)));
  } else {
    const bool before = event.time_ns < options_.origin_ns;
    const std::uint64_t us = (before ? options_.origin_ns - event.time_ns : event.time_ns - options_.origin_ns) / 1000;
    head << (before ? " -" : " +") << us / 1'000'000 << ".";
    head.Padded(us % 1'000'000, 6, '0') << "s";
  }
  head << " t" << std::uint64_t{event.thread} << "  ";
  (out_.Verbatim(head.view()) << ToText(event.body)).Verbatim("\n");
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
