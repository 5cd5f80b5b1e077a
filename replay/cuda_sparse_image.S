/* The images of the sparse backup's kernels: a fatbin if one was built (else empty), and PTX, which ends with a zero byte. */
    .section .rodata
    .macro IMAGE name
    .globl \name
    .hidden \name
    .type \name, %object
    .p2align 6
\name:
    .endm

    IMAGE amem_cuda_sparse_fatbin
#ifdef AMEM_CUDA_SPARSE_FATBIN
    .incbin AMEM_CUDA_SPARSE_FATBIN
#endif
    .size amem_cuda_sparse_fatbin, . - amem_cuda_sparse_fatbin
    IMAGE amem_cuda_sparse_fatbin_end
    .byte 0

    IMAGE amem_cuda_sparse_ptx
    .incbin AMEM_CUDA_SPARSE_PTX
    .byte 0
    .size amem_cuda_sparse_ptx, . - amem_cuda_sparse_ptx

    .section .note.GNU-stack, "", %progbits
