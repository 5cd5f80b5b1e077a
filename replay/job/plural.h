// Counts in sentences.
#pragma once

#include <cstdint>
#include <string>

namespace amem {

// "1 mapping", "12 345 mappings"; `many` where it is not `one` with an s.
inline std::string Plural(std::uint64_t n, const std::string& one, const std::string& many = {}) {
  std::string digits = std::to_string(n);
  for (std::size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, 1, ' ');
  return digits + " " + (n == 1 ? one : many.empty() ? one + "s" : many);
}

}  // namespace amem
