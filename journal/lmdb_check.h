// Whether LMDB can walk a data.mdb without leaving the file.
//
// LMDB trusts what it wrote: a damaged page number, offset or length makes it read outside the map, or ends the process with an
// assertion. A reader of a dead journal therefore checks the pages first, and does not use LMDB when they are not sound.
#pragma once

#include "journal/base/file.h"

namespace amem {

// kCorrupt says which page is wrong and how. Values are not looked at: each has its own checksum. The file must not change
// meanwhile. Knows the format of LMDB 0.9 (data version 1) on 64-bit little-endian machines.
Status CheckStructure(const File& data);

}  // namespace amem
