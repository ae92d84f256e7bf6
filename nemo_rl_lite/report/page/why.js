"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main"), tip = document.getElementById("tip");
// Mismatches above this are marked, in nats.
const FAR = 0.1;
const CLIPPED = 1 | 2, TRUNCATED = 4, DROPPED = 8;

function element(name, options = {}, ...children) {
  const made = Object.assign(document.createElement(name), options);
  made.append(...children);
  return made;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

const percent = (value) => `${value && value < 1e-3 ? (100 * value).toPrecision(2) : (100 * value).toFixed(1)} %`;
const byNumber = new Map(data.samples.map((one) => [one.number, one]));
const withTokens = new Map(data.tokens.map((one) => [one.number, one]));
document.title = `step ${data.step} – nemo_rl_lite why`;
document.getElementById("title").textContent = `Loss of step ${data.step}, ${data.run}`;

function table(headers, rows, options = {}) {
  const kind = (place) => (!place ? "" : headers[place] === options.text ? "value" : "number");
  const head = element("tr", {}, ...headers.map((text, place) => element("th", { className: kind(place), textContent: text })));
  const body = rows.map((cells, row) => {
    const line = element("tr", {}, ...cells.map((cell, place) => element("td", { className: kind(place), textContent: cell })));
    const sample = options.samples?.[row];
    if (withTokens.has(sample)) {
      line.className = "open";
      line.dataset.sample = sample;
      line.onclick = () => { show(sample); document.getElementById("tokens").scrollIntoView(); };
    }
    return line;
  });
  return element("div", { className: "card scroll tall" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

function section(id, title, ...children) {
  main.append(element("h2", { id, textContent: title }), ...children);
}

const kinds = Object.entries(data.kinds), sampled = Math.max(data.kinds.sampled, 1);
section(
  "loss", "Loss",
  element(
    "div", { className: "pair" },
    table(["part", "loss"], Object.entries(data.totals).map(([name, value]) => [name, value === null ? "–" : value.toPrecision(7)])),
    table(["tokens", "count", "share"], kinds.map(([name, count]) => [name, number(count), percent(count / sampled)])),
  ),
  element("ul", { className: "missing" }, ...data.coverage.map((text) => element("li", { textContent: text }))),
);
section(
  "prompts", "Prompts",
  table(["problem", "gradient", "loss", "prompt"], data.prompts.map((one) => [one.problem, percent(one.gradient), number(one.loss), one.prompt]), { text: "prompt" }),
);
const columns = ["reward", "advantage", "tokens", "clipped", "dropped", "mismatch", "age", "ending"];
section(
  "samples", "Samples",
  table(
    ["sample", "problem", "gradient", ...data.parts, ...columns],
    data.samples.map((one) => [one.number, one.problem, percent(one.gradient), ...one.parts.map(number), ...columns.map((name) => number(one[name]))]),
    { samples: data.samples.map((one) => one.number) },
  ),
  element("p", { className: "missing", textContent: `${data.samples.length} of ${data.all} samples. Click one to see its tokens; ${data.tokens.length} have them. For others: nrl-lite why RUN --step ${data.step} --sample NUMBER` }),
);

function tokenTable(title, rows) {
  const cells = rows.map((one) => [`${one.number}/${one.place}`, `${one.before}⟦${one.text}⟧`, percent(one.gradient), number(one.advantage), number(one.ratio), number(one.mismatch)]);
  return element("div", {}, element("h3", { textContent: title }), table(["sample/place", "token", "gradient", "advantage", "ratio", "mismatch"], cells, { samples: rows.map((one) => one.number), text: "token" }));
}

const shown = element("div", { className: "card" });
section(
  "tokens", "Tokens", shown,
  element("div", { className: "pair", style: "margin-top: 14px" }, tokenTable("Largest gradient", data.top), tokenTable("Largest mismatch of policy and engine", data.far)),
);

function facts(own, place) {
  const value = (name) => number(own.columns[name][place]);
  const lines = [["token", `${place}: ${JSON.stringify(own.texts[place])}`]];
  if (own.version[place] < 0) return [...lines, ["", "not sampled by an engine"]];
  lines.push(["weights of step", own.version[place]], ["engine", value("engine")], ["policy", value("policy")]);
  if (!own.trained[place]) return [...lines, ["", "left out of the loss"]];
  lines.push(["gradient", percent(own.columns.gradient[place])], ["advantage", value("advantage")], ["ratio", value("ratio")], ["correction weight", value("weight")]);
  lines.push(...data.parts.map((name) => [name, value(name)]));
  const marks = own.marks[place];
  const told = [[1, "ratio below its bound"], [2, "ratio above its bound"], [TRUNCATED, "weight truncated"], [DROPPED, "policy term dropped"]];
  return [...lines, ...told.filter(([mark]) => marks & mark).map(([, text]) => ["", text])];
}

function show(sample) {
  const own = withTokens.get(sample), one = byNumber.get(sample);
  document.querySelectorAll("tr.chosen").forEach((line) => line.classList.remove("chosen"));
  document.querySelectorAll(`tr[data-sample="${sample}"]`).forEach((line) => line.classList.add("chosen"));
  const most = Math.max(...own.columns.gradient, 1e-30);
  const spans = own.texts.map((text, place) => {
    const span = element("span", { textContent: text });
    span.dataset.place = place;
    const advantage = own.columns.advantage[place], strength = own.columns.gradient[place] / most;
    if (!own.trained[place]) span.className = "other";
    else {
      const colour = advantage < 0 ? "var(--bad)" : "var(--good)";
      span.style.background = `color-mix(in srgb, ${colour} ${Math.round(70 * strength)}%, transparent)`;
      const marks = own.marks[place], gap = Math.abs(own.columns.policy[place] - own.columns.engine[place]);
      span.classList.toggle("clipped", Boolean(marks & CLIPPED));
      span.classList.toggle("dropped", Boolean(marks & DROPPED));
      span.classList.toggle("far", gap > FAR);
    }
    return span;
  });
  const text = element("p", { className: "text tall" }, ...spans);
  text.onpointermove = (event) => {
    const place = event.target.dataset.place;
    tip.hidden = place === undefined;
    if (tip.hidden) return;
    tip.replaceChildren(element("table", {}, ...facts(own, Number(place)).map(([name, value]) => element("tr", {}, element("td", { textContent: name }), element("td", { textContent: value })))));
    tip.style.left = `${Math.max(Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8), 8)}px`;
    tip.style.top = `${Math.max(Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8), 8)}px`;
  };
  text.onpointerleave = () => { tip.hidden = true; };
  const title = `Sample ${sample}: reward ${number(one.reward)}, advantage ${number(one.advantage)}, ${percent(one.gradient)} of the gradient`;
  const legend = "green: more likely, red: less likely, by the token's gradient; wavy: clipped; struck out: dropped; underlined: policy and engine differ by more than " + FAR + "; grey: no loss";
  shown.replaceChildren(element("h3", { textContent: title }), text, element("p", { className: "missing", textContent: legend }));
}

if (data.tokens.length) show(data.tokens[0].number);
