# Makes replay/cuda_sparse.ptx from cuda_sparse.cu; run it after a change there, with a CUDA compiler in PATH:
#   cmake -P replay/cuda_sparse_ptx.cmake
# The kernels need nothing newer than PTX ISA 7.0 (CUDA 11.0), so that is what the file asks for: every driver that AMem runs on
# takes it. ptxas checks that. The file names the source it was made from, so that the build can tell when it is old.
set(here ${CMAKE_CURRENT_LIST_DIR})
find_program(NVCC nvcc REQUIRED HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
get_filename_component(bin ${NVCC} DIRECTORY)
execute_process(COMMAND ${NVCC} -std=c++17 -O3 -I${here}/.. -arch=compute_80 -ptx ${here}/cuda_sparse.cu -o ${here}/cuda_sparse.ptx
                COMMAND_ERROR_IS_FATAL ANY)
file(READ ${here}/cuda_sparse.ptx text)
file(SHA256 ${here}/cuda_sparse.cu kernels)
file(SHA256 ${here}/cuda_sparse_kernels.h shared)
string(REGEX REPLACE "^.*\n(\\.version )[0-9.]+\n"
       "// Generated from cuda_sparse.cu by cuda_sparse_ptx.cmake.\n// ${kernels} cuda_sparse.cu\n// ${shared} cuda_sparse_kernels.h\n\n\\17.0\n"
       text "${text}")
file(WRITE ${here}/cuda_sparse.ptx "${text}")
execute_process(COMMAND ${bin}/ptxas -arch=sm_80 ${here}/cuda_sparse.ptx -o /dev/null COMMAND_ERROR_IS_FATAL ANY)
