#include "replay/job/fold.h"

#include <fmt/format.h>

#include <algorithm>

#include "replay/job/names.h"
#include "replay/job/opening.h"
#include "replay/job/sessions.h"
#include "statemachine/apply.h"

namespace amem {

using BreakKind = Folded::Break::Kind;

static Status OutOfSequence(std::uint64_t expected, std::uint64_t got) {
  if (got < expected) return {Code::kInvalid, fmt::format("event {} comes where {} was expected", got, expected)};
  if (got - expected == 1) return {Code::kInvalid, fmt::format("event {} is missing", expected)};
  return {Code::kInvalid, fmt::format("events {} to {} are missing", expected, got - 1)};
}

void Folding::Begin(Result<State> before) {
  if (before) {
    out_.state = *std::move(before);
  } else {
    out_.broken = {BreakKind::kBeginning, out_.info.first, before.status()};
  }
  for (FoldObserver* observer : observers_) observer->Begin(out_.state);
}

bool Folding::Take(const Event& event) {
  if (!out_.broken && event.seq.value != out_.state.last.value + 1)
    out_.broken = {BreakKind::kSequence, event.seq, OutOfSequence(out_.state.last.value + 1, event.seq.value)};
  if (!out_.broken) return Follow(event);
  bool go_on = false;
  for (FoldObserver* observer : observers_) go_on |= observer->Behind(event);
  return go_on;
}

bool Folding::Follow(const Event& event) {
  for (FoldObserver* observer : observers_) observer->Before(event, out_.state);
  if (const Status applied = Apply(out_.state, event); !applied) {
    out_.broken = {BreakKind::kOrder, event.seq, applied.Within(ToText(event.body))};
    return true;
  }
  ++out_.events;
  out_.last_ns = event.time_ns;
  for (FoldObserver* observer : observers_) {
    const Status sound = observer->After(event, out_.state);
    if (!sound && !out_.broken) out_.broken = {BreakKind::kState, event.seq, sound};
  }
  return observers_.empty() || !std::ranges::all_of(observers_, &FoldObserver::Done);
}

Result<Folded> FoldJournal(JournalReader& reader, std::span<FoldObserver* const> observers, SequenceNumber last) {
  Folded folded;
  AMEM_ASSIGN(folded.info, reader.Info());
  Folding folding(folded, observers);
  folding.Begin(StateBefore(reader, folded.info));
  AMEM_ASSIGN(auto read, reader.Read(SequenceNumber{folded.state.last.value + 1}, last,
                                     [&folding](const Event& event) { return folding.Take(event); }));
  folded.damage = std::move(read);
  for (FoldObserver* observer : observers) observer->End(folded);
  return folded;
}

std::string ToText(const Folded::Break& broken) {
  const std::string& why = broken.why.message();
  if (broken.kind == BreakKind::kOrder)
    return fmt::format("event {} does not fit what came before it: {}", broken.at.value, why);
  if (broken.kind == BreakKind::kState) return fmt::format("event {} left an impossible state: {}", broken.at.value, why);
  return why;
}

std::string DamageText(const ReadReport& report) {
  if (report.whole()) return {};
  if (report.corrupt_records == 0) return report.incomplete;
  const std::string records = Plural(report.corrupt_records, "damaged record was", "damaged records were");
  return fmt::format("{}{}{} left out: {}", report.incomplete, report.incomplete.empty() ? "" : "; ", records,
                     report.corruption);
}

std::vector<std::string> DamageOf(const std::filesystem::path& session, const ReadReport& report) {
  std::vector<std::string> sentences;
  if (!report.incomplete.empty()) sentences.push_back(IncompletePack(report.incomplete));
  const ReadReport records{.corrupt_records = report.corrupt_records, .corruption = report.corruption};
  if (!records.whole())
    sentences.push_back(fmt::format("a journal is incomplete: {}: {}", PlaceOf(session), DamageText(records)));
  return sentences;
}

}  // namespace amem
