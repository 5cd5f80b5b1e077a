// What a command prints with --json, described once (replay/job/json_form.h): PrintAnswer prints it, and its schema follows.
//
// An answer is a struct with kSchema (the name of its schema), kTitle, kMeaning and a WriteFields. The schema's function is in
// the list of schemas/make_schemas.cpp. Include <nlohmann/json.hpp> before.
#pragma once

#include "replay/job/json_form.h"
#include "replay/tool/command.h"

namespace amem::tool {

// The form of an answer with what every schema has besides; `form` as Form makes it.
Json CompleteSchema(Json form, const std::string& name, const char* title, const char* meaning);
Json WithoutOtherKeys(Json schema);  // whose objects have no keys but those that it names

template <class Answer>
Json SchemaOf() {
  return CompleteSchema(FormOf(Answer{}), Answer::kSchema, Answer::kTitle, Answer::kMeaning);
}
template <class Answer>
void PrintAnswer(Output& out, const Answer& answer) {
  PrintJson(out, Object(answer), Answer::kSchema);
}
template <class Answer>
void PrintAnswers(Output& out, const std::vector<Answer>& answers) {
  PrintJson(out, Show(answers), Answer::kSchema);
}

Json ControlSchema(), DifferenceSchema(), ErrorSchema(), EventSchema(), FreezeSchema(), ReferencesSchema(), ReplaySchema(),
    SessionSchema(), StateSchema(), TopSchema(), VerifySchema(), WatchSchema(), WhySchema();

}  // namespace amem::tool
