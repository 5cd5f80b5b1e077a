// The header of another process's tail, and where the rest of it is; internal to tail.cpp and tail_memory.cpp.
#pragma once

#include <sys/stat.h>

#include <memory>
#include <span>

#include "journal/tail.h"

namespace amem {

// It is mapped, because positions must be read whole while their owner moves them. Only the first page is mapped: the file has
// been seen to have it, and no tail ever gets shorter.
struct UnmapHeader {
  void operator()(const TailHeader* header) const;
};
using SharedHeader = std::unique_ptr<const TailHeader, UnmapHeader>;
SharedHeader MapHeader(const File& file);
bool IsSound(const TailHeader& header);
std::uint32_t HeaderCrc(const TailHeader& header);
// Of a file that may not be there; null: it is not, or its header is damaged.
SharedHeader SoundHeader(const Result<File>& file);

// The process, as seen from here, that holds a lock on that file; 0: none that can be seen.
std::int32_t LockHolder(const struct stat& file);
// The memory of a tail, and not of an earlier one by the same name; none: it is not there, or cannot be reached from here. A
// writer in another container is seen by its process.
File MemoryOfTail(const File& file, const TailHeader& tail);
inline constexpr const char* kLocksBeside = ".lock";  // behind the name of the memory

Status WriteAt(const File& file, Bytes offset, std::span<const std::byte> bytes);

}  // namespace amem
