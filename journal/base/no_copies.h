// What guards, threads and memory cannot be copied with: a base of the classes that own them.
#pragma once

namespace amem {

struct NoCopies {
  NoCopies() = default;
  NoCopies(const NoCopies&) = delete;
  NoCopies& operator=(const NoCopies&) = delete;
};

}  // namespace amem
