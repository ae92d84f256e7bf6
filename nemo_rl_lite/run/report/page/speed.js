// How near the limits of its GPUs a run is.

const RATES = [
  ["share of what the GPU can do", [0, 1.02], {
    "performance/train_fp_utilization": "training, MFU",
    "performance/policy_and_reference_logprobs_fp_utilization": "logprobs, MFU",
    "performance/generation_bandwidth_share": "decoding, memory bandwidth",
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
  for (const run of RUNS.filter((one) => one.busy)) grid.append(busyTable(run));
  if (grid.childElementCount) section("Speed", grid);
}

// The share of each phase of a profiled step in which GPUs worked.
function busyTable(run) {
  const { step, phases: rows } = run.busy, kinds = Object.keys(rows[0].shares);
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const cell = ([mean, least, most]) => (most > least ? `${percent(mean)} (${percent(least)} to ${percent(most)})` : percent(mean));
  const title = `GPUs at work in step ${step}, by phase`;
  return element("div", { class: "card busy" }, element("h3", { text: RUNS.length > 1 ? `${run.label}, ${title}` : title }),
    table(["phase", "s", ...kinds.map((kind) => `for ${kind}`)],
      rows.map((row) => [row.phase, number(row.seconds), ...kinds.map((kind) => cell(row.shares[kind]))]), [1, ...kinds.map((_, index) => index + 2)]),
    element("p", { class: "missing", text: "from the step's traces; a profiled step takes longer than others" }));
}
