// What /proc says of a process or a thread of this host, for people who ask why it does not answer.
//
// Nothing here waits for the process that is looked at: files that take its memory map's lock (maps, cmdline) are not read,
// because a process that hangs in a driver may hold that lock. No signal is sent, and nothing is traced.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "statemachine/types.h"

namespace amem {

struct ProcessStat {
  std::string name;               // as ps shows it; may hold any character
  char state = '?';               // 'R', 'S', 'D', 'T', 'Z' and others of proc(5)
  pid_t parent = 0;               // 0: outside this pid namespace
  bool exiting = false;           // it is on its way out, and may still look alive otherwise
  std::uint64_t start_ticks = 0;  // since boot, field 22: with the pid it names one process, also when the pid is reused
  int exit_status = 0;            // as of wait; 0 also where this process may not see it
  int threads = 0;                // that have not been reaped, the first one included

  // What is left of it waits for its parent only.
  [[nodiscard]] bool ended() const { return state == 'Z' || state == 'X'; }
};

// Of one thread. `directory`: "/proc/17/task/18", "/proc/self/task/18". kNotFound: there is no such thread any more; any other
// failure (no descriptor, no memory) says nothing about it.
Result<ProcessStat> ReadProcessStat(const std::filesystem::path& directory);
// Of a process: of its first thread, or, while that one has ended and another runs on (pthread_exit in main), with the state of
// the other.
Result<ProcessStat> ReadProcessStat(pid_t pid);

// Its start_ticks; 0: there is no such process, it has ended, or it cannot be read. LifeOf tells these apart.
std::uint64_t StartTicks(pid_t pid);

pid_t ParentOf(pid_t pid);  // 0: not known

// The pid namespace of this process, by inode; 0: unknown.
std::uint64_t PidNamespace();
// The same of its mount namespace: from Linux 6.11 on a number that is never used again in this boot, before that the inode.
std::uint64_t MountNamespace();

// ---- whether a process lives

// Which process. By its start it is told from another one that has got its number since.
struct ProcessIdentity {
  pid_t pid = 0;                    // 0: it cannot be seen from here
  std::uint64_t start_ticks = 0;    // 0: it was never read
  std::uint64_t pid_namespace = 0;  // in which the pid is its number; 0: this process's own
};
ProcessIdentity OwnProcess();

// What is known of a process. Whoever acts on an end (lets go of memory, goes on without a peer, removes a file) asks HasEnded;
// a process about which nothing can be learned has not.
struct ProcessLife {
  enum class Is : std::uint8_t { kAlive, kEnded, kUnknown };
  Is is = Is::kUnknown;
  // It is unknown: "open /proc/17/task/17/stat: Too many open files (errno 24)". Of a session that has ended, by what that was
  // seen: "lock", "pidfd".
  std::string why;

  [[nodiscard]] bool IsAlive() const { return is == Is::kAlive; }
  [[nodiscard]] bool HasEnded() const { return is == Is::kEnded; }
  [[nodiscard]] bool IsUnknown() const { return is == Is::kUnknown; }
};

// The one place that decides whether a process lives. It has ended if the kernel knows no process of that number (ESRCH,
// ENOENT), if the number is another process's, or if what is left of it waits for its parent or is on its way out; nothing else
// is an end. `pidfd`: of that process, if the caller has one; -1: none. Needs a descriptor for a moment to see that a process
// lives. Any thread; waits for nobody.
ProcessLife LifeOf(const ProcessIdentity& process, int pidfd = -1);

struct Sight {
  // "running", "sleeping", "stopped", "uninterruptible", "zombie", "gone", or "unknown": it cannot be seen from here
  std::string state = "unknown";
  // "in the CUDA driver (ioctl on /dev/nvidia0)", "in Python, in futex"; of a stopped one "by gdb (pid 12), which traces it";
  // empty: unknown
  std::string where;
  std::int32_t exit_code = -1;  // of a process that has ended: 0 to 255; 128 + N: ended by signal N; -1: unknown
};

// The process to which `pidfd` refers and whose number in this pid namespace is `pid`. A process that has got the number since
// is never described: "gone". Without a pidfd (-1) nothing is said.
Sight SeeProcess(pid_t pid, int pidfd);
// Likewise one of its threads. To who may see it, `where` has the functions of the kernel's that wait: "in futex_wait_queue
// (futex_wait, do_futex)".
Sight SeeThread(pid_t pid, pid_t thread, int pidfd);

// The same word for a process by its number alone, where the caller knows otherwise whose it is; empty: it cannot be read.
std::string StateOfProcess(pid_t pid);

// A thread of the calling process.
struct ThreadSight {
  pid_t thread = 0;
  std::string name;  // as top shows it
  Sight sight;
};
// At most `most` of them: the calling thread, the main thread, then those that do not merely sleep, then the others.
std::vector<ThreadSight> SeeOwnThreads(std::size_t most);

// What a process runs, as its /proc/PID/cmdline has it, without folders, options and code: "python3 train.py".
std::string ProgramIn(std::string_view command_line);
std::string OwnProgram();

// The calling thread's stack, innermost first, at most `most` frames: "libc.so.6+0x1234". No symbols are looked up, because the
// loader's lock may be held by a thread that hangs.
std::vector<std::string> OwnStack(std::size_t most);

}  // namespace amem
