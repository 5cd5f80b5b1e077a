// Memory that outlives the process: files in the tmpfs /dev/shm, whose blocks are there from the beginning. Writing to their
// map raises no signal and waits for no disk, whatever file system the journal is on: on one that copies on write, such as
// btrfs, a full disk ends a process that writes to a map, and a frozen one stops it.
#pragma once

#include <sys/stat.h>

#include <filesystem>
#include <optional>

#include "journal/base/file.h"
#include "statemachine/types.h"

namespace amem {

// Whether the file system keeps files in memory, and whether it writes a file with all its blocks in place, so that a full disk
// raises no signal in who writes to its map.
bool IsInMemory(int fd);
bool WritesInPlace(int fd);

// A piece of memory belongs to one tail (tail.h), and is named after it: after its session, owner and inode.
std::filesystem::path MemoryOf(SessionId session, const struct stat& tail);

// Whether the path is of such a piece of this user's. It need not be there.
bool IsOwnSharedMemory(const std::filesystem::path& path);

// Makes it, with at most `bytes`: less where /dev/shm is small, because NCCL needs it. kIo and others: there is none, and why.
struct SharedMemory {
  File file;
  Bytes bytes = 0;
};
Result<SharedMemory> MakeSharedMemory(const std::filesystem::path& path, Bytes bytes);

}  // namespace amem
