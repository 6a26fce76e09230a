"""How does one node of an elastic job start, and with what exit code does it end?

Takes torchrun's parsed arguments with torchrun's meaning, and this package's own.
"""

import argparse
import fcntl
import logging
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args

from tenplex_megatron.adapters.base import ArgumentAdapter
from tenplex_megatron.config import ElasticPolicy, load_policy
from tenplex_megatron.elastic.agent import ElasticAgent
from tenplex_megatron.elastic.entry import WorkerTask, run_task
from tenplex_megatron.elastic.forkserver import ForkServer
from tenplex_megatron.elastic.job import JobSettings
from tenplex_megatron.elastic.membership import Rules
from tenplex_megatron.elastic.requests import default_run_dir, owner_only_folder
from tenplex_megatron.errors import ConfigError, TransportError
from tenplex_megatron.planner.choose import allowed_layouts
from tenplex_megatron.store.shared import SnapshotStore, default_root, node_directory

__all__ = ["LaunchOptions", "run_node"]

logger = logging.getLogger(__name__)

_QUICK_STOP_S = 2
_STORE_ANSWERS_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What `tenplex run` adds to torchrun's options."""

    policy: Path
    node: str
    job: str
    run_dir: Path | None = None
    store_dir: Path | None = None
    keep_store: bool = False
    session: str | None = "tenplex_megatron.elastic.session"
    """Module that hooks the framework in the workers."""


def run_node(
    options: LaunchOptions,
    torchrun: argparse.Namespace,
    adapter: Callable[[str], ArgumentAdapter],
) -> int:
    """Run this node's part of the job; blocks until the job ends. The exit code.

    Raises:
        ConfigError: something a person wrote is wrong, or a port or an address is.
        StoreError: the snapshot directory belongs to another job.
    """
    policy = load_policy(options.policy)
    config = _launch_config(torchrun, policy, options)
    arguments = adapter(policy.framework)
    rules = Rules(_with_failures(policy, config), arguments.limits(torchrun.training_script_args))
    run_dir = owner_only_folder(options.run_dir or default_run_dir(options.job))
    with _claimed(run_dir, options.node), _signals_raise(config):
        server = ForkServer(
            _preload(arguments, policy, options.session), start_method=config.start_method
        )
        try:
            server.warm_up()
            settings = _settings(
                options, torchrun, rules=rules, run_dir=run_dir, arguments=arguments, config=config
            )
            return _run_agent(config, settings, server, keep_store=options.keep_store)
        except SignalException as stopped:
            logger.warning("stopped by %s; snapshots are kept", stopped.sigval.name)
            return 1


def _launch_config(
    torchrun: argparse.Namespace, policy: ElasticPolicy, options: LaunchOptions
) -> LaunchConfig:
    """Torch's configuration, with waiting times that suit a job that recovers in seconds."""
    for flag in ("no_python", "virtual_local_rank", "numa_binding", "run_path"):
        if vars(torchrun).get(flag):
            raise ConfigError(f"--{flag.replace('_', '-')} is not supported in an elastic job")
    if torchrun.start_method == "fork":
        raise ConfigError("--start-method: expected forkserver or spawn, got 'fork'")
    if torchrun.standalone:
        torchrun.rdzv_backend, torchrun.rdzv_endpoint = "c10d", "localhost:0"
    try:
        config, _, _ = config_from_args(torchrun)
    except (ValueError, AssertionError) as error:
        raise ConfigError(str(error)) from error
    wait_s = max(1, round(policy.timeouts.rendezvous_s))
    # Under six seconds of missed keep-alives a loaded machine splits the job in two.
    defaults = {
        "join_timeout": wait_s,
        "keep_alive_interval": 2,
        "keep_alive_max_attempt": 5,
        "timeout": wait_s,
    }
    given = {pair.partition("=")[0].strip() for pair in torchrun.rdzv_conf.split(",")}
    config.rdzv_configs.update(
        {name: value for name, value in defaults.items() if name not in given}
    )
    config.run_id = options.job
    stop_s = vars(torchrun).get("shutdown_timeout")
    config.shutdown_timeout = _QUICK_STOP_S if stop_s is None else stop_s
    return config


def _with_failures(policy: ElasticPolicy, config: LaunchConfig) -> ElasticPolicy:
    """`--max-restarts`, when given, counts as it does for torchrun."""
    return replace(policy, max_failures=config.max_restarts) if config.max_restarts else policy


def _preload(
    arguments: ArgumentAdapter, policy: ElasticPolicy, session: str | None
) -> tuple[str, ...]:
    stand_in = ("tenplex_megatron.cpu",) if policy.device == "cpu" else ()
    hooks = (session,) if session is not None else ()
    return (*stand_in, *arguments.preload, *hooks)


def _settings(
    options: LaunchOptions,
    torchrun: argparse.Namespace,
    *,
    rules: Rules,
    run_dir: Path,
    arguments: ArgumentAdapter,
    config: LaunchConfig,
) -> JobSettings:
    argv = tuple(torchrun.training_script_args)
    identity = arguments.identity(argv)
    directory = rules.policy.snapshot.directory
    root = options.store_dir or (Path(directory) if directory else default_root())
    path = node_directory(root, options.job, options.node)
    devices = config.nproc_per_node * config.max_nodes
    allowed = allowed_layouts(rules.limits, rules.policy.layouts, devices)
    return JobSettings(
        job=options.job,
        identity=identity,
        node=options.node,
        min_nodes=config.min_nodes,
        rules=rules,
        policy_path=options.policy.resolve(),
        run_dir=run_dir.resolve(),
        store=SnapshotStore(path, options.job, identity).create(),
        store_path=path,
        task=WorkerTask(
            script=torchrun.training_script,
            argv=argv,
            is_module=torchrun.module,
            device=rules.policy.device,
            session=options.session,
            preload=_preload(arguments, rules.policy, options.session),
        ),
        layout_flags=lambda layout: [
            *arguments.device_arguments(rules.policy.device),
            *arguments.layout_arguments(argv, layout, allowed),
        ],
    )


def _run_agent(
    config: LaunchConfig, settings: JobSettings, server: ForkServer, *, keep_store: bool
) -> int:
    agent = ElasticAgent(
        _worker_spec(config),
        config.logs_specs or DefaultLogsSpecs(),
        settings=settings,
        server=server,
        line_prefix=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout or _QUICK_STOP_S,
    )
    try:
        agent.run()
    except (RendezvousError, DistError, TransportError) as error:
        where = config.rdzv_endpoint or "the rendezvous"
        cause = error.__cause__ or error
        reason = str(cause).strip().splitlines()[0]
        if agent.has_started:
            raise TransportError(f"the job's store at {where} is gone: {reason}") from error
        raise ConfigError(
            f"no rendezvous at {where} ({config.rdzv_backend}): {reason}; check that every node "
            "runs, that --rdzv-endpoint or --master-addr and --master-port name one free port, "
            "and --nnodes"
        ) from error
    ending = agent.ending
    if ending.code == 2:
        raise ConfigError(ending.reason)
    if ending.code:
        logger.error("the job ended: %s", ending.reason)
    elif not keep_store:
        settings.store.remove()
    return ending.code


def _worker_spec(config: LaunchConfig) -> WorkerSpec:
    # Agents bring a store per generation; the rendezvous must not also keep one for workers.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    try:
        handler = _rendezvous_handler(parameters)
        address = port = None
        if config.rdzv_backend == "static":
            address, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except RendezvousError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ConfigError(
            f"no rendezvous at {config.rdzv_endpoint or 'an empty endpoint'} "
            f"({config.rdzv_backend}): {reason}"
        ) from error
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=run_task,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=address,
        master_port=port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
    )
    for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        setattr(spec, name, vars(config).get(name))
    return spec


def _rendezvous_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """The handler; where something else than a store listens, torch alone would wait forever."""
    made: Future[RendezvousHandler] = Future()

    def make() -> None:
        try:
            made.set_result(rendezvous_registry.get_rendezvous_handler(parameters))
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            made.set_exception(error)

    Thread(target=make, name="tenplex-rendezvous", daemon=True).start()
    read_s = parameters.get_as_int("read_timeout", 60) or 60
    try:
        return made.result(read_s + _STORE_ANSWERS_S)
    except FutureTimeoutError as error:
        if made.done():
            raise
        raise ConfigError(
            f"no rendezvous at {parameters.endpoint} ({parameters.backend}): something else "
            "listens there and does not answer as a store; name a free port"
        ) from error


@contextmanager
def _claimed(run_dir: Path, node: str) -> Iterator[None]:
    """Make sure that one agent only works under this name in this folder."""
    owner_only_folder(run_dir / "requests")
    owner_only_folder(run_dir / "nodes")
    folder = owner_only_folder(run_dir / "nodes" / node)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"node {node} of this job runs already in {run_dir}; "
            "another node needs another --node-name, another job another --job"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _signals_raise(config: LaunchConfig) -> Iterator[None]:
    """Torch handles signals once workers run; before that they must end this process as well."""
    names = config.signals_to_handle
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = names

    def stop(number: int, _: object) -> None:
        raise SignalException(f"received signal {number}", signal.Signals(number))

    former = {}
    for name in names.split(","):
        number = signal.Signals[name.strip()]
        former[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
