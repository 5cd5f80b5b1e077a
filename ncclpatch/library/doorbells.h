// With LD_PRELOAD these come before NCCL's own in the search order: the functions with which a program begins to use NCCL. Each
// sees to it that the NCCLs that were loaded meanwhile are under AMem, with the objects that call them, and leads on to the
// function that the caller would have reached without AMem. Without LD_PRELOAD nobody finds them.
#pragma once

#include <array>

namespace amem::doorbells {

inline constexpr std::array kNames = {"ncclGetUniqueId",          "ncclCommInitRank", "ncclCommInitRankConfig",
                                      "ncclCommInitRankScalable", "ncclCommInitAll",  "ncclCommGrow"};

}  // namespace amem::doorbells
