"""Collect the refit times of the runs that gpu_run.py kept."""

import record
from series import Run, mismatch_bars, values

LAYOUTS = {
    "refit-tp2-tp2": "TP 2 -> TP 2",
    "refit-pp2-tp2": "PP 2 -> TP 2",
    "refit-dp2-2": "DP 2 -> 2 replicas",
    "refit-tp4-tp4": "TP 4 -> TP 4",
    "refit-apart-tp2-tp2": "TP 2 -> TP 2 on two other GPUs",
}
VERIFIED = {"verified-colocated": "on one GPU, offload=pinned", "verified-apart": "on two GPUs, buckets of 64 MB"}


def layouts(runs: list[Run]) -> tuple[list, list]:
    """Measure refits by layout, without the first, which uses the engine's loader."""
    results = []
    for run in sorted(runs, key=lambda run: tuple(LAYOUTS).index(run["name"])):
        for name in ("seconds", "iterate_s", "pack_s", "transfer_s", "load_s"):
            seconds = values(run, f"refit/{name}")[1:]
            results.append(record.result(name.removesuffix("_s"), LAYOUTS[run["name"]], "s", seconds))
        (nbytes,) = set(values(run, "refit/bytes"))
        results.append(record.result("weights of a refit", LAYOUTS[run["name"]], "GB", [nbytes / 1e9]))
    return results, mismatch_bars(runs)


def verified(runs: list[Run]) -> tuple[list, list]:
    """Measure refits with every byte compared, without the first."""
    results = []
    for run in runs:
        config, seconds = VERIFIED[run["name"]], values(run, "refit/seconds")
        if run["config"]["refit"]["verify"] != "full":
            raise ValueError(f"{run['name']} did not compare all bytes")
        results.append(record.result("refits, all bytes compared", config, "", [len(seconds)]))
        results.append(record.result("seconds", config, "s", seconds[1:]))
        (nbytes,) = set(values(run, "refit/bytes"))
        results.append(record.result("weights of a refit", config, "GB", [nbytes / 1e9]))
        differences = values(run, "refit/probe_logprob_diff")
        results.append(record.result("mean logprob difference of a probe", config, "nats", differences))
    return results, mismatch_bars(runs)
