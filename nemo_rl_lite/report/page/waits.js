// Policy and engines: what both did during the newest steps, and how old the tokens were that the policy trained on.

const SIDES = { steps: 18, policy: 30, engines: 110, gap: 8, left: 96 };
const ACTIVITIES = { checkpoint: "#8d6e63", validate: "#8a63d2" };
// Of the steps, in turn; none is that of an activity.
const TURNS = ["#3b7ddd", "#e8833a", "#1fa3b8", "#55627a"];
const ofStep = (step) => TURNS[step % TURNS.length];
const RATIOS = { "train/correction/truncated": "weight truncated", "train/correction/masked": "token masked", "train/correction/rejected": "sequence rejected",
  "train/clip_ratio/low": "clipped below", "train/clip_ratio/high": "clipped above" };

function policyAndEngines() {
  const wide = element("div", { class: "grid wide" }), grid = element("div", { class: "grid" });
  for (const run of RUNS.filter((one) => one.waits)) wide.append(bothSides(run));
  const isAsynchronous = (run) => run.series["timing/rollout/engines_idle"];
  for (const run of RUNS.filter(isAsynchronous)) {
    const named = (title) => (RUNS.length > 1 ? `${run.label}: ${title}` : title);
    const add = (title, names, more = {}) => {
      const series = Object.entries(names).map(([name, label], index) => [name, { label, colour: PARTS[index % PARTS.length] }])
        .filter(([name]) => run.series[name]?.[1].some((value) => value)).map(([name, style]) => curve(run, name, style));
      if (series.length) grid.append(new Chart(named(title), series, { legend: Object.keys(names).length > 1, ...more }).node);
    };
    const ages = Object.keys(run.series).flatMap((name) => name.match(/^train\/age_(\d+)\/tokens_share$/)?.[1] ?? []).sort((a, b) => a - b);
    const ofAges = (metric) => Object.fromEntries(ages.map((age) => [`train/age_${age}/${metric}`, `age ${age}`]));
    add("seconds waited a step", { "timing/train/generation": "policy, for a rollout", "timing/rollout/engines_idle": "engines, for requests" });
    add("age of tokens, in optimizer steps: share of each", ofAges("tokens_share"), { stacked: true });
    add("KL between policy and engines by age, nats per token", ofAges("gen_kl_error"));
    add("effective sample size of the weights, share of tokens", { "train/correction/ess": "all ages" }, { limits: [0, 1.02] });
    add("share that a bound or the clip acts on", RATIOS);
  }
  if (wide.childElementCount + grid.childElementCount) section("Policy and engines", wide, grid);
}

// The card of one run: who waits for whom.
function bothSides(run) {
  const { steps, shares, policy } = run.waits;
  const title = `steps ${steps[0][0]} to ${last(steps)[0]}: ${Object.entries(shares).map(([what, share]) => `${what} ${number(Math.round(share * 1000) / 10)} %`).join(", ")}`;
  const did = new Set(policy.map(([activity]) => activity));
  const legend = element("div", { class: "legend" }, element("span", {}, element("i", { class: "box waiting" }), "waits, idle"),
    ...Object.entries({ ...PHASE_COLOURS, ...ACTIVITIES }).filter(([activity]) => did.has(activity)).map(([activity, colour]) =>
      element("span", {}, element("i", { class: "box", style: `background:${colour}` }), activity)));
  const box = element("div", { class: "chart" });
  new ResizeObserver(() => drawSides(box, title, run.waits)).observe(box);
  const text = "Engines: how many requests they have, in the colour of the step that trains on the responses (grey: held-out problems). They pause while a refit brings new weights. Policy, white: the launcher's own work, such as writing files.";
  return element("div", { class: "card" }, element("h3", { text: RUNS.length > 1 ? `${run.label}, ${title}` : title }), legend, box,
    element("p", { class: "missing", text }));
}

function drawSides(box, title, { seconds, parts, steps, policy, requests, paused, idle }) {
  const width = box.clientWidth, { left, gap } = SIDES;
  if (!width) return;
  const x = (at) => left + (at / seconds) * (width - left - SIZE.right);
  const middle = SIDES.steps + gap, top = middle + SIDES.policy + gap, bottom = top + SIDES.engines;
  const canvas = element("div");
  const svg = drawn(canvas, "svg", { viewBox: `0 0 ${width} ${bottom + 20}`, role: "img", "aria-label": title });
  const name = (y, text) => drawn(svg, "text", { x: left - 8, y, "text-anchor": "end" }, text);
  const rectangle = (begin, end, y, height, style, told) => {
    const made = drawn(svg, "rect", { x: x(begin).toFixed(1), width: Math.max(x(end) - x(begin), 0.5).toFixed(1), y, height, ...style });
    drawn(made, "title", {}, `${told}: ${number(end - begin)} s`);
  };
  for (const at of ticks(0, seconds, Math.max(2, Math.floor(width / 110)))) {
    drawn(svg, "line", { class: "gridline", x1: x(at), x2: x(at), y1: 0, y2: bottom });
    drawn(svg, "text", { x: x(at), y: bottom + 15, "text-anchor": "middle" }, `${number(at)} s`);
  }
  name(SIDES.steps - 4, "step");
  for (const [step, begin, end] of steps) {
    rectangle(begin, end, 0, SIDES.steps, { fill: ofStep(step) }, `step ${step}`);
    if (x(end) - x(begin) > 24) drawn(svg, "text", { x: (x(begin) + x(end)) / 2, y: SIDES.steps - 5, "text-anchor": "middle", class: "inside" }, step);
  }
  name(middle + SIDES.policy / 2 + 4, "policy");
  for (const [activity, begin, end, step] of policy) {
    const colour = { ...PHASE_COLOURS, ...ACTIVITIES }[activity];
    rectangle(begin, end, middle, SIDES.policy, activity === "wait" ? { class: "waiting" } : { fill: colour }, `step ${step}, ${activity}`);
  }
  for (const [begin, end] of idle) rectangle(begin, end, top, SIDES.engines, { class: "waiting" }, "engines idle");
  for (const [begin, end] of paused) rectangle(begin, end, top, SIDES.engines, { fill: PHASE_COLOURS.refit, "fill-opacity": 0.35 }, "engines paused");
  const most = drawRequests(svg, requests, parts, (part) => x((part / parts) * seconds), bottom);
  name(top + 14, "engines");
  name(top + 28, `at most ${number(Math.round(most))}`);
  box.replaceChildren(canvas);
}

// Requests with the engines, those of each rollout on top of those before; returns how many there are at most.
function drawRequests(svg, requests, parts, at, bottom) {
  const total = new Array(parts).fill(0);
  const stacked = requests.map(({ counts: [first, counts], ...one }) => {
    const edges = counts.map((count, place) => [total[first + place], (total[first + place] += count)]);
    return { ...one, first, edges };
  });
  const most = Math.max(...total, 1e-9), y = (count) => bottom - (count / most) * (SIDES.engines - 4);
  const span = (from, to, count) => `${at(from).toFixed(1)},${y(count).toFixed(1)}H${at(to).toFixed(1)}`;
  for (const { step, split, first, edges } of stacked) {
    const over = edges.map(([, above], place) => span(first + place, first + place + 1, above)).join("L");
    const under = edges.map(([below], place) => span(first + place + 1, first + place, below)).reverse().join("L");
    const heldOut = split === "validation";
    const shape = drawn(svg, "path", { d: `M${over}L${under}Z`, fill: heldOut ? "#9aa3b0" : ofStep(step), "fill-opacity": 0.8 });
    drawn(shape, "title", {}, heldOut ? `held-out problems after step ${step}` : `rollout of step ${step}`);
    const heights = edges.map(([below, above]) => above - below), area = heights.reduce((sum, height) => sum + height, 0);
    const centre = Math.floor(heights.reduce((sum, height, place) => sum + height * (place + 0.5), 0) / area);
    const wide = at(edges.length) - at(0) > 14, high = (heights[centre] / most) * SIDES.engines > 14;
    if (!wide || !high || heldOut) continue;
    const height = y((edges[centre][0] + edges[centre][1]) / 2) + 4;
    drawn(svg, "text", { x: at(first + centre + 0.5), y: height, "text-anchor": "middle", class: "inside" }, step);
  }
  return most;
}
