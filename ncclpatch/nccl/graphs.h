// Launches of NCCL's that were captured into CUDA graphs. They are remembered with the graph, and count each time that it is
// launched, where the program's calls about graphs are seen (AMEM_SCOPE=all). A graph with such launches whose instantiation
// was not seen may be launched past AMem, and in other scopes any such graph may be; then the job is not stopped between
// launches.
//
// Graphs and what is made of them are known by the driver's handles, which it gives to others later. What a capture has put
// into a graph is therefore known by the capture's number as well. Where the two disagree, the communicators of what was
// remembered are not stopped between launches any more: a wrong count would be worse. Any thread.
#pragma once

#include <vector>

#include "ncclpatch/nccl/launches.h"

namespace amem::nccl::launches::graphs {

// Why a graph's launches cannot be counted: what follows "captured into a CUDA graph".
inline constexpr const char *kNotFollowed = ", whose own launches are not seen",
                            *kDestroyed = " that was destroyed without being seen instantiated",
                            *kByTheDevice = " that the device may launch itself",
                            *kLaunchedIn = " that another capture launches", *kStillOpen = " whose capture was not seen to end",
                            *kCaptureFailed = ", but that capture failed", *kEdited = " that was edited since",
                            *kRead = " of which the program may have launched a copy",
                            *kAnothers = " whose handle has become another's",
                            *kUnclear = " that was launched on an unknown stream";

void Follow() noexcept;  // from now on the program's calls are seen
// That was captured. False: it is not followed.
bool Remember(const Launched& one, const Capture& into) noexcept;
// The program has ended a capture. `id`: 0 where the driver did not say it.
void CaptureEnded(const void* graph, std::uint64_t id) noexcept;
void CaptureFailed(std::uint64_t id) noexcept;  // its graph is gone; 0: one of those that go on

void Created(const void* graph) noexcept;  // an empty one
void Cloned(const void* clone, const void* graph) noexcept;
void Added(const void* to, const void* part) noexcept;  // as a graph in a graph that may have other launches
void Instantiated(const void* made, const void* graph, bool by_the_device = false) noexcept;
void Updated(const void* made, const void* graph) noexcept;  // from another graph
// A call that destroys a graph, or what was made of it. Before the driver has answered, its handle may be another's.
class Destroying {
 public:
  explicit Destroying(const void* graph) noexcept;
  void Done(bool is_gone) noexcept;  // false: the driver has refused

 private:
  const void* const graph_;
};
void Lost(const void* graph_or_made, const char* why) noexcept;
void NodeEdited() noexcept;  // of some graph
void NodeRead() noexcept;    // its parameters, of some graph: another may get them
void PartGiven() noexcept;   // the program has got the handle of a graph that is in another
// What a launch of `made` launches on that stream; empty: nothing of NCCL's.
std::vector<Launched> LaunchesOf(const void* made, Stream stream) noexcept;

}  // namespace amem::nccl::launches::graphs
