// What the commands share: complaining, where journals are, reading them, printing.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <nlohmann/json.hpp>

#include "replay/job/fold.h"
#include "replay/job/names.h"
#include "replay/tool/answer.h"
#include "replay/tool/command.h"
#include "replay/tool/terminal/terminal.h"

namespace amem::tool {

std::string running_command;
std::string program_name = "amem";
static std::mutex complaining;               // the thread that measures what a pack takes complains, too
static std::vector<std::string> complaints;  // for PrintErrors

std::string AsCalled(std::string text) {
  for (const std::string_view before : {"`", "  ", "| ", "&& "}) {
    const std::string ours = fmt::format("{}amem ", before);
    for (std::size_t at = 0; (at = text.find(ours, at)) != std::string::npos; at += ours.size())
      text.replace(at, ours.size(), fmt::format("{}{} ", before, program_name));
  }
  return text;
}

void AddJson(Arguments& arguments, bool& json, const char* shape) { arguments.Flag("--json", json, shape); }

Exit Complain(const std::string& message, Exit code) {
  Progress::End();
  const std::lock_guard lock(complaining);
  const std::string said = AsCalled(message);
  if (std::ranges::find(complaints, said) != complaints.end()) return code;  // as each session of an incomplete pack says
  complaints.push_back(said);
  std::fprintf(stderr, "%s: %s\n", program_name.c_str(), Escaped(complaints.back()).c_str());
  return code;
}

bool AnyComplaint() {
  const std::lock_guard lock(complaining);
  return !complaints.empty();
}

bool Went(const Status& status) {
  if (!status.ok()) Complain(status.message());
  return status.ok();
}

const char* Variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

static std::filesystem::path FromVariable(const char* variable, const char* usual) {
  const char* set = Variable(variable);
  return set != nullptr ? set : fmt::format("/tmp/amem-{}/{}", ::getuid(), usual);
}

std::filesystem::path DefaultJournalDirectory() { return FromVariable("AMEM_JOURNAL_DIR", "journal"); }
std::filesystem::path DefaultSocketDirectory() { return FromVariable("AMEM_SOCKET_DIR", "sockets"); }

void ForEachJournal(const std::vector<std::filesystem::path>& sessions, const ReadOne& read) {
  for (const auto& session : sessions) {
    const Result<std::unique_ptr<JournalReader>> reader = JournalReader::Open(session);
    ReadReport damage;
    Went(reader ? read(**reader, damage) : reader.status());
    ComplainAboutDamage(session, damage);
    Progress::OneDone();
  }
}

Result<Opening> OpeningOf(const std::filesystem::path& session) {
  AMEM_ASSIGN(const auto reader, JournalReader::Open(session));
  return ReadOpening(*reader);
}

void ComplainAboutDamage(const std::filesystem::path& session, const ReadReport& report) {
  for (const std::string& damage : DamageOf(session, report)) Complain(damage);
}

void Note(const std::string& line) { std::fprintf(stderr, "%s\n", Escaped(line).c_str()); }

void PrintJson(Output& out, Json json, const char* schema, int indent) {
  const auto label = [&](Json& object) {
    Json labelled = {{"schema", fmt::format("amem-replay/{}", schema != nullptr ? schema : running_command)},
                     {"version", kSchemaVersion}};
    for (auto& [key, value] : object.items()) labelled[key] = std::move(value);
    object = std::move(labelled);
  };
  if (json.is_object()) label(json);
  if (json.is_array()) std::ranges::for_each(json, label);
  // Strings in a journal come from elsewhere; bytes that are not UTF-8 are replaced.
  out.Verbatim(json.dump(indent, ' ', true, nlohmann::ordered_json::error_handler_t::replace)) << "\n";
}

struct ErrorAnswer {
  static constexpr const char* kSchema = "error";
  static constexpr const char* kTitle = "What a command with --json prints that fails without a result";
  static constexpr const char* kMeaning = "The exit code is not 0 then.";
  std::string command{};
  unsigned exit = 0;
  std::vector<std::string> errors{};
};
template <class To>
void WriteFields(To& to, const ErrorAnswer& answer) {
  to("command", answer.command);
  to("exit", answer.exit, "The exit code");
  to("errors", answer.errors, "What stderr says, one a line there");
}

void PrintErrors(Output& out, const std::string& command, int exit_code) {
  const std::lock_guard lock(complaining);
  PrintAnswer(out, ErrorAnswer{command, static_cast<unsigned>(exit_code), complaints});
}

Json ErrorSchema() { return SchemaOf<ErrorAnswer>(); }

Json CompleteSchema(Json form, const std::string& name, const char* title, const char* meaning) {
  Json schema = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                 {"$id", fmt::format("urn:amem-replay:{}:{}", name, kSchemaVersion)},
                 {"title", title},
                 {"description", meaning},
                 {"type", "object"},
                 {"required", {"schema", "version"}},
                 {"properties", {{"schema", {{"const", "amem-replay/" + name}}}, {"version", {{"const", kSchemaVersion}}}}}};
  for (const Json& field : form["required"]) schema["required"].push_back(field);
  for (const auto& [field, of] : form["properties"].items()) schema["properties"][field] = of;
  if (form.contains("allOf")) schema["allOf"] = form["allOf"];
  return schema;
}

Json WithoutOtherKeys(Json schema) {
  if (schema.contains("properties")) {
    schema["additionalProperties"] = false;
    for (auto& [name, form] : schema["properties"].items()) form = WithoutOtherKeys(std::move(form));
  }
  if (schema.contains("items")) schema["items"] = WithoutOtherKeys(std::move(schema["items"]));
  return schema;
}

void PrintTable(Output& out, const std::vector<std::vector<std::string>>& rows) {
  const std::vector<std::string> lines = TableLines(rows);
  out.Styled(Output::Style::kHeading, lines.front()) << "\n";
  for (std::size_t i = 1; i < lines.size(); ++i) out << lines[i] << "\n";
}

void PrintParagraph(Output& out, const std::string& text, const std::string& indent) {
  for (const std::string& line : BrokenIntoLines(text, TextWidth() - indent.size())) out << indent << line << "\n";
}

}  // namespace amem::tool
