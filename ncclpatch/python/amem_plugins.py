"""What other projects call through entry points of this package. It is a module of its own because importing `amem` attaches to NCCL,
and a project calls its plugins in every process, also in those whose user never asked for AMem. Nothing here fails a project that did
not choose AMem."""

import functools
import logging
import os
import signal
import sys
import warnings

_log = logging.getLogger("amem")
attached_amem = False  # whether the package was imported from here


def attach():
    """Entry point of the group torch.backends: with AMEM_ENABLE=1 set, `import torch` attaches AMem, also in workers that a framework
    forks or spawns with an LD_PRELOAD of its own."""
    global attached_amem
    if os.environ.get("AMEM_ENABLE") != "1":
        return
    attached_amem = "amem" not in sys.modules
    try:
        import amem  # noqa: F401  (importing attaches)
    except Exception as error:  # pylint: disable=broad-except
        text = "AMem could not be attached, and the program runs without it: %s" % error
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # the program makes errors of warnings
            _log.warning("%s", text)


def _become(name):
    """The programs that lie in the package are commands on PATH as well, which start without importing it."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "amem", name)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores for itself, and the program would, too
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(program, [name, *sys.argv[1:]])
    except OSError as error:
        sys.exit("%s: %s: %s; install the package amem-nccl for this machine" % (name, program, error.strerror))


replay, patch = functools.partial(_become, "amem-replay"), functools.partial(_become, "amem-patch")


def vllm():
    """Entry point of the group vllm.general_plugins: registers the sleep-mode backend "amem". Nothing of AMem is loaded before a
    worker is made whose configuration names that backend."""
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
        from vllm.v1.worker.worker_base import WorkerBase

        if "amem" not in getattr(SleepModeBackendFactory, "_registry", {}):
            SleepModeBackendFactory.register_backend("amem", "amem.frameworks.vllm", "Backend")
        _look_at_new_workers(WorkerBase)
        _let_graphs_go()
    except Exception as error:  # pylint: disable=broad-except
        _log.info("this vLLM has no sleep-mode backends that AMem knows: %s", error)


def _let_graphs_go():
    """vLLM offloads CUDA graphs (--sleep-mode-offload-cudagraph) with a backend of the name "cumem" only; "amem" has the same method."""
    try:
        from vllm.config.vllm import VllmConfig

        own = VllmConfig.use_cumem_cudagraph_pool.fget
    except (ImportError, AttributeError):  # until 0.32
        return
    if hasattr(own, "amem_wraps"):
        return

    class AsIfCumem:
        def __init__(self, of):
            self._of = of

        def __getattr__(self, name):
            return "cumem" if name == "sleep_mode_backend" else getattr(self._of, name)

    class Config:
        def __init__(self, config):
            self._config = config

        def __getattr__(self, name):
            return AsIfCumem(self._config.model_config) if name == "model_config" else getattr(self._config, name)

    def uses(config):
        return own(Config(config) if getattr(config.model_config, "sleep_mode_backend", None) == "amem" else config)

    uses.amem_wraps = own
    VllmConfig.use_cumem_cudagraph_pool = property(uses, doc=VllmConfig.use_cumem_cudagraph_pool.__doc__)


def _look_at_new_workers(worker_class):
    original = worker_class.__init__
    if hasattr(original, "amem_wraps"):
        return

    @functools.wraps(original)
    def init(worker, *arguments, **named):
        original(worker, *arguments, **named)
        model = worker.vllm_config.model_config
        if getattr(model, "sleep_mode_backend", None) == "amem" and getattr(model, "enable_sleep_mode", False):
            from amem.frameworks import vllm as adapter

            adapter.install(nccl=not getattr(model, "enable_nccl_comm_suspend", False) and not _in_a_trainers_process(worker))
            adapter.guard(worker)

    init.amem_wraps = original
    worker_class.__init__ = init


def _in_a_trainers_process(worker):
    """Whether NCCL is used here by others than vLLM, who go on when it sleeps: a worker of vLLM's own makes its groups later."""
    launched = getattr(worker.vllm_config.parallel_config, "distributed_executor_backend", None) == "external_launcher"
    return launched or getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)()


def sglang():
    """Entry point of the group sglang.srt.plugins: with AMEM_ENABLE=1 set, the memory saver's calls and NCCL's memory are AMem's."""
    if os.environ.get("AMEM_ENABLE") != "1":
        return
    try:
        from amem.frameworks import sglang as adapter

        adapter.install()
    except Exception as error:  # pylint: disable=broad-except
        _log.warning("AMem could not be installed in SGLang, which runs without it: %s", error)
