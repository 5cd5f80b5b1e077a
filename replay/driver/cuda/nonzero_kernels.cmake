# The kernels of the sparse backup: always as the committed PTX, and as machine code too where there is a CUDA compiler.
option(AMEM_CUDA_FATBIN "Compile the GPU kernels if a CUDA compiler is found" ON)
set(kernel_definitions AMEM_NONZERO_PTX="${CMAKE_CURRENT_SOURCE_DIR}/nonzero_kernels.ptx")
set(kernel_inputs ${CMAKE_CURRENT_SOURCE_DIR}/nonzero_kernels.ptx)

file(READ ${CMAKE_CURRENT_SOURCE_DIR}/nonzero_kernels.ptx ptx LIMIT 400)
foreach(source nonzero_kernels.cu nonzero_kernels.h)
  file(SHA256 ${CMAKE_CURRENT_SOURCE_DIR}/${source} hash)
  if(NOT ptx MATCHES "${hash} ${source}")
    message(SEND_ERROR "replay/driver/cuda/nonzero_kernels.ptx was not made from this ${source}; run: cmake -P replay/driver/cuda/nonzero_ptx.cmake")
  endif()
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS nonzero_kernels.cu nonzero_kernels.h nonzero_kernels.ptx)

if(AMEM_CUDA_FATBIN)
  find_program(AMEM_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
endif()
if(AMEM_CUDA_FATBIN AND AMEM_NVCC)
  execute_process(COMMAND ${AMEM_NVCC} --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
  set(codes "-gencode=arch=compute_80,code=[sm_80,compute_80]")
  foreach(arch 86 89 90 100 120)
    if(known MATCHES "sm_${arch}[^0-9]")
      list(APPEND codes -gencode=arch=compute_${arch},code=sm_${arch})
    endif()
  endforeach()
  set(fatbin ${CMAKE_CURRENT_BINARY_DIR}/nonzero_kernels.fatbin)
  add_custom_command(OUTPUT ${fatbin}
                     COMMAND ${AMEM_NVCC} -std=c++17 -O3 -I${PROJECT_SOURCE_DIR} -fatbin ${codes}
                             ${CMAKE_CURRENT_SOURCE_DIR}/nonzero_kernels.cu -o ${fatbin}
                     DEPENDS nonzero_kernels.cu nonzero_kernels.h VERBATIM)
  list(APPEND kernel_definitions AMEM_NONZERO_FATBIN="${fatbin}")
  list(APPEND kernel_inputs ${fatbin})
endif()
set_source_files_properties(nonzero_image.S PROPERTIES OBJECT_DEPENDS "${kernel_inputs}" COMPILE_DEFINITIONS "${kernel_definitions}")
