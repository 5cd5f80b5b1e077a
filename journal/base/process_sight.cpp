#include "journal/base/process_sight.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <link.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <unwind.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "journal/base/file.h"

namespace amem {
namespace {

std::string_view BaseName(std::string_view path) { return path.substr(path.rfind('/') + 1); }  // npos + 1 is 0

// The kernel shows how a process ended to those who may look into it, and zero to others.
bool MaySeeExitCode(const std::string& directory) {
  const std::string status = ReadSmallFile(directory + "/status");
  const auto all_are = [&](const char* key, unsigned long id) {
    const std::size_t at = status.find(key);
    if (at == std::string::npos) return false;
    const char* text = status.c_str() + at + std::string_view(key).size();
    char* end = nullptr;
    for (int i = 0; i < 3; ++i, text = end) {  // real, effective, saved
      if (std::strtoul(text, &end, 10) != id || end == text) return false;
    }
    return true;
  };
  return ::geteuid() == 0 || (all_are("\nUid:", ::geteuid()) && all_are("\nGid:", ::getegid()));
}

std::string StateText(char state) {
  constexpr std::pair<std::string_view, const char*> kWords[] = {
      {"R", "running"}, {"SI", "sleeping"}, {"Tt", "stopped"}, {"D", "uninterruptible"}, {"ZX", "zombie"}};
  for (const auto& [states, word] : kWords)
    if (states.find(state) != std::string_view::npos) return word;
  return "unknown";
}

bool IsNvidias(const std::string& function) {
  return function.find("nvidia") != std::string::npos || function.starts_with("uvm_") || function.starts_with("nv_") ||
         function.starts_with("os_acquire");
}

// What a thread is doing, by the files that this user may read.
std::string Where(const std::string& process, const std::string& thread) {
  std::string waits_in = ReadSmallFile(thread + "/wchan");  // a function of the kernel's
  if (waits_in == "0") waits_in.clear();                    // it does not wait, or that is not shown
  const std::string text_of_call = ReadSmallFile(thread + "/syscall");
  const bool in_user_code = text_of_call.starts_with("running") || text_of_call.starts_with("-1");
  char* end = nullptr;
  const long call = text_of_call.empty() || in_user_code ? -1 : std::strtol(text_of_call.c_str(), &end, 10);
  if (call == SYS_ioctl) {
    const std::string file = LinkOf(process + "/fd/" + std::to_string(std::strtoul(end, nullptr, 16)));
    if (file.starts_with("/dev/nvidia")) return "in the CUDA driver (ioctl on " + file + ")";
  }
  if (IsNvidias(waits_in)) return "in the CUDA driver (" + waits_in + ")";
  const std::string program(BaseName(LinkOf(process + "/exe")));
  std::string text = program.starts_with("python") ? "in Python" : "";
  const std::string waits = !waits_in.empty()   ? "in " + waits_in
                            : call == SYS_futex ? "in futex"
                            : call >= 0         ? "in system call " + std::to_string(call)
                                                : "";
  if (!waits.empty()) text += (text.empty() ? "" : ", ") + waits;
  if (text.empty() && in_user_code && !program.empty()) text = "in code of " + program;
  return text;
}

// What called the function of the kernel's in which a thread waits.
std::string CallersOfWait(const std::string& thread) {
  constexpr int kMost = 3;
  const std::string stack = ReadSmallFile(thread + "/stack");  // "[<0>] futex_wait_queue+0x63/0x90", a line each
  std::string names;
  std::size_t line = stack.find('\n');
  for (int i = 0; i < kMost && line != std::string::npos; ++i, line = stack.find('\n', line + 1)) {
    const std::size_t begin = stack.find("] ", line), end = stack.find('+', line);
    if (begin == std::string::npos || end == std::string::npos || end < begin) break;
    const std::string name = stack.substr(begin + 2, end - begin - 2);
    if (name.starts_with("do_syscall") || name.starts_with("entry_")) break;  // where every call enters the kernel
    names += (names.empty() ? "" : ", ") + name;
  }
  return names.empty() ? "" : " (" + names + ")";
}

// What holds a thread that a debugger has stopped.
std::string Tracer(const std::string& thread) {
  constexpr std::string_view kKey = "TracerPid:";
  const std::string status = ReadSmallFile(thread + "/status");
  const std::size_t at = status.find(kKey);
  const long tracer = at == std::string::npos ? 0 : std::strtol(status.c_str() + at + kKey.size(), nullptr, 10);
  if (tracer <= 0) return "by a debugger";
  const auto stat = ReadProcessStat(static_cast<pid_t>(tracer));
  return fmt::format("by {} (pid {}), which traces it", stat ? stat->name : "a debugger", tracer);
}

// As wait says it, and as a shell does.
std::int32_t ExitCode(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

// The number behind a pidfd; -1: its process has been reaped. nullopt: that cannot be known.
std::optional<long> NumberBehind(int pidfd) {
  const std::string text = ReadSmallFile("/proc/self/fdinfo/" + std::to_string(pidfd));
  const std::size_t at = text.find("Pid:");
  if (at == std::string::npos) return std::nullopt;
  return std::strtol(text.c_str() + at + 4, nullptr, 10);
}

struct Frames {
  std::vector<std::uintptr_t> addresses;
  std::size_t most = 0;
};
_Unwind_Reason_Code TakeFrame(_Unwind_Context* context, void* argument) {
  auto& frames = *static_cast<Frames*>(argument);
  const auto address = static_cast<std::uintptr_t>(_Unwind_GetIP(context));
  if (address == 0 || frames.addresses.size() >= frames.most) return _URC_END_OF_STACK;
  frames.addresses.push_back(address);
  return _URC_NO_REASON;
}

// _dl_find_object of glibc 2.35 and later, declared here because the library is also built with older headers and runs with
// older ones. It takes no lock; looking it up does, so that is done while this is being loaded.
struct LoadedObject {
  unsigned long long flags;
  void* begin;
  void* end;
  link_map* map;
  std::array<void*, 16> rest;  // its layout differs between processors, and nothing of it is used
};
using FindLoadedObject = int(void* address, LoadedObject* found);
FindLoadedObject* const kFindLoadedObject = reinterpret_cast<FindLoadedObject*>(::dlsym(RTLD_DEFAULT, "_dl_find_object"));

const link_map* ObjectAt(std::uintptr_t address) {
  LoadedObject found{};
  if (kFindLoadedObject == nullptr || kFindLoadedObject(reinterpret_cast<void*>(address), &found) != 0) return nullptr;
  return found.map;
}

// Whether an object asks the loader for that symbol. Those that it does not define come first in its table of symbols, before
// those that are hashed.
bool AsksFor(const link_map& object, std::string_view wanted) {
  const ElfW(Sym)* symbols = nullptr;
  const char* texts = nullptr;
  const std::uint32_t* hash = nullptr;
  for (const ElfW(Dyn)* entry = object.l_ld; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(entry->d_un.d_ptr);
    if (entry->d_tag == DT_STRTAB) texts = reinterpret_cast<const char*>(entry->d_un.d_ptr);
    if (entry->d_tag == DT_GNU_HASH) hash = reinterpret_cast<const std::uint32_t*>(entry->d_un.d_ptr);
  }
  if (symbols == nullptr || texts == nullptr || hash == nullptr) return false;
  const std::uint32_t first_hashed = hash[1];
  for (std::uint32_t i = 1; i < first_hashed; ++i)
    if (symbols[i].st_shndx == SHN_UNDEF && wanted == texts + symbols[i].st_name) return true;
  return false;
}

#if defined(__GLIBC_PREREQ) && !defined(__clang__)
constexpr bool kOwnUnwinderIsLockFree = __GLIBC_PREREQ(2, 35) && __GNUC__ >= 12;
#else
constexpr bool kOwnUnwinderIsLockFree = false;
#endif

// The unwinder of libgcc before version 12 calls dl_iterate_phdr, which waits for the loader's lock. One that is linked into
// this library is the compiler's.
bool UnwindingTakesNoLock() {
  const link_map* unwinder = ObjectAt(reinterpret_cast<std::uintptr_t>(&_Unwind_Backtrace));
  if (unwinder == nullptr) return false;
  if (unwinder == ObjectAt(reinterpret_cast<std::uintptr_t>(&UnwindingTakesNoLock))) return kOwnUnwinderIsLockFree;
  return AsksFor(*unwinder, "_dl_find_object");
}

std::string NameOfFrame(std::uintptr_t address) {
  const link_map* object = ObjectAt(address);
  if (object == nullptr) return fmt::format("{:#x}", address);
  const std::string_view file = object->l_name;
  return std::string(file.empty() ? "exe" : BaseName(file)) + "+" + fmt::format("{:#x}", address - object->l_addr);
}

std::string WhereItIs(char state, const std::string& process, const std::string& thread) {
  return state == 'T' ? "" : state == 't' ? Tracer(thread) : Where(process, thread);
}

// Only after its files were read is it certain whose they were: the number was this process's until then.
Sight IfStill(pid_t pid, int pidfd, Sight sight) {
  const auto number = NumberBehind(pidfd);
  if (number == pid) return sight;
  sight = {};
  if (number == -1) sight.state = "gone";
  return sight;
}

}  // namespace

Sight SeeProcess(pid_t pid, int pidfd) {
  Sight sight;
  if (pid <= 0 || pidfd < 0) return sight;
  const std::string directory = "/proc/" + std::to_string(pid);
  const auto stat = ReadProcessStat(pid);
  if (stat) {
    const bool ended = stat->ended() || stat->exiting;
    sight.state = ended ? "zombie" : StateText(stat->state);
    if (ended && MaySeeExitCode(directory)) sight.exit_code = ExitCode(stat->exit_status);
    if (!ended) sight.where = WhereItIs(stat->state, directory, directory);
  }
  return IfStill(pid, pidfd, std::move(sight));
}

Sight SeeThread(pid_t pid, pid_t thread, int pidfd) {
  Sight sight;
  if (pid <= 0 || pidfd < 0) return sight;
  const std::string process = "/proc/" + std::to_string(pid), directory = process + "/task/" + std::to_string(thread);
  if (const auto stat = thread == pid ? ReadProcessStat(pid) : ReadProcessStat(std::filesystem::path(directory))) {
    sight.state = StateText(stat->state);
    sight.where = WhereItIs(stat->state, process, directory);
    if (!sight.where.empty() && (stat->state == 'S' || stat->state == 'D')) sight.where += CallersOfWait(directory);
  }
  return IfStill(pid, pidfd, std::move(sight));
}

std::string StateOfProcess(pid_t pid) {
  const auto stat = ReadProcessStat(pid);
  const std::string state = stat ? StateText(stat->state) : "";
  return state == "unknown" ? "" : state;
}

std::string ProgramIn(std::string_view command_line) {
  constexpr std::size_t kMost = 64;
  std::string program;
  while (!command_line.empty()) {
    const std::string_view word = command_line.substr(0, command_line.find('\0'));
    command_line.remove_prefix(std::min(word.size() + 1, command_line.size()));
    const bool first = program.empty(), code = word == "-c";
    if (!first && word.starts_with('-') && !code) continue;
    program.append(first ? "" : " ").append(BaseName(word));
    if (!first) break;
  }
  program.resize(std::min(program.size(), kMost));
  return program;
}

std::string OwnProgram() { return ProgramIn(ReadSmallFile("/proc/self/cmdline")); }

std::vector<ThreadSight> SeeOwnThreads(std::size_t most) {
  const std::string process = "/proc/self";
  const auto self = static_cast<pid_t>(::syscall(SYS_gettid));
  const pid_t main = ::getpid();
  std::vector<ThreadSight> threads;
  std::error_code failed;
  for (std::filesystem::directory_iterator it(process + "/task", failed), end; !failed && it != end; it.increment(failed)) {
    const auto thread = static_cast<pid_t>(std::atoi(it->path().filename().c_str()));
    const auto stat = ReadProcessStat(it->path());
    if (stat) threads.push_back({thread, stat->name, {StateText(stat->state), "", -1}});
  }
  const auto rank = [&](const ThreadSight& seen) {
    return seen.thread == self ? 0 : seen.thread == main ? 1 : seen.sight.state != "sleeping" ? 2 : 3;
  };
  std::ranges::stable_sort(threads, {}, rank);
  if (threads.size() > most) threads.resize(most);
  for (ThreadSight& seen : threads) {
    if (seen.thread != self) seen.sight.where = Where(process, process + "/task/" + std::to_string(seen.thread));
  }
  return threads;
}

std::vector<std::string> OwnStack(std::size_t most) {
  if (!UnwindingTakesNoLock()) return {};
  Frames frames{{}, most};
  frames.addresses.reserve(most);
  _Unwind_Backtrace(&TakeFrame, &frames);
  std::vector<std::string> names;
  for (const std::uintptr_t address : frames.addresses) names.push_back(NameOfFrame(address));
  return names;
}

// ---- /proc/PID/stat

namespace {

// As ReadSmallFile, with the reason of a failure.
Result<std::string> TextOf(const std::filesystem::path& path) {
  AMEM_ASSIGN(const auto file, File::OpenToRead(path));
  std::string text(4096, '\0');
  const auto n = file.ReadAt(0, std::as_writable_bytes(std::span(text)));
  if (!n) return n.status().Within(path.string());
  text.resize(*n);
  return text;
}

// A thread of a process that is not on its way out. kNotFound: there is none.
Result<ProcessStat> LivingThread(pid_t pid) {
  const std::string directory = fmt::format("/proc/{}/task", pid);
  std::error_code failed;
  for (std::filesystem::directory_iterator it(directory, failed), end; !failed && it != end; it.increment(failed)) {
    auto stat = ReadProcessStat(it->path());
    if (!stat && stat.status().code() != Code::kNotFound) return stat.status();
    if (stat && !stat->ended() && !stat->exiting) return stat;
  }
  return SystemFailure("read", directory, failed ? failed.value() : ESRCH);
}

}  // namespace

Result<ProcessStat> ReadProcessStat(const std::filesystem::path& directory) {
  // Numbers of fields in proc(5). The name is in parentheses and may hold parentheses itself, so they count from the last one.
  constexpr int kState = 3, kParent = 4, kFlags = 9, kThreads = 20, kStartTime = 22, kExitCode = 52;
  constexpr unsigned long kExiting = 0x4;  // PF_EXITING
  AMEM_ASSIGN(const std::string text, TextOf(directory / "stat"));
  const std::size_t open = text.find('('), close = text.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open)
    return Status{Code::kCorrupt, (directory / "stat").string() + " is not as the kernel writes it"};
  ProcessStat stat;
  stat.name = text.substr(open + 1, close - open - 1);
  int field = kState;
  for (std::size_t at = close + 2; at < text.size(); ++field) {
    const char* first = text.data() + at;
    if (field == kState) stat.state = *first;
    if (field == kParent) stat.parent = static_cast<pid_t>(std::strtol(first, nullptr, 10));
    if (field == kFlags) stat.exiting = (std::strtoul(first, nullptr, 10) & kExiting) != 0;
    if (field == kThreads) stat.threads = static_cast<int>(std::strtol(first, nullptr, 10));
    if (field == kStartTime) stat.start_ticks = std::strtoull(first, nullptr, 10);
    if (field == kExitCode) stat.exit_status = static_cast<int>(std::strtol(first, nullptr, 10));
    at = std::min(text.find(' ', at), text.size()) + 1;
  }
  return stat;
}

// By its first thread, which says the same: qemu-user shows a process a /proc/PID/stat of its own, with another start than
// others see.
Result<ProcessStat> ReadProcessStat(pid_t pid) {
  auto first = ReadProcessStat(fmt::format("/proc/{0}/task/{0}", pid));
  if (!first || !(first->ended() || first->exiting) || first->threads <= 1) return first;
  const auto other = LivingThread(pid);
  if (!other) return other.status().code() == Code::kNotFound ? first : other.status();
  first->state = other->state;
  first->exiting = false;
  return first;
}

std::uint64_t StartTicks(pid_t pid) {
  const auto stat = ReadProcessStat(pid);
  return stat && !stat->ended() ? stat->start_ticks : 0;
}

pid_t ParentOf(pid_t pid) {
  const auto stat = ReadProcessStat(pid);
  return stat ? stat->parent : 0;
}

std::uint64_t PidNamespace() {
  struct stat found {};
  return ::stat("/proc/self/ns/pid", &found) == 0 ? static_cast<std::uint64_t>(found.st_ino) : 0;
}

std::uint64_t MountNamespace() {
  constexpr unsigned long kGetId = _IOR(0xb7, 5, std::uint64_t);  // NS_GET_MNTNS_ID, which older headers lack
  const auto self = File::Open("/proc/self/ns/mnt", O_RDONLY);
  std::uint64_t id = 0;
  struct stat found {};
  if (!self) return 0;
  if (::ioctl(self->fd(), kGetId, &id) == 0) return id;
  return ::fstat(self->fd(), &found) == 0 ? static_cast<std::uint64_t>(found.st_ino) : 0;
}

// ---- whether a process lives

ProcessIdentity OwnProcess() { return {::getpid(), StartTicks(::getpid()), PidNamespace()}; }

namespace {

using Is = ProcessLife::Is;

// Whether no process has that number. Needs no descriptor and no memory, and no signal is sent.
bool IsNobodys(pid_t pid) { return ::kill(pid, 0) != 0 && errno == ESRCH; }

ProcessLife LifeByNumber(const ProcessIdentity& process, bool number_is_certain) {
  if (process.pid <= 0) return {Is::kUnknown, "it cannot be seen from here"};
  if (process.pid_namespace != 0 && process.pid_namespace != PidNamespace())
    return {Is::kUnknown, "it is of another pid namespace"};
  if (IsNobodys(process.pid)) return {Is::kEnded, {}};
  const auto stat = ReadProcessStat(process.pid);
  // A process may hide from this user (hidepid), or /proc may not be there.
  if (!stat) return IsNobodys(process.pid) ? ProcessLife{Is::kEnded, {}} : ProcessLife{Is::kUnknown, stat.status().message()};
  if (process.start_ticks == 0 && !number_is_certain)
    return {Is::kUnknown, fmt::format("pid {} may be another process's by now", process.pid)};
  if (process.start_ticks != 0 && stat->start_ticks != process.start_ticks) return {Is::kEnded, {}};
  return {stat->ended() || stat->exiting ? Is::kEnded : Is::kAlive, {}};
}

}  // namespace

ProcessLife LifeOf(const ProcessIdentity& process, int pidfd) {
  const auto by_number = LifeByNumber(process, pidfd >= 0);
  if (pidfd < 0 || by_number.HasEnded()) return by_number;
  pollfd polled{pidfd, POLLIN, 0};  // asked last: while it is not readable the number is still the process's
  const int n = ::poll(&polled, 1, 0);
  if (n > 0) return {Is::kEnded, {}};
  if (n == 0) return {Is::kAlive, {}};
  return process.start_ticks != 0 ? by_number : ProcessLife{Is::kUnknown, "poll: " + ErrnoText(errno)};
}

}  // namespace amem
