/* A program that is linked with NCCL. Prints whether its calls came by way of AMem. */
#include <stdio.h>

struct ncclComm;
typedef struct {
  char bytes[128];
} UniqueId;
int ncclGetUniqueId(UniqueId*);
int ncclCommInitRank(struct ncclComm**, int, UniqueId, int);
int ncclCommDestroy(struct ncclComm*);
int stand_in_calls(const char* name, int through_amem);

static void Say(const char* what, const char* name) {
  printf("%s: %s\n", what, stand_in_calls(name, 1) > 0 ? "through" : "plain");
}

int main(void) {
  UniqueId id;
  struct ncclComm* comm = NULL;
  if (ncclGetUniqueId(&id) != 0 || ncclCommInitRank(&comm, 1, id, 0) != 0 || ncclCommDestroy(comm) != 0) return 1;
  Say("init", "ncclCommInitRank");
  Say("destroy", "ncclCommDestroy");
  return 0;
}
