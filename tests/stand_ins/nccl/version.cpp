// What each of the libraries is compiled for; the other files are compiled once for several.
#include "tests/stand_ins/nccl/nccl.h"

#ifndef STAND_IN_VERSION
#define STAND_IN_VERSION 22809
#endif

namespace stand_in {

int Version() { return STAND_IN_VERSION; }

}  // namespace stand_in
