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
    MakeCommunicator(Address(), 7);
  }
  static void MakeCommunicator(ncclComm* address, std::uint64_t clock) {
    nccl::Communicator known{.how = "init", .name = clock, .rank = 0, .ranks = 2, .device = DeviceOrdinal{0}};
    known.id = nccl::registry::Begin(known);
    nccl::registry::Bind(known.id, address);
    nccl::registry::MarkReady(known);
  }
  static ncclComm* Address() { return reinterpret_cast<ncclComm*>(0x5000); }
  static ncclComm* Another() { return reinterpret_cast<ncclComm*>(0x6000); }  // of a test that makes it

  using Ask = CUresult(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**, size_t*);
  // NCCL launches while its stream is captured into that graph, and asks for it. `number`: of the capture.
  static void Capture(CUgraph graph, cuuint64_t number = 1) {
    BeginToCapture(graph, number);
    launches::graphs::CaptureEnded(graph, number);
  }
  static void BeginToCapture(CUgraph graph, cuuint64_t number, ncclComm* of = Address()) {
    static CUgraph captured = nullptr;
    static cuuint64_t number_of_it = 0;
    captured = graph;
    number_of_it = number;
    Ask* const real = [](CUstream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* into, const CUgraphNode**, size_t*) {
      *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
      *id = number_of_it;
      *into = captured;
      return CUDA_SUCCESS;
    };
    auto* const ask =
        reinterpret_cast<Ask*>(replacements::Bind("cuStreamGetCaptureInfo", 12000, reinterpret_cast<void*>(real), nullptr));
    const launches::Launched one{launches::FindCounted(of), launches::Shape::kCollective, -1, nullptr};
    launches::Launch("ncclAllReduce", {&one, 1}, [&] {
      CUstreamCaptureStatus status{};
      cuuint64_t id = 0;
      CUgraph into = nullptr;
      return static_cast<int>(ask(nullptr, &status, &id, &into, nullptr, nullptr));
    });
  }
  static std::uint64_t Launched() { return launches::FindCounted(Address())->counts.collectives(); }
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
    CUresult (*const real)(CUgraphExec, CUstream) = [](CUgraphExec, CUstream) { return ++by_driver_, result; };
    return ForOthers<decltype(cuGraphLaunch)>("cuGraphLaunch", real)(made, stream);
  }
  static void AwaitHeld() {
    for (int i = 0; i < 5000 && launches::HeldNow() < 1; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  static inline std::atomic<int> by_driver_{0};  // launches
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
  AwaitHeld();
  EXPECT_EQ(launches::HeldNow(), 1);
  EXPECT_EQ(Launched(), 2U);
  launches::LetGo();
  held.join();
  EXPECT_EQ(Launched(), 3U);
}

// What it launches passes no gate of its own, and its memory may be away.
TEST_F(Graphs, a_held_graph_is_refused_when_a_communicator_in_it_is_aborted) {
  MakeCommunicator(Another(), 8);
  BeginToCapture(Graph(0x10), 1);
  BeginToCapture(Graph(0x10), 1, Another());
  launches::graphs::CaptureEnded(Graph(0x10), 1);
  ASSERT_EQ(Instantiate(Made(0x20), Graph(0x10)), CUDA_SUCCESS);
  ASSERT_EQ(launches::graphs::LaunchesOf(Made(0x20), nullptr).size(), 2U);
  const std::uint64_t before = Launched();
  launches::Hold({.version = 1});
  CUresult answer = CUDA_SUCCESS;
  std::thread held([&] { answer = Launch(Made(0x20)); });
  AwaitHeld();
  launches::LetHeldLeave(nccl::registry::Detach(Another()));
  held.join();
  EXPECT_EQ(answer, CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_EQ(by_driver_, 0);
  EXPECT_EQ(Launched(), before);
  EXPECT_EQ(launches::HeldNow(), 0);
  launches::LetGo();
}

// AMem's thread waits for that of the GPU's primary context.
TEST_F(Graphs, the_default_stream_of_another_context_is_named) {
  CUcontext other = nullptr, popped = nullptr;
  CUstream stream = nullptr;
  ASSERT_EQ((Plain<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&other, 0, 0)), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuCtxPopCurrent)(&popped), CUDA_SUCCESS);
  Capture(Graph(0x10));
  ASSERT_EQ(Instantiate(Made(0x20), Graph(0x10)), CUDA_SUCCESS);
  EXPECT_EQ(Launch(Made(0x20)), CUDA_SUCCESS);
  ASSERT_EQ(PLAIN(cuCtxPushCurrent)(other), CUDA_SUCCESS);
  EXPECT_EQ(Launch(Made(0x20), CUDA_SUCCESS, stream), CUDA_SUCCESS);
  EXPECT_EQ(Launch(Made(0x20), CUDA_ERROR_INVALID_VALUE), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(WhyNot(), "");
  EXPECT_EQ(Launch(Made(0x20), CUDA_SUCCESS, CU_STREAM_LEGACY), CUDA_SUCCESS);
  EXPECT_NE(WhyNot().find("on the default stream of another context"), std::string::npos) << WhyNot();
  ASSERT_EQ(PLAIN(cuCtxDestroy)(other), CUDA_SUCCESS);
}

TEST_F(Graphs, what_the_driver_does_not_destroy_is_known_as_before) {
  static CUresult answer = CUDA_ERROR_INVALID_HANDLE;
  const auto destroy_graph = ForOthers<decltype(cuGraphDestroy)>("cuGraphDestroy", [](CUgraph) { return answer; });
  const auto destroy_made = ForOthers<decltype(cuGraphExecDestroy)>("cuGraphExecDestroy", [](CUgraphExec) { return answer; });
  const auto destroy_stream = ForOthers<decltype(cuStreamDestroy)>("cuStreamDestroy", [](CUstream) { return answer; });
  Capture(Graph(0x10));
  ASSERT_EQ(destroy_graph(Graph(0x10)), answer);
  EXPECT_NE(WhyNot().find("nobody was seen to instantiate"), std::string::npos) << WhyNot();
  ASSERT_EQ(Instantiate(Made(0x20), Graph(0x10)), CUDA_SUCCESS);
  CUstream stream = nullptr;
  ASSERT_EQ(PLAIN(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  EXPECT_EQ(Launch(Made(0x20), CUDA_SUCCESS, stream), CUDA_SUCCESS);
  const std::uint64_t before = Launched();
  ASSERT_EQ(destroy_made(Made(0x20)), answer);
  EXPECT_EQ(Launch(Made(0x20), CUDA_SUCCESS, stream), CUDA_SUCCESS);
  EXPECT_EQ(Launched(), before + 1);
  ASSERT_EQ(destroy_stream(stream), answer);
  EXPECT_TRUE(launches::IsAwaited(stream));
  EXPECT_EQ(WhyNot(), "");
  answer = CUDA_SUCCESS;
  ASSERT_EQ(destroy_made(Made(0x20)), CUDA_SUCCESS);
  ASSERT_EQ(destroy_graph(Graph(0x10)), CUDA_SUCCESS);
  ASSERT_EQ(destroy_stream(stream), CUDA_SUCCESS);
  EXPECT_TRUE(launches::graphs::LaunchesOf(Made(0x20), nullptr).empty());
  EXPECT_FALSE(launches::IsAwaited(stream));
  EXPECT_EQ(WhyNot(), "");
}

// The driver does not say the number of one that is broken.
TEST_F(Graphs, a_broken_capture_is_not_taken_for_another) {
  MakeCommunicator(Another(), 8);
  CUstream whole = nullptr, broken = nullptr;
  CUgraph graph = nullptr;
  const auto begin = [&](CUstream& stream, CUstreamCaptureMode mode) {
    EXPECT_EQ(PLAIN(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    EXPECT_EQ(OF_DRIVER(cuStreamBeginCapture)(stream, mode), CUDA_SUCCESS);
    CUstreamCaptureStatus status{};
    cuuint64_t number = 0;
    EXPECT_EQ(Plain<Ask>("cuStreamGetCaptureInfo_v2")(stream, &status, &number, nullptr, nullptr, nullptr), CUDA_SUCCESS);
    return number;
  };
  BeginToCapture(Graph(0x10), begin(whole, CU_STREAM_CAPTURE_MODE_RELAXED));
  BeginToCapture(Graph(0x11), begin(broken, CU_STREAM_CAPTURE_MODE_GLOBAL), Another());
  CUdeviceptr memory = 0;
  ASSERT_EQ(PLAIN(cuMemAlloc)(&memory, 64), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  ASSERT_EQ(OF_DRIVER(cuStreamEndCapture)(broken, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_NE(launches::FindCounted(Another())->captured.load(), nullptr);
  EXPECT_EQ(launches::FindCounted(Address())->captured.load(), nullptr);
  for (const CUstream stream : {whole, broken}) EXPECT_EQ(PLAIN(cuStreamDestroy)(stream), CUDA_SUCCESS);
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

TEST_F(Graphs, a_graph_with_launches_in_what_the_device_launches_cannot_be_followed) {
  ASSERT_EQ(Instantiate(Made(0x230), Graph(0x231), 4), CUDA_SUCCESS);
  Capture(Graph(0x232));
  using Update = CUresult(CUgraphExec, CUgraph, void*);
  const auto update = ForOthers<Update>("cuGraphExecUpdate", [](CUgraphExec, CUgraph, void*) { return CUDA_SUCCESS; });
  ASSERT_EQ(update(Made(0x230), Graph(0x232), nullptr), CUDA_SUCCESS);
  EXPECT_NE(WhyNot().find("the device may launch"), std::string::npos) << WhyNot();
}

// The driver gives a broken capture's graph to nobody, and its handle to another.
TEST_F(Graphs, the_end_of_a_capture_says_which_graph_it_filled) {
  static CUgraph made = nullptr;
  static CUresult answer = CUDA_SUCCESS;
  CUstream stream = nullptr;
  ASSERT_EQ(PLAIN(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const auto begin = [&] {
    EXPECT_EQ(PLAIN(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CUstreamCaptureStatus status{};
    cuuint64_t number = 0;
    EXPECT_EQ(Plain<Ask>("cuStreamGetCaptureInfo_v2")(stream, &status, &number, nullptr, nullptr, nullptr), CUDA_SUCCESS);
    return number;
  };
  const auto end = [&](CUgraph graph) {
    made = graph;
    answer = graph == nullptr ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    const auto call = ForOthers<decltype(cuStreamEndCapture)>("cuStreamEndCapture", [](CUstream of, CUgraph* out) {
      CUgraph none = nullptr;
      EXPECT_EQ(PLAIN(cuStreamEndCapture)(of, &none), CUDA_SUCCESS);
      *out = made;
      return answer;
    });
    CUgraph out = nullptr;
    return call(stream, &out);
  };
  const std::uint64_t before = Launched();
  BeginToCapture(Graph(0x410), begin());
  ASSERT_EQ(end(Graph(0x410)), CUDA_SUCCESS);
  ASSERT_EQ(Instantiate(Made(0x420), Graph(0x410)), CUDA_SUCCESS);
  EXPECT_EQ(WhyNot(), "");
  Launch(Made(0x420));
  EXPECT_EQ(Launched(), before + 2);
  begin();
  ASSERT_EQ(end(Graph(0x410)), CUDA_SUCCESS);  // without a launch of NCCL's
  ASSERT_EQ(Instantiate(Made(0x421), Graph(0x410)), CUDA_SUCCESS);
  Launch(Made(0x421));
  EXPECT_EQ(Launched(), before + 2);
  EXPECT_NE(WhyNot().find("has become another's"), std::string::npos) << WhyNot();
  BeginToCapture(Graph(0x430), begin());
  ASSERT_EQ(end(nullptr), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_NE(WhyNot().find("that capture failed"), std::string::npos) << WhyNot();
  EXPECT_EQ(PLAIN(cuStreamDestroy)(stream), CUDA_SUCCESS);
}

TEST_F(Graphs, a_stream_that_the_program_destroys_is_not_waited_for) {
  const auto destroy = OF_DRIVER(cuStreamDestroy);
  CUstream done = nullptr, runs = nullptr;
  for (CUstream* const stream : {&done, &runs}) ASSERT_EQ(PLAIN(cuStreamCreate)(stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const auto launch = [](CUstream stream) {
    const launches::Launched one{launches::FindCounted(Address()), launches::Shape::kCollective, -1, stream};
    launches::Launch("ncclAllReduce", {&one, 1}, [] { return 0; });
  };
  launches::NoteCapture(false);
  launch(done);
  ASSERT_TRUE(launches::IsAwaited(done));
  launches::Hold({.version = 1});
  std::thread held([&] { EXPECT_EQ(destroy(done), CUDA_SUCCESS); });
  AwaitHeld();
  EXPECT_TRUE(launches::IsAwaited(done)) << "not while the job is stopped";
  launches::LetGo();
  held.join();
  EXPECT_FALSE(launches::IsAwaited(done));
  EXPECT_EQ(WhyNot(), "");
  launch(runs);
  // What a stream under capture still runs cannot be asked.
  ASSERT_EQ(PLAIN(cuStreamBeginCapture)(runs, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  destroy(runs);
  EXPECT_NE(WhyNot().find("on a stream that was destroyed"), std::string::npos) << WhyNot();
}

TEST_F(Graphs, a_clone_goes_unused_without_a_word_and_an_original_does_not) {
  const auto destroy = ForOthers<decltype(cuGraphDestroy)>("cuGraphDestroy", [](CUgraph) { return CUDA_SUCCESS; });
  const auto clone = ForOthers<decltype(cuGraphClone)>("cuGraphClone", [](CUgraph* out, CUgraph) {
    *out = Graph(0x511);
    return CUDA_SUCCESS;
  });
  CUgraph out = nullptr;
  Capture(Graph(0x510));
  ASSERT_EQ(clone(&out, Graph(0x510)), CUDA_SUCCESS);
  ASSERT_EQ(destroy(out), CUDA_SUCCESS);
  ASSERT_EQ(Instantiate(Made(0x520), Graph(0x510)), CUDA_SUCCESS);
  EXPECT_EQ(WhyNot(), "");
  const std::uint64_t before = Launched();
  Launch(Made(0x520));
  EXPECT_EQ(Launched(), before + 1);
  Capture(Graph(0x512), 2);
  ASSERT_EQ(destroy(Graph(0x512)), CUDA_SUCCESS);
  EXPECT_NE(WhyNot().find("destroyed without being seen instantiated"), std::string::npos) << WhyNot();
}

TEST_F(Graphs, a_graph_that_is_edited_cannot_be_followed) {
  const auto destroy = ForOthers<decltype(cuGraphDestroy)>("cuGraphDestroy", [](CUgraph) { return CUDA_SUCCESS; });
  const auto is_lost = [&](const char* what, const auto& edit) {
    nccl::launches::Counted& counted = *launches::FindCounted(Address());
    Capture(Graph(0x610));
    EXPECT_EQ(Instantiate(Made(0x620), Graph(0x610)), CUDA_SUCCESS);
    EXPECT_EQ(WhyNot(), "") << what;
    edit();
    EXPECT_NE(WhyNot().find("that was edited since"), std::string::npos) << what << ": " << WhyNot();
    counted.captured.store(nullptr);
    destroy(Graph(0x610));
  };
  CUgraphExec const made = Made(0x620);
  using Node = CUgraphNode;
  is_lost("a node of what was made", [&] {
    using Edit = CUresult(CUgraphExec, Node, void*);
    ForOthers<Edit>("cuGraphExecNodeSetParams", [](CUgraphExec, Node, void*) { return CUDA_SUCCESS; })(made, nullptr, nullptr);
  });
  is_lost("a kernel of what was made", [&] {
    using Edit = CUresult(CUgraphExec, Node, const void*);
    Edit* const real = [](CUgraphExec, Node, const void*) { return CUDA_SUCCESS; };
    ForOthers<Edit>("cuGraphExecKernelNodeSetParams", real)(made, nullptr, nullptr);
  });
  is_lost("a node that is left out", [&] {
    using Edit = CUresult(CUgraphExec, Node, unsigned);
    ForOthers<Edit>("cuGraphNodeSetEnabled", [](CUgraphExec, Node, unsigned) { return CUDA_SUCCESS; })(made, nullptr, 0);
  });
  is_lost("a node of some graph", [&] {
    ForOthers<CUresult(Node, void*)>("cuGraphNodeSetParams", [](Node, void*) { return CUDA_SUCCESS; })(nullptr, nullptr);
  });
  is_lost("a node less", [&] { ForOthers<CUresult(Node)>("cuGraphDestroyNode", [](Node) { return CUDA_SUCCESS; })(nullptr); });
}

// With them the program can put a copy of NCCL's kernel into a graph of its own.
TEST_F(Graphs, a_graph_whose_nodes_are_read_cannot_be_followed) {
  Capture(Graph(0x710));
  ASSERT_EQ(Instantiate(Made(0x720), Graph(0x710)), CUDA_SUCCESS);
  using Read = CUresult(CUgraphNode, void*);
  for (const char* const name : {"cuGraphKernelNodeGetParams", "cuGraphNodeGetParams"}) {
    EXPECT_EQ(WhyNot(), "");
    ForOthers<Read>(name, [](CUgraphNode, void*) { return CUDA_SUCCESS; })(nullptr, nullptr);
    EXPECT_NE(WhyNot().find("may have launched a copy"), std::string::npos) << name << ": " << WhyNot();
    launches::FindCounted(Address())->captured.store(nullptr);
  }
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
  EXPECT_EQ(Launch(Made(0x320)), CUDA_SUCCESS);
  EXPECT_NE(WhyNot().find("on an unknown stream"), std::string::npos) << WhyNot();
  launches::FindCounted(Address())->captured.store(nullptr);
  EXPECT_EQ(Launch(Made(0x320), CUDA_SUCCESS, stream), CUDA_SUCCESS);
  EXPECT_EQ(Launched(), before);
  EXPECT_NE(WhyNot().find("captured into a CUDA graph"), std::string::npos) << WhyNot();
  EXPECT_EQ(PLAIN(cuStreamEndCapture)(stream, &graph), CUDA_SUCCESS);
}

}  // namespace
}  // namespace amem::test
