// With AMEM_SCOPE=all: what a program makes of graphs in which NCCL's launches were captured, and when it launches them.
#include "ncclpatch/nccl/graphs.h"

#include <algorithm>

#include "ncclpatch/intercept/others.h"
#include "tests/ncclpatch/intercept/intercepted.h"

namespace amem::test {
namespace {

namespace launches = nccl::launches;

CUgraph Graph(std::uintptr_t value) { return reinterpret_cast<CUgraph>(value); }
CUgraphExec Made(std::uintptr_t value) { return reinterpret_cast<CUgraphExec>(value); }

class Graphs : public Intercepted {
 protected:
  static void SetUpTestSuite() {
    Intercepted::SetUpTestSuite();
    intercept::Widen(LibraryScope::kAll);
    nccl::Communicator known{.how = "init", .clock = 7, .rank = 0, .ranks = 2, .device = DeviceOrdinal{0}};
    known.id = nccl::registry::Begin(known);
    nccl::registry::Bind(known.id, Address());
    nccl::registry::MarkReady(known);
  }
  static ncclComm* Address() { return reinterpret_cast<ncclComm*>(0x5000); }

  // NCCL launches while its stream is captured into that graph, and asks for it.
  static void Capture(CUgraph graph) {
    static CUgraph captured = nullptr;
    captured = graph;
    using Ask = CUresult(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**, size_t*);
    Ask* const real = [](CUstream, CUstreamCaptureStatus* status, cuuint64_t*, CUgraph* into, const CUgraphNode**, size_t*) {
      *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
      *into = captured;
      return CUDA_SUCCESS;
    };
    auto* const ask =
        reinterpret_cast<Ask*>(replacements::Bind("cuStreamGetCaptureInfo", 12000, reinterpret_cast<void*>(real), nullptr));
    const launches::Launched one{launches::FindCounted(Address()), launches::Shape::kCollective, -1, nullptr};
    launches::Launch("ncclAllReduce", {&one, 1}, [&] {
      CUstreamCaptureStatus status{};
      cuuint64_t id = 0;
      CUgraph into = nullptr;
      return static_cast<int>(ask(nullptr, &status, &id, &into, nullptr, nullptr));
    });
  }
  static std::uint64_t Launched() { return launches::FindCounted(Address())->collectives.value(); }
  static std::string WhyNot() { return launches::Read().why_not; }
  static CUresult Instantiate(CUgraphExec made, CUgraph graph, unsigned long long flags = 0) {
    static CUgraphExec answer = nullptr;
    answer = made;
    const auto call = ForOthers<decltype(cuGraphInstantiateWithFlags)>("cuGraphInstantiateWithFlags",
                                                                       [](CUgraphExec* out, CUgraph, unsigned long long) {
                                                                         *out = answer;
                                                                         return CUDA_SUCCESS;
                                                                       });
    CUgraphExec out = nullptr;
    return call(&out, graph, flags);
  }
  static CUresult Launch(CUgraphExec made, CUresult answer = CUDA_SUCCESS, CUstream stream = nullptr) {
    static CUresult result;
    result = answer;
    return ForOthers<decltype(cuGraphLaunch)>("cuGraphLaunch", [](CUgraphExec, CUstream) { return result; })(made, stream);
  }
};

TEST_F(Graphs, each_launch_of_a_graph_counts_and_is_held) {
  Capture(Graph(0x10));
  ASSERT_EQ(Launched(), 1U);
  EXPECT_NE(WhyNot().find("nobody was seen to instantiate"), std::string::npos) << WhyNot();
  ASSERT_EQ(Instantiate(Made(0x20), Graph(0x10)), CUDA_SUCCESS);
  EXPECT_EQ(WhyNot(), "");
  EXPECT_EQ(Launch(Made(0x20)), CUDA_SUCCESS);
  EXPECT_EQ(Launch(Made(0x99)), CUDA_SUCCESS) << "nothing of NCCL's is in it";
  EXPECT_EQ(Launched(), 2U);
  EXPECT_EQ(Launch(Made(0x20), CUDA_ERROR_INVALID_VALUE), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Launched(), 2U) << "the driver refused it";
  launches::Hold({.version = 1});
  std::thread held([] { EXPECT_EQ(Launch(Made(0x20)), CUDA_SUCCESS); });
  for (int i = 0; i < 5000 && launches::HeldNow() < 1; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(launches::HeldNow(), 1);
  EXPECT_EQ(Launched(), 2U);
  launches::LetGo();
  held.join();
  EXPECT_EQ(Launched(), 3U);
}

TEST_F(Graphs, clones_children_and_updates_have_what_they_were_made_of) {
  const std::uint64_t before = Launched();
  Capture(Graph(0x110));
  const auto clone = ForOthers<decltype(cuGraphClone)>("cuGraphClone", [](CUgraph* out, CUgraph) {
    *out = Graph(0x111);
    return CUDA_SUCCESS;
  });
  CUgraph out = nullptr;
  ASSERT_EQ(clone(&out, Graph(0x110)), CUDA_SUCCESS);
  const auto add = ForOthers<decltype(cuGraphAddChildGraphNode)>(
      "cuGraphAddChildGraphNode", [](CUgraphNode*, CUgraph, const CUgraphNode*, std::size_t, CUgraph) { return CUDA_SUCCESS; });
  for (int i = 0; i < 2; ++i) ASSERT_EQ(add(nullptr, Graph(0x112), nullptr, 0, Graph(0x111)), CUDA_SUCCESS);
  ASSERT_EQ(Instantiate(Made(0x120), Graph(0x112)), CUDA_SUCCESS);
  Launch(Made(0x120));
  EXPECT_EQ(Launched(), before + 3) << "the capture, and twice in one graph";
  const auto destroy = ForOthers<decltype(cuGraphDestroy)>("cuGraphDestroy", [](CUgraph) { return CUDA_SUCCESS; });
  for (const std::uintptr_t graph : {0x110, 0x111, 0x112}) ASSERT_EQ(destroy(Graph(graph)), CUDA_SUCCESS);
  EXPECT_EQ(WhyNot(), "");
  using Update = CUresult(CUgraphExec, CUgraph, void*);
  const auto update = ForOthers<Update>("cuGraphExecUpdate", [](CUgraphExec, CUgraph, void*) { return CUDA_SUCCESS; });
  ASSERT_EQ(update(Made(0x120), Graph(0x199), nullptr), CUDA_SUCCESS);
  Launch(Made(0x120));
  EXPECT_EQ(Launched(), before + 3) << "its new graph has none";
}

TEST_F(Graphs, a_graph_that_the_device_launches_cannot_be_followed) {
  Capture(Graph(0x210));
  ASSERT_EQ(Instantiate(Made(0x220), Graph(0x210), 4), CUDA_SUCCESS);
  EXPECT_NE(WhyNot().find("captured into a CUDA graph"), std::string::npos) << WhyNot();
}

TEST_F(Graphs, a_graph_that_is_launched_into_another_cannot_be_followed) {
  Capture(Graph(0x310));
  ASSERT_EQ(Instantiate(Made(0x320), Graph(0x310)), CUDA_SUCCESS);
  const std::uint64_t before = Launched();
  CUstream stream = nullptr;
  CUgraph graph = nullptr;
  ASSERT_EQ(PLAIN(cuStreamCreate)(&stream, CU_STREAM_DEFAULT), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  EXPECT_EQ(Launch(Made(0x320), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  EXPECT_EQ(WhyNot(), "") << "the driver refused that one";
  EXPECT_EQ(Launch(Made(0x320), CUDA_SUCCESS, stream), CUDA_SUCCESS);
  EXPECT_EQ(Launched(), before);
  EXPECT_NE(WhyNot().find("captured into a CUDA graph"), std::string::npos) << WhyNot();
  EXPECT_EQ(PLAIN(cuStreamEndCapture)(stream, &graph), CUDA_SUCCESS);
}

}  // namespace
}  // namespace amem::test
