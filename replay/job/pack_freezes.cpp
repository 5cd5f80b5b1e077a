#include "replay/job/pack_freezes.h"

#include <fcntl.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>

#include "journal/base/file.h"

namespace amem {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFreezePrefix = "freeze-", kFreezeSuffix = ".journal";
constexpr std::size_t kIdDigits = 16, kLongestFreeze = std::size_t{4} << 20;

bool IsFreezeName(std::string_view name) {
  if (name.size() != kFreezePrefix.size() + kIdDigits + kFreezeSuffix.size()) return false;
  const std::string_view id = name.substr(kFreezePrefix.size(), kIdDigits);
  return name.starts_with(kFreezePrefix) && name.ends_with(kFreezeSuffix) &&
         id.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

std::vector<FreezeText> FreezesOf(std::span<const fs::path> sessions, std::vector<std::string>& damage) {
  std::set<fs::path> folders;
  std::vector<std::string> names;
  for (const fs::path& session : sessions) {
    const fs::path whole = fs::absolute(session / "").lexically_normal().parent_path();  // without a slash at its end
    folders.insert(whole.parent_path());
    names.push_back('"' + whole.filename().string() + '"');
  }
  std::vector<FreezeText> found;
  for (const fs::path& folder : folders) {
    std::error_code failed;
    for (const auto& entry : fs::directory_iterator(folder, failed)) {
      FreezeText freeze{.name = entry.path().filename().string(), .content = {}};
      if (!IsFreezeName(freeze.name)) continue;
      std::ifstream in(entry.path(), std::ios::binary);
      if (!in || entry.file_size(failed) > kLongestFreeze) {
        damage.push_back(entry.path().string() + ": " +
                         (in ? "it is too long for the journal of a freeze" : "it cannot be read"));
        continue;
      }
      freeze.content.assign(std::istreambuf_iterator<char>(in), {});
      const bool concerned =
          std::ranges::any_of(names, [&](const std::string& name) { return freeze.content.find(name) != std::string::npos; });
      if (concerned) found.push_back(std::move(freeze));
    }
  }
  std::ranges::sort(found, {}, &FreezeText::name);
  return found;
}

std::string ToBlock(const FreezeText& freeze) { return freeze.name + "\n" + freeze.content; }

Status WriteFreeze(std::span<const std::byte> block, const fs::path& directory) {
  const std::string_view text(reinterpret_cast<const char*>(block.data()), block.size());
  const std::size_t end = text.find('\n');
  const std::string name(text.substr(0, std::min(end, text.size())));
  if (end == std::string_view::npos || !IsFreezeName(name)) return {Code::kCorrupt, "a freeze's journal has no name"};
  const fs::path path = directory / name;
  const auto file = File::Open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW);
  return file.ok() ? file->Write(text.substr(end + 1)).Within(path.string()) : file.status();
}

}  // namespace amem
