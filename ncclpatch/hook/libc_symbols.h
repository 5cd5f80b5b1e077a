// libc's own dlsym and dlvsym, found without calling anybody.
//
// A sanitizer's runtime, or another preloaded library that wraps libc, asks dlsym for libc's functions before it can answer any
// call that it wraps. With libamem_nccl.so preloaded that question arrives here, so the answer must not need strcmp,
// dl_iterate_phdr or malloc: it is read from the loader's list of objects and their symbol tables.
#pragma once

namespace amem::hook {

bool SameName(const char* a, const char* b);

// Null: no loaded libc defines it.
void* FindInLibc(const char* name);

}  // namespace amem::hook
