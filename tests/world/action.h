// What a thread of the program may do: the language of the world.
#pragma once

#include <span>

#include "tests/world/rank.h"

namespace amem::world {

struct Action {
  const char* name;
  int weight;
  void (*run)(Worker&);
};
std::span<const Action> Actions();  // the table

// ---- memory.cpp: NCCL's, ncclMemAlloc's and cuMemAlloc's
void MakeMemory(Worker& worker);
void MakeMuchMemory(Worker& worker);
void MakeLegacy(Worker& worker);
void FreeSome(Worker& worker);
void UseWrongly(Worker& worker);
bool HasMuch(const Worker& worker);  // a piece of many MiB: one is enough for a thread
// Maps an allocation at an address of its own, and gives one reference to it back if that fails.
bool MapNew(Worker& worker, Place& place, AllocationId allocation);
void Free(Worker& worker, Place& place);  // and forgets the place

// ---- contents.cpp: kernels
void Write(Worker& worker);
void Check(Worker& worker);
void Use(Worker& worker, Place& place, bool write);
void Capture(Worker& worker);
// What a kernel of NCCL's does with that place; the caller has launched it.
void UseAsKernel(Worker& worker, Stream& stream, Place& place, bool write);

// ---- launches.cpp
void Collective(Worker& worker);

// ---- tags.cpp
void AllocateInTag(Worker& worker);
void AllocateMuchInTag(Worker& worker);
void PauseOrResumeTag(Worker& worker);
void TrimOrLook(Worker& worker);
void ResumeTag(Rank& rank, Tag& tag);

// ---- windows.cpp: a second mapping of memory, and network cards
void MakeWindow(Worker& worker);
void RegisterWithCard(Worker& worker);
void DeregisterFromCard(Worker& worker);
void Deregister(Worker& worker, Place& place);
void CheckCard(Worker& worker, const Place& place);

// ---- sharing.cpp: between ranks
void OfferMemory(Worker& worker);
void ImportOffer(Worker& worker);
// Whether memory that was offered may be freed; nobody can open it from then on.
bool MayFree(Rank& rank, const Place& place);
void Closed(Rank& rank, const Place& place);  // what was opened

// ---- process.cpp
void Fork(Worker& worker);
void FailACall(Worker& worker);
void Lose(Worker& worker);
void Rest(Worker& worker);

}  // namespace amem::world
