"""`vla-rl serve TARGET [CONFIG]`: a policy on a network socket, for openpi's clients and vla-eval (docs/serving.md).

Concurrent clients are answered in common batches by the inference server that training and evaluation use.
"""

import asyncio
import contextlib
import ipaddress
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs import env_spec
from vla_rl.cluster.held_folder import HeldFolder, sweep_leftovers
from vla_rl.commands.evaluate import config_of_arguments
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import RunError, UserError
from vla_rl.core.ipc.shared_memory import shared_root
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec
from vla_rl.policies.build import build_policy, check_policy, torch_dtype

TOKEN_VARIABLE = "VLA_RL_TOKEN"


def serve_command(args: Any) -> int:
    """Serve until Ctrl-C. What can be found wrong without the policy is found before it is loaded."""
    from vla_rl.inference.serving.server import Door

    door = Door(args.host, args.port, token_of(args.token_file))
    _require_safe(door.host, door.token)
    _require_free(door.host, door.port)
    config = config_of_arguments(args)
    spec = env_spec(config.env)
    check_policy(config.policy, spec)
    print(f"{config.policy.origin}: loading", flush=True)
    sweep_leftovers()
    held = HeldFolder(shared_root())
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, held.path, ignore_errors=True)
        stack.callback(held.release)
        policy = _batched(config, spec, held.path, args.connections, greedy=not args.sampled)
        asyncio.run(_serve(policy, door, spec))
    return 0


def token_of(file: Path | None) -> str | None:
    """Of the file, or of the environment; None if neither is given. Raises UserError for one that cannot be used."""
    try:
        token = os.environ.get(TOKEN_VARIABLE) if file is None else file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {file}: cannot be read ({error}); name a file with one line") from None
    if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
        place = TOKEN_VARIABLE if file is None else f"--token-file {file}"
        raise UserError(
            f"{place}: a token is one word of ASCII; make one: python3 -c 'import secrets; "
            "print(secrets.token_urlsafe())'"
        )
    return token


def _require_safe(host: str, token: str | None) -> None:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may be that of any interface
        loopback = False
    if not loopback and token is None:
        raise UserError(
            f"--host {host}: everybody in that network could use the policy; give a token (--token-file FILE, or "
            f"{TOKEN_VARIABLE}), or serve this machine alone with --host 127.0.0.1"
        )


def _require_free(host: str, port: int) -> None:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host {host} --port {port}: {error}; choose another one, or end what listens there"
        ) from None


def _batched(config: RunConfig, spec: EnvSpec, folder: Path, connections: int, *, greedy: bool) -> Any:
    from vla_rl.core.devices.settings import set_up_torch
    from vla_rl.core.finite import require_finite
    from vla_rl.inference.inference_server import BatchRule
    from vla_rl.inference.policy_runner import PolicyRunner
    from vla_rl.inference.serving.batched_policy import BatchedPolicy

    machine = Machine.detect()
    device = "cuda" if machine.gpus else "cpu"
    threads = config.placement.inference_threads or (1 if machine.gpus else machine.cpus)
    set_up_torch(device, threads, config.learner.matmul)
    prompts, dtype = config.algo.prompts(spec.instructions), torch_dtype(config.learner.precision)
    policy = build_policy(config.policy, spec, config.seed, prompts, device=device, dtype=dtype)
    require_finite(policy.parameters(), config.policy.origin)
    rule = BatchRule(min(connections, config.placement.max_batch), config.placement.max_wait_ms * 1e-3)
    runner = PolicyRunner(policy, config, None, device)
    return BatchedPolicy(
        runner, spec, config.policy.spec(spec), rule, connections, folder, greedy=greedy, seed=config.seed
    )


async def _serve(policy: Any, door: Any, spec: EnvSpec) -> None:
    from vla_rl.inference.serving.server import serve_policy

    stopped = asyncio.Event()

    def listening(port: int) -> None:
        host = f"[{door.host}]" if ":" in door.host else door.host
        who = "with the token" if door.token else "without a token"
        print(f"{spec.name}, {len(spec.instructions)} instructions; images are resized to {spec.image_size} pixels")
        print(f"listening {who}: ws://{host}:{port} (openpi), ws://{host}:{port}/vla-eval; Ctrl-C ends", flush=True)

    with _until_signal(stopped):
        try:
            await serve_policy(policy, door, stopped, listening)
        except OSError as error:
            raise UserError(f"--host {door.host} --port {door.port}: {error}") from None
        except Exception as error:
            raise RunError(f"the policy failed, so that nobody is served: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _until_signal(stopped: asyncio.Event) -> Iterator[None]:
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
