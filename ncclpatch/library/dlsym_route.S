/* Only in libamem_nccl.so: with LD_PRELOAD these come before libc's, so that a libnccl that is loaded later binds to them. */
#if defined(__x86_64__)
#define JUMP jmp
#define LANDING endbr64
#elif defined(__aarch64__)
#define JUMP b
#define LANDING hint #34
#endif

.macro EXPORTED name, stub
    .globl \name
    .type \name, %function
    .p2align 4
\name:
    .cfi_startproc
    LANDING
    JUMP \stub
    .cfi_endproc
    .size \name, . - \name
.endm

    .text
    .hidden amem_exported_dlsym_stub
    .hidden amem_exported_dlvsym_stub
EXPORTED dlsym, amem_exported_dlsym_stub
EXPORTED dlvsym, amem_exported_dlvsym_stub

    .section .note.GNU-stack, "", %progbits
