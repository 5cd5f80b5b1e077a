// A call in a thread of its own, as of std::async, which makes dozens of classes anew for each lambda, and this one for each
// kind of result.
#pragma once

#include <functional>
#include <future>
#include <type_traits>
#include <utility>

namespace amem::test {

template <class Call>
std::future<std::invoke_result_t<Call&>> InThread(Call call) {
  return std::async(std::launch::async, std::function<std::invoke_result_t<Call&>()>(std::move(call)));
}

}  // namespace amem::test
