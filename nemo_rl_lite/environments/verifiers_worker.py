"""Process that plays episodes of an environment of verifiers. It runs in the Python that verifiers is installed in, and
imports nothing of this package.

    python -P verifiers_worker.py rows CONFIG     print rows of data=file
    python -P verifiers_worker.py play CONFIG     play an episode for each line

`CONFIG` is the environment's configuration as JSON. Requests and answers are one JSON object a line.
Source: verifiers 0.4, `v1/env.py` and `v1/serve/server.py`.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


def write_rows(environment: Any, rows: TextIO) -> None:
    """Write the tasks. The column `task` is a task's data as JSON."""
    for task in environment.taskset:
        data = task.data
        shown = data.prompt_text.strip() or data.description or data.name or f"task {data.idx}"
        rows.write(json.dumps({"prompt": shown, "answer": "", "task": data.model_dump_json()}) + "\n")


async def answer_requests(environment: Any, requests: TextIO, answers: TextIO) -> None:
    """Play the episodes of all requests at the same time."""
    playing: dict[int, asyncio.Task] = {}

    async def answer(request: Mapping[str, Any]) -> None:
        try:
            result = await play(environment, request)
        except Exception as error:  # an environment may raise anything
            result = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"id": request["id"], **result}) + "\n")
        answers.flush()

    async with environment.serving():
        while line := await asyncio.to_thread(requests.readline):
            request = json.loads(line)
            if "task" in request:
                task = playing[request["id"]] = asyncio.create_task(answer(request))
                task.add_done_callback(lambda _, identity=request["id"]: playing.pop(identity))
            elif request["id"] in playing:
                playing[request["id"]].cancel()
        for task in playing.values():
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)


async def play(environment: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Play an episode, and return its reward and its metrics. Raises what `reward_of` raises."""
    import verifiers.v1 as vf

    # verifiers reads keys from the environment. Programs of a harness do not inherit names with API_KEY.
    variable = f"EPISODE_{request['id']}_API_KEY"
    os.environ[variable] = request["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
        kind = type(environment.taskset).task_type()
        data = kind.data_type().model_validate_json(request["task"])
        context = vf.ModelContext(model=request["model"], client=client, sampling=vf.SamplingConfig())
        episode = await environment.run_episode(kind(data, environment.config.taskset.task), context)
    finally:
        del os.environ[variable]
    return {"reward": reward_of(episode, request["base_url"]), "metrics": metrics_of(episode)}


def reward_of(episode: Any, base_url: str) -> float:
    """Return the mean reward of an episode's trainable agents. Raises RuntimeError: the episode failed, an agent that
    must not train asked the policy's endpoint, or no agent trains."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.base_url == base_url:
            raise RuntimeError(f"agent {trace.agent.name} does not train: give it its own client and model")
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    if not rewards:
        raise RuntimeError("the episode has no trace of a trainable agent: the environment must train at least one")
    return sum(rewards) / len(rewards)


def metrics_of(episode: Any) -> dict[str, float]:
    """Return the metrics of an episode's trainable agents, and their rewards before the weights as `reward/NAME`. Each
    is the mean over the agents that have it."""
    found: dict[str, list[float]] = {}
    for trace in episode.traces:
        if trace.agent.trainable:
            scores = {f"reward/{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
            for name, value in {**scores, **trace.metrics}.items():
                if value is not None:
                    found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def main() -> None:
    """Run one of the two commands."""
    # Tasksets may lie in the working directory, also for their tool servers. Harnesses need the uv next to verifiers.
    sys.path.insert(0, here := str(Path.cwd()))
    for name, folder in (("PYTHONPATH", here), ("PATH", str(Path(sys.executable).parent))):
        os.environ[name] = os.pathsep.join(filter(None, [folder, os.environ.get(name)]))
    import verifiers.v1 as vf

    command, config = sys.argv[1:]
    # An environment and its child processes may print and read.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    environment = vf.load_environment(vf.resolve_env_config(json.loads(config)))
    if command == "rows":
        write_rows(environment, answers)
        answers.close()
    else:
        asyncio.run(answer_requests(environment, requests, answers))


if __name__ == "__main__":
    main()
