// Writes the JSON schemas of `--json` into a folder: each follows from what the command prints (replay/tool/answer.h). That of
// `amem doctor --prove`, which Python prints, is copied from this folder.
//   make_schemas FROM TO
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "replay/tool/answer.h"
#include "replay/tool/command_line/command_line.h"

std::span<const amem::tool::Command> amem::tool::AllCommands() { return {}; }  // which are main.cpp's

namespace {

using amem::tool::Json;

constexpr std::pair<const char*, Json (*)()> kMade[] = {
    {"control", amem::tool::ControlSchema}, {"diff", amem::tool::DifferenceSchema}, {"error", amem::tool::ErrorSchema},
    {"event", amem::tool::EventSchema},     {"freeze", amem::tool::FreezeSchema},   {"refs", amem::tool::ReferencesSchema},
    {"run", amem::tool::ReplaySchema},      {"session", amem::tool::SessionSchema}, {"state", amem::tool::StateSchema},
    {"top", amem::tool::TopSchema},         {"verify", amem::tool::VerifySchema},   {"watch", amem::tool::WatchSchema},
    {"why", amem::tool::WhySchema}};

void AddDefinitions(Json& schema) {
  schema["$defs"] = {{"session", {{"description", "The id of a session"}, {"type", "string"}, {"pattern", "^[0-9a-f]{16}$"}}},
                     {"hex", {{"type", "string"}, {"pattern", "^0x[0-9a-f]+$"}}}};
}

void Write(const Json& schema, const std::filesystem::path& to) {
  std::ofstream out(to);
  out << schema.dump(1) << "\n";
  if (!out.flush()) throw std::runtime_error("cannot write " + to.string());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 1;
  try {
    std::filesystem::remove_all(argv[2]);  // with schemas of commands that are gone
    std::filesystem::create_directories(argv[2]);
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
      if (entry.path().extension() == ".json") std::filesystem::copy(entry.path(), argv[2]);
    }
    for (const auto& [name, make] : kMade) {
      Json schema = make();
      AddDefinitions(schema);
      Write(schema, std::filesystem::path(argv[2]) / (std::string(name) + ".schema.json"));
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "make_schemas: %s\n", e.what());
    return 1;
  }
}
