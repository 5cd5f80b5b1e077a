// Which of many session directories belong to one job: a directory of journals keeps those of earlier jobs too.
#pragma once

#include <filesystem>
#include <span>
#include <vector>

namespace amem {

// Sessions that were open at the same time are one job's. The latest job is the one whose journals reach furthest. Journals
// that cannot be read count as its own, so that their damage is reported.
struct JobSelection {
  std::vector<std::filesystem::path> latest;
  std::vector<std::filesystem::path> earlier;
};
JobSelection SelectLatestJob(std::span<const std::filesystem::path> sessions);

}  // namespace amem
