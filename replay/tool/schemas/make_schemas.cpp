// Writes the JSON schemas of `--json` into a folder. Of a command that tells its answer once (replay/tool/answer.h) the schema
// follows from that. Others are as they stand in this folder; those of events, states and sessions say with "made" what follows
// from the fields of events and states (replay/job/event_json.h).
//   make_schemas FROM TO
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "replay/job/event_json.h"
#include "replay/tool/answer.h"
#include "replay/tool/command_line/command_line.h"

std::span<const amem::tool::Command> amem::tool::AllCommands() { return {}; }  // which are main.cpp's

namespace {

using amem::tool::Json;

constexpr std::pair<const char*, Json (*)()> kTold[] = {{"diff", amem::tool::DifferenceSchema},
                                                        {"error", amem::tool::ErrorSchema},
                                                        {"refs", amem::tool::ReferencesSchema},
                                                        {"run", amem::tool::ReplaySchema},
                                                        {"verify", amem::tool::VerifySchema}};

void AddDefinitions(Json& schema) {
  schema["$defs"] = {{"session", {{"description", "The id of a session"}, {"type", "string"}, {"pattern", "^[0-9a-f]{16}$"}}},
                     {"hex", {{"type", "string"}, {"pattern", "^0x[0-9a-f]+$"}}}};
}

void Fill(Json& schema) {
  const Json made = schema["made"];
  schema.erase("made");
  if (made == "events") {
    schema["allOf"] = amem::EventForms();
  } else {
    const Json state = amem::StateForm();
    for (const Json& name : made == "state" ? state["required"] : made) {
      schema["required"].push_back(name);
      schema["properties"][name.get<std::string>()] = state["properties"].at(name.get<std::string>());
    }
  }
  AddDefinitions(schema);
}

void Write(const Json& schema, const std::filesystem::path& to) {
  std::ofstream out(to);
  out << schema.dump(1) << "\n";
  if (!out.flush()) throw std::runtime_error("cannot write " + to.string());
}

void Make(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::ifstream in(from);
  Json schema = Json::parse(in);
  if (schema.contains("made")) Fill(schema);
  Write(schema, to);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 1;
  try {
    std::filesystem::remove_all(argv[2]);  // with schemas of commands that are gone
    std::filesystem::create_directories(argv[2]);
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
      if (entry.path().extension() == ".json") Make(entry.path(), std::filesystem::path(argv[2]) / entry.path().filename());
    }
    for (const auto& [name, make] : kTold) {
      Json schema = make();
      AddDefinitions(schema);
      Write(schema, std::filesystem::path(argv[2]) / (std::string(name) + ".schema.json"));
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "make_schemas: %s\n", e.what());
    return 1;
  }
}
