// One rollout: how much engines, environment and reward had to do, and below it what each episode waited for.

const WAITS = { generate: "#22a6b8", environment: "#e8833a", reward: "#8a63d2" };
const LANE = { height: 30, gap: 6, episodes: 240 };

function rollout() {
  const grid = element("div", { class: "grid wide" });
  for (const run of RUNS.filter((one) => one.timeline)) {
    const { step, seconds, count, lanes, episodes } = run.timeline;
    const legend = element("div", { class: "legend" }, ...Object.entries(WAITS).map(([what, colour]) =>
      element("span", {}, element("i", { class: "box", style: `background:${colour}` }), what)));
    const shown = episodes.length < count ? `${episodes.length} of ${count} episodes` : `${count} episodes`;
    const box = element("div", { class: "chart" });
    const title = `step ${step}: ${number(seconds)} s, ${shown}`;
    new ResizeObserver(() => drawTimeline(box, title, run.timeline, lanes)).observe(box);
    const waits = Object.keys(WAITS).filter((what) => run.series[`timing/rollout/${what}_max`]?.[1].some((value) => value > 0))
      .flatMap((what) => [["mean", "mean"], ["max", "longest"]].map(([kind, label]) => {
        const value = median(run.series[`timing/rollout/${what}_${kind}`][1]);
        return [`${what}, ${label}`, [[WAITS[what], value]], `${number(value)} s`];
      }));
    grid.append(element("div", { class: "card" }, element("h3", { text: RUNS.length > 1 ? `${run.label}, ${title}` : title }), legend, box,
      waits.length ? element("p", { class: "missing", text: "an episode's waiting, median over the run's steps" }) : null, waits.length ? bars(waits) : null));
  }
  if (grid.childElementCount) section("Rollout", grid);
}

function drawTimeline(box, title, { seconds, episodes }, lanes) {
  const width = box.clientWidth, left = 96, names = Object.keys(lanes);
  if (!width) return;
  const x = (at) => left + (at / seconds) * (width - left - SIZE.right);
  const below = names.length * (LANE.height + LANE.gap), bottom = below + LANE.episodes;
  const canvas = element("div");
  const svg = drawn(canvas, "svg", { viewBox: `0 0 ${width} ${bottom + 20}`, role: "img", "aria-label": title });
  names.forEach((name, lane) => {
    const counts = lanes[name], most = Math.max(...counts, 1e-9), floor = lane * (LANE.height + LANE.gap) + LANE.height;
    const at = (part) => x((part / counts.length) * seconds).toFixed(1);
    const top = counts.map((value, part) => `${at(part)},${(floor - (value / most) * (LANE.height - 4)).toFixed(1)}H${at(part + 1)}`).join("L");
    drawn(svg, "text", { x: left - 8, y: floor - 10, "text-anchor": "end" }, name);
    drawn(svg, "text", { x: left - 8, y: floor + 2, "text-anchor": "end" }, `at most ${number(Math.round(most * 10) / 10)}`);
    drawn(svg, "path", { d: `M${at(0)},${floor}L${top}V${floor}Z`, fill: WAITS[name] ?? WAITS.generate, "fill-opacity": 0.75 });
  });
  const row = LANE.episodes / episodes.length;
  drawn(svg, "text", { x: left - 8, y: below + 12, "text-anchor": "end" }, "episodes");
  for (const what of Object.keys(WAITS)) {
    const lines = episodes.flatMap((spans, index) => spans.filter((span) => span[0] === what)
      .map(([, begin, end]) => `M${x(begin).toFixed(1)},${(below + (index + 0.5) * row).toFixed(1)}H${Math.max(x(end), x(begin) + 0.7).toFixed(1)}`));
    drawn(svg, "path", { d: lines.join(""), stroke: WAITS[what], "stroke-width": Math.min(row * 0.8, 8), fill: "none" });
  }
  for (const at of ticks(0, seconds, Math.max(2, Math.floor(width / 110)))) {
    drawn(svg, "line", { class: "gridline", x1: x(at), x2: x(at), y1: 0, y2: bottom });
    drawn(svg, "text", { x: x(at), y: bottom + 15, "text-anchor": "middle" }, `${number(at)} s`);
  }
  box.replaceChildren(canvas);
}
