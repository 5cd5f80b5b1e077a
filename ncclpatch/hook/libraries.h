// The list behind hook::Libraries: read without a lock, written under one.
#pragma once

#include "ncclpatch/hook/hook.h"

namespace amem::hook::libraries {

// Whether this object is in the list, and not one that was unloaded from the same addresses.
bool Knows(const ElfImage& image);
// Adds it, once. Null: the list is full.
const Library* Register(const ElfImage& image, const char* way);

// Its own function of that name; null: it has none, or was unloaded.
void* FindIn(const Library& library, const char* name);

// As the NCCL itself says; empty: it does not.
std::string VersionOf(const ElfImage& image);

// Around fork.
void Lock();
void Unlock();

}  // namespace amem::hook::libraries
