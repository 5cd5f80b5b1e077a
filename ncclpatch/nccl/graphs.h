// Launches of NCCL's that were captured into CUDA graphs. They are remembered with the graph, and count each time that it is
// launched, where the program's calls about graphs are seen (AMEM_SCOPE=all). A graph with such launches that nobody was seen
// to instantiate may be launched past AMem, and elsewhere every one may: then the job is not stopped between launches.
//
// Graphs and what is made of them are known by the driver's handles. Any thread.
#pragma once

#include <vector>

#include "ncclpatch/nccl/launches.h"

namespace amem::nccl::launches::graphs {

void Follow() noexcept;  // from now on the program's calls are seen
// What this thread launched was captured into `graph`. False: it is not followed.
bool Remember(const void* graph, std::span<const Launched> launched) noexcept;

void Copied(const void* to, const void* from) noexcept;           // also into a graph that has other launches already
void Instantiated(const void* made, const void* graph) noexcept;  // also anew, from another graph
void Destroyed(const void* graph) noexcept;                       // or what was made of it
// Its launches cannot be followed: the device launches it, or it is captured itself.
void Lost(const void* graph_or_made) noexcept;
// What a launch of `made` launches on that stream; empty: nothing of NCCL's.
std::vector<Launched> LaunchesOf(const void* made, Stream stream) noexcept;

}  // namespace amem::nccl::launches::graphs
