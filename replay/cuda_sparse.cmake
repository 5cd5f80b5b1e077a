# The kernels of the sparse backup: always as the committed PTX, and as machine code too where there is a CUDA compiler.
option(AMEM_CUDA_FATBIN "Compile the GPU kernels if a CUDA compiler is found" ON)
set(sparse_definitions AMEM_CUDA_SPARSE_PTX="${CMAKE_CURRENT_SOURCE_DIR}/cuda_sparse.ptx")
set(sparse_inputs ${CMAKE_CURRENT_SOURCE_DIR}/cuda_sparse.ptx)

file(READ ${CMAKE_CURRENT_SOURCE_DIR}/cuda_sparse.ptx ptx LIMIT 400)
foreach(source cuda_sparse.cu cuda_sparse_kernels.h)
  file(SHA256 ${CMAKE_CURRENT_SOURCE_DIR}/${source} hash)
  if(NOT ptx MATCHES "${hash} ${source}")
    message(SEND_ERROR "replay/cuda_sparse.ptx was not made from this ${source}; run: cmake -P replay/cuda_sparse_ptx.cmake")
  endif()
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS cuda_sparse.cu cuda_sparse_kernels.h cuda_sparse.ptx)

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
  set(fatbin ${CMAKE_CURRENT_BINARY_DIR}/cuda_sparse.fatbin)
  add_custom_command(OUTPUT ${fatbin}
                     COMMAND ${AMEM_NVCC} -std=c++17 -O3 -I${PROJECT_SOURCE_DIR} -fatbin ${codes}
                             ${CMAKE_CURRENT_SOURCE_DIR}/cuda_sparse.cu -o ${fatbin}
                     DEPENDS cuda_sparse.cu cuda_sparse_kernels.h VERBATIM)
  list(APPEND sparse_definitions AMEM_CUDA_SPARSE_FATBIN="${fatbin}")
  list(APPEND sparse_inputs ${fatbin})
endif()
set_source_files_properties(cuda_sparse_image.S PROPERTIES OBJECT_DEPENDS "${sparse_inputs}" COMPILE_DEFINITIONS "${sparse_definitions}")
