// What AMem looks up of the driver for its own calls. These must never come back to AMem, whoever answers the look-up and
// whatever library that answer passes through.
#pragma once

namespace amem::hook::own_look_ups {

// A function of the driver's library, by its exported name. Of cuGetProcAddress_v2 a variant for AMem, which hands out no
// replacement. What the library does not export is asked of its cuGetProcAddress_v2. Null: there is none.
void* Find(void* (*dlsym)(void* handle, const char* name), void* library, const char* name);

}  // namespace amem::hook::own_look_ups
