// The JSON of a trace in the Trace Event Format, object by object. One thread.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "replay/report/trace.h"
#include "statemachine/types.h"

namespace amem {

// Processes are pids, threads are rows, times are nanoseconds since the trace's beginning.
class TraceWriter {
 public:
  // `write` gets the text in pieces; what is drawn is counted in `summary`. Both are the caller's.
  TraceWriter(const std::function<void(std::string_view)>& write, TraceSummary& summary);
  void Finish();

  void Name(std::uint64_t process, std::optional<std::uint32_t> thread, std::string_view name);
  void SortIndex(std::uint64_t process, std::int64_t index);
  void Slice(std::uint64_t process, std::uint32_t thread, std::string_view name, std::string_view category, std::uint64_t from,
             std::uint64_t to, SequenceNumber seq, std::string_view detail = {});
  void Instant(std::uint64_t process, std::uint32_t thread, std::string_view name, std::uint64_t at, SequenceNumber seq,
               std::string_view detail);
  // `phase`: 's' where an arrow begins, 'f' where it ends.
  void Arrow(char phase, std::uint64_t process, std::uint32_t thread, std::uint64_t id, std::uint64_t at);
  void Memory(std::uint64_t process, std::uint64_t at, Bytes held, Bytes released);
  void Counter(std::uint64_t process, std::uint64_t at, std::string_view name, Bytes bytes);

 private:
  TraceWriter& operator<<(std::string_view text) {
    text_.append(text);
    return *this;
  }
  TraceWriter& operator<<(std::integral auto number);
  void Microseconds(std::uint64_t ns);
  void Begin(char phase, std::string_view name, std::uint64_t process, std::uint32_t thread, std::uint64_t at);
  void Category(std::string_view category, SequenceNumber seq, std::string_view detail);
  void End();

  const std::function<void(std::string_view)>& write_;
  TraceSummary& summary_;
  std::string text_;  // not written yet
  bool first_ = true;
};

}  // namespace amem
