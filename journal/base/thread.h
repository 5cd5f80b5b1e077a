// Threads of AMem's own in the host's process.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "statemachine/types.h"

namespace amem {

// Starts a thread that takes no signals: those are for the host's own threads, whose handlers may expect to run there.
// `name`, of at most 15 characters, is what top and gdb show. kIo: the system has no thread left.
Result<std::thread> StartThread(const std::string& name, std::function<void()> body);

}  // namespace amem
