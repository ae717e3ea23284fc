// When things happened (episodes, versions, lag), and what looks wrong.

import { el, empty, fill, link, num, reward, seconds, segmented } from "./dom.js";
import { get, remember, runHash, runUrl } from "./data.js";
import { css, histogram, prepared, ticks } from "./chart.js";
import { diverging, kindColor } from "./colors.js";

const AXIS = 22, BAR = 7;

export async function timeView({ run, params }) {
  const view = new Timeline(run, params);
  await view.load();
  return { node: view.node, up: runHash(run, "/metrics"), refresh: () => view.load(), shown: () => view.draw(), move: (d) => view.move(d), open: () => view.open(), leave: () => view.observer.disconnect() };
}

class Timeline {
  constructor(run, params) {
    Object.assign(this, { run, params: { ...params }, at: null, bars: [], updates: [] });
    this.canvas = el("canvas.timeline", { tabindex: "0", role: "img", onpointermove: (e) => this.point(this.find(e.offsetX, e.offsetY)), onpointerleave: () => this.point(null), onclick: () => this.open() });
    this.reader = el("div.timeline-reader", { role: "status" });
    this.controls = el("div.controls");
    this.side = el("div.panels");
    this.sums = el("p.muted");
    this.node = el("section", {}, el("div.title", {}, el("div", {}, el("h1", {}, "Time"), this.sums), this.controls), el("div.timeline-box", {}, this.canvas), this.reader, this.side);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
  }

  async load() {
    const steps = (await get(runUrl(this.run, "/steps"))).steps.map((s) => s.step);
    const last = Number(this.params.step || steps.at(-1) || 0), span = Number(this.params.span || 5);
    const wanted = steps.filter((s) => s <= last).slice(-span);
    const answers = await Promise.all(wanted.map((step) => get(runUrl(this.run, "/time"), { step })));
    this.answer = answers.at(-1) || { episodes: [] };
    const episodes = answers.flatMap((a) => a.episodes).filter((e) => e.started_ns && e.ended_ns && wanted.includes(e.step)).sort((a, b) => a.started_ns - b.started_ns);
    this.updates = [...new Map(answers.flatMap((a) => a.steps || []).map((s) => [s.step, s])).values()].filter((s) => s.time);
    this.place([...new Map(episodes.map((e) => [e.id, e])).values()]);
    const slider = el("input", { type: "range", min: 0, max: Math.max(0, steps.length - 1), value: Math.max(0, steps.indexOf(last)), "aria-label": "Last step", onchange: () => this.set({ step: steps[Number(slider.value)] }) });
    fill(this.controls, el("span.muted", {}, "up to step ", String(last)), slider, segmented("Steps", [["1", "1 step"], ["5", "5 steps"], ["20", "20 steps"]], String(span), (value) => this.set({ span: value })), segmented("Colour", [["version", "Version"], ["reward", "Reward"]], this.params.color || "version", (color) => this.set({ color })));
    const busy = this.bars.reduce((s, b) => s + (b.ended_ns - b.started_ns), 0) / 1e9, wall = this.bars.length ? (this.high - this.low) / 1e9 : 0;
    this.sums.textContent = this.bars.length ? `${num(this.bars.length)} episodes in ${seconds(wall)} · ${num(busy / (wall || 1))} at once on average · longest ${seconds(Math.max(...this.bars.map((b) => b.ended_ns - b.started_ns)) / 1e9)}` : "No episode has times.";
    this.drawSide();
    this.point(null);
    this.draw();
  }

  set(change) {
    Object.assign(this.params, change);
    remember(this.params);
    this.load();
  }

  /** Every episode goes into the first lane that is free when it starts. */
  place(episodes) {
    const free = [];
    this.bars = episodes.map((e) => {
      let lane = free.findIndex((end) => end <= e.started_ns);
      if (lane < 0) lane = free.length;
      free[lane] = e.ended_ns;
      return { ...e, lane };
    });
    this.lanes = free.length;
    this.low = Math.min(...this.bars.map((b) => b.started_ns));
    this.high = Math.max(...this.bars.map((b) => b.ended_ns));
    this.canvas.style.height = `${Math.max(80, Math.min(520, this.lanes * BAR) + AXIS)}px`;
    this.canvas.setAttribute("aria-label", `${this.bars.length} episodes in ${this.lanes} lanes; j and k move, Enter opens`);
  }

  draw() {
    if (!this.canvas.clientWidth || !this.bars.length) return;
    const { g, width, height } = prepared(this.canvas);
    const size = (height - AXIS) / this.lanes, x = (ns) => ((ns - this.low) / (this.high - this.low || 1)) * (width - 2) + 1;
    this.scale = { x, size };
    g.fillStyle = css("--muted");
    g.strokeStyle = css("--line");
    const whole = (this.high - this.low) / 1e9;
    for (const s of ticks(0, whole, 8)) {
      const at = Math.round(x(this.low + s * 1e9)) + 0.5;
      g.beginPath(); g.moveTo(at, 0); g.lineTo(at, height - AXIS); g.stroke();
      g.textAlign = s === 0 ? "left" : at > width - 30 ? "right" : "center";
      g.fillText(s === 0 ? "0 s" : seconds(s), at, height - 6);
    }
    g.setLineDash([4, 4]);
    g.strokeStyle = css("--muted");
    for (const update of this.updates) {
      const at = Math.round(x(update.time * 1e9)) + 0.5;
      if (at < 0 || at > width) continue;
      g.beginPath(); g.moveTo(at, 0); g.lineTo(at, height - AXIS); g.stroke();
    }
    g.setLineDash([]);
    for (const bar of this.bars) {
      const reach = Math.max(3, x(bar.ended_ns) - x(bar.started_ns) - 0.5), [first, last] = bar.versions || [0, 0];
      g.fillStyle = this.params.color === "reward" ? (bar.reward ? diverging(Math.sign(bar.reward)).background : css("--quiet")) : kindColor(last ?? 0);
      g.globalAlpha = bar === this.at ? 1 : 0.78;
      g.fillRect(x(bar.started_ns), bar.lane * size, reach, Math.max(1, size - 1));
      if (this.params.color !== "reward" && first !== last && first !== undefined) { // the weights changed during the episode
        g.fillStyle = kindColor(first);
        g.fillRect(x(bar.started_ns), bar.lane * size, Math.min(reach / 2, 5), Math.max(1, size - 1));
      }
      g.globalAlpha = 1;
      if (bar === this.at) { g.strokeStyle = css("--ink"); g.lineWidth = 1.5; g.strokeRect(x(bar.started_ns), bar.lane * size - 0.5, reach, size); g.lineWidth = 1; }
    }
  }

  find(px, py) {
    if (!this.scale) return null;
    const lane = Math.floor(py / this.scale.size), { x } = this.scale;
    return this.bars.find((b) => b.lane === lane && x(b.started_ns) - 1 <= px && px <= Math.max(x(b.ended_ns), x(b.started_ns) + 3)) || null;
  }

  point(bar) {
    this.at = bar;
    fill(this.reader, bar ? [reward(bar.reward), ` step ${num(bar.step)} · ${seconds((bar.ended_ns - bar.started_ns) / 1e9)} · ${num(bar.tokens)} tokens · weights ${[...new Set(bar.versions || [])].map((v) => `v${v}`).join(" to ") || "–"} · started at ${seconds((bar.started_ns - this.low) / 1e9)}`] : el("span.muted", {}, "A bar is an episode, from its first to its last step. The colour is the version of the weights; a differently coloured beginning means that they changed on the way. A dashed line is the end of an update. Click a bar to open it."));
    this.draw();
  }

  move(delta) {
    if (!this.bars.length) return;
    const at = this.at ? this.bars.indexOf(this.at) + delta : 0;
    this.point(this.bars[Math.max(0, Math.min(this.bars.length - 1, at))]);
  }

  open() {
    if (this.at) location.hash = runHash(this.run, `/rollout/${encodeURIComponent(this.at.id)}`);
  }

  drawSide() {
    const { lag_histogram: lag, pipeline } = this.answer;
    fill(this.side, lag?.counts?.length ? el("div.panel", {}, el("h3", {}, "Lag: versions between sampling and training"), histogram(lag, { label: "lag" })) : null,
      pipeline ? el("div.panel", {}, el("h3", {}, "Where the time of the pipeline went"), account(pipeline)) : null);
  }
}

function account(pipeline) {
  const entries = Object.entries(pipeline).filter(([, v]) => typeof v === "number"), most = Math.max(1e-9, ...entries.map(([, v]) => Math.abs(v)));
  return el("div.account", {}, entries.map(([name, v]) => el("div", {}, el("span.mono", {}, name), el("div.progress", {}, el("div", { css: { width: `${(100 * Math.abs(v)) / most}%` } })), el("span.n", {}, num(v)))));
}

// --- health ---

export async function healthView({ run }) {
  const box = el("div.advisories");
  const draw = async () => {
    const { advisories } = await get(runUrl(run, "/health"));
    fill(box, advisories.length ? advisories.map((a) => {
      const to = typeof a.link === "string" && a.link.startsWith("#/") ? a.link : null;
      return el(`article.advisory.${a.level}`, {}, el("div.glyph", { "aria-hidden": "true" }, { error: "✕", warning: "▲", info: "i" }[a.level]),
        el("div", {}, el("h2", {}, a.title), el("p", {}, a.detail), el("p.advice", {}, el("strong", {}, "What to do: "), a.advice), el("p.muted.small", {}, a.level, a.step === null || a.step === undefined ? "" : ` · step ${num(a.step)}`, " · ", el("span.mono", {}, a.code))),
        to ? link(to, { class: "button", "data-nav": true }, "Show") : null);
    }) : empty("Nothing to worry about", "No check found anything unusual."));
  };
  await draw();
  return { node: el("section", {}, el("div.title", {}, el("div", {}, el("h1", {}, "Health"), el("p.muted", {}, "What the run's own numbers say, with what to do."))), box), up: runHash(run, "/metrics"), refresh: draw };
}
