# Makes replay/driver/cuda/nonzero_kernels.ptx from nonzero_kernels.cu; run it after a change there, with a CUDA compiler in PATH:
#   cmake -P replay/driver/cuda/nonzero_ptx.cmake
# The kernels need nothing newer than PTX ISA 7.0 (CUDA 11.0), so that is what the file asks for: every driver that AMem runs on
# takes it. ptxas checks that. The file names the source it was made from, so that the build can tell when it is old.
set(here ${CMAKE_CURRENT_LIST_DIR})
find_program(NVCC nvcc REQUIRED HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
get_filename_component(bin ${NVCC} DIRECTORY)
execute_process(COMMAND ${NVCC} -std=c++17 -O3 -I${here}/../../.. -arch=compute_75 -ptx ${here}/nonzero_kernels.cu -o ${here}/nonzero_kernels.ptx
                COMMAND_ERROR_IS_FATAL ANY)
file(READ ${here}/nonzero_kernels.ptx text)
file(SHA256 ${here}/nonzero_kernels.cu kernels)
file(SHA256 ${here}/nonzero_kernels.h shared)
file(SHA256 ${here}/../content_key.h key)
string(REGEX REPLACE "^.*\n(\\.version )[0-9.]+\n"
       "// Generated from nonzero_kernels.cu by nonzero_ptx.cmake.\n// ${kernels} nonzero_kernels.cu\n// ${shared} nonzero_kernels.h\n// ${key} ../content_key.h\n\n\\17.0\n"
       text "${text}")
# From CUDA 13 on the compiler keeps variables to the module, where the host would not find the key.
string(REPLACE "\n.global .align 16 .b8 amem_sparse_key" "\n.visible .global .align 16 .b8 amem_sparse_key" text "${text}")
file(WRITE ${here}/nonzero_kernels.ptx "${text}")
execute_process(COMMAND ${bin}/ptxas -arch=sm_75 ${here}/nonzero_kernels.ptx -o /dev/null COMMAND_ERROR_IS_FATAL ANY)
