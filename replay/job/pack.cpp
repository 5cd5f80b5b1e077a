#include "replay/job/pack.h"

#include <fmt/format.h>
#include <unistd.h>
#define ZSTD_STATIC_LINKING_ONLY  // for the default limit of a window
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "journal/base/clock.h"
#include "journal/base/file.h"
#include "journal/codec.h"
#include "journal/journal.h"
#include "journal/record.h"
#include "journal/session_dir.h"
#include "journal/store.h"
#include "replay/job/names.h"
#include "replay/job/output_file.h"

namespace amem {
namespace {

namespace fs = std::filesystem;
using PackJson = nlohmann::ordered_json;

constexpr std::array<char, 12> kMagic = {'A', 'M', 'E', 'M', 'P', 'A', 'C', 'K', 1, 0, 0, 0};
enum class Block : std::uint32_t { kSession = 1, kSnapshot = 2, kEvent = 3, kDamage = 4, kAbsent = 5 };  // others are skipped
constexpr std::uint32_t kLargestBlock = std::uint32_t{1} << 30;
constexpr std::size_t kHeaderMost = std::size_t{1} << 16;  // of a block that introduces a session
constexpr std::size_t kDamageMost = 100;                   // sentences about it
constexpr std::size_t kMissingMost = 1000;                 // bytes of what a journal says that it lacks
constexpr int kLevel = 9;                                  // of zstd, 1 to 19
constexpr std::size_t kEventsPerTransaction = 20'000;
constexpr Bytes kBytesPerTransaction = Bytes{4} << 20;

struct BlockHeader {
  Block kind{};
  std::uint32_t bytes = 0;
};

using Magic = std::array<char, kMagic.size()>;

// The beginning of a pack, of whatever version; nullopt: it is none.
std::optional<Magic> ReadMagic(const File& file) {
  Magic magic{};
  const auto read = file.ReadAt(0, std::as_writable_bytes(std::span(magic)));
  if (!read || *read != magic.size() || std::memcmp(magic.data(), kMagic.data(), 8) != 0) return std::nullopt;
  return magic;
}

// ---- writing ---------------------------------------------------------------------------------------------------------------

class Compressor {
 public:
  explicit Compressor(OutputFile& file)
      : file_(file), context_(ZSTD_createCCtx(), &ZSTD_freeCCtx), out_(ZSTD_CStreamOutSize()) {
    ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_compressionLevel, kLevel);
    ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_checksumFlag, 1);
    pending_.reserve(kPendingBytes * 2);
  }
  void Add(Block kind, std::span<const std::byte> payload) {
    const BlockHeader header{kind, static_cast<std::uint32_t>(payload.size())};
    const auto* bytes = reinterpret_cast<const std::byte*>(&header);
    pending_.insert(pending_.end(), bytes, bytes + sizeof header);
    pending_.insert(pending_.end(), payload.begin(), payload.end());
    if (pending_.size() >= kPendingBytes) Push(ZSTD_e_continue);
  }
  bool Finish() {
    Push(ZSTD_e_end);
    return good_;
  }

 private:
  static constexpr std::size_t kPendingBytes = std::size_t{1} << 18;
  void Push(ZSTD_EndDirective how) {
    ZSTD_inBuffer in{pending_.data(), pending_.size(), 0};
    std::size_t left = 1;
    while (good_ && (how == ZSTD_e_end ? left != 0 : in.pos < in.size)) {
      ZSTD_outBuffer out{out_.data(), out_.size(), 0};
      left = ZSTD_compressStream2(context_.get(), &out, &in, how);
      good_ = ZSTD_isError(left) == 0;
      file_.Write({out_.data(), out.pos});
    }
    pending_.clear();
  }

  OutputFile& file_;
  std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)> context_;
  std::vector<char> out_;
  std::vector<std::byte> pending_;
  bool good_ = true;
};

std::span<const std::byte> BytesOf(const std::string& text) { return std::as_bytes(std::span(text)); }

class Packer {
 public:
  Packer(Compressor& out, const PackOptions& options, Packed& packed) : out_(out), options_(options), packed_(packed) {}

  Status Add(const fs::path& session) {
    const std::uint64_t as_of_ns = MonotonicNs();
    AMEM_ASSIGN(const auto reader, JournalReader::Open(session));
    AMEM_ASSIGN(const auto info, reader->Info());
    const std::string reason = Shown(info.broken_reason);
    const PackJson header = {{"session", info.session.value},
                             {"pid", info.pid},
                             {"format", info.format},
                             {"status", ToText(info.status)},
                             {"broken_reason", reason},
                             {"as_of_ns", as_of_ns},
                             {"set_realtime_ns", info.set_clock.realtime_ns},
                             {"set_monotonic_ns", info.set_clock.monotonic_ns}};
    out_.Add(Block::kSession, BytesOf(header.dump(-1, ' ', false, PackJson::error_handler_t::replace)));
    const Status snapshot = info.first.value > 1 ? AddSnapshot(*reader, SequenceNumber{info.first.value - 1}) : Status{};
    if (!snapshot) Note(Block::kDamage, session, snapshot.message());
    const auto read = reader->Read(info.first, info.last, [&](const Event& event) {
      Add(event);
      return true;
    });
    ++packed_.sessions;
    if (!read) return Note(Block::kDamage, session, read.status().message()), Status{};
    for (const std::string& damage : {read->corruption, read->incomplete})
      if (!damage.empty()) Note(Block::kDamage, session, damage);
    return {};
  }
  void Note(Block kind, const fs::path& session, const std::string& damage) {
    out_.Add(kind, BytesOf(Shown(damage)));
    packed_.damage.push_back(session.string() + ": " + damage);
  }
  // What there are of names, before the first text of any journal is cleaned. What cannot be read is told when it is packed.
  void Learn(const fs::path& session) {
    const auto reader = JournalReader::Open(session);
    const auto info = reader ? (*reader)->Info() : reader.status();
    if (!info) return;
    const auto learn = [&](EventBody& body) { names_.Learn(body); };
    if (const auto state = info->first.value > 1 ? (*reader)->StateAt(SequenceNumber{info->first.value - 1}) : State{})
      static_cast<void>(EncodeSnapshot(*state, learn));
    static_cast<void>(
        (*reader)->Read(info->first, info->last, [&](const Event& event) { return names_.Learn(event.body), true; }));
  }

 private:
  [[nodiscard]] std::string Shown(const std::string& text) const { return options_.anonymous ? names_.CleanText(text) : text; }
  void Add(const Event& event) {
    ++packed_.events;
    if (!options_.anonymous) return out_.Add(Block::kEvent, encoder_.Encode(event));
    Event clean = event;
    names_.Clean(clean.body);
    out_.Add(Block::kEvent, encoder_.Encode(clean));
  }
  Status AddSnapshot(JournalReader& reader, SequenceNumber at) {
    AMEM_ASSIGN(const auto state, reader.StateAt(at));
    const auto clean = [&](EventBody& body) { names_.Clean(body); };
    AMEM_ASSIGN(const auto payload, options_.anonymous ? EncodeSnapshot(state, clean) : EncodeSnapshot(state));
    out_.Add(Block::kSnapshot, payload);
    return {};
  }

  Compressor& out_;
  const PackOptions& options_;
  Packed& packed_;
  Encoder encoder_;
  Anonymizer names_;
};

// ---- reading ---------------------------------------------------------------------------------------------------------------

// What a pack of so many bytes may unpack to. Journals shrink to a twentieth, and hardly ever to less than a fiftieth.
struct Limits {
  Bytes bytes = ~Bytes{0};
  std::uint32_t block = kLargestBlock;
  std::uint64_t sessions = ~std::uint64_t{0};
  int window_log = ZSTD_WINDOWLOG_LIMIT_DEFAULT;

  static Limits Of(Bytes file) {
    constexpr Bytes kMiB = Bytes{1} << 20;
    return {8 * kMiB + 64 * file, static_cast<std::uint32_t>(std::min<Bytes>(16 * kMiB + 16 * file, kLargestBlock)),
            512 + file / 256, 24};
  }
};

class Decompressor {
 public:
  Decompressor(const File& file, const Limits& limits)
      : file_(file), limits_(limits), context_(ZSTD_createDCtx(), &ZSTD_freeDCtx), in_(ZSTD_DStreamInSize()) {
    ZSTD_DCtx_setParameter(context_.get(), ZSTD_d_windowLogMax, limits.window_log);
  }
  [[nodiscard]] bool too_large() const { return too_large_; }
  [[nodiscard]] Bytes read() const { return total_; }  // unpacked

  // The next block's payload, valid until the next call; nullopt at the end, and then `damage` is empty or says what is wrong.
  std::optional<std::span<const std::byte>> Next(Block& kind, std::string& damage) {
    BlockHeader header;
    const std::size_t had = Read(std::as_writable_bytes(std::span(&header, 1)), damage);
    if (had == sizeof header && header.bytes > limits_.block) {
      too_large_ = header.bytes <= kLargestBlock;
      damage = fmt::format("a block claims {} bytes", header.bytes);
      return std::nullopt;
    }
    // What a damaged block claims is not believed until it is there.
    constexpr std::size_t kAtOnce = std::size_t{1} << 20;
    bool whole = had == sizeof header;
    for (payload_.clear(); whole && payload_.size() < header.bytes;) {
      const std::size_t old = payload_.size(), more = std::min(header.bytes - old, kAtOnce);
      payload_.resize(old + more);
      whole = Read(std::span(payload_).subspan(old), damage) == more;
    }
    if (!whole && had != 0 && damage.empty()) damage = "it ends inside a block";
    kind = header.kind;
    return whole ? std::optional<std::span<const std::byte>>(payload_) : std::nullopt;
  }

 private:
  // How many bytes there were.
  std::size_t Read(std::span<std::byte> to, std::string& damage) {
    ZSTD_outBuffer out{to.data(), to.size(), 0};
    while (out.pos < out.size && total_ <= limits_.bytes) {
      if (source_.pos == source_.size) {
        const auto read = file_.ReadAt(offset_, std::as_writable_bytes(std::span(in_)));
        if (!read) damage = read.status().message();
        source_ = {in_.data(), read ? *read : 0, 0};
        offset_ += source_.size;
      }
      const std::size_t before = out.pos, left = ZSTD_decompressStream(context_.get(), &out, &source_);
      if (source_.size == 0 && out.pos == before) {
        if (expects_more_ && damage.empty()) damage = "it is cut short";
        break;
      }
      if (ZSTD_isError(left) != 0) {
        damage = std::string("it does not decompress: ") + ZSTD_getErrorName(left);
        break;
      }
      total_ += out.pos - before;
      expects_more_ = left != 0;
    }
    too_large_ = total_ > limits_.bytes;
    return out.pos;
  }

  const File& file_;
  const Limits limits_;
  Bytes offset_ = kMagic.size();  // of what is read next
  Bytes total_ = 0;
  bool too_large_ = false;
  std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> context_;
  std::vector<char> in_;
  ZSTD_inBuffer source_{nullptr, 0, 0};
  bool expects_more_ = true;
  std::vector<std::byte> payload_;
};

// One session's directory while it is filled.
class SessionUnpacker {
 public:
  static Result<std::unique_ptr<SessionUnpacker>> Begin(const fs::path& directory, const PackJson& header) {
    const SessionId session{Number(header, "session")};
    AMEM_ASSIGN(auto fresh, NewSessionDirectory::Create(directory, session));
    const Bytes largest = 2 * JournalOptions{}.map_bytes;  // filled in another order, a journal may take more than it had
    AMEM_ASSIGN(auto store, Store::Create(fresh.path(), largest));
    const auto pid = static_cast<std::int32_t>(Number(header, "pid"));
    AMEM_TRY(store->Append(Table::kMeta, 1, MetaRecord(session, pid, {})));
    const WallClock set{Number(header, "set_realtime_ns"), Number(header, "set_monotonic_ns")};
    if (set.monotonic_ns != 0) AMEM_TRY(store->Append(Table::kMeta, 2, MetaRecord(session, pid, set, 2)));
    return std::unique_ptr<SessionUnpacker>(new SessionUnpacker(std::move(fresh), std::move(store), header));
  }

  Status Snapshot(std::span<const std::byte> payload) {
    AMEM_ASSIGN(const auto state, DecodeSnapshot(payload));
    const auto frame = Framed(RecordType::kSnapshot, state.last.value, payload);
    return store_->Append(Table::kSnapshots, state.last.value, frame);
  }
  Status Event(std::span<const std::byte> payload) {
    AMEM_ASSIGN(const auto event, DecodeEvent(payload));
    waiting_.emplace_back(event.seq.value, Framed(RecordType::kEvent, event.seq.value, payload));
    waiting_bytes_ += payload.size();
    return waiting_.size() >= kEventsPerTransaction || waiting_bytes_ >= kBytesPerTransaction ? Flush() : Status{};
  }
  Result<fs::path> Finish() {
    AMEM_TRY(Flush());
    store_.reset();
    const std::string status = Text(header_, "status");
    if (status == ToText(SessionStatus::kClosed)) AMEM_TRY(MarkClosed(fresh_.path()));
    if (status == ToText(SessionStatus::kBroken)) MarkBroken(fresh_.path(), Text(header_, "broken_reason"));
    if (status == ToText(SessionStatus::kLive)) AMEM_TRY(MarkPackedLive(fresh_.path(), Number(header_, "as_of_ns")));
    if (!missing_.empty()) AMEM_TRY(MarkIncomplete(fresh_.path(), missing_));
    return fresh_.Publish();
  }
  // What could not be read when it was packed; the first is enough to say that it is incomplete.
  void Lacks(std::string_view what) {
    if (missing_.empty()) missing_ = "when it was packed: " + std::string(what.substr(0, kMissingMost));
  }

 private:
  SessionUnpacker(NewSessionDirectory fresh, std::unique_ptr<Store> store, PackJson header)
      : fresh_(std::move(fresh)), store_(std::move(store)), header_(std::move(header)) {}

  Status Flush() {
    const Status written = store_->Write([&](const Store::Writing& writing) {
      for (const auto& [seq, frame] : waiting_) AMEM_TRY(writing.Append(Table::kEvents, seq, frame));
      return Status{};
    });
    waiting_.clear();
    waiting_bytes_ = 0;
    return written;
  }
  // What has another type is as good as missing.
  static std::uint64_t Number(const PackJson& header, const char* key) {
    const auto at = header.find(key);
    return at != header.end() && at->is_number_integer() ? at->get<std::uint64_t>() : 0;
  }
  static std::string Text(const PackJson& header, const char* key) {
    const auto at = header.find(key);
    return at != header.end() && at->is_string() ? at->get<std::string>() : "";
  }

  NewSessionDirectory fresh_;
  std::unique_ptr<Store> store_;
  PackJson header_;
  std::string missing_;
  std::vector<std::pair<std::uint64_t, std::vector<std::byte>>> waiting_;
  Bytes waiting_bytes_ = 0;
};

// Unpacks one file.
class Unpacker {
 public:
  Unpacker(const fs::path& file, const fs::path& directory, const Limits& limits)
      : file_(file), directory_(directory), limits_(limits) {}

  Result<Unpacked> Run(const File& in) {
    Decompressor blocks(in, limits_);
    std::string damage;
    Block kind{};
    while (const auto payload = blocks.Next(kind, damage)) AMEM_TRY(Take(kind, *payload));
    if (blocks.too_large()) return TooLarge();
    AMEM_TRY(Finish());
    if (!damage.empty()) {
      Damaged(fmt::format("{} after {} and {} of {}; what comes before that is used", damage,
                          Plural(unpacked_.sessions.size(), "session"), Plural(unpacked_.events, "event"),
                          Plural(blocks.read(), "byte")));
    }
    if (unnamed_ != 0) unpacked_.damage.push_back(fmt::format("{}: and {} more", PackName(file_), unnamed_));
    for (const fs::path& session : unpacked_.sessions)
      if (!missing_.empty()) AMEM_TRY(MarkIncomplete(session, missing_));
    return std::move(unpacked_);
  }

 private:
  Status Take(Block kind, std::span<const std::byte> payload) {
    const std::string_view text(reinterpret_cast<const char*>(payload.data()), payload.size());
    if (kind == Block::kSession) return Begin(text);
    if (kind == Block::kAbsent) {
      Damaged("a journal was not packed: " + std::string(text.substr(0, kHeaderMost)));
    } else if (kind == Block::kDamage) {
      Note(std::string(text.substr(0, kHeaderMost)));
      if (session_) session_->Lacks(text);
    } else if (session_) {
      const Status added = kind == Block::kSnapshot ? session_->Snapshot(payload)
                           : kind == Block::kEvent  ? session_->Event(payload)
                                                    : Status{};
      if (!added) Damaged("a block is left out: " + added.message());
      unpacked_.events += added.ok() && kind == Block::kEvent ? 1 : 0;
    }
    return {};
  }
  Status Begin(std::string_view text) {
    AMEM_TRY(Finish());
    if (++sessions_ > limits_.sessions) return TooLarge();
    const PackJson header = text.size() <= kHeaderMost ? PackJson::parse(text.begin(), text.end(), nullptr, false) : PackJson();
    auto begun = header.is_object() ? SessionUnpacker::Begin(directory_, header)
                                    : Status{Code::kCorrupt, "what should introduce it is no JSON"};
    if (begun) {
      session_ = *std::move(begun);
    } else {
      Damaged("a session is left out: " + begun.status().message());
    }
    return {};
  }
  Status Finish() {
    if (!session_) return {};
    auto made = session_->Finish();
    session_.reset();
    if (made) {
      unpacked_.sessions.push_back(*std::move(made));
    } else if (made.status().code() == Code::kCorrupt) {  // as of two events with one number
      Damaged("a session is left out: " + made.status().message());
    } else {
      return made.status();
    }
    return {};
  }
  // Of the pack itself: nobody knows which of its journals, or of those that are not there, lack something.
  void Damaged(const std::string& what) {
    std::string named = PackName(file_) + ": " + what;
    if (missing_.empty()) missing_ = named.substr(0, kMissingMost);
    Note(std::move(named));
  }
  void Note(std::string what) {
    unpacked_.damage.size() < kDamageMost ? unpacked_.damage.push_back(std::move(what)) : void(++unnamed_);
  }
  [[nodiscard]] Status TooLarge() const {
    return {Code::kRefused, PackName(file_) +
                                " unpacks to far more than its size lets expect, as one that is made to fill memory "
                                "or disk; if you trust who made it, use --force"};
  }

  const fs::path& file_;
  const fs::path& directory_;
  const Limits limits_;
  Unpacked unpacked_;
  std::unique_ptr<SessionUnpacker> session_;
  std::uint64_t sessions_ = 0, unnamed_ = 0;
  std::string missing_;
};

}  // namespace

Result<Packed> Pack(std::span<const fs::path> sessions, const fs::path& file, const PackOptions& options) {
  AMEM_ASSIGN(auto out, OutputFile::Open(file, OutputFile::kPrivate));
  out.Write({kMagic.data(), kMagic.size()});
  Packed packed;
  Compressor compressor(out);
  Packer packer(compressor, options, packed);
  if (options.anonymous) std::ranges::for_each(sessions, [&](const fs::path& session) { packer.Learn(session); });
  for (const fs::path& session : sessions)
    if (const Status added = packer.Add(session); !added) packer.Note(Block::kAbsent, session, added.message());
  if (packed.sessions == 0) return Status{Code::kNotFound, "pack: none of the journals could be read"};
  if (!compressor.Finish()) return Status{Code::kIo, "pack " + file.string() + ": zstd failed"};
  AMEM_TRY(out.Commit());
  packed.file_bytes = out.bytes();
  packed.to_standard_output = out.is_standard_output();
  return packed;
}

std::string PackName(const fs::path& file) { return file.filename() == kStandardInputFile ? "standard input" : file.string(); }

bool IsPack(const fs::path& file) {
  const auto in = File::OpenToRead(file, File::Links::kFollowed);
  return in && ReadMagic(*in).has_value();
}

Result<Unpacked> Unpack(const fs::path& file, const fs::path& directory, bool however_large) {
  AMEM_ASSIGN(const auto in, File::OpenToRead(file, File::Links::kFollowed));
  const auto magic = ReadMagic(in);
  if (!magic) return Status{Code::kCorrupt, file.string() + " is no pack of journals: make one with `amem pack DIR -o FILE`"};
  if (*magic != kMagic) return Status{Code::kUnsupported, file.string() + " was packed by a newer AMem: use that to read it"};
  AMEM_ASSIGN(const auto bytes, in.Size());
  return Unpacker(file, directory, however_large ? Limits{} : Limits::Of(bytes)).Run(in);
}

}  // namespace amem
