/* What libnccl's dlsym and dlvsym slots point to, and what the exported dlsym and dlvsym jump to (amem_exported_...).
 *
 * Each asks the C side where this call shall go, and then jumps there with the stack as it was: the function that answers sees
 * the original caller's return address. libc's dlsym needs that for RTLD_NEXT and RTLD_DEFAULT, so that AMem in between is
 * invisible to everybody but libnccl.
 *
 *   void* amem_route_dlsym(void* return_address, void* handle, const char* name);
 */
#if defined(__x86_64__)

.macro ASK_AND_JUMP route
    endbr64
    push %rdi
    .cfi_adjust_cfa_offset 8
    push %rsi
    .cfi_adjust_cfa_offset 8
    push %rdx                     /* dlvsym's version; the stack is now aligned for a call */
    .cfi_adjust_cfa_offset 8
    mov %rsi, %rdx
    mov %rdi, %rsi
    mov 24(%rsp), %rdi
    call \route
    pop %rdx
    .cfi_adjust_cfa_offset -8
    pop %rsi
    .cfi_adjust_cfa_offset -8
    pop %rdi
    .cfi_adjust_cfa_offset -8
    jmp *%rax
.endm

#elif defined(__aarch64__)

.macro ASK_AND_JUMP route
    hint #34                      /* bti c */
    stp x29, x30, [sp, #-48]!
    .cfi_def_cfa_offset 48
    .cfi_offset 29, -48
    .cfi_offset 30, -40
    stp x0, x1, [sp, #16]
    str x2, [sp, #32]
    mov x2, x1
    mov x1, x0
    mov x0, x30
    bl \route
    mov x16, x0
    ldp x0, x1, [sp, #16]
    ldr x2, [sp, #32]
    ldp x29, x30, [sp], #48
    .cfi_restore 29
    .cfi_restore 30
    .cfi_def_cfa_offset 0
    br x16
.endm

#else
#error "AMem has no dlsym stub for this processor"
#endif

.macro STUB name, route
    .globl \name
    .hidden \name
    .type \name, %function
    .p2align 4
\name:
    .cfi_startproc
    ASK_AND_JUMP \route
    .cfi_endproc
    .size \name, . - \name
.endm

    .text
    .hidden amem_route_dlsym
    .hidden amem_route_dlvsym
STUB amem_dlsym_stub, amem_route_dlsym
    .hidden amem_route_exported_dlsym
    .hidden amem_route_exported_dlvsym
STUB amem_dlvsym_stub, amem_route_dlvsym
STUB amem_exported_dlsym_stub, amem_route_exported_dlsym
STUB amem_exported_dlvsym_stub, amem_route_exported_dlvsym

    .section .note.GNU-stack, "", %progbits
