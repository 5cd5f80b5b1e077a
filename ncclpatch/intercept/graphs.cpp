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

constexpr auto kGraphCreated = [](CUresult result, const CUgraph* graph, unsigned) {
  if (result == CUDA_SUCCESS) graphs::Created(*graph);
};
constexpr auto kMade = [](CUresult result, const CUgraphExec* made, CUgraph graph, auto... how) {
  if (result == CUDA_SUCCESS) graphs::Instantiated(*made, graph, (FlagsOf(how...) & kByTheDevice) != 0);
};
constexpr auto kMadeAnew = [](CUresult result, CUgraphExec made, CUgraph graph, auto...) {
  if (result == CUDA_SUCCESS) graphs::Updated(made, graph);
};
constexpr auto kCloned = [](CUresult result, const CUgraph* clone, CUgraph graph) {
  if (result == CUDA_SUCCESS) graphs::Cloned(*clone, graph);
};
constexpr auto kAdded = [](CUresult result, CUgraphNode*, CUgraph graph, const CUgraphNode*, std::size_t, CUgraph child) {
  if (result == CUDA_SUCCESS) graphs::Added(graph, child);
};
CUgraph PartIn(const NodeParameters* node) {
  return node != nullptr && node->type == CU_GRAPH_NODE_TYPE_GRAPH ? node->child : nullptr;
}
void AddNode(CUgraph graph, const NodeParameters* node) {
  if (const CUgraph part = PartIn(node)) graphs::Added(graph, part);
}
constexpr auto kNodeAdded = [](CUresult result, CUgraphNode*, CUgraph graph, const CUgraphNode*, std::size_t,
                               const NodeParameters* node) {
  if (result == CUDA_SUCCESS) AddNode(graph, node);
};
constexpr auto kNodeAddedAfter = [](CUresult result, CUgraphNode*, CUgraph graph, const CUgraphNode*, const void*, std::size_t,
                                    const NodeParameters* node) {
  if (result == CUDA_SUCCESS) AddNode(graph, node);
};
// Which graph a node is in, the driver does not say. Also after a failure, which may have changed something.
constexpr auto kPartGiven = [](CUresult, CUgraphNode, auto) { graphs::PartGiven(); };
constexpr auto kNodeRead = [](CUresult, CUgraphNode, auto) { graphs::NodeRead(); };
constexpr auto kNodeEdited = [](CUresult, CUgraphNode, auto...) { graphs::NodeEdited(); };
constexpr auto kNodeReplaced = [](CUresult, CUgraphNode, const NodeParameters* node) {
  graphs::NodeEdited();
  graphs::Lost(PartIn(node), graphs::kEdited);
};
constexpr auto kMadeEdited = [](CUresult, CUgraphExec made, CUgraphNode, auto) { graphs::Lost(made, graphs::kEdited); };
constexpr auto kMadeReplaced = [](CUresult, CUgraphExec made, CUgraphNode, const NodeParameters* node) {
  graphs::Lost(made, graphs::kEdited);
  graphs::Lost(PartIn(node), graphs::kEdited);
};
constexpr auto kChildChanged = [](CUresult, CUgraphExec made, CUgraphNode, CUgraph child) {
  graphs::Lost(made, graphs::kEdited);
  graphs::Lost(child, graphs::kEdited);
};
template <class Handle, Text Name>
struct Destroy : Named<Name> {
  static CUresult Call(CUresult (*real)(Handle), Handle handle) {
    graphs::Destroying destroying(handle);
    const CUresult result = real(handle);
    destroying.Done(result == CUDA_SUCCESS);
    return result;
  }
};

// Of a default stream AMem's thread knows that of the GPU's primary context.
void NoteContext(std::span<const nccl::launches::Launched> launched, CUstream stream) {
  if (stream != nullptr && stream != CU_STREAM_LEGACY) return;
  const CUcontext current = CurrentContext();
  for (const nccl::launches::Launched& one : launched)
    if (current == nullptr || PrimaryContext(DeviceOrdinal{one.counted->member.device}) != current)
      one.counted->streams.CannotAwait("by a CUDA graph on the default stream of another context than its GPU's primary one");
}

struct Launch : Named<"cuGraphLaunch"> {
  static CUresult Call(CUresult (*real)(CUgraphExec, CUstream), CUgraphExec made, CUstream stream) {
    static const auto of_thread = reinterpret_cast<void*>(hook::DriverFunction<decltype(cuGraphLaunch)>("cuGraphLaunch_ptsz"));
    static const auto asks = AMEM_DRIVER(cuStreamIsCapturing);
    const bool is_own = stream == nullptr && reinterpret_cast<void*>(real) == of_thread;
    const CUstream on = is_own ? CU_STREAM_PER_THREAD : stream;
    const std::vector<nccl::launches::Launched> launched = graphs::LaunchesOf(made, on);
    if (launched.empty()) return real(made, stream);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    const bool answered = asks != nullptr && asks(on, &status) == CUDA_SUCCESS;
    // The answer where a stop holds the launch and one of its communicators ends meanwhile: its kernels would pass no other
    // gate, and may be about memory that is away.
    CUresult result = CUDA_ERROR_ILLEGAL_STATE;
    if (!answered || status != CU_STREAM_CAPTURE_STATUS_NONE) {  // where it cannot be asked, the launch is refused as well
      result = real(made, stream);
      if (answered || result == CUDA_SUCCESS) graphs::Lost(made, answered ? graphs::kLaunchedIn : graphs::kUnclear);
      return result;
    }
    const auto launch = [&]() noexcept {
      result = real(made, stream);
      if (result == CUDA_SUCCESS) NoteContext(launched, on);
      return result == CUDA_SUCCESS ? nccl::kSuccess : nccl::kInvalidUsage;
    };
    static_cast<void>(nccl::launches::Launch("cuGraphLaunch", launched, launch));
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
template <auto done, class F, Text Name, Text Later, int later>
using Before = AtVersion<done, F, Name, Name, replacements::kFirst, later>;
template <auto done, class F, Text Name, Text Later, int later>
using Since = AtVersion<done, F, Name, Later, later, replacements::kNoBound>;
// The parameters of later versions are others; they are not read here.
template <template <auto, class, Text, Text, int> class When>
using EditKernel =
    When<kNodeEdited, CUresult(CUgraphNode, const void*), "cuGraphKernelNodeSetParams", "cuGraphKernelNodeSetParams_v2", 12000>;
template <template <auto, class, Text, Text, int> class When>
using ReadKernel =
    When<kNodeRead, CUresult(CUgraphNode, void*), "cuGraphKernelNodeGetParams", "cuGraphKernelNodeGetParams_v2", 12000>;
template <template <auto, class, Text, Text, int> class When>
using EditMadeKernel = When<kMadeEdited, CUresult(CUgraphExec, CUgraphNode, const void*), "cuGraphExecKernelNodeSetParams",
                            "cuGraphExecKernelNodeSetParams_v2", 12000>;

}  // namespace

std::span<const replacements::Replacement> GraphsOfOthers() {
  return replacements::Table<
      Then<kGraphCreated, CUresult(CUgraph*, unsigned), "cuGraphCreate">, EditKernel<Before>, EditKernel<Since>,
      EditMadeKernel<Before>, EditMadeKernel<Since>, ReadKernel<Before>, ReadKernel<Since>,
      Then<kNodeRead, CUresult(CUgraphNode, void*), "cuGraphNodeGetParams">,
      Then<kPartGiven, CUresult(CUgraphNode, CUgraph*), "cuGraphChildGraphNodeGetGraph">,
      Then<kNodeEdited, CUresult(CUgraphNode), "cuGraphDestroyNode">,
      Then<kNodeReplaced, CUresult(CUgraphNode, NodeParameters*), "cuGraphNodeSetParams">,
      Then<kMadeReplaced, CUresult(CUgraphExec, CUgraphNode, NodeParameters*), "cuGraphExecNodeSetParams">,
      Then<kMadeEdited, CUresult(CUgraphExec, CUgraphNode, unsigned), "cuGraphNodeSetEnabled">, MakeV1, MakeV2, MakeWithFlags,
      Then<kMade, CUresult(CUgraphExec*, CUgraph, Parameters*), "cuGraphInstantiateWithParams">, UpdateV1, UpdateV2,
      Then<kCloned, CUresult(CUgraph*, CUgraph), "cuGraphClone">,
      Then<kAdded, CUresult(CUgraphNode*, CUgraph, const CUgraphNode*, std::size_t, CUgraph), "cuGraphAddChildGraphNode">,
      AddNodeV1, AddNodeV2,
      Then<kChildChanged, CUresult(CUgraphExec, CUgraphNode, CUgraph), "cuGraphExecChildGraphNodeSetParams">,
      Destroy<CUgraph, "cuGraphDestroy">, Destroy<CUgraphExec, "cuGraphExecDestroy">, Launch>();
}

}  // namespace amem::intercept
