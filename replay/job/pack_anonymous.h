// Replaces what a bug report need not show: host names, GPU and boot ids, ids of jobs, programs, paths.
#pragma once

#include <map>
#include <string>

#include "statemachine/event.h"
#include "statemachine/state.h"

namespace amem {

// The same name becomes the same word in all journals that go through one object.
class Anonymizer {
 public:
  Event Clean(Event event);
  State Clean(State state);
  // Known names, and everything that looks like an absolute path, within a text for people.
  std::string CleanText(std::string text);

 private:
  void Clean(SessionOpened& who);
  void Clean(FreezeStep& freeze);
  static void Clean(LibraryAttached& library);
  std::string Word(std::map<std::string, std::string>& words, const std::string& name, const char* kind);
  std::string Host(const std::string& name) { return Word(hosts_, name, "host-"); }

  std::map<std::string, std::string> hosts_, gpus_, boots_, jobs_, programs_;
};

}  // namespace amem
