#include "replay/job/pack_anonymous.h"

#include <filesystem>

namespace amem {
namespace {

void ReplaceAll(std::string& text, const std::string& from, const std::string& to) {
  if (from.size() < 2) return;  // too short to be told from ordinary letters
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

std::string FileName(const std::string& path) { return std::filesystem::path(path).filename(); }

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
}

void Anonymizer::Clean(LibraryAttached& library) { library.path = FileName(library.path); }

Event Anonymizer::Clean(Event event) {
  if (auto* opened = std::get_if<SessionOpened>(&event.body)) Clean(*opened);
  if (auto* library = std::get_if<LibraryAttached>(&event.body)) Clean(*library);
  if (auto* peer = std::get_if<PeerConnected>(&event.body)) peer->host = Host(peer->host);
  if (auto* lost = std::get_if<PeerLost>(&event.body)) lost->reason = CleanText(std::move(lost->reason));
  if (auto* closed = std::get_if<SessionClosed>(&event.body)) closed->reason = CleanText(std::move(closed->reason));
  if (auto* broken = std::get_if<SessionBroken>(&event.body)) broken->reason = CleanText(std::move(broken->reason));
  if (auto* passed = std::get_if<PassedThrough>(&event.body)) passed->detail = CleanText(std::move(passed->detail));
  if (auto* legacy = std::get_if<LegacyAllocated>(&event.body)) legacy->why = CleanText(std::move(legacy->why));
  if (auto* failed = std::get_if<StepFailed>(&event.body)) failed->message = CleanText(std::move(failed->message));
  if (auto* decided = std::get_if<PhaseDecided>(&event.body)) decided->message = CleanText(std::move(decided->message));
  if (auto* cycle = std::get_if<CycleFailed>(&event.body)) cycle->message = CleanText(std::move(cycle->message));
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
  state.broken = CleanText(std::move(state.broken));
  state.cycle.failure = CleanText(std::move(state.cycle.failure));
  return state;
}

}  // namespace amem
