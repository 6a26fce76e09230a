"""How does one node of an elastic job start, and with what exit code does it end?

Takes torchrun's parsed arguments with torchrun's meaning, and this package's own.
"""

import argparse
import fcntl
import logging
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_min_max_nnodes

from tenplex_megatron.adapters.arguments import ArgumentAdapter
from tenplex_megatron.config import ElasticPolicy, load_policy
from tenplex_megatron.elastic.agent import ElasticAgent
from tenplex_megatron.elastic.entry import WorkerTask, run_task
from tenplex_megatron.elastic.forkserver import ForkServer
from tenplex_megatron.elastic.job import JobSettings
from tenplex_megatron.elastic.membership import Rules
from tenplex_megatron.elastic.planning import rules_of
from tenplex_megatron.elastic.requests import LOCK, default_run_dir, owner_only_folder
from tenplex_megatron.errors import ConfigError, StoreError, TransportError
from tenplex_megatron.planner.allowed import allowed_layouts
from tenplex_megatron.store.shared import (
    SnapshotStore,
    default_root,
    node_directory,
    remove_empty_parents,
)

__all__ = ["LaunchOptions", "run_node"]

logger = logging.getLogger(__name__)

_QUICK_STOP_S = 2
_STORE_ANSWERS_S = 5
_LAST_CALL_S = 30
# torchrun's own defaults; the parser can't tell them from what was given.
_MASTER_ADDRESS = "127.0.0.1"
_MASTER_PORT = 29500


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
    """Module that hooks the framework in the workers; None for a script that does without."""


def run_node(
    options: LaunchOptions,
    torchrun: argparse.Namespace,
    adapter: Callable[[str], ArgumentAdapter],
) -> int:
    """Run this node's part of the job; blocks until the job ends. The exit code.

    Raises:
        ConfigError: something a person wrote is wrong, or a port or an address is.
        StoreError: the snapshot directory belongs to another job.
        TransportError: other nodes did not come, or went away.
    """
    policy = load_policy(options.policy)
    _check_script(torchrun)
    config = _launch_config(torchrun, policy, options)
    if policy.device == "cuda":
        _check_devices(options.policy, config.nproc_per_node)
    arguments = adapter(policy.framework)
    # Before the fork server, whose modules may look for a device when they are imported.
    os.environ.update(arguments.environment(policy.device))
    rules = rules_of(
        _with_failures(policy, config),
        options.policy,
        arguments,
        torchrun.training_script_args,
        devices_per_node=config.nproc_per_node,
    )
    run_dir = owner_only_folder(options.run_dir or default_run_dir(options.job))
    with _claimed(run_dir, options.node), _signals_raise(config):
        server = ForkServer(
            _preload(arguments, policy, torchrun, options.session),
            start_method=config.start_method,
        )
        try:
            server.warm_up()
            settings = _settings(
                options, torchrun, rules=rules, run_dir=run_dir, arguments=arguments, config=config
            )
            with _store_in_place(settings.store):
                return _run_agent(config, settings, server, keep_store=options.keep_store)
        except SignalException as stopped:
            logger.warning("stopped by %s; snapshots are kept", stopped.sigval.name)
            return 1


def _check_script(torchrun: argparse.Namespace) -> None:
    """Refuse a script that is not there, before anything slow starts."""
    script = torchrun.training_script
    if not (torchrun.module or Path(script).is_file()):
        raise ConfigError(
            f"training script {script} does not exist (seen from {Path.cwd()}); "
            "give the path of a file, or --module and the name of a module"
        )


def _check_devices(policy_path: Path, wanted: int) -> None:
    """Refuse more workers than GPUs; workers would only find out generation after generation.

    Whether this initialises CUDA does not matter: workers are forked from another process, which
    starts afresh.
    """
    with warnings.catch_warnings():
        # The sentence below says it.
        warnings.simplefilter("ignore")
        found = torch.cuda.device_count()
    if found >= wanted:
        return
    if found == 0:
        raise ConfigError(
            f"{policy_path}: device: expected cuda devices, found 0; set device: cpu to try the "
            "job on this machine without GPUs"
        )
    raise ConfigError(
        f"{policy_path}: device: expected {wanted} cuda devices (--nproc-per-node), found {found}; "
        f"set --nproc-per-node to at most {found}"
    )


def _launch_config(
    torchrun: argparse.Namespace, policy: ElasticPolicy, options: LaunchOptions
) -> LaunchConfig:
    """Torch's configuration, with waiting times that suit a job that recovers in seconds."""
    for flag in ("no_python", "virtual_local_rank", "numa_binding", "run_path"):
        if vars(torchrun).get(flag):
            raise ConfigError(f"--{flag.replace('_', '-')} is not supported in an elastic job")
    if torchrun.start_method == "fork":
        raise ConfigError("--start-method: expected forkserver or spawn, got 'fork'")
    try:
        _set_endpoint(torchrun)
        config, _, _ = config_from_args(torchrun)
    except (ValueError, AssertionError) as error:
        raise ConfigError(str(error)) from error
    if config.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node: expected a count from 1, got {config.nproc_per_node}")
    wait_s = _whole_seconds(policy)
    # Under six seconds of missed keep-alives a loaded machine splits the job in two.
    defaults = {
        "join_timeout": wait_s,
        "keep_alive_interval": 2,
        "keep_alive_max_attempt": 5,
        "timeout": wait_s,
        # How long enough nodes wait for even more: that has to fit into the time to join.
        "last_call_timeout": min(_LAST_CALL_S, max(1, wait_s // 2)),
    }
    given = {pair.partition("=")[0].strip() for pair in torchrun.rdzv_conf.split(",")}
    config.rdzv_configs.update(
        {name: value for name, value in defaults.items() if name not in given}
    )
    config.run_id = options.job
    stop_s = vars(torchrun).get("shutdown_timeout")
    config.shutdown_timeout = _QUICK_STOP_S if stop_s is None else stop_s
    return config


def _set_endpoint(torchrun: argparse.Namespace) -> None:
    """Where nodes meet when it was not said, as torchrun has it; several must be told."""
    if torchrun.standalone:
        torchrun.rdzv_backend, torchrun.rdzv_endpoint = "c10d", "localhost:0"
    elif torchrun.rdzv_backend == "static" and not torchrun.rdzv_endpoint:
        if torchrun.master_port is None and torchrun.master_addr == _MASTER_ADDRESS:
            _, most = parse_min_max_nnodes(torchrun.nnodes)
            if most > 1:
                raise ConfigError(
                    f"--nnodes {torchrun.nnodes}: expected a place where the nodes meet, got none; "
                    "add --rdzv-backend c10d --rdzv-endpoint HOST:PORT with a host and a free port "
                    "that all nodes reach, or --standalone for this node alone"
                )
            torchrun.rdzv_backend, torchrun.rdzv_endpoint = "c10d", "localhost:0"
        elif torchrun.master_port is None:
            torchrun.master_port = _MASTER_PORT


def _with_failures(policy: ElasticPolicy, config: LaunchConfig) -> ElasticPolicy:
    """`--max-restarts`, when given, counts as it does for torchrun."""
    return replace(policy, max_failures=config.max_restarts) if config.max_restarts else policy


def _preload(
    arguments: ArgumentAdapter,
    policy: ElasticPolicy,
    torchrun: argparse.Namespace,
    session: str | None,
) -> tuple[str, ...]:
    usual = arguments.modules(torchrun.training_script_args)
    modules = (_stand_in(arguments, policy), *usual, *policy.preload, session)
    return tuple(name for name in modules if name is not None)


def _stand_in(arguments: ArgumentAdapter, policy: ElasticPolicy) -> str | None:
    return arguments.cpu_stand_in if policy.device == "cpu" else None


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
    allowed = allowed_layouts(rules.job, devices)
    return JobSettings(
        job=options.job,
        identity=identity,
        node=options.node,
        min_nodes=config.min_nodes,
        rules=rules,
        policy_path=options.policy.resolve(),
        run_dir=run_dir.resolve(),
        store=SnapshotStore(path, options.job, identity),
        store_path=path,
        task=WorkerTask(
            script=torchrun.training_script,
            argv=argv,
            is_module=torchrun.module,
            stand_in=_stand_in(arguments, rules.policy),
            session=options.session,
            preload=_preload(arguments, rules.policy, torchrun, options.session),
        ),
        layout_flags=lambda layout: [
            *arguments.device_arguments(rules.policy.device),
            *arguments.layout_arguments(argv, layout, allowed),
        ],
    )


def _run_agent(
    config: LaunchConfig, settings: JobSettings, server: ForkServer, *, keep_store: bool
) -> int:
    spec = _worker_spec(config)
    attendance = _Attendance(spec.rdzv_handler)
    agent = ElasticAgent(
        spec,
        config.logs_specs or DefaultLogsSpecs(),
        settings=settings,
        server=server,
        line_prefix=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout or _QUICK_STOP_S,
    )
    try:
        agent.run()
    except (RendezvousError, DistError, TransportError) as error:
        if agent.has_started:
            where = config.rdzv_endpoint or "the rendezvous"
            raise TransportError(
                f"the job's store at {where} is gone: {_first_line(error)}"
            ) from error
        raise _no_meeting(config, settings.rules.policy, attendance, error) from error
    ending = agent.ending
    if ending.code == 2:
        raise ConfigError(ending.reason)
    if ending.code:
        logger.error("the job ended: %s", ending.reason)
    elif not keep_store:
        settings.store.remove()
    return ending.code


class _Attendance:
    """How many nodes were at the rendezvous at once; torch's timeout does not say."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self.most: int | None = None
        self.is_complete = False
        # torch has no public view of who came; a handler of another kind is not counted.
        self._holder: Any = getattr(handler, "_state_holder", None)
        if self._holder is not None:
            self._sync = self._holder.sync
            self._holder.sync = self._sync_and_count

    def _sync_and_count(self) -> bool | None:
        written: bool | None = self._sync()
        state = self._holder.state
        self.most = max(self.most or 0, len(state.participants))
        self.is_complete = state.complete
        return written


def _no_meeting(
    config: LaunchConfig, policy: ElasticPolicy, attendance: _Attendance, error: Exception
) -> ConfigError | TransportError:
    """Why the nodes did not meet, and what to do."""
    where = config.rdzv_endpoint or "the rendezvous"
    reason = _first_line(error)
    if isinstance(error, RendezvousClosedError):
        return TransportError(f"the job at {where} has ended; start it on all nodes again")
    most = attendance.most
    if isinstance(error, RendezvousTimeoutError) and attendance.is_complete:
        return TransportError(
            f"the job at {where} runs with {most} nodes already and takes no more while it runs"
        )
    # The static rendezvous counts in its message only.
    counted = re.search(r"(\d+)/\d+ clients joined", reason)
    if counted is not None:
        most = int(counted[1])
    if counted is not None or isinstance(error, RendezvousTimeoutError):
        return TransportError(_some_are_missing(config, policy, most))
    return ConfigError(
        f"no rendezvous at {where} ({config.rdzv_backend}): {reason}; check that every node "
        "runs, that --rdzv-endpoint or --master-addr and --master-port name one free port, "
        "and --nnodes"
    )


def _some_are_missing(config: LaunchConfig, policy: ElasticPolicy, came: int | None) -> str:
    is_static = config.rdzv_backend == "static"
    setting = "timeout" if is_static else "join_timeout"
    wait_s = int(config.rdzv_configs[setting])
    of_policy = wait_s == _whole_seconds(policy)
    is_short = came is not None and came < config.min_nodes
    wanted = config.min_nodes if is_short and not is_static else config.max_nodes
    return (
        f"{'not all' if came is None else came} of {wanted} nodes came to {config.rdzv_endpoint} "
        f"within {wait_s} s; start tenplex run with the same "
        f"{'--master-addr and --master-port' if is_static else '--rdzv-endpoint and --job'} on the "
        f"others, or raise {'timeouts.rendezvous_s' if of_policy else f'{setting} of --rdzv-conf'}"
    )


def _whole_seconds(policy: ElasticPolicy) -> int:
    return max(1, round(policy.timeouts.rendezvous_s))


def _first_line(error: BaseException) -> str:
    """What an error says, or its kind: several of torch's say nothing."""
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


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
        raise ConfigError(
            f"no rendezvous at {config.rdzv_endpoint or 'an empty endpoint'} "
            f"({config.rdzv_backend}): {_first_line(error)}"
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
def _store_in_place(store: SnapshotStore) -> Iterator[None]:
    """Make the store; in the end nothing is left of one that never held a version."""
    is_new = not store.directory.exists()
    store.create()
    try:
        yield
    finally:
        with suppress(StoreError):
            if is_new:
                store.remove_unused()
        remove_empty_parents(store.directory)


@contextmanager
def _claimed(run_dir: Path, node: str) -> Iterator[None]:
    """Make sure that one agent only works under this name in this folder."""
    owner_only_folder(run_dir / "requests")
    owner_only_folder(run_dir / "nodes")
    folder = owner_only_folder(run_dir / "nodes" / node)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
