#include "replay/job/pack.h"

namespace amem {
namespace {

void ReplaceAll(std::string& text, const std::string& from, const std::string& to) {
  if (from.size() < 2) return;  // too short to be told from ordinary letters
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

std::string FileName(const std::string& path) { return std::filesystem::path(path).filename(); }

// How large a job is, and which part of it this is, names nobody; an id or a name of a job might.
bool TellsOnlyHowMany(std::string_view variable) {
  return variable.ends_with("SIZE") || variable.ends_with("RANK") || variable.ends_with("COUNT");
}

bool EndsPath(char c) { return c == ' ' || c == ',' || c == ';' || c == ':' || c == '"' || c == '\'' || c == ')'; }

}  // namespace

std::string Anonymizer::Word(std::map<std::string, std::string>& words, const std::string& name, const char* kind) {
  if (name.empty()) return name;
  return words.try_emplace(name, kind + std::to_string(words.size() + 1)).first->second;
}

std::string Anonymizer::CleanText(std::string text) {
  for (const auto& [name, word] : hosts_) ReplaceAll(text, name, word);
  for (const auto& [name, word] : gpus_) ReplaceAll(text, name, word);
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

void Anonymizer::Clean(SessionOpened& who) {
  who.host = Host(who.host);
  who.boot_id = Word(boots_, who.boot_id, "boot-");
  for (std::string& uuid : who.gpu_uuids) uuid = Word(gpus_, uuid, "gpu-");
  who.program = Word(programs_, who.program, "program-");
  for (std::string& variable : who.launcher) {
    const std::string name = variable.substr(0, variable.find('='));
    if (name.size() == variable.size() || TellsOnlyHowMany(name)) continue;
    variable = name + '=' + Word(jobs_, variable.substr(name.size() + 1), "job-");
  }
}

void Anonymizer::Clean(StepFailed& failed) {
  for (MemoryHolder& holder : failed.holders) holder.name = Word(programs_, holder.name, "program-");
}

void Anonymizer::Clean(LibraryAttached& library) { library.path = FileName(library.path); }

void Anonymizer::Clean(FreezeStep& freeze) {
  for (GpuShare& share : freeze.gpus) share.gpu = Word(gpus_, share.gpu, "gpu-");
  for (std::vector<GpuPair>* pairs : {&freeze.pairs, &freeze.moved})
    for (GpuPair& pair : *pairs) pair = {Word(gpus_, pair.from, "gpu-"), Word(gpus_, pair.to, "gpu-")};
  freeze.message = CleanText(std::move(freeze.message));
}

Event Anonymizer::Clean(Event event) {
  if (auto* opened = std::get_if<SessionOpened>(&event.body)) Clean(*opened);
  if (auto* library = std::get_if<LibraryAttached>(&event.body)) Clean(*library);
  if (auto* freeze = std::get_if<FreezeStep>(&event.body)) Clean(*freeze);
  if (auto* failed = std::get_if<StepFailed>(&event.body)) Clean(*failed);
  if (auto* peer = std::get_if<PeerConnected>(&event.body)) peer->host = Host(peer->host);
  std::visit(
      [this](auto& e) {  // texts for people
        if constexpr (requires { e.reason; }) e.reason = CleanText(std::move(e.reason));
        if constexpr (requires { e.message; }) e.message = CleanText(std::move(e.message));
        if constexpr (requires { e.detail; }) e.detail = CleanText(std::move(e.detail));
        if constexpr (requires { e.why; }) e.why = CleanText(std::move(e.why));
        if constexpr (requires { e.where; }) e.where = CleanText(std::move(e.where));
        if constexpr (requires { e.answer; }) e.answer = CleanText(std::move(e.answer));
        if constexpr (requires { e.moved_gpus; }) e.moved_gpus = CleanText(std::move(e.moved_gpus));
        if constexpr (requires { e.stack; }) {
          for (std::string& frame : e.stack) frame = CleanText(std::move(frame));
        }
      },
      static_cast<EventVariant&>(event.body));
  return event;
}

State Anonymizer::Clean(State state) {
  Clean(state.session);
  for (LibraryAttached& library : state.libraries) Clean(library);
  for (auto& [id, peer] : state.peers) {
    peer.host = Host(peer.host);
    peer.lost_reason = CleanText(std::move(peer.lost_reason));
  }
  for (auto& [address, legacy] : state.legacy) legacy.why = CleanText(std::move(legacy.why));
  if (state.freeze) Clean(*state.freeze);
  state.broken = CleanText(std::move(state.broken));
  state.cycle.failure = CleanText(std::move(state.cycle.failure));
  return state;
}

}  // namespace amem
