// Events and states as JSON, for programs that read `amem-replay --json`.
//
// Shape: one flat object an event, {"seq", "time_ns", "thread", "kind", and the fields of that kind}. Session ids are strings
// of 16 hex digits, addresses, handles and call sites strings like "0x7f00" (they do not fit a double); bytes, allocation ids
// and sequence numbers are numbers. A field that an older journal did not have is there with its default.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "replay/job/story/contents.h"
#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

nlohmann::ordered_json ToJson(const Event& event);
nlohmann::ordered_json ToJson(const State& state);
nlohmann::ordered_json ToJson(const Step& step);
nlohmann::ordered_json ToJson(const SavedContents& contents);
nlohmann::ordered_json ToJson(const PauseContents& contents);

// The same in words of JSON Schema: an event, with the fields of each kind in "allOf" ("if" it is of that kind "then"), and
// what a state has. They refer to "#/$defs/session" and "#/$defs/hex".
nlohmann::ordered_json EventForm();
nlohmann::ordered_json StateForm();

// A session id the way directories of journals are named: 16 hex digits.
std::string SessionText(SessionId session);
// "allocation-created": a kind's name without blanks, for command lines and JSON.
std::string KindWord(std::size_t kind);

}  // namespace amem
