// LMDB reads its file through a map, where a page that cannot be read raises SIGBUS: one that a failing disk or a lost server
// does not give back, or one behind the end of a file that was cut short. These say so before LMDB touches the page.
//
// What is left: a page that is in memory when it is checked, and is evicted and lost, or cut off, in the milliseconds before
// LMDB reads it.
#pragma once

#include "journal/base/file.h"
#include "statemachine/types.h"

namespace amem {

// kIo: the file has no name any more, has fewer bytes than `least`, or cannot be reached.
Status CheckWhole(const File& file, Bytes least);

// Whether each page below `bytes` is in memory, or can be read into it. The file system is only asked for those that are not.
Status CheckReadable(const File& file, Bytes bytes);

}  // namespace amem
