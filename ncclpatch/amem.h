/* AMem's C interface, exported by libamem_nccl.so.
 *
 * A patched libnccl.so.2 depends on libamem_nccl.so, so that these are found through it (dlsym, ctypes, linking) like NCCL's
 * own. Every function may be called from any thread. None prints to stdout, throws or ends the process.
 *
 * Those that return int return an ncclResult_t: 0 ok, 1 CUDA driver failure or out of memory, 2 system failure (file, socket),
 * 3 internal failure, 4 invalid argument, 5 invalid usage (switched off, too late, not under AMem, wrong setting), 6 a peer
 * failed or did not come in time. After anything but 0, amem_last_error() says in words what happened and what to do.
 */
#ifndef AMEM_H_
#define AMEM_H_

#include <stddef.h>

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

/* Gives back the GPU memory that NCCL holds in this process, contents saved, addresses kept. Collective over the processes that
 * share NCCL memory with this one and have the same group: all of them must call it, in any order, and it returns when all
 * have. Always the whole process: `comm` may be null and selects nothing. Already paused: returns 0. When it fails, nothing is
 * paused. Between pause and resume whatever NCCL would launch fails with an error. */
AMEM_EXPORT int ncclPause(struct ncclComm** comm);

/* Brings the memory back at the same addresses with the same contents. Collective as ncclPause. Not paused: returns 0. When it
 * fails everything is still paused, contents kept, and it can be called again. */
AMEM_EXPORT int ncclResume(struct ncclComm** comm);

/* Writes statistics for people to stderr: what NCCL holds, and how long each phase of the last pause and resume took. */
AMEM_EXPORT int ncclMemStats(void);

/* The group of this process: only processes with equal groups pause together. Starts as AMEM_GROUPID, or 0. */
AMEM_EXPORT int ncclSetGroupID(int group);
AMEM_EXPORT int ncclGetGroupID(int* group);

/* Puts every NCCL under AMem that is loaded and has not called the driver yet; again after another one was loaded. Not needed
 * with LD_PRELOAD or a patched copy, and harmless there. 5 when there is none, or when it is too late for one of them. */
AMEM_EXPORT int amem_attach(void);

/* Statistics as JSON, one object, terminated by NUL. In: *length is the size of `buffer`. Out: *length is the size needed, with
 * the NUL. `buffer` null: only that. Too small: 4, and nothing is written. Before NCCL has used memory: {"session":null,...}.
 * "nccl_libraries" names every NCCL of the process: path, version, under_amem, way, why_not.
 */
AMEM_EXPORT int amem_stats_json(char* buffer, size_t* length);

/* Gives pinned host memory back that holds no contents, until no more than `keep_bytes` are left. A pause pins what it needs
 * and keeps it for the next one; AMEM_PINNED_MB bounds what is pinned ahead. Waits for a pause or resume that is under way, and
 * may wait for running kernels, as CUDA does when it unpins memory. */
AMEM_EXPORT int amem_trim_pinned(size_t keep_bytes);

/* Why the last call on this thread that did not return 0 failed; "" if none has. Valid until this thread's next call. Of a
 * pause or resume it ends with the command that explains it, "amem-replay why DIR", quoted for a shell. */
AMEM_EXPORT const char* amem_last_error(void);

/* "0.1.0" */
AMEM_EXPORT const char* amem_version(void);

#ifdef __cplusplus
}
#endif

#endif /* AMEM_H_ */
