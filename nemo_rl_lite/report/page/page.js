// Makes the page, section by section.

const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#3b7ddd", "#e8833a", "#2ba672", "#d6539b", "#8a63d2", "#c9a227", "#1fa3b8", "#d9534f", "#7a8a3a", "#8d6e63"];
const PHASE_COLOURS = { generate: "#22a6b8", logprob: "#d9a514", train: "#3a9d5d", refit: "#b6559d", "between phases": "#9aa3b0" };
const PARTS = ["#3b7ddd", "#e8833a", "#2ba672", "#d6539b", "#8a63d2", "#c9a227", "#9aa3b0"];
const RUNS = DATA.runs.map((run, index) => ({ ...run, index, colour: COLOURS[index % COLOURS.length] }));
const TIMERS = "timing/train/";

const swatch = (colour) => element("span", { class: "swatch", style: `background:${colour}` });
const last = (list) => list[list.length - 1];
const median = (values) => {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b), half = sorted.length / 2;
  return sorted.length ? (sorted[Math.ceil(half) - 1] + sorted[Math.floor(half)]) / 2 : null;
};
const present = (name) => RUNS.filter((run) => run.series[name]);

function section(title, ...children) {
  const id = title.toLowerCase().replaceAll(" ", "-");
  document.getElementById("nav").append(element("a", { href: `#${id}`, text: title }));
  document.getElementById("main").append(element("section", {}, element("h2", { id, text: title }), ...children));
}

function table(headers, rows, numbers = []) {
  const kind = (index) => (numbers.includes(index) ? "number" : undefined);
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...headers.map((head, index) => element("th", { class: kind(index) }, head)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell, index) =>
      cell instanceof HTMLTableCellElement ? cell : element("td", { class: kind(index) }, cell)))))));
}

function curve(run, metric, more = {}) {
  const [xs, ys] = run.series[metric];
  return { label: RUNS.length > 1 ? run.label : metric, run: run.index, colour: run.colour, xs, ys, ...more };
}

// The table of runs, each of which can be hidden in all charts.
function runs() {
  const view = DATA.views[RUNS[0].algorithm] ?? [];
  const judged = view.filter((panel) => panel.isResult).flatMap((panel) => panel.curves).filter((one) => present(one.metric).length);
  const named = ({ metric }) => [...new Set(present(metric).map((run) => run.labels[metric] ?? metric))].join(" or ");
  const headers = ["run", "state", "steps", "s/step", ...judged.map(named), "started", "on"];
  const numbers = headers.map((_, index) => index).filter((index) => index > 1 && index < headers.length - 2);
  const rows = RUNS.map((run) => {
    const seconds = run.series[`${TIMERS}total_step_time`];
    const toggle = element("input", { type: "checkbox", checked: true, onchange: (event) => {
      event.target.checked ? shared.hidden.delete(run.index) : shared.hidden.add(run.index);
      Chart.redrawAll();
    } });
    const name = element("label", { class: "run", style: `--colour:${run.colour}` }, toggle, swatch(run.colour), run.label);
    return [name, state(run), number(seconds ? last(seconds[0]) : 0), number(seconds ? median(seconds[1]) : null),
      ...judged.map((one) => ends(run.series[one.metric])), (run.status.started ?? "").slice(0, 16).replace("T", " "),
      run.status.host ?? run.environment.host ?? ""];
  });
  const problems = RUNS.flatMap((run) => [
    run.notes.length ? element("ul", { class: "notes" }, ...run.notes.map((note) =>
      element("li", { text: RUNS.length > 1 ? `${run.label}: ${note}` : note }))) : null,
    run.status.message || run.error ? element("pre", { class: "error", text: run.error || `${run.label}: ${run.status.message}` }) : null,
  ]);
  section("Runs", element("div", { class: "card" }, element("div", { class: "runs" }, table(headers, rows, numbers)), ...problems));
}

function state(run) {
  const { state: name, exit_status: code } = run.status;
  const words = { running: "running, or killed" };
  const text = name ? (words[name] ?? name) + (code || code === 0 ? ` (status ${code})` : "") : "unknown";
  return element("span", { class: `state ${name ?? "unknown"}`, text });
}

function ends(series) {
  const values = series?.[1].filter((value) => value !== null) ?? [];
  if (!values.length) return "–";
  return values.length > 1 ? `${number(values[0])} → ${number(last(values))}` : number(values[0]);
}

function curves() {
  const grid = element("div", { class: "grid" });
  for (const algorithm of new Set(RUNS.map((run) => run.algorithm))) {
    for (const panel of DATA.views[algorithm] ?? []) {
      const solid = panel.curves.some((one) => !one.heldOut);
      // Losses of different algorithms cannot be compared.
      const own = (metric) => present(metric).filter((run) => run.algorithm === algorithm);
      const series = panel.curves.flatMap((one, index) => own(one.metric).map((run) => curve(run, one.metric, {
        label: RUNS.length > 1 ? `${run.label}: ${run.labels[one.metric]}` : run.labels[one.metric],
        colour: RUNS.length > 1 ? run.colour : COLOURS[(index + 1) % panel.curves.length],
        name: RUNS.length > 1 ? (one.heldOut && solid ? run.labels[one.metric] : run.label) : run.labels[one.metric],
        dashed: one.heldOut && solid,
      })));
      if (series.length) grid.append(new Chart(panel.title, series, { legend: true }).node);
    }
  }
  section("Curves", grid.childElementCount ? grid : element("p", { class: "missing", text: "No step has been logged yet." }));
}

// All metrics, grouped by the first part of their names.
function metrics() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.series)))].sort();
  if (!names.length) return;
  const groups = names.reduce((map, name) => map.set(group(name), [...(map.get(group(name)) ?? []), name]), new Map());
  const charts = [];
  const blocks = [...groups].map(([title, members]) => {
    const grid = element("div", { class: "grid small" });
    const block = element("details", { ontoggle: () => {
      for (const name of grid.childElementCount ? [] : members) {
        const { node } = new Chart(name, present(name).map((run) => curve(run, name)));
        grid.append(node);
        charts.push([name, node]);
      }
      filter();
    } }, element("summary", {}, element("b", { text: title }), ` ${members.length}`), grid);
    return { block, members };
  });
  const search = element("input", { type: "search", placeholder: "filter, such as grad or ray/", oninput: () => filter(true) });
  function filter(opens = false) {
    const fits = (name) => name.includes(search.value.trim().toLowerCase());
    for (const { block, members } of blocks) {
      const found = members.some(fits);
      block.hidden = !found;
      if (opens && search.value.trim() && found) block.open = true;
    }
    for (const [name, node] of charts) node.hidden = !fits(name);
  }
  section("All metrics", element("div", { class: "tools" }, search), ...blocks.map(({ block }) => block));
}

function group(name) {
  const parts = name.split("/");
  return parts[0] === "timing" || parts[0] === "memory" ? parts.slice(0, 2).join("/") : parts[0];
}

// Where a step's time goes.
function phases() {
  const grid = element("div", { class: "grid" });
  for (const run of RUNS) {
    const whole = run.series[`${TIMERS}total_step_time`];
    if (!whole) continue;
    const [xs, totals] = whole;
    const timer = (name) => {
      const series = run.series[TIMERS + name];
      const at = series ? new Map(series[0].map((step, index) => [step, series[1][index]])) : new Map();
      return xs.map((step) => at.get(step) ?? 0);
    };
    const parts = Object.entries(DATA.phases).map(([phase, names]) => {
      const columns = names.map(timer);
      return { label: phase, run: run.index, colour: PHASE_COLOURS[phase], xs, ys: xs.map((_, index) => columns.reduce((sum, column) => sum + column[index], 0)) };
    }).filter((part) => part.ys.some((value) => value > 0));
    const rest = totals.map((total, index) => Math.max(0, total - parts.reduce((sum, part) => sum + part.ys[index], 0)));
    parts.push({ label: "between phases", run: run.index, colour: PHASE_COLOURS["between phases"], xs, ys: rest });
    const chart = new Chart(RUNS.length > 1 ? run.label : "seconds per step", parts, { stacked: true, legend: true });
    chart.node.append(bars(parts.map((part) => [part.label, [[part.colour, median(part.ys)]], `${number(median(part.ys))} s`])));
    grid.append(chart.node);
  }
  if (grid.childElementCount) section("Time", grid);
}

// rows: [label, [[colour, amount], ...], text, hatched]; the longest fills its track.
function bars(rows) {
  const length = (parts) => parts.reduce((sum, [, amount]) => sum + amount, 0);
  const longest = rows.reduce((most, [, parts]) => Math.max(most, length(parts)), 0) || 1;
  return element("div", { class: "bars" }, ...rows.flatMap(([label, parts, text, hatched]) => [
    element("span", { text: label }),
    element("div", { class: hatched ? "track hatched" : "track" }, ...parts.map(([colour, amount, title]) =>
      element("span", { style: `width:${(100 * amount) / longest}%;background:${colour}`, title }))),
    element("span", { class: hatched ? "amount faint" : "amount", text }),
  ]));
}

// Device memory by phase and component, predicted and measured.
function memory() {
  const grid = element("div", { class: "grid" });
  for (const run of RUNS) {
    const sizes = { predicted: {}, measured: {} }, components = new Set();
    for (const [name, [, ys]] of Object.entries(run.series)) {
      const [, kind, phase, component] = name.match(/^memory\/(predicted|measured)\/([^/]+)\/([^/]+)$/) ?? [];
      if (!kind || !DATA.phases[phase]) continue;
      const values = ys.filter((value) => value !== null).slice(-DATA.lastSteps);
      if (values.length) (sizes[kind][phase] ??= {})[component] = values.reduce((a, b) => a + b) / values.length;
      if (kind === "measured") components.add(component);
    }
    const parts = [...components].filter((part) => part !== "other");
    if (components.has("other")) parts.push("other");
    if (!parts.length) continue;
    const colour = (part) => (part === "other" ? "#9aa3b0" : PARTS[parts.indexOf(part) % PARTS.length]);
    const row = (phase, kind) => {
      const there = parts.filter((part) => sizes[kind][phase]?.[part]);
      const sum = there.reduce((total, part) => total + sizes[kind][phase][part], 0);
      const label = kind === "measured" ? phase : "";
      return [label, there.map((part) => [colour(part), sizes[kind][phase][part], `${part}: ${bytes(sizes[kind][phase][part])}`]), bytes(sum) + (kind === "predicted" ? " predicted" : ""), kind === "predicted"];
    };
    const rows = Object.keys(DATA.phases).filter((phase) => sizes.measured[phase]).flatMap((phase) => [row(phase, "measured"), row(phase, "predicted")]);
    const legend = element("div", { class: "legend" }, ...parts.map((part) =>
      element("span", {}, element("i", { class: "box", style: `background:${colour(part)}` }), part.replaceAll("_", " "))));
    grid.append(element("div", { class: "card" }, element("h3", { text: RUNS.length > 1 ? run.label : "on the device, by phase" }), legend, bars(rows)));
  }
  for (const [title, pattern] of [["memory of machines, GiB", /^ray\/node\.\d+\.mem_gb$/], ["memory of GPUs, GiB", /\.gpu\.\d+\.mem_gb$/],
    ["use of cores, percent", /\.cpu_util$/], ["use of GPUs, percent", /\.gpu\.\d+\.util$/]]) {
    const series = RUNS.flatMap((run) => Object.keys(run.series).filter((name) => pattern.test(name)).map((name, index) =>
      curve(run, name, { label: `${RUNS.length > 1 ? `${run.label}: ` : ""}${name.slice(4)}`, colour: RUNS.length > 1 ? run.colour : COLOURS[index % COLOURS.length] })));
    if (series.length) grid.append(new Chart(title, series, { limits: title.endsWith("percent") ? [0, 102] : null }).node);
  }
  if (grid.childElementCount) section("Memory and use", grid);
}

function bytes(size) {
  return size >= 2 ** 30 ? `${number(size / 2 ** 30)} GiB` : `${number(size / 2 ** 20)} MiB`;
}

// The seconds of each stage of a refit. Stages overlap.
function refit() {
  const stages = ["iterate", "pack", "transfer", "load", "wake"], grid = element("div", { class: "grid" });
  for (const run of present("refit/seconds")) {
    const rows = [["whole", "refit/seconds"], ...stages.map((stage) => [stage, `refit/${stage}_s`]), ["probe", "refit/probe_s"]]
      .filter(([, name]) => run.series[name])
      .map(([stage, name]) => [stage, [[stage === "whole" ? run.colour : "#9aa3b0", median(run.series[name][1])]], `${number(median(run.series[name][1]))} s`]);
    const size = run.series["refit/bytes"] ? `${bytes(last(run.series["refit/bytes"][1]))} in ${number(last(run.series["refit/buckets"][1]))} bucket(s)` : "";
    grid.append(element("div", { class: "card" }, element("h3", { text: RUNS.length > 1 ? run.label : "median of each stage" }),
      element("p", { class: "missing", text: `${size}; stages overlap, so they do not add up` }), bars(rows)));
  }
  const speed = present("refit/gb_per_s").map((run) => curve(run, "refit/gb_per_s"));
  if (speed.length) grid.append(new Chart("GB/s", speed).node);
  if (grid.childElementCount) section("Refit", grid);
}

function samples() {
  const having = RUNS.filter((run) => run.samples.length);
  if (!having.length) return;
  const pick = element("select", {}, ...having.map((run) => element("option", { value: run.index, text: run.label })));
  const split = element("select", {});
  const slider = element("input", { type: "range", min: 0, step: 1 });
  const where = element("b"), list = element("div", { class: "samples" });
  const run = () => RUNS[pick.value];
  const steps = () => [...new Set(run().samples.filter((one) => one.split === split.value).map((one) => one.step))].sort((a, b) => a - b);
  function choose() {
    const before = split.value, splits = [...new Set(run().samples.map((one) => one.split))];
    split.replaceChildren(...splits.map((name) => element("option", { value: name, text: name })));
    if (splits.includes(before)) split.value = before;
    slider.max = steps().length - 1;
    slider.value = slider.max;
    show();
  }
  function show() {
    const step = steps()[slider.value];
    where.textContent = `step ${step}`;
    list.replaceChildren(...run().samples.filter((one) => one.step === step && one.split === split.value)
      .sort((a, b) => b.reward - a.reward).map((one) => element("div", { class: "card sample" },
        element("div", {}, element("small", { text: "prompt" }), element("pre", { text: one.prompt })),
        element("div", {}, element("small", { text: `response, ${one.tokens} tokens, ended by ${one.ending}` }), element("pre", { text: one.said })),
        element("div", {}, element("small", { text: `reward, the answer is ${one.answer}` }), element("div", { class: "reward", text: number(one.reward) })))));
  }
  pick.addEventListener("change", choose);
  split.addEventListener("change", () => { slider.max = steps().length - 1; slider.value = slider.max; show(); });
  slider.addEventListener("input", show);
  section("Samples", element("div", { class: "tools" }, having.length > 1 ? element("label", {}, "run ", pick) : null,
    element("label", {}, "of ", split), element("label", {}, slider, where),
    element("span", { text: "from the best to the worst of a rollout" })), list);
  choose();
}

// Keys on which the runs differ from each other or from their algorithm's defaults.
function configuration() {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))].sort();
  if (!keys.length) return;
  const fallback = (run, key) => (DATA.defaults[run.algorithm] ?? {})[key];
  // These keys only name a run.
  const matters = (key) => key !== "run_name" && !key.startsWith("logger.");
  const between = (key) => matters(key) && new Set(RUNS.map((run) => run.config[key]).filter((value) => value !== undefined)).size > 1;
  const unusual = (key) => matters(key) && RUNS.some((run) => key in run.config && run.config[key] !== fallback(run, key));
  const holder = element("div");
  const choice = element("select", { onchange: show },
    RUNS.length > 1 ? element("option", { value: "runs", text: "differ between runs" }) : null,
    element("option", { value: "defaults", text: "differ from the defaults" }), element("option", { value: "all", text: "all" }));
  function show() {
    const shown = keys.filter({ runs: between, defaults: unusual, all: () => true }[choice.value]);
    const cell = (run, key) => {
      const value = run.config[key];
      return element("td", { class: `value mono${value !== undefined && value !== fallback(run, key) ? " differs" : ""}`, text: value ?? "–" });
    };
    holder.replaceChildren(shown.length ? table(["key", ...RUNS.map((run) => element("span", {}, swatch(run.colour), run.label)), "default"],
      shown.map((key) => [element("td", { class: "key mono", text: key }), ...RUNS.map((run) => cell(run, key)),
        element("td", { class: "value mono", text: [...new Set(RUNS.map((run) => fallback(run, key) ?? "–"))].join(" or ") })]))
      : element("p", { class: "missing", text: "None." }));
  }
  show();
  section("Configuration", element("div", { class: "card" }, element("div", { class: "tools" }, element("label", {}, "keys that ", choice),
    element("span", { text: "coloured: not the default" })), holder));
}

function environment() {
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.environment)))];
  const rows = keys.map((key) => {
    const values = RUNS.map((run) => run.environment[key] ?? "–"), differs = new Set(values.filter((value) => value !== "–")).size > 1;
    return [element("td", { class: "key mono", text: key }), ...values.map((value) => element("td", { class: `value${differs ? " differs" : ""}`, text: value }))];
  });
  const more = [["command", (run) => run.command], ["folder", (run) => run.folder], ["ended", (run) => run.status.ended ?? "–"]];
  rows.push(...more.map(([key, value]) => [element("td", { class: "key mono", text: key }), ...RUNS.map((run) => element("td", { class: "value mono", text: value(run) || "–" }))]));
  section("Environment", element("div", { class: "card" }, table(["", ...RUNS.map((run) => element("span", {}, swatch(run.colour), run.label))], rows)));
}

function controls() {
  const find = (id) => document.getElementById(id);
  find("title").textContent = RUNS.length > 1 ? `${RUNS.length} runs` : RUNS[0].label;
  document.title = `${find("title").textContent} – nemo_rl_lite`;
  find("smooth").addEventListener("input", (event) => {
    shared.smooth = Number(event.target.value);
    find("smooth-value").textContent = event.target.value;
    Chart.redrawAll();
  });
  find("axis").addEventListener("change", (event) => { shared.axis = event.target.value; Chart.redrawAll(); });
  find("log").addEventListener("change", (event) => { shared.log = event.target.checked; Chart.redrawAll(); });
  find("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
}

controls();
for (const part of [runs, curves, phases, speed, policyAndEngines, rollout, memory, refit, samples, configuration, environment, metrics]) part();
document.getElementById("main").append(element("footer", { text: `Made ${DATA.made.replace("T", " ").slice(0, 16)} UTC by nrl-lite report.` }));
