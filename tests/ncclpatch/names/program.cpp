// A program that uses NCCL and knows nothing of AMem: finds NCCL's functions in one of the ways that there are, makes two
// communicators, suspends one, and destroys them. Prints who was reached.
//
//   program handle|default LIBNCCL     by dlsym, with the library's handle or in the global scope
//   program unknown LIBNCCL            suspends and resumes what AMem did not see made, and as AMem does not know
//   program import CALLER [LIBNCCL]    through a library that imports them; LIBNCCL is loaded before
//   program two CALLER LIBNCCL         both, each with its own NCCL
//   program none                       looks the names up, and there is no NCCL
//   program weak                       the same with a weak import, which is called
// ATTACH: the libamem_nccl.so to attach with, after LIBNCCL was loaded; LATE_ATTACH: after CALLER was. CHILD: in a forked
// child.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

struct ncclComm;
namespace {
struct UniqueId {
  char bytes[128];
};
}  // namespace
extern "C" __attribute__((weak)) int ncclCommInitAll(ncclComm**, int, const int*);

namespace {

template <class F>
F* Look(void* where, const char* name) {
  return reinterpret_cast<F*>(dlsym(where, name));
}

void Fail(const char* what) {
  std::printf("failed: %s: %s\n", what, dlerror());
  std::fflush(stdout);
  _exit(3);
}

void* Load(const char* path, int mode) {
  void* library = dlopen(path, mode);
  if (library == nullptr) Fail(path);
  return library;
}

void Attach(const char* variable) {
  const char* path = std::getenv(variable);
  if (path == nullptr) return;
  void* amem = Load(path, RTLD_LAZY | RTLD_LOCAL);
  std::printf("attach: %d\n", Look<int()>(amem, "amem_attach")());
}

// Makes a call, and prints by whom it was answered, as the library that counts its calls says.
template <class Call>
void Who(void* nccl, const char* what, const char* name, const Call& call) {
  const auto calls = Look<int(const char*, int)>(nccl, "stand_in_calls");
  const int before = calls(name, 0);
  const int result = call();
  if (calls(name, 0) == before)
    std::printf("%s: amem %d\n", what, result);
  else
    std::printf("%s: %s %d\n", what, calls(name, 1) > 0 ? "through" : "plain", result);
}

void ByName(void* nccl, void* where) {
  ncclComm* comm = nullptr;
  UniqueId id{};
  const auto init = Look<int(ncclComm**, int, UniqueId, int)>(where, "ncclCommInitRank");
  const auto destroy = Look<int(ncclComm*)>(where, "ncclCommDestroy");
  if (init == nullptr || destroy == nullptr) Fail("dlsym");
  Who(nccl, "init", "ncclCommInitRank", [&] { return init(&comm, 1, id, 0); });
  const auto suspend = Look<int(ncclComm*, int)>(where, "ncclCommSuspend");
  if (suspend == nullptr)
    std::printf("suspend: none\n");
  else
    Who(nccl, "suspend", "ncclCommSuspend", [&] { return suspend(comm, 1); });
  Who(nccl, "destroy", "ncclCommDestroy", [&] { return destroy(comm); });
}

// What is not AMem's to answer: a communicator that it did not see made, and what a later NCCL may know.
void Unknown(void* nccl, void* where) {
  ncclComm *known = nullptr, *unseen = Look<ncclComm*()>(nccl, "stand_in_unseen")();
  Look<int(ncclComm**, int, UniqueId, int)>(where, "ncclCommInitRank")(&known, 1, UniqueId{}, 0);
  const auto suspend = Look<int(ncclComm*, int)>(where, "ncclCommSuspend");
  const auto resume = Look<int(ncclComm*)>(where, "ncclCommResume");
  const auto figure = Look<int(ncclComm*, int, unsigned long*)>(where, "ncclCommMemStats");
  unsigned long value = 0;
  Who(nccl, "suspend", "ncclCommSuspend", [&] { return suspend(unseen, 1); });
  Who(nccl, "resume", "ncclCommResume", [&] { return resume(unseen); });
  Who(nccl, "figure", "ncclCommMemStats", [&] { return figure(unseen, 0, &value); });
  Who(nccl, "suspend", "ncclCommSuspend", [&] { return suspend(known, 2); });
  Who(nccl, "resume", "ncclCommResume", [&] { return resume(known); });
  Who(nccl, "resume", "ncclCommResume", [&] { return resume(known); });
  Who(nccl, "figure", "ncclCommMemStats", [&] { return figure(known, 4, &value); });
}

void ByImport(void* nccl, void* caller) {
  ncclComm *comm = nullptr, *other = nullptr;
  const auto init = Look<int(ncclComm**)>(caller, "caller_init");
  Who(nccl, "init", "ncclCommInitRank", [&] { return init(&comm); });
  init(&other);
  const auto suspend = Look<int(ncclComm*)>(caller, "caller_suspend");
  if (suspend == nullptr)
    std::printf("suspend: none\n");
  else
    Who(nccl, "suspend", "ncclCommSuspend", [&] { return suspend(comm); });
  Who(nccl, "destroy", "ncclCommDestroy", [&] { return Look<int(ncclComm*)>(caller, "caller_end")(comm); });
  using Pointer = int (*)(ncclComm*);
  const int through = Look<int(const char*, int)>(nccl, "stand_in_calls")("ncclCommDestroy", 1);
  (*static_cast<Pointer*>(dlsym(caller, "caller_destroy")))(other);
  std::printf("pointer: %s\n",
              Look<int(const char*, int)>(nccl, "stand_in_calls")("ncclCommDestroy", 1) > through ? "through" : "plain");
}

int LookForNothing() {
  for (const char* name : {"ncclCommInitRank", "ncclGetUniqueId", "ncclCommGrow", "ncclCommSuspend", "ncclCommMemStats"})
    for (void* where : {RTLD_DEFAULT, RTLD_NEXT, dlopen(nullptr, RTLD_LAZY)})
      if (dlsym(where, name) != nullptr) std::printf("found: %s\n", name);
  std::printf("looked: 0\n");
  return 0;
}

int CallWeak() {
  ncclComm* comm = nullptr;
  std::printf("weak: %d\n", &ncclCommInitAll == nullptr ? -1 : ncclCommInitAll(&comm, 1, nullptr));
  return 0;
}

int Run(int count, char** arguments) {
  const std::string how = arguments[1];
  if (how == "none") return LookForNothing();
  if (how == "weak") return CallWeak();
  if (how == "unknown") {
    void* nccl = Load(arguments[2], RTLD_LAZY | RTLD_LOCAL);
    Attach("ATTACH");
    Unknown(nccl, nccl);
    return 0;
  }
  if (how == "handle" || how == "default") {
    void* nccl = Load(arguments[2], RTLD_LAZY | (how == "handle" ? RTLD_LOCAL : RTLD_GLOBAL));
    Attach("ATTACH");
    ByName(nccl, how == "handle" ? nccl : RTLD_DEFAULT);
    return 0;
  }
  void* before = count > 3 ? Load(arguments[3], RTLD_LAZY | RTLD_LOCAL) : nullptr;
  Attach("ATTACH");
  void* caller = Load(arguments[2], RTLD_LAZY | RTLD_LOCAL);
  Attach("LATE_ATTACH");
  void* nccl = Load("libnccl.so.2", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  ByImport(nccl, caller);
  if (how == "two") ByName(before, before);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return 2;
  if (std::getenv("CHILD") == nullptr) return Run(count, arguments);
  const pid_t child = fork();
  if (child == 0) {
    const int result = Run(count, arguments);
    std::fflush(stdout);
    _exit(result);
  }
  int status = 1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 9;
}
