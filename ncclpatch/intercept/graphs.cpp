// Calls of other libraries about CUDA graphs, with AMEM_SCOPE=all: what NCCL launched while it was captured is launched again
// by the graphs that are made of it (ncclpatch/nccl/graphs.h).
#include "ncclpatch/nccl/graphs.h"

#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/intercept/others.h"

namespace amem::intercept {
namespace {

namespace graphs = nccl::launches::graphs;

// As cuda.h has them since 12.0 and 12.2; AMem is also built with older ones.
struct Parameters {
  unsigned long long flags;
};
struct NodeParameters {
  CUgraphNodeType type;
  int reserved[3];
  CUgraph child;  // of a node that is a graph
};
constexpr unsigned long long kByTheDevice = 4;  // CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
unsigned long long FlagsOf(unsigned long long flags) { return flags; }
unsigned long long FlagsOf(const Parameters* with) { return with == nullptr ? 0 : with->flags; }
unsigned long long FlagsOf(const CUgraphNode*, const char*, std::size_t) { return 0; }

constexpr auto kMade = [](CUresult result, const CUgraphExec* made, CUgraph graph, auto... how) {
  if (result != CUDA_SUCCESS) return;
  if ((FlagsOf(how...) & kByTheDevice) != 0) graphs::Lost(graph);
  graphs::Instantiated(*made, graph);
};
constexpr auto kMadeAnew = [](CUresult result, CUgraphExec made, CUgraph graph, auto...) {
  if (result == CUDA_SUCCESS) graphs::Instantiated(made, graph);
};
constexpr auto kCloned = [](CUresult result, const CUgraph* clone, CUgraph graph) {
  if (result == CUDA_SUCCESS) graphs::Copied(*clone, graph);
};
constexpr auto kAdded = [](CUresult result, CUgraphNode*, CUgraph graph, const CUgraphNode*, std::size_t, CUgraph child) {
  if (result == CUDA_SUCCESS) graphs::Copied(graph, child);
};
void AddNode(CUgraph graph, const NodeParameters* node) {
  if (node != nullptr && node->type == CU_GRAPH_NODE_TYPE_GRAPH) graphs::Copied(graph, node->child);
}
constexpr auto kNodeAdded = [](CUresult result, CUgraphNode*, CUgraph graph, const CUgraphNode*, std::size_t,
                               const NodeParameters* node) {
  if (result == CUDA_SUCCESS) AddNode(graph, node);
};
constexpr auto kNodeAddedAfter = [](CUresult result, CUgraphNode*, CUgraph graph, const CUgraphNode*, const void*, std::size_t,
                                    const NodeParameters* node) {
  if (result == CUDA_SUCCESS) AddNode(graph, node);
};
constexpr auto kChildChanged = [](CUresult, CUgraphExec made, CUgraphNode, CUgraph child) {
  graphs::Lost(made);
  graphs::Lost(child);
};
// The driver's part is over when it answers: handles may be another graph's then.
template <class Handle, Text Name>
struct Destroy : Named<Name> {
  static CUresult Call(CUresult (*real)(Handle), Handle handle) {
    graphs::Destroyed(handle);
    return real(handle);
  }
};

struct Launch : Named<"cuGraphLaunch"> {
  static CUresult Call(CUresult (*real)(CUgraphExec, CUstream), CUgraphExec made, CUstream stream) {
    static const auto of_thread = reinterpret_cast<void*>(hook::DriverFunction<decltype(cuGraphLaunch)>("cuGraphLaunch_ptsz"));
    static const auto asks = AMEM_DRIVER(cuStreamIsCapturing);
    const bool is_own = stream == nullptr && reinterpret_cast<void*>(real) == of_thread;
    const std::vector<nccl::launches::Launched> launched = graphs::LaunchesOf(made, is_own ? CU_STREAM_PER_THREAD : stream);
    if (launched.empty()) return real(made, stream);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    const bool answered = asks != nullptr && asks(stream, &status) == CUDA_SUCCESS;  // else the launch itself is refused
    if (asks == nullptr || (answered && status != CU_STREAM_CAPTURE_STATUS_NONE)) {
      graphs::Lost(made);
      return real(made, stream);
    }
    CUresult result = CUDA_SUCCESS;
    const auto launch = [&]() noexcept {
      result = real(made, stream);
      return result == CUDA_SUCCESS ? nccl::kSuccess : nccl::kInvalidUsage;
    };
    static_cast<void>(nccl::launches::Launch("cuGraphLaunch", launched, launch, nccl::launches::Made::kAlways));
    return result;
  }
};

template <class F, Text Exported, int since, int before>
using Make = AtVersion<kMade, F, "cuGraphInstantiate", Exported, since, before>;
using MakeV1 = Make<CUresult(CUgraphExec*, CUgraph, CUgraphNode*, char*, std::size_t), "cuGraphInstantiate_v2", 10000, 12000>;
using MakeV2 =
    Make<CUresult(CUgraphExec*, CUgraph, unsigned long long), "cuGraphInstantiateWithFlags", 12000, replacements::kNoBound>;
using MakeWithFlags = Then<kMade, CUresult(CUgraphExec*, CUgraph, unsigned long long), "cuGraphInstantiateWithFlags">;
using UpdateV1 = AtVersion<kMadeAnew, CUresult(CUgraphExec, CUgraph, CUgraphNode*, void*), "cuGraphExecUpdate",
                           "cuGraphExecUpdate", 10000, 12000>;
using UpdateV2 = AtVersion<kMadeAnew, CUresult(CUgraphExec, CUgraph, void*), "cuGraphExecUpdate", "cuGraphExecUpdate_v2", 12000,
                           replacements::kNoBound>;
using AddNodeV1 = AtVersion<kNodeAdded, CUresult(CUgraphNode*, CUgraph, const CUgraphNode*, std::size_t, NodeParameters*),
                            "cuGraphAddNode", "cuGraphAddNode", 12020, 12030>;
using AddNodeV2 =
    AtVersion<kNodeAddedAfter, CUresult(CUgraphNode*, CUgraph, const CUgraphNode*, const void*, std::size_t, NodeParameters*),
              "cuGraphAddNode", "cuGraphAddNode_v2", 12030, replacements::kNoBound>;

}  // namespace

std::span<const replacements::Replacement> GraphsOfOthers() {
  return replacements::Table<
      MakeV1, MakeV2, MakeWithFlags, Then<kMade, CUresult(CUgraphExec*, CUgraph, Parameters*), "cuGraphInstantiateWithParams">,
      UpdateV1, UpdateV2, Then<kCloned, CUresult(CUgraph*, CUgraph), "cuGraphClone">,
      Then<kAdded, CUresult(CUgraphNode*, CUgraph, const CUgraphNode*, std::size_t, CUgraph), "cuGraphAddChildGraphNode">,
      AddNodeV1, AddNodeV2,
      Then<kChildChanged, CUresult(CUgraphExec, CUgraphNode, CUgraph), "cuGraphExecChildGraphNodeSetParams">,
      Destroy<CUgraph, "cuGraphDestroy">, Destroy<CUgraphExec, "cuGraphExecDestroy">, Launch>();
}

}  // namespace amem::intercept
