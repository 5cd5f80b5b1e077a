// Directories below which no other user can put anything.
#pragma once

#include <filesystem>
#include <string_view>

#include "journal/base/unique_fd.h"
#include "statemachine/types.h"

namespace amem {

// Opens a directory; what is missing of its path is made with mode 0700. The path is walked component by component. Where
// anyone may create entries, as in /tmp, a component must belong to this user or root and must be no link: another user could
// have put it there. kRefused names the component; kIo and kNotFound are the system's. `doing` begins the message.
Result<UniqueFd> OpenOwnDirectory(std::string_view doing, const std::filesystem::path& path);

// Whether the file system is of this host alone, as far as is known: not NFS, Lustre or the like.
bool IsOnLocalFileSystem(int fd);

}  // namespace amem
