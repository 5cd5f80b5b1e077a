#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "journal/record_source.h"

namespace amem {
namespace {

using Page = std::vector<std::byte>;

constexpr std::uint32_t kMagic = 0xBEEFC0DE;
constexpr std::uint32_t kDataVersion = 1;
constexpr std::uint64_t kNoPage = ~std::uint64_t{0};
constexpr std::uint16_t kBranch = 1, kLeaf = 2, kOverflow = 4, kMeta = 8;
constexpr std::uint16_t kBigData = 1, kSubTable = 2;
constexpr std::uint16_t kIntegerKey = 8;  // the flags of our tables
constexpr unsigned kDeepest = 32;

struct Tree {  // MDB_db
  std::uint32_t page_bytes;
  std::uint16_t flags, depth;
  std::uint64_t counts[4], root;
};
struct Meta {  // MDB_meta
  std::uint32_t magic, version;
  std::uint64_t address, map_bytes;
  Tree free, main;
  std::uint64_t last_page, transaction;
};
struct PageHeader {
  std::uint64_t number;
  std::uint16_t pad, flags;
  std::uint16_t lower, upper;  // together the number of pages, of a value that has some of its own
};
struct NodeHeader {
  std::uint16_t low, high, flags, key_bytes;  // the first two: the size of the value, the page number with the third
};
static_assert(sizeof(Tree) == 48 && sizeof(Meta) == 136 && sizeof(PageHeader) == 16 && sizeof(NodeHeader) == 8);

template <class T>
T At(std::span<const std::byte> bytes, std::size_t offset = 0) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

class Checker {
 public:
  explicit Checker(const File& file) : file_(file) {}

  Status Run() {
    AMEM_ASSIGN(const auto first, ReadMeta(0, 0));
    page_bytes_ = first.free.page_bytes;
    if (page_bytes_ < 512 || page_bytes_ > 65536 || !std::has_single_bit(page_bytes_))
      return Bad(0, "does not give a possible page size");
    AMEM_ASSIGN(const auto second, ReadMeta(1, page_bytes_));
    const Meta& meta = first.transaction < second.transaction ? second : first;  // as LMDB chooses
    AMEM_ASSIGN(const auto bytes, file_.Size());
    last_page_ = meta.last_page;
    if (meta.free.page_bytes != page_bytes_ || last_page_ > bytes / page_bytes_ || (last_page_ + 1) * page_bytes_ > bytes) {
      return {Code::kCorrupt,
              fmt::format("data.mdb has {} bytes, too few for {} pages after the first: it is cut off", bytes, last_page_)};
    }
    budget_ = last_page_ + 1;
    if (meta.main.flags != 0) return Bad(0, "has an unknown kind of table");
    return meta.main.root == kNoPage ? Status{} : Walk(meta.main.root, 1, meta.main, true);
  }

 private:
  static Status Bad(std::uint64_t page, const std::string& what) {
    return {Code::kCorrupt, fmt::format("page {} of data.mdb {}", page, what)};
  }

  Status Load(std::uint64_t number, Page& page) const {
    if (number < 2 || number > last_page_) return Bad(number, "is referred to, and does not exist");
    page.resize(page_bytes_);
    AMEM_ASSIGN(const auto n, file_.ReadAt(number * page_bytes_, page));
    if (n != page_bytes_) return Bad(number, "is missing: the file is cut off");
    if (At<PageHeader>(page).number != number) return Bad(number, "has the number of another page");
    return {};
  }

  Result<Meta> ReadMeta(std::uint64_t number, Bytes offset) const {
    std::vector<std::byte> bytes(sizeof(PageHeader) + sizeof(Meta));
    AMEM_ASSIGN(const auto n, file_.ReadAt(offset, bytes));
    if (n != bytes.size()) return Bad(number, "is missing: the file is cut off");
    const auto meta = At<Meta>(bytes, sizeof(PageHeader));
    if ((At<PageHeader>(bytes).flags & kMeta) == 0 || meta.magic != kMagic)
      return Bad(number, "is not the beginning of an LMDB file");
    if (meta.version != kDataVersion) {
      return Status{Code::kUnsupported, fmt::format("data.mdb has version {} of LMDB's format, and this build knows version {}",
                                                    meta.version, kDataVersion)};
    }
    return meta;
  }

  Status Walk(std::uint64_t number, unsigned depth, const Tree& tree, bool main) {
    if (budget_-- == 0) return Bad(number, "is reached twice");
    if (depth > kDeepest) return Bad(number, "is at the wrong depth");
    Page& page = (main ? main_pages_ : pages_)[depth];  // kDeepest and one more
    AMEM_TRY(Load(number, page));
    const auto header = At<PageHeader>(page);
    const bool leaf = header.flags == kLeaf;
    if (!leaf && header.flags != kBranch) return Bad(number, "is of an unknown kind");
    if (tree.depth > kDeepest || leaf != (depth == tree.depth)) return Bad(number, "is at the wrong depth");
    if (header.lower < sizeof header || header.lower > header.upper || header.upper > page_bytes_)
      return Bad(number, "has impossible bounds");
    const std::size_t nodes = (header.lower - sizeof header) / 2;
    if (nodes < (leaf ? 1U : 2U)) return Bad(number, "has too few entries");
    for (std::size_t i = 0; i < nodes; ++i) {
      const std::size_t at = At<std::uint16_t>(page, sizeof header + 2 * i);
      if (at < header.upper || at + sizeof(NodeHeader) > page_bytes_) return Bad(number, "has an entry outside itself");
      AMEM_TRY(CheckNode(number, std::span(page).subspan(at), leaf, main, depth, tree));
    }
    return {};
  }

  Status CheckNode(std::uint64_t number, std::span<const std::byte> node, bool leaf, bool main, unsigned depth,
                   const Tree& tree) {
    const auto header = At<NodeHeader>(node);
    if (sizeof header + header.key_bytes > node.size()) return Bad(number, "has a key outside itself");
    if (!main) AMEM_TRY(CheckKey(number, node, leaf));
    if (leaf) return CheckValue(number, node, main);
    const std::uint64_t child = header.low | std::uint64_t{header.high} << 16 | std::uint64_t{header.flags} << 32;
    return Walk(child, depth + 1, tree, main);
  }

  // Keys come in order, and a branch gives the least key of a page before the page is visited.
  Status CheckKey(std::uint64_t number, std::span<const std::byte> node, bool leaf) {
    const std::size_t bytes = At<NodeHeader>(node).key_bytes;
    if (!leaf && bytes == 0) return {};  // the first key of a branch is not needed, so LMDB leaves it out
    if (bytes != sizeof(std::uint64_t)) return Bad(number, "has a key that is not a sequence number");
    const auto key = At<std::uint64_t>(node, sizeof(NodeHeader));
    if (key < least_key_) return Bad(number, "has keys out of order");
    least_key_ = leaf ? key + 1 : key;
    return {};
  }

  Status CheckValue(std::uint64_t number, std::span<const std::byte> node, bool main) {
    const auto header = At<NodeHeader>(node);
    const std::uint64_t bytes = header.low | std::uint64_t{header.high} << 16;
    const auto rest = node.subspan(sizeof header + header.key_bytes);
    const std::uint64_t here = header.flags == kBigData ? sizeof(std::uint64_t) : bytes;
    if (here > rest.size()) return Bad(number, "has a value outside itself");
    if (header.flags == (main ? kSubTable : std::uint16_t{0})) {
      if (!main) return {};
      if (bytes != sizeof(Tree)) return Bad(number, "has a table of the wrong size");
      const auto table = At<Tree>(rest);
      if (table.flags != kIntegerKey) return Bad(number, "has a table of an unknown kind");
      least_key_ = 0;
      return table.root == kNoPage ? Status{} : Walk(table.root, 1, table, false);
    }
    if (main || header.flags != kBigData) return Bad(number, "has an entry of an unknown kind");
    return CheckOverflow(At<std::uint64_t>(rest), bytes);
  }

  Status CheckOverflow(std::uint64_t number, std::uint64_t bytes) const {
    Page page;
    AMEM_TRY(Load(number, page));
    const auto header = At<PageHeader>(page);
    const std::uint64_t pages = header.lower | std::uint64_t{header.upper} << 16;
    if (header.flags != kOverflow || pages == 0 || pages > last_page_ - number + 1 ||
        sizeof header + bytes > pages * page_bytes_)
      return Bad(number, "is not a large value, as an entry says");
    return {};
  }

  const File& file_;
  // The pages that are looked at, one of each depth, of the tree of trees and of the tree in it: memory for each page anew
  // would have to be cleared.
  std::array<Page, kDeepest + 1> main_pages_, pages_;
  std::size_t page_bytes_ = 0;
  std::uint64_t last_page_ = 0;
  std::uint64_t budget_ = 0;     // pages that may still be visited, so that a tree with a loop in it ends
  std::uint64_t least_key_ = 0;  // the least key that may come next in this table
};

}  // namespace

Status CheckStructure(const File& data) { return Checker(data).Run(); }

}  // namespace amem
