"use strict";
// Small charts in SVG: lines over steps or minutes, or stacked areas. All charts share the controls at the top of the
// page and the position of the pointer.

const shared = { smooth: 0, axis: "step", log: false, hidden: new Set() };

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else if (value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawn(parent, tag, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// 0.0123, 4.57, 1,234, 5.68 G.
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, factor] of [["T", 1e12], ["G", 1e9], ["M", 1e6]]) {
    if (size >= factor) return `${trimmed(value / factor)} ${unit}`;
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 1e-4 ? value.toExponential(2) : trimmed(value);
}

function trimmed(value) {
  return String(Number(value.toPrecision(4)));
}

// Round values from at most `low` to at least `high`.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    found.push(Number((index * step).toPrecision(12)));
  }
  return found;
}

// An exponential moving mean, normalized so that it starts at the first value.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

const SIZE = { height: 210, left: 52, right: 10, top: 8, bottom: 24 };

class Chart {
  static all = [];
  static watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = Chart.all.find((one) => one.box === entry.target);
      chart.visible = entry.isIntersecting;
      if (chart.visible && chart.stale) chart.draw();
    }
  }, { rootMargin: "200px" });

  // series: [{label, run, colour, dashed, xs, ys}]; stacked: stacked areas; limits: those of the vertical axis.
  constructor(title, series, { stacked = false, limits = null, legend = false } = {}) {
    Object.assign(this, { title, series, stacked, limits, stale: true, visible: false });
    this.box = element("div", { class: "chart" });
    this.node = element("div", { class: "card" }, element("h3", { text: title }), legend ? this.legend() : null, this.box);
    Chart.all.push(this);
    Chart.watcher.observe(this.box);
    new ResizeObserver(() => this.redraw()).observe(this.box);
  }

  static redrawAll() {
    for (const chart of Chart.all) chart.redraw();
  }

  redraw() {
    this.stale = true;
    if (this.visible) this.draw();
  }

  legend() {
    const shown = new Map([...this.series].sort((a, b) => Boolean(a.dashed) - Boolean(b.dashed)).map((one) => [one.name ?? one.label, one]));
    return element("div", { class: "legend" }, ...[...shown].map(([name, one]) =>
      element("span", {}, element("i", {
        class: this.stacked ? "box" : one.dashed ? "dashed" : "",
        style: this.stacked ? `background:${one.colour}` : `border-color:${one.colour}`,
      }), name)));
  }

  // The visible series, over the chosen horizontal axis.
  lines() {
    const lines = this.series.filter((one) => !shared.hidden.has(one.run)).map((one) => {
      const xs = shared.axis === "step" ? one.xs : one.xs.map((step) => RUNS[one.run].minutes[step] ?? null);
      return { ...one, xs, raw: one.ys, ys: shared.smooth && !this.stacked ? smoothed(one.ys, shared.smooth) : one.ys };
    });
    if (!this.stacked) return lines;
    let below = null;
    for (const line of lines) {
      line.below = below ?? line.ys.map(() => 0);
      line.above = line.ys.map((value, place) => (value ?? 0) + line.below[place]);
      below = line.above;
    }
    return lines;
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width) return;
    this.stale = false;
    const lines = this.lines(), isLog = shared.log && !this.stacked;
    const tops = lines.flatMap((line) => (this.stacked ? line.above : [...line.ys, ...(shared.smooth ? line.raw : [])]));
    const values = tops.filter((value) => value !== null && (!isLog || value > 0));
    const xs = lines.flatMap((line) => line.xs).filter((x) => x !== null);
    this.box.replaceChildren();
    const canvas = drawn(this.box, "svg", { viewBox: `0 0 ${width} ${SIZE.height}`, role: "img", "aria-label": this.title });
    if (!values.length || !xs.length) {
      drawn(canvas, "text", { x: width / 2, y: SIZE.height / 2, "text-anchor": "middle", class: "empty" }, "nothing to show");
      return;
    }
    this.scales(width, xs, values, isLog);
    this.axes(canvas, width, isLog);
    for (const line of lines) this.stacked ? this.area(canvas, line) : this.line(canvas, line, isLog);
    this.marks = drawn(canvas, "g");
    this.shown = lines;
    const hit = drawn(canvas, "rect", {
      x: SIZE.left, y: SIZE.top, width: width - SIZE.left - SIZE.right, height: SIZE.height - SIZE.top - SIZE.bottom, fill: "transparent",
    });
    hit.addEventListener("pointermove", (event) => this.point(event, width));
    hit.addEventListener("pointerleave", () => hover(null));
  }

  scales(width, xs, values, isLog) {
    let [low, high] = this.limits ?? range(values);
    if (this.stacked) low = 0;
    if (isLog) [low, high] = range(values).map(Math.log10);
    if (high - low < 1e-12) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
    const padding = this.limits || (this.stacked && !isLog) ? 0 : (high - low) * 0.05;
    this.low = low - padding;
    this.high = high + (this.stacked ? (high - low) * 0.04 : padding);
    [this.first, this.last] = range(xs);
    if (this.last === this.first) this.last = this.first + 1;
    const across = width - SIZE.left - SIZE.right, down = SIZE.height - SIZE.top - SIZE.bottom;
    this.x = (value) => SIZE.left + ((value - this.first) / (this.last - this.first)) * across;
    this.y = (value) => SIZE.top + (1 - ((isLog ? Math.log10(value) : value) - this.low) / (this.high - this.low)) * down;
  }

  axes(canvas, width, isLog) {
    const floor = SIZE.height - SIZE.bottom;
    let levels = ticks(this.low, this.high, 5);
    if (isLog) {
      const whole = levels.filter(Number.isInteger);
      levels = (whole.length > 1 ? whole : levels).map((power) => 10 ** power);
    }
    for (const level of levels) {
      const y = this.y(level);
      drawn(canvas, "line", { class: "gridline", x1: SIZE.left, x2: width - SIZE.right, y1: y, y2: y });
      drawn(canvas, "text", { x: SIZE.left - 6, y: y + 4, "text-anchor": "end" }, number(level));
    }
    for (const x of ticks(this.first, this.last, Math.max(2, Math.floor(width / 110)))) {
      if (shared.axis === "step" && !Number.isInteger(x)) continue;
      drawn(canvas, "text", { x: this.x(x), y: floor + 16, "text-anchor": "middle" }, number(x) + (shared.axis === "step" ? "" : " min"));
    }
  }

  line(canvas, line, isLog) {
    const place = (ys) => {
      let path = "", open = false, points = 0;
      ys.forEach((y, index) => {
        const x = line.xs[index], there = y !== null && x !== null && (!isLog || y > 0);
        if (there) {
          path += `${open ? "L" : "M"}${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`;
          points++;
        }
        open = there;
      });
      return [path, points];
    };
    if (shared.smooth) drawn(canvas, "path", { class: "line raw", d: place(line.raw)[0], stroke: line.colour });
    const [path, points] = place(line.ys);
    drawn(canvas, "path", { class: "line", d: path, stroke: line.colour, ...(line.dashed ? { "stroke-dasharray": "5 4" } : {}) });
    if (points > (line.dashed ? 60 : 1)) return;
    line.ys.forEach((y, index) => {
      if (y === null || line.xs[index] === null || (isLog && y <= 0)) return;
      drawn(canvas, "circle", { cx: this.x(line.xs[index]), cy: this.y(y), r: 3, fill: line.colour });
    });
  }

  area(canvas, line) {
    const there = line.xs.map((x, index) => [x, index]).filter(([x]) => x !== null);
    const edge = (ys, steps) => steps.map(([x, index]) => `${this.x(x).toFixed(1)},${this.y(ys[index]).toFixed(1)}`).join("L");
    const path = `M${edge(line.above, there)}L${edge(line.below, [...there].reverse())}Z`;
    drawn(canvas, "path", { class: "area", d: path, fill: line.colour, "fill-opacity": 0.85 });
  }

  point(event, width) {
    const bounds = this.box.getBoundingClientRect();
    const wanted = this.first + ((event.clientX - bounds.left) * (width / bounds.width) - SIZE.left) / (width - SIZE.left - SIZE.right) * (this.last - this.first);
    const xs = this.shown.flatMap((line) => line.xs).filter((x) => x !== null);
    const nearest = xs.reduce((best, x) => (Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best));
    hover(nearest, this, event);
  }

  mark(x) {
    this.marks?.replaceChildren();
    if (x === null || !this.marks || this.stale || x < this.first || x > this.last) return;
    drawn(this.marks, "line", { class: "mark", x1: this.x(x), x2: this.x(x), y1: SIZE.top, y2: SIZE.height - SIZE.bottom });
  }

  // Each line's value at `x`, or else its nearest value.
  at(x) {
    return this.shown.map((line) => {
      let best = -1;
      line.xs.forEach((own, index) => {
        if (own !== null && line.ys[index] !== null && (best < 0 || Math.abs(own - x) < Math.abs(line.xs[best] - x))) best = index;
      });
      return best < 0 ? null : { ...line, at: line.xs[best], value: line.ys[best] };
    }).filter((one) => one && (this.stacked ? one.at === x : true));
  }
}

function range(values) {
  return [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
}

function hover(x, chart, event) {
  for (const one of Chart.all) if (one.visible) one.mark(x);
  const tip = document.getElementById("tip");
  tip.hidden = x === null;
  if (x === null) return;
  const place = (value) => (shared.axis === "step" ? `step ${number(value)}` : `${number(value)} min`);
  const rows = chart.at(x);
  const total = chart.stacked ? [element("tr", {}, element("td"), element("td", { text: "together" }),
    element("td", { class: "number", text: number(rows.reduce((sum, row) => sum + row.value, 0)) }))] : [];
  tip.replaceChildren(element("b", { text: place(x) }), element("table", {}, ...[...rows].map((row) =>
    element("tr", {}, element("td", {}, element("span", { class: "swatch", style: `background:${row.colour};margin:0` })),
      element("td", { text: row.label + (row.at === x ? "" : ` (${place(row.at)})`) }),
      element("td", { class: "number", text: number(row.value) }))), ...total));
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 16, innerWidth - width - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, innerHeight - height - 8)}px`;
}
