"""The checks of `amem doctor`: what a machine, its settings and its NCCL mean for AMem, in words, each problem with its remedy."""

import collections
import functools
import glob
import os
import re
import resource
import shutil
import subprocess

from . import _library, _private, _why

Finding = collections.namedtuple("Finding", "level subject text remedy", defaults=("",))
Finding.__doc__ = """One thing that was looked at. `level`: "ok"; "note", which is good to know; "warning": less memory is freed than could
be, or a thing may fail; "problem": AMem cannot work like this."""

TESTED = ((2, 18), (2, 32))   # versions of NCCL that were run, the oldest and the newest
DESCRIPTORS = 1024            # enough for a rank of a host with eight GPUs, several times over
JOURNAL_BYTES = 256 << 20     # a long job's journal and what is kept of the one before
PINNED_KIB = 4 << 20           # of host memory, that a pause of a job of some size needs
SHM_BYTES = 64 << 20          # what NCCL takes of /dev/shm for a few communicators
SOCKET_PATH = 108 - 40        # of a Unix socket's path, less the name that AMem adds
SCOPES = ("nccl", "shared", "all")   # of AMEM_SCOPE
LEVELS = ("trace", "debug", "info", "warn", "error", "off")   # of AMEM_LOG
NO_SUCH_VARIABLE = "AMem has no such variable"   # as the library says it


ok, note, warning, problem = (functools.partial(Finding, level) for level in ("ok", "note", "warning", "problem"))


def listed(*otherwise):
    """Has a generator of findings return a list: `otherwise` where it finds nothing."""
    return lambda look: functools.wraps(look)(lambda *arguments: list(look(*arguments)) or list(otherwise))


def mib(count):
    return "%d MiB" % (count >> 20)


class Machine:
    """This machine, this user and this environment; tests show the checks another one, which is broken in a certain way. Every method
    answers, also where it cannot know: with None, "" or []."""

    def variable(self, name):
        return os.environ.get(name, "")

    def read(self, path):
        """The text of a small file; "" where it cannot be read."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(65536)
        except OSError:
            return ""

    def exists(self, path):
        return os.path.exists(path)

    def find(self, pattern):
        return sorted(glob.glob(pattern))

    def run(self, command, environment):
        """(exit code, stdout, stderr); the code is None where it could not be run, or did not end in 20 seconds."""
        try:
            done = subprocess.run(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, "", str(error)
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def descriptors(self):
        """How many descriptors a process may hold open."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def free_bytes(self, directory):
        """Free bytes of the file system that has `directory`, or will have it; None where that cannot be known."""
        while directory and not os.path.exists(directory):
            directory = os.path.dirname(directory)
        try:
            return shutil.disk_usage(directory).free
        except OSError:
            return None

    def why_not_writable(self, directory, sockets=False):
        """"" where the library would use `directory`, which is made if it does not exist; else the reason. That of `sockets` must be of this user alone."""
        try:
            place = _private.open_directory(directory)
        except OSError as error:
            return ("%s " % error.filename if str(error.filename).rstrip("/") != directory.rstrip("/") else "") + (error.strerror or str(error))
        try:
            if sockets and (why := self._why_not_private(directory, os.fstat(place))):
                return why
            name = ".doctor-%d" % os.getpid()
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=place))
            os.unlink(name, dir_fd=place)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            os.close(place)
        return ""

    @staticmethod
    def _why_not_private(directory, found):
        if os.path.islink(directory):
            return "it is a symbolic link; name the directory itself"
        if found.st_uid != os.geteuid():
            return "it belongs to user %d" % found.st_uid
        return "it is open to other users; chmod 700 it" if found.st_mode & 0o077 else ""

    def why_no_memfd(self):
        """"" where the memory files exist by which ranks share tokens; else the reason."""
        try:
            os.close(os.memfd_create("amem-doctor"))
        except OSError as error:
            return error.strerror or str(error)
        return ""


# ---- AMem itself


def library(machine, path):
    """The library can be loaded, and understands the settings. A process of its own tries, so that a crash is only a finding."""
    if not os.path.isabs(path) or not machine.exists(path):
        return [problem("library", "libamem_nccl.so was not found", "set AMEM_LIBRARY to its path, or install the package amem-nccl")]
    try:
        preload = _library.preloadable(path)
    except OSError as error:
        return [problem("library", "%s cannot be preloaded, because its path has blanks or colons: %s" % (path, error), "install it in a path without")]
    level = machine.variable("AMEM_LOG")  # at info it names unknown variables; one that is not known is left for it to name
    code, _, said = machine.run(["/bin/true"], {"LD_PRELOAD": preload, "AMEM_LOG": "info" if level in ("", *LEVELS) else level})
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    missing = next((line for line in lines if "version `GLIBC" in line or "cannot be preloaded" in line), None)
    if missing and "GLIBC" in missing:
        return [problem("library", "%s needs a newer C library than this machine has (%s)" % (path, missing.split(": ")[-1]),
                        "use a newer image (glibc 2.34 or later), or build AMem on this one")]
    if missing:
        return [problem("library", "%s cannot be loaded: %s" % (path, missing), "install the package amem-nccl for this kind of CPU")]
    if code != 0:
        return [problem("library", "a process with %s preloaded ended with %s" % (path, code), "report this, with the output of `amem doctor --json`")]
    about = [line for line in lines if "AMEM_" in line]
    unknown = [warning("settings", line, "correct or unset the variable; AMem goes on without it") for line in about if NO_SUCH_VARIABLE in line]
    wrong = [problem("settings", line, "correct or unset the variable") for line in about if NO_SUCH_VARIABLE not in line]
    return [*unknown, *(wrong or [ok("library", path)])]


def replay(machine, path):
    if not path:
        chosen = machine.variable("AMEM_REPLAY")
        return [warning("amem-replay", ("AMEM_REPLAY is %s, which is no program" % chosen if chosen else "amem-replay was not found")
                        + ": journals are written, and nothing here can read them", "set AMEM_REPLAY to its path, or install the package amem-nccl")]
    code, out, said = machine.run([path, "--version"], {"LD_PRELOAD": "", "LD_LIBRARY_PATH": _why.environment().get("LD_LIBRARY_PATH", "")})
    if code != 0:
        return [warning("amem-replay", "%s does not run: %s" % (path, (said or "exit code %s" % code).strip().splitlines()[0]),
                        "install the package amem-nccl for this machine, or copy journals to one that has it")]
    return [ok("amem-replay", "%s %s" % (path, out.strip().split()[-1] if out.strip() else ""))]


@listed()
def activation(machine):
    """How AMem gets into the job, and what is in its way."""
    if machine.variable("AMEM_ENABLE") == "0":
        yield problem("activation", "AMEM_ENABLE=0: AMem is switched off", "unset AMEM_ENABLE")
        return
    preloads = [name for name in re.split(r"[ :]+", machine.variable("LD_PRELOAD")) if name]
    nccls = [name for name in preloads if os.path.basename(name).startswith("libnccl.so")]
    if nccls:
        yield problem("activation", "LD_PRELOAD has an NCCL (%s): its functions become those of every NCCL of the process" % nccls[0],
                      "take it out of LD_PRELOAD; name it in VLLM_NCCL_SO_PATH or the like where an engine asks for one")
    own = [name for name in preloads if os.path.basename(name) == "libamem_nccl.so"]
    for name in own:
        if not machine.exists(name):
            yield problem("activation", "LD_PRELOAD names %s, which is not there" % name, "start with `amem run -- COMMAND`")
    others = [name for name in preloads if name not in own and name not in nccls]
    for name in others:
        if "torch_memory_saver" in os.path.basename(name):
            yield note("activation", "torch_memory_saver is preloaded as well: it manages its own allocations, AMem NCCL's and its pools'")
        elif not machine.exists(name) and "/" in name:
            yield warning("activation", "LD_PRELOAD names %s, which is not there" % name, "correct LD_PRELOAD; the loader goes on without it")
    if not own and machine.variable("AMEM_ENABLE") == "1":
        yield note("activation", "LD_PRELOAD does not have AMem: processes that import torch attach by themselves, because AMEM_ENABLE=1",
                   "`amem run -- COMMAND` covers engines that load NCCL by themselves, too")
    elif not own:
        yield note("activation", "nothing is preloaded in this shell", "start jobs with `amem run -- COMMAND`")
    else:
        yield ok("activation", "preloaded by LD_PRELOAD")


def scope(machine):
    """Whether a freeze will know of memory that libraries beside NCCL share between processes (AMEM_SCOPE)."""
    name = machine.variable("AMEM_SCOPE") or SCOPES[0]
    preloaded = any(os.path.basename(one) == "libamem_nccl.so" for one in re.split(r"[ :]+", machine.variable("LD_PRELOAD")))
    if name not in SCOPES:
        return []  # the library says so
    if name == "all" and not preloaded:
        return [note("scope", "all, without the preload: memory that is allocated before AMem is attached stays on the GPU", "`amem run --scope all -- COMMAND`")]
    if name == "all":
        return [ok("scope", "all: what the program allocates is under the tag program, which amem.pause(\"program\"), amem pause --all and a freeze take")]
    if name == "shared":
        return [ok("scope", "shared: what any library shares by cudaIpc or descriptors is under a tag of its name, and what it shares otherwise makes a freeze refuse by name; all processes of a job need the same scope")]
    if not preloaded and machine.variable("AMEM_ENABLE") == "1":
        return [note("scope", "nccl, without the preload: what other libraries share between processes is not seen, and a freeze only warns",
                     "`amem run -- COMMAND`, or AMEM_SCOPE=shared")]
    return [ok("scope", "nccl: memory that other libraries share between processes is counted if they find the driver's functions by dlsym, and a freeze refuses it by name")]


# ---- GPU and NCCL


@listed()
def driver(machine):
    text = machine.read("/proc/driver/nvidia/version")
    version = re.search(r"Kernel Module\b.*?\s([0-9]+\.[0-9.]+)", text)  # the open one is "for x86_64" as well
    devices = machine.find("/dev/nvidia[0-9]*")
    if not devices and not version:
        yield note("GPU", "this machine has no NVIDIA GPU: AMem has nothing to free here; journals can be read",
                   "in a container: start it with the GPUs (--gpus all)")
    elif not devices:
        yield problem("GPU", "the driver %s is loaded, and no GPU is visible here" % version.group(1), "start the container with the GPUs (--gpus all)")
    else:
        yield ok("GPU", "%d visible, driver %s" % (len(devices), version.group(1) if version else "unknown"))
        if version and int(version.group(1).split(".")[0]) < 525:
            yield problem("GPU", "driver %s is older than those that AMem knows (525 and later)" % version.group(1), "update the driver")


@listed()
def nccl(machine, libraries):
    """`libraries`: (path, version as a tuple or None) of each libnccl that Python would load."""
    if not libraries:
        yield note("NCCL", "no libnccl was found from this Python; one may be linked into another library, which AMem cannot reach",
                   "run doctor with the Python that has PyTorch, or name the library: `amem doctor --nccl PATH`")
    for path, version in libraries:
        text = ".".join(map(str, version)) if version else "of unknown version"
        if not version:
            yield warning("NCCL", "%s: its version cannot be read" % path, "it is taken as it is; look at `nccl_libraries` of amem.stats()")
        elif version[:2] < TESTED[0]:
            yield problem("NCCL", "%s is %s; the oldest that was run is %d.%d" % ((path, text) + TESTED[0]), "update nvidia-nccl")
        elif version[:2] > TESTED[1]:
            yield warning("NCCL", "%s is %s; the newest that was run is %d.%d" % ((path, text) + TESTED[1]),
                          "it will probably work; compare results of a short job, and look for passed-through calls in amem.stats()")
        else:
            yield ok("NCCL", "%s, version %s" % (path, text))
    if len({version for _, version in libraries}) > 1:
        yield note("NCCL", "there are several versions; a process may load more than one, and AMem covers all of them")


@listed(ok("NCCL's settings", "nothing that keeps memory"))
def nccl_settings(machine, value):
    """`value(name)`: an NCCL setting, from the environment or from NCCL's own files; "" if unset."""
    if value("NCCL_CUMEM_ENABLE") == "0":
        yield note("NCCL_CUMEM_ENABLE", "0: NCCL allocates by cuMemAlloc, and AMem backs that; freed and as fast as the default",
                   "unset it where nothing else needs it: NCCL holds less with it unset (5 756 in place of 6 270 MiB in the reference workload)")
    if value("NCCL_NVLS_ENABLE") not in ("", "0") or (value("NCCL_NVLS_ENABLE") == "" and machine.find("/dev/nvidia-nvswitch*")):
        yield warning("NVLS", "multicast objects may be used here: memory that is bound to them stays in a pause",
                      "NCCL_NVLS_ENABLE=0 frees it; AMEM_NVLS=release never ran on our hardware, and `amem doctor --prove` tries it on yours")
    for name, what in (("NCCL_GRAPH_REGISTER", "buffers of CUDA graphs"), ("NCCL_LOCAL_REGISTER", "user buffers")):
        if value(name) == "1" and machine.find("/sys/class/infiniband/*"):
            yield warning(name, "1: %s are registered with network cards, and such memory stays in a pause" % what, "%s=0 frees it" % name)
    cards = machine.find("/sys/class/infiniband/*")
    uses_cards = cards and value("NCCL_IB_DISABLE") in ("", "0") and value("NCCL_NET").lower() != "socket"
    if uses_cards and machine.variable("AMEM_NETWORK") == "renew":
        yield note("network cards", "%d here: AMEM_NETWORK=renew is set, so NCCL's buffers that they hold are released in pauses on which all hosts agree; this has "
                   "never run on hardware" % len(cards), "pause with process_group=; amem.memory() says what each card holds")
    elif uses_cards:
        yield note("network cards", "%d here: in a job of several hosts they hold NCCL's buffers, which stay in a pause, some 50 to 400 MiB per GPU and communicator "
                   "(AMEM_NETWORK=renew releases most; `amem doctor --prove --hosts FILE` tests it); in a job of one host none stay" % len(cards), "amem.memory() says how much, by reason")
    plugin = value("NCCL_NET_PLUGIN")
    if plugin not in ("", "none"):
        yield note("network plugin", "NCCL_NET_PLUGIN=%s: what it registers stays; under tables of unknown versions (known: networks 5 to 12, "
                   "GIN 11 to 14, RMA 13 to 15) all NCCL memory stays" % plugin,
                   "amem.stats() says how much; NCCL_NET_PLUGIN=none where no other host takes part")
    if machine.exists("/dev/gdrdrv") and value("NCCL_GDRCOPY_ENABLE") == "1":
        yield note("GDRCopy", "memory that GDRCopy pins stays in a pause", "NCCL_GDRCOPY_ENABLE=0 frees it")


# ---- limits of the machine


def limits(machine):
    found = []
    descriptors = machine.descriptors()
    if 0 <= descriptors < DESCRIPTORS:
        found.append(problem("descriptors", "a process may hold %d open; NCCL and AMem need several hundred" % descriptors, "ulimit -n 65536"))
    why = machine.why_no_memfd()
    if why:
        found.append(problem("memfd", "memory files cannot be made (%s): ranks could not share memory" % why, "allow memfd_create in the container's seccomp profile"))
    shm = machine.free_bytes("/dev/shm")
    if shm is not None and shm < SHM_BYTES:
        found.append(warning("/dev/shm", "%s are free; NCCL may fail to start" % mib(shm), "start the container with --shm-size=1g or --ipc=host"))
    available = re.search(r"MemAvailable:\s*(\d+) kB", machine.read("/proc/meminfo"))
    if available and int(available.group(1)) < PINNED_KIB:
        found.append(warning("host memory", "%d MiB are available; a pause needs as much as the nonzero contents that it saves" % (int(available.group(1)) >> 10),
                             "give the job more memory"))
    if machine.read("/sys/fs/selinux/enforce").strip() == "1":
        found.append(note("SELinux", "where it forbids execmod, NCCL's own names (ncclCommSuspend) are not redirected; ncclPause works",
                          "setsebool -P selinuxuser_execmod on"))
    return found or [ok("limits", "%d descriptors, enough shared memory" % descriptors)]


@listed(ok("directories", "journals and sockets can be written"))
def places(machine):
    """The directories of journals and of sockets."""
    home = "/tmp/amem-%d" % os.getuid()
    for name, default, purpose in (("AMEM_JOURNAL_DIR", home + "/journal", "journals"), ("AMEM_SOCKET_DIR", home + "/sockets", "sockets for peers")):
        path = machine.variable(name) or default
        if not os.path.isabs(path):
            yield problem(name, "%s is not an absolute path" % path, "ranks may have different working directories: name it from /")
            continue
        why = machine.why_not_writable(path, name == "AMEM_SOCKET_DIR")
        if why:
            yield problem(purpose, "%s cannot be used: %s" % (path, why), "set %s to a directory of this user's" % name)
            continue
        if name == "AMEM_SOCKET_DIR" and len(path) > SOCKET_PATH:
            yield problem(purpose, "%s is too long for the path of a Unix socket" % path, "set AMEM_SOCKET_DIR to a shorter one")
        free = machine.free_bytes(path)
        if name == "AMEM_JOURNAL_DIR" and free is not None and free < JOURNAL_BYTES:
            yield warning(purpose, "%s are free in %s; a pause without a journal is refused" % (mib(free), path),
                          "free some, or set AMEM_JOURNAL_DIR to another file system")


@listed()
def container(machine):
    if not (machine.exists("/.dockerenv") or machine.exists("/run/.containerenv") or "kubepods" in machine.read("/proc/1/cgroup")):
        return
    if not machine.variable("AMEM_JOURNAL_DIR"):
        yield note("container", "journals under /tmp are lost with it", "set AMEM_JOURNAL_DIR to a volume")
    if not machine.variable("AMEM_SOCKET_DIR"):
        yield note("container", "ranks of one host in several containers find each other only if those share /tmp or the network",
                   "else set AMEM_SOCKET_DIR to a volume that they share")


def nccl_setting_reader(machine):
    values = nccl_settings_of_files(machine)
    return lambda name: machine.variable(name) or values.get(name, "")


def nccl_settings_of_files(machine):
    """NCCL reads its settings from the environment, then from NCCL_CONF_FILE or ~/.nccl.conf, then from /etc/nccl.conf."""
    values = {}
    files = [machine.variable("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf"]
    for path in files:
        for line in machine.read(path).splitlines():
            name, mark, value = line.partition("=")
            if mark and not name.strip().startswith("#"):
                values.setdefault(name.strip(), value.strip())
    return values


def examine(machine, library_path, replay_path, libraries):
    """All findings, in the order in which a person would look."""
    return (library(machine, library_path) + replay(machine, replay_path) + activation(machine) + scope(machine) + driver(machine)
            + nccl(machine, libraries) + nccl_settings(machine, nccl_setting_reader(machine)) + limits(machine) + places(machine)
            + container(machine))


def conclusion(findings):
    """The last line: whether AMem can work here, and what follows where there is no GPU to work on."""
    problems = sum(finding.level == "problem" for finding in findings)
    if problems:
        return "AMem cannot work here: %d problem%s." % (problems, "s" if problems > 1 else "")
    if any(finding.level == "note" and finding.subject == "GPU" for finding in findings):
        return ("There is no GPU here, so AMem frees nothing: jobs run as without it. `amem why` reads journals of other machines, and `amem demo` "
                "shows a pause on the simulator. No other problem was found.")
    return "No problem was found: AMem can work here."
