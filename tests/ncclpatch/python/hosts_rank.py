"""One rank of hosts_test.py, on the stand-in driver: STORE RANK SIZE HOST. Commands are JSON lists on standard input, answers on its output."""
import ctypes
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import store_for_tests  # noqa: E402

FILL = 0x5A
WITHOUT = os.environ.get("HOSTS_RANK_WITHOUT")  # "gpu": a rank that uses none; "amem": one where AMem is switched off
if sys.argv[1].startswith("group:"):
    from torch import distributed
    distributed.init_process_group("gloo", init_method="file://" + sys.argv[1][6:], rank=int(sys.argv[2]), world_size=int(sys.argv[3]))
    store = distributed.distributed_c10d._get_default_store()
else:
    store = store_for_tests.open_store(sys.argv[1])  # before the stand-in, because it may import PyTorch with an NCCL of its own
if not WITHOUT:
    cuda = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
if WITHOUT != "gpu":
    nccl = ctypes.CDLL(os.environ["STAND_IN_NCCL"])
import amem  # noqa: E402
from amem import _calls, _tags  # noqa: E402

rank, size, host = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


memory = ctypes.c_void_p()
if not WITHOUT:
    assert nccl.ncclMemAlloc(ctypes.byref(memory), ctypes.c_size_t(4 << 20)) == 0
    assert cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(FILL), ctypes.c_size_t(4 << 20)) == 0
    unique, communicator = UniqueId(), ctypes.c_void_p()
    if rank == 0:
        assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
        store.set("unique", unique.internal.decode())
    unique.internal = store.get("unique")
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    assert nccl.ncclCommInitRank(ctypes.byref(communicator), int(os.environ["RANKS_WITH_GPU"]), unique, rank) == 0
group = amem.StoreGroup(store, rank, size, host) if not sys.argv[1].startswith("group:") else True
real = {"pause": _tags.pause, "resume_in_time": _tags.resume_in_time, "await_idle": _tags.await_idle}


def plant(name, effect):
    """The next local call of _tags.`name`, which AMem does itself, has this effect first."""
    def planted(*tags, **more):
        if "process_group" not in more or more["process_group"] is None:
            setattr(_tags, name, real[name])
            effect()
        return real[name](*tags, **more)
    setattr(_tags, name, planted)


def pause_and_say_how(timeout):
    """[when this rank's own part began, whether that was told that all hosts are idle]."""
    own = []
    def recorded(*tags, **more):
        if more.get("process_group") is None:
            own.extend([time.monotonic(), more.get("hosts_idle", False)])
        return real["pause"](*tags, **more)
    _tags.pause = recorded
    try:
        amem.pause(process_group=group, timeout=timeout)
    finally:
        _tags.pause = real["pause"]
    return own


def fail():
    raise _calls.AmemError(1, "planted failure")


def state():
    row = _tags.row_of("nccl")
    if row is None:
        return ["nothing", True]
    intact = True
    if row["state"] == "resident":
        back = (ctypes.c_ubyte * 4096)()
        assert cuda.cuMemcpyDtoH_v2(back, memory, ctypes.c_size_t(4096)) == 0
        intact = set(back) == {FILL}
    return [row["state"], intact]


def with_paused(timeout, stays=0):
    with amem.paused(process_group=group, timeout=timeout):
        time.sleep(stays)
        return state()[0]


def join(where):
    """As a new process would: another store, and nothing planted or paused that a test left behind."""
    global store, group
    vars(_tags).update(real)
    if state()[0] == "paused":
        _tags.resume("nccl")
    store = store_for_tests.open_store(where)
    group = amem.StoreGroup(store, rank, size, host)


def do(command, *arguments):
    global group
    if command == "pause":
        amem.pause(*arguments[1:], process_group=group, timeout=arguments[0])
    elif command == "pause_and_say_how":
        return pause_and_say_how(*arguments)
    elif command == "is_busy":
        plant("await_idle", fail)
    elif command == "resume":
        amem.resume(*arguments[1:], process_group=group, timeout=arguments[0])
    elif command == "state":
        return state()
    elif command == "join":
        join(*arguments)
    elif command == "fail_next_pause":
        plant("pause", fail)
    elif command == "fail_next_resume":
        plant("resume_in_time", fail)
    elif command == "slow_next_pause":
        plant("pause", lambda: time.sleep(arguments[0]))
    elif command == "new_group":
        group = distributed.new_group(arguments[0])
    elif command == "with_paused":
        return with_paused(*arguments)
    elif command == "keys":
        return group.store.num_keys()
    elif command == "fail_in_the_driver":
        assert cuda.stand_in_cuda_fail_next(b"Create", ctypes.c_uint64(1), 2) == 0
    elif command == "no_replay":
        os.environ["AMEM_REPLAY"] = "/nowhere/amem-replay"
    elif command == "gather":
        return amem.gather(arguments[0], process_group=group, timeout=arguments[1])
    return "ok"


print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    try:
        answer = do(*json.loads(line))
    except amem.AmemError as error:
        answer = str(error)
    print(json.dumps(answer), flush=True)
