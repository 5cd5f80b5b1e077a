// A writer that outlasts its journal: the session goes on when there is none, and in a fresh directory once there can be one.
#include <fmt/format.h>

#include <utility>

#include "journal/base/fork_guard.h"
#include "journal/journal.h"

namespace amem {
namespace {

class LastingWriter final : public JournalWriter {
 public:
  LastingWriter(JournalOptions options, SessionId session) : options_(std::move(options)), session_(session) {
    auto opened = JournalWriter::Open(options_, session_);
    if (opened) {
      journal_ = *std::move(opened);
    } else {
      Lose(opened.status());
    }
  }
  Status Append(const Event& event) override {
    if (journal_ == nullptr) return why_;
    Status appended = journal_->Append(event);
    if (!appended && !ended_ && !guard_.InChild()) Lose(appended);
    return appended;
  }
  Status Flush() override { return journal_ == nullptr ? why_ : journal_->Flush(); }
  [[nodiscard]] bool SnapshotDue() const override { return journal_ != nullptr && journal_->SnapshotDue(); }
  Status Snapshot(const State& state) override { return journal_ == nullptr ? why_ : journal_->Snapshot(state); }
  Status Renew(const State& state) override {
    if (journal_ != nullptr || ended_ || guard_.InChild()) return {Code::kRefused, "this journal is not renewed now"};
    auto fresh = JournalWriter::Continue(options_, session_, state);
    if (!fresh) return why_ = fresh.status();
    journal_ = *std::move(fresh);
    Say("the journal begins anew in " + journal_->Directory().string() + ", and pausing works again");
    return {};
  }
  Status Close() override {
    ended_ = true;
    return journal_ == nullptr ? Status{} : journal_->Close();  // that there is none has been said
  }
  [[nodiscard]] std::filesystem::path Directory() const override {
    return journal_ == nullptr ? std::filesystem::path() : journal_->Directory();
  }
  [[nodiscard]] Bytes TailBytesUsed() const override { return journal_ == nullptr ? 0 : journal_->TailBytesUsed(); }

 private:
  void Lose(const Status& why) {
    why_ = why;
    journal_.reset();  // its directory says by now that it is broken
    Say(
        fmt::format("there is no journal: {}; NCCL goes on, and pauses are refused while there is none (AMEM_JOURNAL_DIR "
                    "chooses another place)",
                    why.message()));
  }
  void Say(const std::string& message) const {
    if (options_.report) options_.report(message);
  }

  const JournalOptions options_;
  const SessionId session_;
  const ForkGuard guard_;
  std::unique_ptr<JournalWriter> journal_;  // null: none now, because of why_
  Status why_;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<JournalWriter> JournalWriter::OpenLasting(const JournalOptions& options, SessionId session) {
  return std::make_unique<LastingWriter>(options, session);
}

}  // namespace amem
