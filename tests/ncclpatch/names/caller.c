/* A library that calls NCCL by importing its functions, as PyTorch does. */
#include <stddef.h>

struct ncclComm;
typedef struct {
  char bytes[128];
} UniqueId;

#define EXPORT __attribute__((visibility("default")))
int ncclGetUniqueId(UniqueId*);
int ncclCommInitRank(struct ncclComm**, int, UniqueId, int);
int ncclCommDestroy(struct ncclComm*);
#ifndef CALLER_WITHOUT_SUSPEND
int ncclCommSuspend(struct ncclComm*, int);
EXPORT int caller_suspend(struct ncclComm* comm) { return ncclCommSuspend(comm, 1); }
#endif

EXPORT int caller_init(struct ncclComm** comm) {
  UniqueId id;
  const int result = ncclGetUniqueId(&id);
  return result != 0 ? result : ncclCommInitRank(comm, 1, id, 0);
}
EXPORT int (*caller_destroy)(struct ncclComm*) = &ncclCommDestroy; /* a pointer in data, bound when this is loaded */
EXPORT int caller_end(struct ncclComm* comm) { return ncclCommDestroy(comm); }
