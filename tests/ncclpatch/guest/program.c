/* A program as it may be built with any sanitizer, or run under any allocator: threads, memory, look-ups by name; and a fork, in
 * which the child goes on like its parent. Prints "fine". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void* Work(void* argument) {
  char* copy = strdup((const char*)argument);
  const size_t length = strlen(copy);
  free(copy);
  return (void*)length;
}

static int Threads(void) {
  pthread_t threads[4];
  for (int i = 0; i < 4; ++i)
    if (pthread_create(&threads[i], NULL, &Work, "eight ch") != 0) return 1;
  for (int i = 0; i < 4; ++i) {
    void* length = NULL;
    if (pthread_join(threads[i], &length) != 0 || length != (void*)8) return 2;
  }
  return dlsym(RTLD_NEXT, "getpid") == NULL || dlsym(RTLD_DEFAULT, "no_such_function") != NULL ? 3 : 0;
}

int main(void) {
  const int here = Threads();
  if (here != 0) return here;
  const pid_t child = fork();
  if (child == 0) _exit(Threads());
  int status = 1;
  if (waitpid(child, &status, 0) != child || status != 0) return 4;
  puts("fine");
  return 0;
}
