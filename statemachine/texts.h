// Texts of events: a type for each kind of thing that a text names, so that whoever hands a journal on without names finds them
// by their types (replay/job/pack_anonymous.cpp). An event has no plain std::string: a new text needs a type, and what becomes
// of that type without names is told there, or nothing compiles.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace amem {

// A std::string in all respects but its type. What is on disk does not depend on the type.
template <class What>
struct Text : std::string {
  Text() = default;
  Text(std::string text) : std::string(std::move(text)) {}  // NOLINT(google-explicit-constructor)
  Text(const char* text) : std::string(text) {}             // NOLINT(google-explicit-constructor)
  Text(std::string_view text) : std::string(text) {}        // NOLINT(google-explicit-constructor)
};

using HostName = Text<struct HostNameText>;
using BootId = Text<struct BootIdText>;
using GpuName = Text<struct GpuUuidText>;                  // "GPU-..."
using ProgramName = Text<struct ProgramNameText>;          // "python3 train.py"
using ThreadName = Text<struct ThreadNameText>;            // as top shows it; of most threads that of the program
using FilePath = Text<struct FilePathText>;                // of a library: a path, or its last part alone
using LauncherSetting = Text<struct LauncherSettingText>;  // "SLURM_JOB_ID=17"
using FreeText = Text<struct SentenceText>;                // for people; any of the above may be in it
// Names nobody: a word of a list that AMem, NCCL or the driver has, a version, a tag.
using PublicText = Text<struct PublicTextText>;

}  // namespace amem
