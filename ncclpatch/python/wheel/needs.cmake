# What a build needs of Debian's packages, named all at once: pip shows nothing else to whoever builds from the source distribution.
# Pairs of a program, or a header, by which a package is known to be there, and the package.
set(AMEM_PROGRAMS c++ g++ capnp capnproto pkg-config pkg-config)
set(AMEM_HEADERS capnp/message.h libcapnp-dev lmdb.h liblmdb-dev spdlog/spdlog.h libspdlog-dev fmt/format.h libfmt-dev
    CLI/CLI.hpp libcli11-dev nlohmann/json.hpp nlohmann-json3-dev zstd.h libzstd-dev libelf.h libelf-dev)

# find is find_program, which can be asked before there is a compiler, or find_path, which cannot.
function(amem_need find)
  set(needed ${ARGN})
  while(needed)
    list(POP_FRONT needed file package)
    unset(found)
    cmake_language(CALL ${find} found ${file} NO_CACHE)
    if(NOT found)
      list(APPEND missing ${package})
    endif()
  endwhile()
  if("g++" IN_LIST missing)  # without a compiler no header can be looked for
    list(FILTER AMEM_HEADERS INCLUDE REGEX "-dev$")
    list(APPEND missing ${AMEM_HEADERS})
  endif()
  if(missing)
    list(JOIN missing " " missing)
    message(FATAL_ERROR "AMem cannot be built from source here. What is missing, on Debian and Ubuntu:\n"
                        "    apt-get install ${missing}\nThe wheel needs none of them.")
  endif()
endfunction()
