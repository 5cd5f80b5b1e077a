#include <algorithm>
#include <cctype>
#include <sstream>
#include <type_traits>

#include "replay/job/pack.h"

namespace amem {
namespace {

bool IsLetterOrDigit(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

// Not within a longer word: node1 is not in node10.
void ReplaceAll(std::string& text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos;) {
    const std::size_t end = at + from.size();
    const bool within = (at != 0 && IsLetterOrDigit(text[at - 1])) || (end < text.size() && IsLetterOrDigit(text[end]));
    if (!within) text.replace(at, from.size(), to);
    at += within ? 1 : to.size();
  }
}

// Whether a name within a sentence differs from ordinary letters and numbers.
bool IsDistinctive(const std::string& name) {
  return name.size() > 1 && !std::ranges::all_of(name, [](char c) { return c >= '0' && c <= '9'; });
}

std::string FileName(const std::string& path) { return std::filesystem::path(path).filename(); }

// The size of a job, and the number of a part of it, identify nobody; an id or a name of a job might.
bool IsQuantity(std::string_view variable) {
  return variable.ends_with("SIZE") || variable.ends_with("RANK") || variable.ends_with("COUNT");
}

// Threads that AMem, NCCL, the driver and PyTorch name; any other one is called like its program.
bool IsOfALibrary(std::string_view thread) {
  constexpr std::string_view kBeginnings[] = {"amem-", "NCCL", "nccl", "cuda", "pt_", "autograd"};
  return std::ranges::any_of(kBeginnings, [thread](std::string_view begin) { return thread.starts_with(begin); });
}

bool EndsPath(char c) { return c == ' ' || c == ',' || c == ';' || c == ':' || c == '"' || c == '\'' || c == ')'; }

template <class T>
constexpr bool kIsText = std::is_base_of_v<std::string, T>;
template <class T>
constexpr bool kIsList = false;
template <class T>
constexpr bool kIsList<std::vector<T>> = true;
template <class T>
constexpr bool kIsId = false;
template <class Tag, class Rep>
constexpr bool kIsId<Id<Tag, Rep>> = true;

// Calls `change` with each text in an event, wherever it is.
template <class T, class Change>
void ForEachText(T& value, const Change& change) {
  if constexpr (kIsText<T>) {
    change(value);
  } else if constexpr (kIsList<T>) {
    for (auto& element : value) ForEachText(element, change);
  } else if constexpr (Described<T>) {
    std::apply([&change](auto&... members) { (ForEachText(members, change), ...); }, Members(value));
  } else {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T> || kIsId<T> || std::is_same_v<T, CallSite>,
                  "a type whose texts are not looked for");
  }
}
template <class Change>
void ForEachTextOf(EventBody& event, const Change& change) {
  std::visit([&change](auto& body) { ForEachText(body, change); }, static_cast<EventVariant&>(event));
}

}  // namespace

// A type of text that is in neither list does not compile: what becomes of it must be said here.
struct Anonymizer::Names {
  Anonymizer& of;
  void operator()(HostName& name) const { name = of.WordFor(kHost, name); }
  void operator()(GpuName& name) const { name = of.WordFor(kGpu, name); }
  void operator()(BootId& name) const { name = of.WordFor(kBoot, name); }
  void operator()(ProgramName& name) const {
    constexpr std::size_t kThreadNameMost = 15;  // what the kernel keeps of one
    std::istringstream words(name);
    for (std::string word; words >> word;) {  // "python3" or "train.py" alone is in messages and names of threads
      of.WordFor(kThread, word);
      of.WordFor(kThread, word.substr(0, kThreadNameMost));
    }
    name = of.WordFor(kProgram, name);
  }
  void operator()(ThreadName& name) const {
    if (!IsOfALibrary(name)) name = of.WordFor(kThread, name);
  }
  void operator()(LauncherSetting& setting) const {
    const std::string variable = setting.substr(0, setting.find('='));
    if (variable.size() == setting.size() || IsQuantity(variable)) return;
    setting = variable + '=' + of.WordFor(kJob, setting.substr(variable.size() + 1));
  }
  void operator()(FilePath& path) const { path = FileName(path); }
  void operator()(FreeText&) const {}
  void operator()(PublicText&) const {}
};
struct Anonymizer::FreeTexts {
  const Anonymizer& of;
  void operator()(FreeText& text) const { text = of.CleanText(std::move(text)); }
  void operator()(std::string&) const {}
};

const std::string& Anonymizer::WordFor(Kind kind, const std::string& name) {
  static constexpr const char* kWords[kKinds] = {"host-", "gpu-", "boot-", "program-", "thread-", "job-"};
  if (name.empty()) return name;
  auto& words = words_[kind];
  return words.try_emplace(name, kWords[kind] + std::to_string(words.size() + 1)).first->second;
}

std::string Anonymizer::CleanText(std::string text) const {
  for (const auto& words : words_)
    for (const auto& [name, word] : words)
      if (IsDistinctive(name)) ReplaceAll(text, name, word);  // a program before the words of its name
  for (std::size_t at = text.find('/'); at != std::string::npos; at = text.find('/', at)) {
    const bool begins = at == 0 || EndsPath(text[at - 1]) || text[at - 1] == '(' || text[at - 1] == '=';
    std::size_t end = at + 1;
    while (end < text.size() && !EndsPath(text[end])) ++end;
    if (!begins || end == at + 1) {
      ++at;
      continue;
    }
    const std::string name = FileName(text.substr(at, end - at));
    text.replace(at, end - at, name);
    at += name.size();
  }
  return text;
}

void Anonymizer::Learn(const EventBody& event) {
  EventBody named = event;
  ForEachTextOf(named, Names{*this});
}

void Anonymizer::Clean(EventBody& event) {
  ForEachTextOf(event, Names{*this});  // first, so that the event's own names are known
  ForEachTextOf(event, FreeTexts{*this});
}

}  // namespace amem
