// Saved contents: what became of the bytes that a pause saved.
#pragma once

#include <cstdint>
#include <string>

#include "statemachine/event.h"
#include "statemachine/fields.h"

namespace amem {

struct SavedContents {
  Bytes changed = 0;    // copied
  Bytes unchanged = 0;  // as in the copy that was kept of the pause before, and not copied
  Bytes zero = 0;       // not copied either
  // False: nothing was saved, or that is not recorded, as by older builds.
  explicit operator bool() const { return changed + unchanged + zero != 0; }
  SavedContents& operator+=(const SavedContents& other) {
    changed += other.changed;
    unchanged += other.unchanged;
    zero += other.zero;
    return *this;
  }
  AMEM_STRUCT(SavedContents, As{"changed_bytes", changed}, As{"unchanged_bytes", unchanged}, As{"zero_bytes", zero});
};
inline std::string ToText(const SavedContents& contents) {  // "12 MiB copied, 3 072 MiB unchanged, 1 024 MiB zero"
  return RoundedBytes(contents.changed) + " copied, " + RoundedBytes(contents.unchanged) + " unchanged, " +
         RoundedBytes(contents.zero) + " zero";
}

// What the last pause of NCCL's memory, or of the pool with that tag, moved: in all sessions that are as far as the furthest.
struct PauseContents {
  std::string tag;  // empty: NCCL's
  std::uint64_t cycle = 0, processes = 0;
  SavedContents contents;
  AMEM_STRUCT(PauseContents, OrNull{tag}, cycle, processes, contents);
};

}  // namespace amem
