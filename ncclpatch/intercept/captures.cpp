// NCCL's questions whether a stream is being captured: it asks before each launch. What was captured is launched again by
// graphs, so it is noted for whoever counts launches, with the graph if NCCL asks for it.
#include "ncclpatch/intercept/intercept.h"
#include "ncclpatch/nccl/launches.h"

namespace amem::intercept {
namespace {

// All versions have the status second; the later ones only say more of the graph. Edges have a type since CUDA 12.3.
void Note() { nccl::launches::NoteCapture(true); }
void Note(const cuuint64_t*) { nccl::launches::NoteCapture(true); }
void Note(const cuuint64_t* id, const CUgraph* graph, auto...) {
  nccl::launches::NoteCapture(true, graph == nullptr ? nullptr : *graph, id == nullptr ? 0 : *id);
}
constexpr auto kAsked = [](CUresult result, CUstream, CUstreamCaptureStatus* status, auto... rest) {
  if (result != CUDA_SUCCESS || status == nullptr || *status == CU_STREAM_CAPTURE_STATUS_NONE)
    return nccl::launches::NoteCapture(false);
  if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return nccl::launches::NoteCapture(true);  // the driver says no more then
  Note(rest...);
};
template <class F, Text Exported, int since, int before>
struct CaptureInfo : Then<kAsked, F, "cuStreamGetCaptureInfo", Exported> {
  static constexpr int kSince = since, kBefore = before;
};
using CaptureInfoV1 =
    CaptureInfo<CUresult(CUstream, CUstreamCaptureStatus*, cuuint64_t*), "cuStreamGetCaptureInfo", 10010, 11030>;
using CaptureInfoV2 =
    CaptureInfo<CUresult(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**, size_t*),
                "cuStreamGetCaptureInfo_v2", 11030, 12030>;
using CaptureInfoV3 =
    CaptureInfo<CUresult(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**, const void**, size_t*),
                "cuStreamGetCaptureInfo_v3", 12030, replacements::kNoBound>;
struct IsCapturing : AMEM_THEN(kAsked, cuStreamIsCapturing) {};

}  // namespace

std::span<const replacements::Replacement> CaptureReplacements() {
  return replacements::Table<CaptureInfoV1, CaptureInfoV2, CaptureInfoV3, IsCapturing>();
}

}  // namespace amem::intercept
