// A witness beside the loader (LD_AUDIT): writes down each dlsym and dlvsym of a name that concerns memory on a GPU or a network
// card, with the library that asked. The loader itself tells it, so that nothing which AMem does can hide a look-up from it.
//
//   STAND_IN_WITNESS  a file; each such look-up that found something adds a line, "NAME LIBRARY"
//
// It says the library for which the loader searched: AMem's, when NCCL asked AMem and AMem asked libc.
#define _GNU_SOURCE
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int Concerns(const char* name) {
  static const char* const prefixes[] = {"ibv_", "mlx5dv_", "gdr_"};
  for (size_t i = 0; i < sizeof(prefixes) / sizeof(*prefixes); ++i)
    if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0) return 1;
  return name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z';
}

unsigned la_version(unsigned version) { return version; }

unsigned la_objopen(struct link_map* map, Lmid_t space, uintptr_t* cookie) {
  (void)space;
  *cookie = (uintptr_t)map;
  return LA_FLG_BINDTO | LA_FLG_BINDFROM;
}

uintptr_t la_symbind64(Elf64_Sym* symbol, unsigned index, uintptr_t* from, uintptr_t* to, unsigned* flags, const char* name) {
  (void)index;
  (void)to;
  if ((*flags & LA_SYMB_DLSYM) == 0 || !Concerns(name)) return symbol->st_value;
  const char* file = getenv("STAND_IN_WITNESS");
  if (file == NULL) return symbol->st_value;
  const struct link_map* caller = (const struct link_map*)*from;
  char line[4096];
  const int length = snprintf(line, sizeof(line), "%s %s\n", name, caller->l_name[0] != '\0' ? caller->l_name : "program");
  const int descriptor = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (descriptor >= 0 && length > 0 && (size_t)length < sizeof(line)) {
    const ssize_t written = write(descriptor, line, (size_t)length);
    (void)written;
  }
  if (descriptor >= 0) close(descriptor);
  return symbol->st_value;
}
