/* The images of the sparse backup's kernels: a fatbin if one was built (else empty), and PTX, which ends with a zero byte. */
    .section .rodata
    .macro IMAGE name
    .globl \name
    .hidden \name
    .type \name, %object
    .p2align 6
\name:
    .endm

    IMAGE amem_nonzero_fatbin
#ifdef AMEM_NONZERO_FATBIN
    .incbin AMEM_NONZERO_FATBIN
#endif
    .size amem_nonzero_fatbin, . - amem_nonzero_fatbin
    IMAGE amem_nonzero_fatbin_end
    .byte 0

    IMAGE amem_nonzero_ptx
    .incbin AMEM_NONZERO_PTX
    .byte 0
    .size amem_nonzero_ptx, . - amem_nonzero_ptx

    .section .note.GNU-stack, "", %progbits
