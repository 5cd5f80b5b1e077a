// Events, states and numbers in words for people, generated from their values.
#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>

#include "statemachine/check.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {
namespace {

template <class... Kinds>
constexpr std::array<std::string_view, kEventKinds> NamesOf(const std::variant<Kinds...>*) {
  return {Kinds::kKind...};
}
constexpr auto kKindNames = NamesOf(static_cast<const EventVariant*>(nullptr));

using std::to_string;

constexpr Bytes kWholeMiB = Bytes{1} << 20;

template <class AnyText>
std::string Joined(const std::vector<AnyText>& texts, const char* between) {
  std::string out;
  for (const std::string& text : texts) out += (out.empty() ? "" : between) + text;
  return out;
}
std::string After(const char* between, const std::string& text) { return text.empty() ? "" : between + text; }

// ---- a struct as the words for its fields

template <Described T>
std::string FieldsText(const T& value, bool first_too = false);

template <class T>
std::string Value(const T& value) {
  if constexpr (std::is_base_of_v<std::string, T>) {
    return value;
  } else if constexpr (std::is_same_v<T, AccessDescriptor>) {
    const char* const may = value.flags == 3 ? "read-write" : value.flags == 1 ? "read" : value.flags == 0 ? "none" : nullptr;
    return amem::ToText(value.location) + (may != nullptr ? " " + std::string(may) : " flags " + to_string(value.flags));
  } else if constexpr (std::is_same_v<T, Address> || std::is_same_v<T, SessionId> || std::is_same_v<T, DriverHandle>) {
    return Hex(value);
  } else if constexpr (requires { value.value; }) {  // another id
    return to_string(value.value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    return to_string(value);
  } else if constexpr (requires { amem::ToText(value); }) {
    return std::string(amem::ToText(value));
  } else {
    return FieldsText(value);
  }
}
template <class T>
std::string Value(const std::vector<T>& list) {
  std::vector<std::string> texts;
  for (const T& element : list) texts.push_back(Value(element));
  return Joined(texts, "; ");
}

// Names that say no more than the value does.
constexpr std::string_view kSelfEvident[] = {"access", "bytes",    "call",         "code", "cycle_kind", "detail",
                                             "how",    "location", "message",      "name", "phase",      "properties",
                                             "reason", "remote",   "request_kind", "step", "why"};
bool IsAmount(std::string_view name) { return name == "bytes" || name == "alignment" || name.ends_with("offset"); }

// Nothing of this is inlined into hundreds of fields, which takes long to compile, and where GCC 12 warns of bounds that no
// text crosses.
[[gnu::noinline]] std::string Spoken(std::string_view name) {
  std::string words(name);
  std::ranges::replace(words, '_', ' ');
  return words;
}
[[gnu::noinline]] std::string WithName(std::string_view name, const std::string& value) {
  if (value.empty() || std::ranges::find(kSelfEvident, name) != std::end(kSelfEvident)) return value;
  return Spoken(name) + " " + value;
}

template <class T>
[[gnu::noinline]] std::string Words(std::string_view name, const T& field) {
  if constexpr (std::is_same_v<T, bool>) return (field ? "" : "not ") + Spoken(name);
  if constexpr (std::is_same_v<T, Bytes>) return WithName(name, IsAmount(name) ? FormatBytes(field) : to_string(field));
  return WithName(name, Value(field));
}
template <class T>
std::string Words(std::string_view name, const IfAny<T>& value) {
  return value.field != T{} ? Words(name, value.field) : "";
}
template <class T>
std::string Words(std::string_view name, const OrNull<T>& value) {
  return Words(name, IfAny{value.field});
}
template <class T>
std::string Words(std::string_view name, const Hexadecimal<T>& value) {
  return WithName(name, Hex(value.field));
}
template <class T>
std::string Words(std::string_view, const Unlisted<T>&) {
  return {};
}

// Fields of which zero means as much as any other value.
template <class T>
bool IsAlwaysListed(const T& field) {
  if constexpr (std::is_same_v<T, bool>) return field;
  return std::is_same_v<T, DeviceOrdinal> || (std::is_enum_v<T> && !std::is_same_v<T, Code>);
}

struct FieldWords {
  std::vector<std::string> words;
  std::vector<bool> always_listed;
  [[gnu::noinline]] void Add(std::string of_field, bool always) {
    words.push_back(std::move(of_field));
    always_listed.push_back(always);
  }
};
template <Described T>
[[gnu::noinline]] FieldWords AllWords(const T& value) {
  FieldWords all;
  ForEachField(value, [&](std::string_view name, const auto& field) { all.Add(Words(name, field), IsAlwaysListed(field)); });
  return all;
}
[[gnu::noinline]] std::string ListedWords(FieldWords of, const FieldWords& unset, bool first_too) {
  std::vector<std::string> listed;
  for (std::size_t i = 0; i < of.words.size(); ++i) {
    std::string& words = of.words[i];
    if (!words.empty() && ((i == 0 && first_too) || of.always_listed[i] || words != unset.words[i]))
      listed.push_back(std::move(words));
  }
  return Joined(listed, ", ");
}

// The fields that are not as they are when nobody sets them, and an event's first one: "address 0x7f00, 2 MiB, allocation 3".
template <Described T>
std::string FieldsText(const T& value, bool first_too) {
  static const auto& kUnset = *new FieldWords(AllWords(T{}));  // for threads that outlive exit(), too
  return ListedWords(AllWords(value), kUnset, first_too);
}

// ---- events of which a list of fields does not read well

std::string NameOf(const auto& cycle) {
  return std::string(ToText(cycle.kind)) + " " + to_string(cycle.cycle) + (cycle.pool ? " of " + ToText(cycle.pool) : "");
}

[[gnu::noinline]] std::string OfKind(std::string_view kind, const std::string& fields) {
  return std::string(kind) + ": " + fields;
}

struct Describe {
  std::string operator()(const auto& e) const { return OfKind(e.kKind, FieldsText(e, true)); }
  std::string operator()(const CycleBegun& e) const {
    return NameOf(e) + " begun" + (e.pool ? "" : " with " + to_string(e.members.size()) + " sessions");
  }
  std::string operator()(const CycleDone& e) const {
    std::string text = NameOf(e) + " done in " + to_string(e.duration_ns / 1000) + " us";
    if (e.changed + e.unchanged + e.zero == 0) return text;
    return text + ", contents: " + FormatBytes(e.changed) + " changed, " + FormatBytes(e.unchanged) + " unchanged, " +
           FormatBytes(e.zero) + " zero";
  }
  std::string operator()(const CycleFailed& e) const {
    return NameOf(e) + " failed" +
           (e.undone   ? " and was undone: "
            : e.paused ? " and could not be undone, so all stay paused: "
                       : " and could not be undone: ") +
           e.message;
  }
  std::string operator()(const CommunicatorSuspended& e) const {
    return ToText(e.communicator) + (e.suspended ? " suspended" : " resumed");
  }
  std::string operator()(const MemberHeard& e) const {
    const std::string who = ToText(e.member) + (e.rank >= 0 ? " (rank " + to_string(e.rank) + ")" : "");
    if (e.asks) return who + " waits for others to come to the " + std::string(amem::ToText(e.kind));
    if (!e.voted) return who + " has come to the " + std::string(amem::ToText(e.kind));
    return who + " voted " + (e.ok ? "for " : "against ") + std::string(amem::ToText(e.phase));
  }
  std::string operator()(const ProcessSeen& e) const {
    return "process of " + ToText(e.session) + " seen: pid " + to_string(e.pid) + " is " + e.state + After(" ", e.where) +
           (e.exit_code > 128  ? ", ended by signal " + to_string(e.exit_code - 128)
            : e.exit_code >= 0 ? ", exit code " + to_string(e.exit_code)
                               : "") +
           After(", it answered: ", e.answer) +
           (e.waited_ns != 0 ? ", waited " + to_string(e.waited_ns / 1'000'000) + " ms" : "");
  }
  std::string operator()(const ThreadSeen& e) const {
    return "thread " + to_string(e.thread) + After(" ", e.name) + " is " + e.state + After(" ", e.where) +
           After(", in ", Joined(e.stack, " < "));
  }
  static std::string NameOfSeat(const SeatShown& seat) {
    const std::string who = seat.rank >= 0 ? "rank " + to_string(seat.rank) : ToText(seat.session);
    return seat.pid != 0 ? who + " (pid " + to_string(seat.pid) + After(" on ", seat.host) + ")" : who;
  }
  static std::string NameIn(const BallotShown& e, SessionId session) {
    const auto seat = std::ranges::find(e.seats, session, &SeatShown::session);
    return seat == e.seats.end() ? ToText(session) : NameOfSeat(*seat) + After(" that ", seat->end);
  }
  // Each is looked for among all seats, and nobody reads a line of thousands.
  static std::string NamesOfCulprits(const BallotShown& e) {
    const std::size_t named = std::min(e.culprits.size(), BallotShown::kSeatsMost), more = e.culprits.size() - named;
    std::string names;
    for (std::size_t i = 0; i < named; ++i) names += (i == 0 ? "" : ", ") + NameIn(e, e.culprits[i]);
    return more == 0 ? names : names + " and " + to_string(more) + " more";
  }
  std::string operator()(const BallotShown& e) const {
    const std::string ballot = "ballot " + std::string(ToText(e.ballot)) + " of " + NameOf(e);
    const std::string votes = to_string(e.yes) + " of " + to_string(e.members) + " voted for";
    const std::string names = NamesOfCulprits(e);
    if (e.cause == agreement::Cause::kUndecided) return ballot + " waits" + After(" for ", names) + ", " + votes;
    if (e.cause == agreement::Cause::kAllVoted) {
      std::string last;
      std::uint64_t last_ns = e.first_ns;
      for (const SeatShown& seat : e.seats) {
        if (seat.voted_ns <= last_ns) continue;
        last = NameOfSeat(seat);
        last_ns = seat.voted_ns;
      }
      if (e.first_ns != 0 && !last.empty()) last += " " + to_string((last_ns - e.first_ns) / 1000) + " us after the first";
      return ballot + " passed, " + votes + After(", the last was ", last);
    }
    return ballot + " failed, " + std::string(ToText(e.cause)) + After(": ", names) + ", " + votes +
           (e.by ? ", decided by " + NameIn(e, e.by) : "") + After(": ", e.message);
  }
  std::string operator()(const RequestEnded& e) const {
    const std::string what = "request " + to_string(e.request) + " to " + std::string(amem::ToText(e.kind));
    if (e.code != Code::kOk) return what + " failed: " + std::string(amem::ToText(e.code)) + After(": ", e.message);
    return what + " done" + (e.bytes != 0 ? ", " + FormatBytes(e.bytes) + " given back" : "");
  }
  std::string operator()(const Frozen& e) const {
    return "was frozen by the driver for " + to_string((e.to_ns - e.from_ns) / 1'000'000) + " ms, " + FormatBytes(e.bytes) +
           " moved out" + After(", on other GPUs since: ", e.moved_gpus);
  }
  std::string operator()(const FreezeStep& e) const {
    const std::string command = e.goal == "frozen" ? "freeze" : "thaw";
    if (!e.outcome.empty()) return command + " ended, the process is " + e.outcome + After(": ", e.message);
    if (e.step == "begin") return command + " begun";
    return command + (e.done ? ": made " : ": begins to ") + e.step;
  }
  std::string operator()(const Condensed& e) const {
    return "snapshot of everything up to event " + to_string(e.through.value);
  }
};

}  // namespace

std::string Hex(std::uint64_t value) {
  std::array<char, 24> buffer{'0', 'x'};
  const auto end = std::to_chars(buffer.data() + 2, buffer.data() + buffer.size(), value, 16).ptr;
  return {buffer.data(), end};
}

std::string FormatBytes(Bytes bytes) {
  const char* unit = " B";
  if (bytes != 0 && bytes % kWholeMiB == 0) {
    bytes >>= 20;
    unit = " MiB";
  } else if (bytes != 0 && bytes % 1024 == 0) {
    bytes >>= 10;
    unit = " KiB";
  }
  std::string digits = to_string(bytes);
  for (std::size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, 1, ' ');
  return digits + unit;
}

constexpr Bytes kWholeGiB = 1024 * kWholeMiB;

// In MiB, from 10 GiB on in GiB, with one decimal. `up`: what is less than a tenth counts as one.
static std::string InTenths(Bytes bytes, bool up) {
  if (bytes < kWholeMiB) return FormatBytes(bytes);
  const bool large = bytes >= 10 * kWholeGiB;
  const Bytes unit = large ? kWholeGiB : kWholeMiB;
  const Bytes tenths = bytes / unit * 10 + (bytes % unit * 10 + (up ? unit - 1 : 0)) / unit;
  std::string text = FormatBytes(tenths / 10 * kWholeMiB);
  if (tenths % 10 != 0) text.insert(text.size() - 4, "." + to_string(tenths % 10));
  if (large) text[text.size() - 3] = 'G';
  return text;
}

std::string RoundedBytes(Bytes bytes) { return InTenths(bytes, false); }
std::string RoundedUpBytes(Bytes bytes) { return InTenths(bytes, true); }

std::string_view KindName(std::size_t kind) { return kind < kEventKinds ? kKindNames[kind] : "unknown"; }

std::optional<std::size_t> KindOf(std::string_view name) {
  const auto at = static_cast<std::size_t>(std::ranges::find(kKindNames, name) - kKindNames.begin());
  return at < kEventKinds ? std::optional(at) : std::nullopt;
}

std::string ToText(const Step& step) {
  using enum StepKind;
  std::string out{ToText(step.kind)};
  const std::string device = " device " + to_string(step.device.value);
  const std::string object = " multicast object " + to_string(step.allocation.value);
  if (step.kind == kAddDevice) return out + " " + to_string(step.device.value) + " to" + object;
  if (step.region) return out + " " + ToText(step.region) + " of " + FormatBytes(step.bytes) + " at " + Hex(step.address);
  if (step.kind == kBind || step.kind == kUnbind)
    return out + " memory of" + device + (step.kind == kBind ? " to" : " from") + object + " at " + FormatBytes(step.offset) +
           ", " + FormatBytes(step.bytes);
  if (step.kind == kQuiesce || step.kind == kCheckMemory || step.kind == kScan || step.kind == kBeginRestore) out += device;
  if (step.allocation) out += " " + ToText(step.allocation);
  if (step.address) out += " at " + Hex(step.address);
  if (step.bytes != 0) out += ", " + FormatBytes(step.bytes);
  return out;
}

std::string ToText(AllocationId id) { return "allocation " + to_string(id.value); }
std::string ToText(CommunicatorId id) { return "communicator " + to_string(id.value); }
std::string ToText(RegionId id) { return "registration " + to_string(id.value); }
std::string ToText(PoolId id) { return "pool " + to_string(id.value); }
std::string ToText(SessionId id) { return "session " + Hex(id); }
std::string ToText(const Location& location) {
  const std::string id = to_string(location.id);
  if (location.type == LocationType::kDevice) return "device " + id;
  if (location.type == LocationType::kHost) return "host";
  if (location.type == LocationType::kHostNuma) return "host NUMA node " + id;
  if (location.type == LocationType::kHostNumaCurrent) return "host current NUMA node";
  return "location type " + to_string(static_cast<std::uint32_t>(location.type));
}

std::string ToText(const CallSite& site) {
  std::string out;
  for (const std::uint64_t frame : site.frames) {
    if (frame == 0) break;
    if (!out.empty()) out += ",";
    out += "+" + Hex(frame).substr(2);
  }
  return out;
}

std::string ToText(const EventBody& body) { return std::visit(Describe{}, body); }

Status check::Failed(std::string_view expression, std::string_view file, int line, const std::string& operands,
                     std::string_view names, const std::string& values) {
  const std::string place = std::string(file.substr(file.rfind('/') + 1)) + ":" + std::to_string(line);
  std::string text = "check failed at " + place + ": " + std::string(expression) + " (" + operands + ")";
  if (!names.empty()) text += ", " + std::string(names) + " = " + values;
  return {Code::kInvalid, text + "; this is a defect of AMem, report it with the journal"};
}

}  // namespace amem
