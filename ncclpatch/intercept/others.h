// What other libraries of the process allocate, and share with other processes past AMem.
#pragma once

#include <cuda.h>

#include <array>
#include <span>

#include "ncclpatch/hook/replacements.h"
#include "ncclpatch/runtime/options.h"
#include "replay/peers/token.h"
#include "replay/session/session.h"

namespace amem::intercept {

// For replacements::Install: what other libraries get with AMEM_SCOPE=nccl. All calls are made as they are, and counted.
const replacements::Tables& CountingTables();
// The same with AMEM_SCOPE=shared: what a library that imports functions of cudaIpc gets from cudaMalloc is a tag's, which is
// called as the library is. With AMEM_SCOPE=all everybody's is, under the tag `program`.
const replacements::Tables& WiderTables(LibraryScope scope);
void Widen(LibraryScope scope);  // installs them

// Tells the session what other libraries share (SharedOutside), and which of them share by calls that AMem does not see. For
// Runtime::TellOfOthers.
void TellOfOthers(Session& session);

// By these a library begins to share.
inline constexpr std::array kSharing = {"cuIpcGetMemHandle",
                                        "cuIpcOpenMemHandle",
                                        "cuIpcOpenMemHandle_v2",
                                        "cuMemExportToShareableHandle",
                                        "cuMemImportFromShareableHandle",
                                        "cuMulticastCreate",
                                        "cuMemPoolExportToShareableHandle",
                                        "cuMemPoolImportFromShareableHandle"};

// program.cpp: memory of tags; with AMEM_SCOPE=all also the second table.
std::span<const replacements::Replacement> TaggedReplacements();
std::span<const replacements::Replacement> ProgramReplacements();
inline constexpr const char* kProgram = "program";  // the tag of everything, with AMEM_SCOPE=all
bool TakesAll();                                    // whether that is so
void OpenProgram(Session& session);
// others.cpp: frees what is not a tag's; counts memory that AMEM_SCOPE=all does not take, by its address or handle.
CUresult FreeCounted(CUresult (*real)(CUdeviceptr), CUdeviceptr address);
void CountLeft(const char* function, std::uint64_t key, Bytes bytes);

// handles.cpp: handles of cuMemCreate, which are a tag's.
std::span<const replacements::Replacement> HandleReplacements();
// Makes memory that is to be shared by descriptors under the caller's tag. False: it is not, or the driver must answer.
bool CreateShared(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                  unsigned long long flags);
// Says which scopes differ if the driver could not open a token; gives `result`.
CUresult NameScopes(const char* call, const Result<Token>& token, CUresult result);
Result<Token> TokenIn(const void* shareable, CUmemAllocationHandleType type);  // kNotFound: no token
// others.cpp: the driver's calls on others, which are counted.
using Handle = CUmemGenericAllocationHandle;
CUresult ExportCounted(decltype(cuMemExportToShareableHandle)* real, void* shareable, Handle handle,
                       CUmemAllocationHandleType type, unsigned long long flags);
CUresult ImportCounted(decltype(cuMemImportFromShareableHandle)* real, Handle* handle, void* shareable,
                       CUmemAllocationHandleType type);
CUresult RetainCounted(decltype(cuMemRetainAllocationHandle)* real, Handle* handle, void* address);
CUresult ReleaseCounted(decltype(cuMemRelease)* real, Handle handle);
CUresult MapCounted(decltype(cuMemMap)* real, CUdeviceptr at, size_t bytes, size_t offset, Handle handle,
                    unsigned long long flags);
CUresult UnmapCounted(decltype(cuMemUnmap)* real, CUdeviceptr at, size_t bytes);

}  // namespace amem::intercept
