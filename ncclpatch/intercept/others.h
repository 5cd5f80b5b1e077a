// What other libraries of the process allocate, and share with other processes past AMem.
#pragma once

#include <cuda.h>

#include <array>
#include <span>

#include "ncclpatch/hook/replacements.h"
#include "ncclpatch/runtime/options.h"
#include "replay/session/session.h"

namespace amem::intercept {

// For replacements::Install: what other libraries get with AMEM_SCOPE=nccl. All calls are made as they are, and counted.
const replacements::Tables& CountingTables();
// The same with AMEM_SCOPE=shared: what a library that imports functions of cudaIpc gets from cudaMalloc is a tag's, which is
// called as the library is. With AMEM_SCOPE=all everybody's is, under the tag `program`.
const replacements::Tables& WiderTables(LibraryScope scope);
void Widen(LibraryScope scope);  // installs them

// Tells the session what other libraries share (SharedOutside), and which of them share by calls that AMem does not see. For
// Runtime::Above. Without `wait` only the first, and only if that can be done soon.
void TellOfOthers(Session& session, bool wait = true);

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

// memory.cpp: handles of cuMemCreate, which are a tag's; private ones with AMEM_SCOPE=all.
std::span<const replacements::Replacement> HandleReplacements();

}  // namespace amem::intercept
