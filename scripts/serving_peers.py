"""Clients and a server of other projects, for scripts/check_serving.sh: openpi's client, vla-eval, openpi's server."""

import argparse
from functools import partial
from importlib.metadata import version
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import numpy as np

from envs.libero.bootstrap import import_libero
from envs.libero.dropin import OffScreenRenderEnv, get_benchmark_dict
from envs.libero.protocol.conventions import NO_OP, pose

SUITE, TASK, STEPS, SETTLE, REPLAN = "libero_spatial", 0, 220, 10, 5
# The served clone was trained on placeholder assets; the clients look at few of the frames.
Env = partial(OffScreenRenderEnv, lazy_images=True, assets="placeholder")


def versions(*names: str) -> None:
    print(", ".join(f"{name} {version(name)}" for name in names), flush=True)


def openpi(address: str, episodes: int) -> None:
    """As openpi's examples evaluate LIBERO: images of 224 pixels, five actions of each answer."""
    from openpi_client.image_tools import resize_with_pad
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    versions("openpi-client", "websockets", "numpy")
    suite = get_benchmark_dict()[SUITE]()
    env = Env(suite.get_task_bddl_file_path(TASK), camera_heights=256, camera_widths=256)
    client, states = WebsocketClientPolicy(address), suite.get_task_init_states(TASK)
    ended = []
    for state in states[:episodes]:
        env.seed(7)
        env.reset()
        env.set_init_state(state)
        for _ in range(SETTLE):
            seen, *_ = env.step(NO_OP)
        plan: list[np.ndarray] = []
        taken, done = 0, False
        while not done and taken < STEPS:
            if not plan:
                image = np.ascontiguousarray(seen["agentview_image"][::-1, ::-1])
                parts = (seen["robot0_eef_pos"], seen["robot0_eef_quat"], seen["robot0_gripper_qpos"])
                answer = client.infer(
                    {
                        "observation/image": resize_with_pad(image, 224, 224),
                        "observation/state": pose(*parts),
                        "prompt": suite.get_task(TASK).language,
                    }
                )
                plan = list(answer["actions"][:REPLAN])
            seen, _, done, _ = env.step(plan.pop(0))
            taken += 1
        ended.append((done, taken))
    env.close()
    successes = sum(done for done, _ in ended)
    print(f"openpi's client: {successes} of {episodes} episodes succeed, steps {[taken for _, taken in ended]}")


def vla_eval(address: str, episodes: int) -> None:
    """Its LIBERO benchmark, on this project's environment in place of hf-libero's."""
    import libero.libero.envs
    import vla_eval.api

    versions("vla-eval", "websockets", "numpy")
    libero.libero.envs.OffScreenRenderEnv = Env
    benchmark = {
        "benchmark": "vla_eval.benchmarks.libero.benchmark:LIBEROBenchmark",
        "episodes_per_task": episodes,
        "max_tasks": 1,
        "params": {"suite": SUITE, "quat_no_antipodal": True},  # robosuite's axis and angle, as policies here read them
    }
    config = {"benchmarks": [benchmark], "server": {"url": f"{address}/vla-eval"}}
    with TemporaryDirectory() as folder:
        (found,) = vla_eval.api.run(config, output_dir=folder, no_save=True, docker=False)
    ended = [episode for task in found["tasks"] for episode in task["episodes"]]
    successes = sum(bool(episode["metrics"].get("success")) for episode in ended)
    print(f"vla-eval: {successes} of {episodes} episodes succeed, steps {[episode['steps'] for episode in ended]}")


class MovesUp:
    """A policy of openpi's server: chunks of ten actions; it reads what openpi's policies for LIBERO read."""

    def infer(self, seen: dict) -> dict:
        assert seen["observation/image"].dtype == seen["observation/wrist_image"].dtype == np.uint8
        assert seen["observation/state"].shape == (8,)
        assert isinstance(seen["prompt"], str)
        return {"actions": np.tile([0.0, 0.0, 0.5, 0.0, 0.0, 0.0, -1.0], (10, 1))}


def server(address: str, episodes: int) -> None:
    from openpi_server.websocket_policy_server import WebsocketPolicyServer

    versions("openpi-server", "openpi-client", "websockets")
    print("listening", flush=True)
    WebsocketPolicyServer(MovesUp(), "127.0.0.1", urlsplit(address).port).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["openpi", "vla_eval", "server"])
    parser.add_argument("address")
    parser.add_argument("--episodes", type=int, default=4)
    args = parser.parse_args()
    if args.role != "server":
        import_libero("placeholder")
    {"openpi": openpi, "vla_eval": vla_eval, "server": server}[args.role](args.address, args.episodes)
