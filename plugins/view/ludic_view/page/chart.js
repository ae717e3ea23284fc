// Line charts on a canvas and histograms as SVG: all that the page needs, drawn here so that nothing is fetched from elsewhere.

import { el, num, svg } from "./dom.js";
import { kindColor } from "./colors.js";

const PAD = { left: 16, right: 10, top: 8, bottom: 20 };
const DASHES = [[], [6, 3], [2, 2], [8, 2, 2, 2], [4, 4]];

export function ticks(low, high, wanted = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((m) => m * power >= raw) * power;
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(Math.abs(v) < step * 1e-6 ? 0 : v);
  return found;
}

/** Exponential moving average without the bias towards the first value; gaps stay gaps. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, norm = 0;
  return values.map((v) => {
    if (v === null || !Number.isFinite(v)) return null;
    sum = weight * sum + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A canvas of the element's size in device pixels, cleared, with its context scaled to CSS pixels. */
export function prepared(canvas) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = `11px ${css("--sans")}`;
  return { g, width, height };
}

/** lines: [{name, steps, values}]. `onStep(step)` when a step is clicked; `onHover(step|null)` so that other charts follow. */
export class LineChart {
  constructor({ title, onStep = null, onHover = null, isBare = false }) {
    this.title = title;
    this.pad = isBare ? { left: 2, right: 2, top: 2, bottom: 2 } : PAD;
    this.isBare = isBare;
    this.lines = [];
    this.weight = 0;
    this.cursor = null;
    this.onStep = onStep;
    this.onHover = onHover;
    this.canvas = el("canvas.plot", { tabindex: "0", role: "img", "data-nav": true });
    this.readout = el("span.readout", { "aria-live": "off" });
    this.node = el("figure.chart", {}, el("figcaption", {}, el("span.name", { title }, title), this.readout), this.canvas);
    this.canvas.addEventListener("pointermove", (e) => this.point(this.stepAt(e.offsetX)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("click", (e) => this.open(this.stepAt(e.offsetX)));
    this.canvas.addEventListener("keydown", (e) => this.key(e));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  set(lines, weight = this.weight) {
    this.lines = lines;
    this.weight = weight;
    this.draw();
  }

  key(event) {
    const all = this.allSteps();
    const at = this.cursor === null ? all.length - 1 : all.indexOf(this.cursor);
    if (event.key === "ArrowLeft") this.point(all[Math.max(0, at - 1)]);
    else if (event.key === "ArrowRight") this.point(all[Math.min(all.length - 1, at + 1)]);
    else if (event.key === "Enter" && this.cursor !== null) this.open(this.cursor);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  open(step) {
    if (step !== null && step !== undefined && this.onStep) this.onStep(step);
  }

  allSteps() {
    return [...new Set(this.lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  }

  stepAt(x) {
    if (!this.x) return null;
    const wanted = this.x.low + ((x - this.pad.left) / this.x.size) * (this.x.high - this.x.low);
    return this.allSteps().reduce((best, s) => (best === null || Math.abs(s - wanted) < Math.abs(best - wanted) ? s : best), null);
  }

  point(step, tell = true) {
    if (step === undefined || step === this.cursor) return;
    this.cursor = step;
    this.draw();
    if (tell && this.onHover) this.onHover(step);
  }

  draw() {
    if (!this.canvas.clientWidth) return;
    const { g, width, height } = prepared(this.canvas);
    const steps = this.allSteps();
    const shown = this.lines.map((line) => smoothed(line.values, this.weight));
    const values = this.lines.flatMap((line) => line.values).concat(this.weight ? shown.flat() : []).filter((v) => v !== null && Number.isFinite(v));
    this.describe(shown.flat().filter((v) => v !== null && Number.isFinite(v)));
    if (!values.length) {
      g.fillStyle = css("--muted");
      g.fillText("no values yet", this.pad.left, height / 2);
      this.x = null;
      return;
    }
    let low = Math.min(...values), high = Math.max(...values);
    if (low === high) [low, high] = low ? [Math.min(low, 0), Math.max(high, 0)] : [0, 1]; // a rate that never changes
    [low, high] = [low - (high - low) * 0.06, high + (high - low) * 0.06];
    const levels = ticks(low, high);
    if (!this.isBare) this.pad = { ...PAD, left: PAD.left + Math.max(24, ...levels.map((v) => g.measureText(num(v)).width)) };
    this.x = { low: steps[0], high: steps.at(-1) > steps[0] ? steps.at(-1) : steps[0] + 1, size: width - this.pad.left - this.pad.right };
    const px = (s) => this.pad.left + ((s - this.x.low) / (this.x.high - this.x.low)) * this.x.size;
    const py = (v) => this.pad.top + (1 - (v - low) / (high - low)) * (height - this.pad.top - this.pad.bottom);
    if (!this.isBare) this.axes(g, width, height, levels, px, py);
    this.lines.forEach((line, i) => {
      const color = line.color || kindColor(i);
      if (this.weight) this.stroke(g, line.steps, line.values, px, py, color, 0.22, []);
      this.stroke(g, line.steps, shown[i], px, py, color, 1, DASHES[i % DASHES.length]);
    });
    this.mark(g, height, px, py, shown);
  }

  axes(g, width, height, levels, px, py) {
    g.strokeStyle = css("--line");
    g.fillStyle = css("--muted");
    g.lineWidth = 1;
    g.textAlign = "right";
    g.textBaseline = "middle";
    for (const v of levels) {
      const y = Math.round(py(v)) + 0.5;
      g.beginPath(); g.moveTo(this.pad.left, y); g.lineTo(width - this.pad.right, y); g.stroke();
      g.fillText(num(v), this.pad.left - 6, y);
    }
    g.textAlign = "center";
    g.textBaseline = "alphabetic";
    for (const s of ticks(this.x.low, this.x.high, Math.max(2, width / 90)).filter(Number.isInteger)) g.fillText(num(s), px(s), height - 5);
  }

  stroke(g, steps, values, px, py, color, alpha, dash) {
    g.strokeStyle = color;
    g.fillStyle = color;
    g.globalAlpha = alpha;
    g.lineWidth = 1.8;
    g.lineJoin = "round";
    g.setLineDash(dash);
    g.beginPath();
    let open = false, points = 0;
    steps.forEach((s, i) => {
      const v = values[i];
      if (v === null || v === undefined || !Number.isFinite(v)) return; // a metric that is logged every N steps is one line
      if (open) g.lineTo(px(s), py(v));
      else g.moveTo(px(s), py(v));
      open = true;
      points += 1;
    });
    g.stroke();
    g.setLineDash([]);
    if (points <= 30 && !this.isBare) steps.forEach((s, i) => {
      if (values[i] === null || values[i] === undefined || !Number.isFinite(values[i])) return;
      g.beginPath(); g.arc(px(s), py(values[i]), 2.2, 0, 7); g.fill();
    });
    g.globalAlpha = 1;
  }

  mark(g, height, px, py, shown) {
    const last = this.lines.map((line, i) => [line, shown[i].findLast?.((v) => v !== null)]);
    if (this.cursor === null) {
      this.readout.textContent = last.length === 1 ? num(last[0][1]) : "";
      return;
    }
    const x = Math.round(px(this.cursor)) + 0.5;
    g.strokeStyle = css("--muted");
    g.beginPath(); g.moveTo(x, this.pad.top); g.lineTo(x, height - this.pad.bottom); g.stroke();
    const texts = this.lines.map((line, i) => {
      const at = line.steps.indexOf(this.cursor), v = at < 0 ? null : shown[i][at];
      if (v !== null && Number.isFinite(v)) {
        g.fillStyle = line.color || kindColor(i);
        g.beginPath(); g.arc(x, py(v), 3.5, 0, 7); g.fill();
      }
      return num(v);
    });
    this.readout.textContent = `step ${this.cursor}: ${texts.join(" · ")}`;
  }

  describe(values) {
    this.canvas.setAttribute("aria-label", values.length ? `${this.title}: ${values.length} values, last ${num(values.at(-1))}` : `${this.title}: no values yet`);
  }
}

/** Clickable bars. `onBin(low, high)`; `chosen` marks the bin that is filtered for. */
export function histogram({ edges, counts, values = null }, { onBin = null, chosen = null, label = "rewards" } = {}) {
  const width = 360, height = 84, base = height - 16, most = Math.max(1, ...counts), bar = Math.min(72, width / Math.max(1, counts.length));
  const isChosen = (i) => chosen && Math.abs(chosen[0] - edges[i]) < 1e-9 && Math.abs(chosen[1] - (edges[i + 1] ?? edges[i])) < 1e-9;
  const bins = counts.map((n, i) => {
    const high = edges[i + 1] ?? edges[i], size = n ? Math.max(2, (n / most) * (base - 12)) : 0, text = `${values ? num(values[i]) : `${num(edges[i])} to ${num(high)}`}: ${n}`;
    const act = () => onBin && n && onBin(edges[i], high, isChosen(i));
    return svg(`g.bin${isChosen(i) ? ".chosen" : ""}${n ? "" : ".none"}`, { tabindex: n && onBin ? "0" : null, role: onBin ? "button" : null, "aria-label": text, onclick: act,
      onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); e.stopPropagation(); act(); } } },
      svg("title", {}, text), svg("rect.hit", { x: i * bar, y: 0, width: bar, height: base }),
      svg("rect.bar", { x: i * bar + 1, y: base - size, width: Math.max(1, bar - 2), height: size, rx: 1.5 }),
      n && bar > 15 ? svg("text", { x: (i + 0.5) * bar, y: base - size - 3, "text-anchor": "middle" }, num(n)) : null);
  });
  return svg("svg.histogram", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Histogram of ${label}` }, bins,
    svg("line", { x1: 0, x2: width, y1: base + 0.5, y2: base + 0.5 }),
    values ? values.map((v, i) => (bar > 22 ? svg("text", { x: (i + 0.5) * bar, y: height - 3, "text-anchor": "middle" }, num(v)) : null)) : edges.length ? [svg("text", { x: 0, y: height - 3 }, num(edges[0])), svg("text", { x: bar * counts.length, y: height - 3, "text-anchor": "end" }, num(edges.at(-1)))] : null);
}
