// libc's own dlsym and dlvsym, found without a call to anybody.
//
// A sanitizer's runtime, or any other preloaded library that wraps libc's functions, asks dlsym for libc's versions before it
// can answer a single one of the calls that it wraps. While libamem_nccl.so is preloaded that question arrives here, so the
// answer must not rest on strcmp, dl_iterate_phdr, malloc or the like: it is read from the loader's list of objects and their
// symbol tables.
#pragma once

namespace amem::hook {

// Null if no loaded libc defines it.
void* FindInLibc(const char* name);

}  // namespace amem::hook
