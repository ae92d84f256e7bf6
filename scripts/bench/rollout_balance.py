"""How even two or more engines' work is, and how long a rollout takes: contiguous shares against one queue.

rollout_balance.py [--engines 2] [--repeats 5] [--prompts 64] [--samples 8] [KEY=VALUE ...]

Responses have forced lengths: lognormal with sigma 1, alike within a prompt (10 % apart), or all equal. `shares` gives
each engine a contiguous share of the prompts, as the launcher did before it had a queue. Each engine is the real worker
in its own process, without a policy: on CPUs it starts with the model's own weights.
"""

import argparse
import asyncio
import contextlib
import random
import tempfile
import time

import record

from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.runtime import ray_runtime
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.engines import engine_of
from nemo_rl_lite.generation.interface import Request, Sampling
from nemo_rl_lite.generation.request_queue import RequestQueue
from nemo_rl_lite.host.devices import ON_CPUS
from nemo_rl_lite.rules.compose import compose_config
from nemo_rl_lite.run.workers.remote_generation import RemoteGeneration, RemoteReplica

MEAN, LONGEST, PROMPT = 20, 110, (1, 5, 6, 7, 8, 41)
TARGET = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    shape = f"{given.engines} engines, {given.prompts} prompts x {given.samples} samples"
    seconds: dict[tuple[str, str], list[float]] = {}
    evenness: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(ray_runtime())
        engines = start(given.engines, given.overrides, folder)
        for repeat in range(given.repeats + 1):
            for lengths_are in ("lognormal", "equal"):
                requests = asked(given.prompts, given.samples, lengths_are == "lognormal", repeat)
                for way in ("shares", "queue"):
                    started = time.perf_counter()
                    tokens = asyncio.run(sample(engines.replicas, requests, way))
                    taken = time.perf_counter() - started
                    print(f"{lengths_are}, {way}: {taken:.2f} s, tokens {tokens}", flush=True)
                    if repeat:
                        seconds.setdefault((lengths_are, way), []).append(taken)
                        evenness.setdefault((lengths_are, way), []).append(max(tokens) * len(tokens) / sum(tokens))
    results = [record.result(f"{key[1]}, {key[0]} lengths", shape, "s", values) for key, values in seconds.items()]
    results += [
        record.result(f"busiest engine's tokens over the mean, {key[1]}, {key[0]} lengths", shape, "", values)
        for key, values in evenness.items()
    ]
    bars = [
        record.bar(
            "busiest engine's tokens over the mean, lognormal", max(evenness["lognormal", "queue"]), TARGET, False
        ),
        record.bar("queue over shares, lognormal: median of the ratios", ratio(seconds, "lognormal"), 1.0, False),
        record.bar("queue over shares, equal lengths: median of the ratios", ratio(seconds, "equal"), 1.05, False),
    ]
    print(record.write("rollouts-balance", results, bars))


def ratio(seconds: dict[tuple[str, str], list[float]], lengths_are: str) -> float:
    pairs = zip(seconds[lengths_are, "queue"], seconds[lengths_are, "shares"], strict=True)
    return sorted(queue / shares for queue, shares in pairs)[len(seconds[lengths_are, "queue"]) // 2]


def start(count: int, overrides: list[str], folder: str) -> RemoteGeneration:
    """Start engines on this machine's CPUs, each with its share of the cores."""
    from nemo_rl_lite.run.workers.reserve import worker_threads

    model = next((record.ROOT / "outputs" / "models").glob("reverse-4-digits-*"))
    own = [f"policy.model_name={model}", "policy.max_total_sequence_length=128", "generation.max_new_tokens=110"]
    config = compose_config([*own, f"generation.data_parallel_size={count}", *overrides])
    environment = engine_of(config).environment(config.generation, False) | ON_CPUS
    environment |= {"OMP_NUM_THREADS": str(worker_threads(config, count))}
    group = WorkerGroup("generation", [{}] * count, folder, environment)
    arguments = {"generation": config.generation, "policy": config.policy, "model_path": config.policy.model_name}
    wait(group.load(engine_of(config).worker, [{}] * count), timeout_s=600)
    wait(group.start([arguments | {"seed": 1, "on_gpu": False}] * count), timeout_s=600)
    return RemoteGeneration(group, shares_device=False)


def asked(prompts: int, samples: int, lognormal: bool, seed: int) -> list[Request]:
    rng, found = random.Random(seed), []
    for prompt in range(prompts):
        length = rng.lognormvariate(0, 1) / 1.65 * MEAN if lognormal else MEAN
        for sample in range(samples):
            own = round(length * rng.uniform(0.9, 1.1)) if lognormal else MEAN
            sampling = Sampling(1.0, 1.0, None, min(max(own, 1), LONGEST), stop_token_ids=(), stop_strings=())
            found.append(Request(PROMPT, sampling, seed=prompt * samples + sample))
    return found


async def sample(replicas: list[RemoteReplica], requests: list[Request], way: str) -> list[int]:
    """The tokens that each engine has sampled."""
    count = len(replicas)
    tokens = [0] * count

    async def share(queue: RequestQueue, own: list[Request], first: int) -> None:
        async with queue.serving() as served:
            with served.together():
                waiting = [asyncio.create_task(served.sample(request)) for request in own]
                await asyncio.sleep(0)
            for completion, replica in await asyncio.gather(*waiting):
                tokens[first + replica] += len(completion.tokens)

    def queue_over(own: list[RemoteReplica]) -> RequestQueue:
        return RequestQueue(own, 512, lambda *_: None, lambda: None)

    if way == "queue":
        await share(queue_over(replicas), requests, 0)
        return tokens
    bounds = [len(requests) * replica // count for replica in range(count + 1)]
    shares = [requests[bounds[replica] : bounds[replica + 1]] for replica in range(count)]
    await asyncio.gather(*(share(queue_over([replicas[r]]), own, r) for r, own in enumerate(shares)))
    return tokens


if __name__ == "__main__":
    main()
