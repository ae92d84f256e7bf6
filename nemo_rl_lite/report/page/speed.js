// How near the limits of its GPUs a run is.

const RATES = [
  ["share of what the GPU can do", [0, 1.02], {
    "performance/train_fp_utilization": "training, MFU",
    "performance/policy_and_reference_logprobs_fp_utilization": "logprobs, MFU",
    "performance/generation_bandwidth_share": "decoding, memory bandwidth",
  }],
  ["share of the time in which engines had requests", [0, 1.02], {
    "performance/engines_starved_share": "without a step",
  }],
  ["share of the KV cache in use", [0, 1.02], {
    "performance/kv_cache_usage": "mean",
    "performance/kv_cache_usage_max": "maximum",
  }],
  ["TFLOP/s a GPU or rank", null, {
    "performance/train_flops_per_gpu": "training",
    "performance/policy_and_reference_logprobs_flops_per_gpu": "logprobs",
  }],
];

function speed() {
  const grid = element("div", { class: "grid" });
  for (const [title, limits, names] of RATES) {
    const series = Object.entries(names).flatMap(([metric, label], index) => present(metric).map((run) => curve(run, metric, {
      label: RUNS.length > 1 ? `${run.label}: ${label}` : label,
      name: label,
      colour: RUNS.length > 1 ? run.colour : COLOURS[index],
      dashed: RUNS.length > 1 && index > 0,
    })));
    if (series.length) grid.append(new Chart(title, series, { legend: true, limits }).node);
  }
  if (grid.childElementCount) section("Speed", grid);
}
