// The functions of a CUDA runtime that one_shot.cpp calls and direct.cpp has.
#pragma once

#include <cuda.h>

extern "C" {
int cudaMalloc(void** pointer, size_t bytes);
int cudaFree(void* pointer);
int cudaIpcGetMemHandle(CUipcMemHandle* handle, void* pointer);
int cudaIpcOpenMemHandle(void** pointer, CUipcMemHandle handle, unsigned flags);
int cudaIpcCloseMemHandle(void* pointer);
int cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags, int* found);
}
