// Runs, the curves of one run, and the curves of several.

import { ago, debounced, el, empty, fill, link, num, segmented } from "./dom.js";
import { get, query, remember, runHash, runUrl } from "./data.js";
import { LineChart } from "./chart.js";
import { kindColor } from "./colors.js";

const REWARD = "train/avg_total_reward";
const KEY_METRICS = [REWARD, "eval/accuracy", "train/avg_completion_length", "train/entropy", "train/kl_actor_policy", "train/grad_norm", "train/loss", "train/clip_frac", "train/truncated_rate", "train/zero_weight_rate", "train/lag_mean", "perf/step_s"];

// --- all runs ---

export async function runsView({ params }) {
  const chosen = new Set((params.runs || "").split(",").filter(Boolean));
  const { root, runs } = await get("api/runs");
  if (!runs.length) return { node: empty("No run here yet", `${root} has no run folder. Start one with: ludic train … --out ${root}/first`) };
  const compare = el("a.button", {});
  const update = () => {
    compare.textContent = chosen.size < 2 ? "Choose runs to compare" : `Compare ${chosen.size} runs`;
    compare.classList.toggle("disabled", chosen.size < 2);
    if (chosen.size < 2) compare.removeAttribute("href");
    else compare.setAttribute("href", `#/compare${query({ runs: [...chosen].join(",") })}`);
  };
  update();
  const sparks = [];
  const rows = runs.map((run) => {
    const rewards = Object.keys(run.last ?? {}).filter((name) => name === REWARD || name.endsWith(`/${REWARD}`)).sort();
    const spark = new Spark(run.id, rewards.length ? rewards : [REWARD]);
    sparks.push(spark);
    const open = runHash(run.id, "/metrics");
    return el("div.run-row", {},
      el("label.pick", { title: "Compare" }, el("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, checked: chosen.has(run.id), onchange: (e) => { chosen[e.target.checked ? "add" : "delete"](run.id); update(); } })),
      link(open, { class: "run-link", "data-nav": true }, el("div", {}, el("strong", {}, run.name), run.damage.length ? el("div.damage", {}, run.damage.join(" · ")) : null, el("div.muted", {}, [run.env, run.model, run.algo, run.seed === null || run.seed === undefined ? null : `seed ${run.seed}`].filter((x) => x !== null && x !== undefined).join(" · "))),
        el("div", { title: run.error ?? "" }, el(`span.badge.${run.state}`, {}, run.state), el("div.muted", {}, ago(run.updated))),
        progress(run), spark.node, el("div.figure", {}, spark.names.map((name) => el("div", {}, policyOf(name), el("strong", {}, num(run.last?.[name])))), el("div.muted", {}, "reward"))));
  });
  const timer = setInterval(() => location.hash.includes("/runs") && sparks.forEach((s) => s.load()), 15000);
  sparks.slice(0, 30).forEach((s) => s.load());
  return {
    node: el("section", {}, el("div.title", {}, el("div", {}, el("h1", {}, "Runs"), el("p.muted", {}, root)), compare), el("div.run-list", {}, rows)),
    leave: () => clearInterval(timer),
  };
}

function progress(run) {
  const share = run.steps_planned ? Math.min(1, run.step / run.steps_planned) : null;
  return el("div.progress-cell", {}, el("div", {}, `step ${num(run.step)}${run.steps_planned ? ` of ${num(run.steps_planned)}` : ""}`),
    share === null ? null : el("div.progress", {}, el("div", { css: { width: `${100 * share}%` } })));
}

// Of several policies each has its own reward: ann/train/avg_total_reward.
function policyOf(name) {
  return name === REWARD ? null : el("span.muted", {}, `${name.slice(0, -REWARD.length - 1)} `);
}

class Spark {
  constructor(run, names) {
    Object.assign(this, { run, names });
    this.chart = new LineChart({ title: "reward", isBare: true });
    this.chart.canvas.tabIndex = -1;
    delete this.chart.canvas.dataset.nav;
    this.node = el("div.spark", {}, this.chart.canvas);
  }

  async load() {
    const { steps, columns } = await get(runUrl(this.run, "/metrics"), { names: this.names.join(",") }).catch(() => ({ steps: [], columns: {} }));
    this.chart.set(this.names.map((name, i) => ({ name, steps, values: columns[name] || [], color: kindColor(i) })), 0.6);
  }
}

// --- one run, several runs ---

export async function metricsView({ run, params }) {
  const info = await get(runUrl(run));
  const charts = new Charts([run], info.metrics, params, (step) => { location.hash = runHash(run, `/step/${step}`); });
  await charts.load();
  const config = el("details.config", {}, el("summary", {}, "Settings of the run"), el("dl.settings", {}, flat(info.config).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, String(v))))));
  const steps = info.steps?.length ? `steps ${num(info.steps[0])} to ${num(info.steps.at(-1))}` : "no step yet";
  return {
    node: el("section", {}, el("div.title", {}, el("div", {}, el("h1", {}, run), el("p.muted", {}, `${steps} · ${num(info.num_rollouts)} rollouts stored · click a curve to open the step`)), charts.controls), charts.node, config),
    up: "#/runs", refresh: () => charts.load(),
  };
}

export async function compareView({ params }) {
  const runs = (params.runs || "").split(",").filter(Boolean);
  if (!runs.length) return { node: empty("Nothing to compare", "Choose runs on the page of all runs.") };
  const infos = await Promise.all(runs.map((run) => get(runUrl(run))));
  const names = [...new Set(infos.flatMap((info) => info.metrics))];
  const charts = new Charts(runs, names, params, null);
  await charts.load();
  const all = infos.map((info) => new Map(flat(info.config)));
  const keys = [...new Set(all.flatMap((m) => [...m.keys()]))].filter((k) => new Set(all.map((m) => String(m.get(k)))).size > 1);
  const key = el("div.run-key", {}, runs.map((run, i) => link(runHash(run, "/metrics"), {}, el("span.dot", { css: { backgroundColor: kindColor(i) } }), run)));
  const differences = keys.length ? el("div.scroll", {}, el("table.grid", {}, el("thead", {}, el("tr", {}, el("th", {}, "Setting"), runs.map((run) => el("th", {}, run)))),
    el("tbody", {}, keys.map((k) => el("tr", {}, el("td.mono", {}, k), all.map((m) => el("td.mono", {}, m.has(k) ? String(m.get(k)) : "–"))))))) : el("p.muted", {}, "The settings are equal.");
  const timer = setInterval(() => charts.load().catch(() => {}), 5000);
  return { node: el("section", {}, el("div.title", {}, el("div", {}, el("h1", {}, `${runs.length} runs compared`), key), charts.controls), charts.node, el("h2", {}, "Settings that differ"), differences), up: "#/runs", leave: () => clearInterval(timer) };
}

class Charts {
  constructor(runs, names, params, onStep) {
    Object.assign(this, { runs, names, onStep, params: { ...params } });
    this.known = runs.map(() => ({ steps: [], columns: {} }));
    this.charts = new Map();
    this.node = el("div");
    this.controls = el("div.controls");
    this.drawControls();
    this.layout();
  }

  get weight() {
    return Number(this.params.smooth || 0);
  }

  drawControls() {
    const search = el("input", { type: "search", placeholder: "Find a metric  /", "aria-label": "Find a metric", value: this.params.find || "", oninput: debounced(120, () => this.setting({ find: search.value })) });
    this.smoothing = el("div");
    fill(this.controls, search, this.smoothing);
    this.drawSmoothing();
  }

  drawSmoothing() {
    fill(this.smoothing, segmented("Smoothing", [["0", "Raw"], ["0.6", "Smooth"], ["0.9", "Smoother"]], String(this.params.smooth || "0"), (smooth) => this.setting({ smooth: smooth === "0" ? "" : smooth })));
  }

  setting(change) {
    Object.assign(this.params, change);
    remember(this.params);
    this.drawSmoothing();
    this.layout();
    this.draw();
  }

  layout() {
    const find = (this.params.find || "").toLowerCase();
    const found = this.names.filter((name) => name.toLowerCase().includes(find));
    // Of several policies each has its own: ann/train/loss.
    const first = find ? found : KEY_METRICS.flatMap((key) => found.filter((name) => name === key || name.endsWith(`/${key}`)));
    const shownFirst = first.length ? first : found.slice(0, 9);
    const rest = found.filter((name) => !shownFirst.includes(name));
    const grid = (names) => el("div.charts", {}, names.map((name) => this.chart(name).node));
    const more = el("details.more", { open: this.isOpen, ontoggle: () => { this.isOpen = more.open; this.draw(); } }, el("summary", {}, `${rest.length} more metrics`), grid(rest));
    fill(this.node, found.length ? null : empty("No metric", this.names.length ? `No name contains "${this.params.find}".` : "The run has logged nothing yet."), grid(shownFirst), rest.length ? more : null);
  }

  chart(name) {
    if (!this.charts.has(name)) {
      const follow = (step) => { for (const other of this.charts.values()) other.point(step, false); };
      this.charts.set(name, new LineChart({ title: name, onStep: this.onStep, onHover: follow }));
    }
    return this.charts.get(name);
  }

  async load() {
    await Promise.all(this.runs.map(async (run, i) => {
      const known = this.known[i];
      const answer = await get(runUrl(run, "/metrics"), { since: known.steps.at(-1) });
      if (known.steps.length && answer.steps[0] <= known.steps.at(-1)) Object.assign(known, answer); // an exported file answers in full
      else {
        known.steps = known.steps.concat(answer.steps);
        for (const [name, values] of Object.entries(answer.columns)) known.columns[name] = (known.columns[name] || Array(known.steps.length - answer.steps.length).fill(null)).concat(values);
        for (const column of Object.values(known.columns)) while (column.length < known.steps.length) column.push(null);
      }
    }));
    const names = [...new Set([...this.names, ...this.known.flatMap((k) => Object.keys(k.columns))])];
    if (names.length !== this.names.length) { this.names = names; this.layout(); }
    this.draw();
  }

  draw() {
    for (const [name, chart] of this.charts) {
      chart.set(this.runs.map((run, i) => ({ name: run, steps: this.known[i].steps, values: this.known[i].columns[name] || [], color: kindColor(i) })), this.weight);
    }
  }
}

function flat(value, prefix = "") {
  return Object.entries(value || {}).flatMap(([k, v]) => (v !== null && typeof v === "object" && !Array.isArray(v) ? flat(v, `${prefix}${k}.`) : [[`${prefix}${k}`, Array.isArray(v) ? JSON.stringify(v) : v]]));
}
