#include "replay/report/trace_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace amem {
namespace {

constexpr std::size_t kWriteAt = std::size_t{1} << 16;

// The frame of JSON is written by hand, for a million small objects of a fixed shape. Strings come from elsewhere, so all but
// the plainest are left to the JSON library, which escapes control bytes and replaces what is not UTF-8.
std::string Quoted(std::string_view text) {
  const auto plain = [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; };
  if (!std::ranges::all_of(text, plain))
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::string quoted;
  quoted.reserve(text.size() + 2);
  return quoted.append(1, '"').append(text).append(1, '"');
}

std::string Mebibytes(Bytes bytes) {
  constexpr Bytes kMiB = Bytes{1} << 20;
  if (bytes % kMiB == 0) return std::to_string(bytes / kMiB);
  return fmt::format("{:.3f}", static_cast<double>(bytes) / static_cast<double>(kMiB));
}

}  // namespace

TraceWriter::TraceWriter(const std::function<void(std::string_view)>& write, TraceSummary& summary)
    : write_(write), summary_(summary), text_("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n") {}

void TraceWriter::Finish() {
  *this << "\n]}\n";
  write_(text_);
  text_.clear();
}

TraceWriter& TraceWriter::operator<<(std::integral auto number) {
  const fmt::format_int digits(number);
  return *this << std::string_view(digits.data(), digits.size());
}

void TraceWriter::Microseconds(std::uint64_t ns) {
  const fmt::format_int rest(1000 + ns % 1000);  // with its zeros in front
  *this << ns / 1000 << "." << std::string_view(rest.data() + 1, rest.size() - 1);
}

void TraceWriter::Begin(char phase, std::string_view name, std::uint64_t process, std::uint32_t thread, std::uint64_t at) {
  if (!first_) *this << ",\n";
  first_ = false;
  *this << R"({"ph":")" << std::string_view(&phase, 1) << R"(","name":)" << Quoted(name) << R"(,"pid":)" << process
        << R"(,"tid":)" << thread << R"(,"ts":)";
  Microseconds(at);
}

void TraceWriter::Category(std::string_view category, SequenceNumber seq, std::string_view detail) {
  *this << R"(,"cat":)" << Quoted(category) << R"(,"args":{"event":)" << seq.value;
  if (!detail.empty()) *this << R"(,"detail":)" << Quoted(detail);
  *this << "}";
}

void TraceWriter::End() {
  *this << "}";
  if (text_.size() < kWriteAt) return;
  write_(text_);
  text_.clear();
}

void TraceWriter::Name(std::uint64_t process, std::optional<std::uint32_t> thread, std::string_view name) {
  Begin('M', thread ? "thread_name" : "process_name", process, thread.value_or(0), 0);
  *this << R"(,"args":{"name":)" << Quoted(name) << "}";
  End();
}

void TraceWriter::SortIndex(std::uint64_t process, std::int64_t index) {
  Begin('M', "process_sort_index", process, 0, 0);
  *this << R"(,"args":{"sort_index":)" << index << "}";
  End();
}

void TraceWriter::Slice(std::uint64_t process, std::uint32_t thread, std::string_view name, std::string_view category,
                        std::uint64_t from, std::uint64_t to, SequenceNumber seq, std::string_view detail) {
  Begin('X', name, process, thread, from);
  *this << R"(,"dur":)";
  Microseconds(to > from ? to - from : 0);
  Category(category, seq, detail);
  End();
  ++summary_.slices;
}

void TraceWriter::Instant(std::uint64_t process, std::uint32_t thread, std::string_view name, std::uint64_t at,
                          SequenceNumber seq, std::string_view detail) {
  Begin('i', name, process, thread, at);
  *this << R"(,"s":"t")";
  Category("failure", seq, detail);
  End();
}

void TraceWriter::Arrow(char phase, std::uint64_t process, std::uint32_t thread, std::uint64_t id, std::uint64_t at) {
  Begin(phase, "reference", process, thread, at);
  // As text, so that no reader of JSON rounds it. Perfetto takes numbers of up to 64 bits for an id, and nothing else.
  *this << R"(,"cat":"reference","id":")" << Hex(id) << R"(")";
  if (phase == 'f') *this << R"(,"bp":"e")";
  End();
  summary_.arrows += phase == 'f' ? 1 : 0;
}

void TraceWriter::Memory(std::uint64_t process, std::uint64_t at, Bytes held, Bytes released) {
  Begin('C', "memory (MiB)", process, 0, at);
  *this << R"(,"args":{"held":)" << Mebibytes(held) << R"(,"released":)" << Mebibytes(released) << "}";
  End();
  ++summary_.samples;
}

void TraceWriter::Counter(std::uint64_t process, std::uint64_t at, std::string_view name, Bytes bytes) {
  Begin('C', name, process, 0, at);
  *this << R"(,"args":{"value":)" << Mebibytes(bytes) << "}";
  End();
}

}  // namespace amem
