/* AMem's C interface, exported by libamem_nccl.so.
 *
 * A patched libnccl.so.2 depends on libamem_nccl.so, so that these are found through it (dlsym, ctypes, linking) like NCCL's
 * own. Every function may be called from any thread. None prints to stdout, throws or ends the process.
 *
 * Those that return int return an ncclResult_t: 0 ok, 1 CUDA driver failure or out of memory, 2 system failure (file, socket),
 * 3 internal failure, 4 invalid argument, 5 invalid usage (too late, not under AMem, wrong setting), 6 a peer failed or did not
 * come in time. After anything but 0, amem_last_error() says in words what happened and what to do.
 *
 * With AMEM_ENABLE=0, and where there is no GPU, every function does nothing and returns 0, and one line on stderr says so
 * once; amem_alloc then hands out plain driver memory, or null.
 */
#ifndef AMEM_H_
#define AMEM_H_

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define AMEM_EXPORT __attribute__((visibility("default")))
#else
#define AMEM_EXPORT
#endif

/* NCCL's communicator; AMem only takes pointers to it, so nccl.h is not needed. */
struct ncclComm;

/* Gives back the GPU memory that NCCL holds in this process; saves contents and keeps addresses. Collective over the processes
 * that share NCCL memory with this one and have the same group: all of them call it, in any order, and each call returns when
 * all have. Always the whole process: `comm` may be null and selects nothing. Already paused: 0. If it fails, nothing is
 * paused. Until the resume NCCL's launches fail with an error. */
AMEM_EXPORT int ncclPause(struct ncclComm** comm);

/* Brings the memory back at the same addresses with the same contents. Collective like ncclPause. Not paused: 0. If it fails
 * everything is still paused with contents kept; call it again. 5: another want (below) names it; it comes back with that. */
AMEM_EXPORT int ncclResume(struct ncclComm** comm);

/* Writes statistics for people to stderr: what NCCL holds, and how long each phase of the last pause and resume took. */
AMEM_EXPORT int ncclMemStats(void);

/* The group of this process: only processes with equal groups pause together. Starts as AMEM_GROUPID, or 0. */
AMEM_EXPORT int ncclSetGroupID(int group);
AMEM_EXPORT int ncclGetGroupID(int* group);

/* Puts every NCCL under AMem that is loaded and has not called the driver yet. Call it again after another NCCL was loaded.
 * Harmless and not needed with LD_PRELOAD or a patched copy. 5: there is none, or it is too late for one of them. */
AMEM_EXPORT int amem_attach(void);

/* What AMem knows, as one JSON object terminated by NUL. `what`: AMEM_STATS and those below. In: *length is the size of
 * `buffer`. Out: *length is the size needed, with the NUL. `buffer` null: only that. Too small, or another `what`: 4, and
 * nothing is written. */
AMEM_EXPORT int amem_json(const char* what, char* buffer, size_t* length);

/* Statistics of NCCL's memory. Before NCCL has used memory: {"session":null,...}. "nccl_libraries" names every NCCL of the
 * process: path, version, under_amem, way, why_not. */
#define AMEM_STATS "stats"

/* Memory by tag: {"schema":1,"tags":[{"tag","policy","state":"resident|pausing|paused|resuming","bytes","resident_bytes",
 * "kept_bytes","kept":{reason:bytes},"held_by":{library:bytes},"parts","devices":[ordinals],"pinned_bytes","last_pause_ms",
 * "last_resume_ms","failure"}]}.
 * Sizes in bytes: of chunks and slabs, as the driver gave them; "part_bytes" is what was asked for and is in use,
 * "pinned_bytes" the host memory that holds contents of the tag now. Times are null where there was none. "nccl" and "user"
 * (ncclMemAlloc) are tags as well; the state of "nccl" may be "not under AMem", for the reason in "failure".
 * "left":{function:{"allocations","bytes"}} is what AMEM_SCOPE=all leaves to the driver. Before memory was asked for: no tags,
 * and a "reason". */
#define AMEM_MEMORY "memory"

/* The account of each GPU that has memory of AMem's here: {"schema":1,"devices":[{"device":ordinal,"used_bytes","taken":{tag:
 * bytes},"running":{tag:bytes},"kept":{reason:bytes}}],"unplaced":{whose:bytes}}. Sizes in bytes, as the driver gave them.
 * "taken": away until a resume; "running": a pause of the tag would take it; "kept": no pause takes it; "unplaced": on some GPU
 * as well, of functions that name none. "used_bytes" is the driver's, of all processes, or null: what it has beyond "running"
 * and "kept" is "unplaced", or memory that AMem does not see (the program's, contexts and modules, other processes'). A pause
 * moves bytes from "running" to "taken", and "used_bytes" falls by as much. */
#define AMEM_ACCOUNT "account"

/* The processes that have memory on these GPUs, this one among them, as far as the management library (NVML) knows them:
 * {"schema":1,"devices":[{"device":ordinal,"processes":[{"pid","name","bytes"}]}]}. Takes milliseconds. */
#define AMEM_PROCESSES "processes"

/* Unpins host memory that holds no contents, until at most `keep_bytes` are left. A pause pins what it needs and keeps it for
 * the next one. Waits for a pause or resume of NCCL's memory,
 * leaves what a tag's needs, and may wait for running kernels, because CUDA does when it unpins memory. */
AMEM_EXPORT int amem_trim_pinned(size_t keep_bytes);

/* ---- Memory of the program under tags ----
 *
 * A tag names memory that is paused and resumed together: "weights", "optimizer", "kv_cache". Each tag has a pool, from which
 * amem_alloc takes. Addresses stay the same over a pause, so tensors, CUDA graphs and registrations stay valid; touching memory
 * of a paused tag faults, like freed memory.
 *
 * A tag whose memory no other process imported is private: no other rank takes part. If ranks share it, for example through a
 * window of NCCL's, all of them must pause and resume that tag, several tags in the same order. A rank that imported memory of
 * a tag has the tag from then on, and a rank that cannot release it keeps it in place for all. Memory that a network card or
 * another library holds (retained, exported, a dma-buf of it, registered, bound) stays in place and is reported (AMEM_MEMORY,
 * kept_bytes and held_by).
 *
 * "nccl" is a tag too: what NCCL holds; with AMEM_SCOPE=all "program": what everybody else has from cudaMalloc. */
#define AMEM_PRESERVE 0 /* a pause saves the contents to pinned host memory, and a resume brings them back to the last bit */
#define AMEM_DISCARD 1  /* a pause of the program forgets them, and the memory then holds anything; `amem pause` keeps them */

#define AMEM_NO_WAIT 1u /* amem_pause, amem_resume: return at once; a failure comes at amem_wait */
#define AMEM_ON_STREAM                                                                                                        \
  2u /* amem_wait: see there; amem_pause: after what `stream` holds now (null: CUDA's default stream), and no other stream is \
        waited for; copy engines copy what has changed, and all of it until a pause without this flag has loaded the kernels  \
        that know. Else the devices must become idle. */

#define AMEM_IN_TIME 4u /* amem_resume: of "nccl", waits no longer than AMEM_TIMEOUT_MS for ranks that are still paused */
#define AMEM_ONLY_ASK                                                                                                          \
  8u /* amem_resume: resumes nothing; 1 where a device has too little free memory for all of these tags, else 0. amem_pause:   \
        pauses nothing; waits until the devices that NCCL uses here are idle, AMEM_TIMEOUT_MS at most. Other ranks do not hear \
        of it. */

#define AMEM_HOSTS_IDLE                                                                                                        \
  32u /* amem_pause: of "nccl", with AMEM_NETWORK=renew: the GPUs of all ranks on all hosts have finished their work, and the  \
         caller has made sure of it (AMEM_ONLY_ASK, then a barrier of all). Only then memory that a network card holds leaves. \
         If it is not so, a kernel elsewhere may wait for what this rank sends until its resume. */

/* Opens the pool of a tag. The same again: 0. With another policy, or for "nccl", "user" or "": 4. */
AMEM_EXPORT int amem_pool(const char* tag, int policy);

/* From here on amem_alloc takes from this tag's pool on this thread, until amem_pool_leave. Nests. Unknown tag: 4. A paused tag
 * cannot be entered, nor a tag be paused that a thread is inside: 5. An allocator above this one may have memory of the tag in
 * reserve, which it would hand out. */
AMEM_EXPORT int amem_pool_enter(const char* tag);
AMEM_EXPORT int amem_pool_leave(void); /* 5: no pool was entered */

/* Memory of the entered pool, else of tag "default" (AMEM_PRESERVE), in the form of PyTorch's pluggable allocators: `size` in
 * bytes, `device` a CUDA ordinal of this process, `stream` not used. Aligned to 512 bytes; of zero bytes an address as well.
 * CUDA has no IPC handle for it (cudaIpcGetMemHandle, torch.multiprocessing).
 * Null: the device has no memory left, or the tag is paused; amem_last_error says which, and nothing is printed. A resume that
 * is under way is waited for. */
AMEM_EXPORT void* amem_alloc(ssize_t size, int device, void* stream);

/* Frees memory of amem_alloc, on any thread, also while its tag is paused. Like cudaFree, waits for what `stream` holds, where
 * the memory was used last; other streams must not use it any more. `size` is not needed. Any other address is logged once and
 * left alone. */
AMEM_EXPORT void amem_free(void* ptr, ssize_t size, int device, void* stream);

/* Pauses `count` tags in this order, each after its earlier requests. Paused already: 0. If one fails, those that this call had
 * paused are resumed, and the message names the tag that failed. Always waits for "nccl". Unknown tag: 4, nothing is paused. */
AMEM_EXPORT int amem_pause(const char* const* tags, size_t count, unsigned flags, void* stream);

/* Resumes `count` tags in this order; with AMEM_NO_WAIT in the order of `priority`, higher first. If one fails, it stays paused
 * with its contents kept, and those that this call had resumed are paused again; call it again. 5: another want (below) names a
 * tag, which comes back when that ends. */
AMEM_EXPORT int amem_resume(const char* const* tags, size_t count, unsigned flags, int priority);

/* Waits for what is under way on this tag, and returns its failure, once. With AMEM_ON_STREAM, what is submitted to `stream`
 * from now on (null: CUDA's default stream) waits for the resume that is under way, and the host only until its copies are
 * queued. Resident: 0. Paused, and no resume asked for: 5. */
AMEM_EXPORT int amem_wait(const char* tag, unsigned flags, void* stream);

/* ---- Who wants what paused ----
 *
 * Memory of a tag is paused while any want names it. A want is one part of a program that needs memory away for itself, a block
 * of code or an adapter for example, and knows nothing of the others. AMEM_PLAIN is the want of the plain calls amem_pause,
 * amem_resume, ncclPause, ncclResume, ncclCommSuspend and ncclCommResume, all of them together: it names a tag or does not,
 * however often that is paused. Requests from outside (`amem pause`) are none: what they resume stays paused while a want names
 * it. Threads may pause and resume the same tag through different wants, or one; one at a time changes its memory, and a pause
 * waits for that no longer than AMEM_TIMEOUT_MS. */
typedef unsigned long long amem_want_id;
#define AMEM_PLAIN 0ull

/* A new want, which names nothing. It is a number that nobody has had before; there is nothing to give back. */
AMEM_EXPORT amem_want_id amem_want(void);

/* As amem_pause, and `want` names these tags from then on, also those that were paused already. After a failure it names none
 * that it did not name before. */
AMEM_EXPORT int amem_want_pause(amem_want_id want, const char* const* tags, size_t count, unsigned flags, void* stream);

/* As amem_resume: `want` names these tags no more, whether this succeeds or fails. What another want names stays paused, and
 * that is success; except for AMEM_PLAIN, whose callers expect the memory: 5. A tag that is paused and that no want names,
 * because its resume has failed, is resumed by any want. */
#define AMEM_LET_GO 16u /* amem_want_resume: resumes nothing; what no want names then stays paused until a resume */
AMEM_EXPORT int amem_want_resume(amem_want_id want, const char* const* tags, size_t count, unsigned flags, int priority);

/* ---- Safe points, and requests from outside ----
 *
 * A place of the program, once a step, where `amem pause JOB`, `amem resume JOB` and `amem freeze JOB` take hold. One thread of
 * each process calls it, in all ranks equally often and in the same order of steps, because a request is carried out at the
 * step with the same number in all ranks. It costs some nanoseconds while nothing is asked. Otherwise it waits for the agreed
 * step, pauses together with all, and returns when the memory is back, however long that takes. Returns 0 whenever the program
 * can go on, also after a pause from outside that failed or was withdrawn, with AMEM_ENABLE=0, and in a forked child.
 *
 * A program that pauses by itself can be asked too: the request waits for its next own pause, and holds its resume. An own
 * pause that is called while the process has stopped for a request begins when that has ended. */
AMEM_EXPORT int amem_safepoint(unsigned how);

/* `how` is 0, or one of these, for interpreters, which must run their signal handlers. AMEM_BEGIN: a safe point that never
 * waits, and returns 7 (ncclInProgress) if something is asked. Then call it with AMEM_GO_ON until it returns something else;
 * that waits a tenth of a second at most, except for a pause or resume that is under way. AMEM_BEFORE_RESUME is no safe point:
 * 7 while a request from outside stands, which a resume would wait for. AMEM_BEFORE_PAUSE likewise: 7 while the process has
 * stopped for a request, which a pause of NCCL's memory would wait for, however long that takes. */
#define AMEM_BEGIN 1u
#define AMEM_GO_ON 2u
#define AMEM_BEFORE_RESUME 3u
#define AMEM_BEFORE_PAUSE 4u

/* Why this thread's last failed call failed, of AMem's or one of NCCL's that AMem refused (ncclGetLastError says that, too); ""
 * if none did. Valid until this thread's next call. After a pause or resume it ends with the command that explains it,
 * "amem-replay why DIR", quoted for a shell. */
AMEM_EXPORT const char* amem_last_error(void);

/* "0.1.0" */
AMEM_EXPORT const char* amem_version(void);

#ifdef __cplusplus
}
#endif

#endif /* AMEM_H_ */
