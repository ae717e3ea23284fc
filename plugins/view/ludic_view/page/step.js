// One step, or all of them: its groups and its rollouts, with filters.

import { count, debounced, el, fill, link, named, num, reward, seconds, segmented } from "./dom.js";
import { get, query, remember, runHash, runUrl, stored } from "./data.js";
import { histogram } from "./chart.js";
import { VirtualTable } from "./table.js";

const FLAGS = [["failed", "failed"], ["parse_error", "parse errors"], ["zero_spread", "no spread"]];
const STOPS = ["", "terminated", "env", "max_steps", "context_full", "token_budget", "parse_error", "nobody_active", "failed"];

export async function stepView({ run, item, params }) {
  const view = new Step(run, item, params);
  await view.load();
  return {
    node: view.node, up: runHash(run, "/metrics"), move: (d) => view.table.move(d), open: () => view.table.open(), refresh: () => view.refresh(), shown: () => view.table.draw(),
    keys: { "[": () => view.go(-1), "]": () => view.go(1) },
  };
}

class Step {
  constructor(run, item, params) {
    Object.assign(this, { run, item, params: { show: "rollouts", ...params }, steps: [] });
    this.total = el("span.muted", { role: "status" });
    this.holder = el("div.table-holder");
    this.bars = el("div.histogram-box");
    this.filters = el("div.filters");
    this.picker = el("div.steps");
    this.sums = el("p.muted");
    this.heading = el("h1");
    this.node = el("section.fills", {}, el("div.title", {}, el("div", {}, this.heading, this.sums), this.picker), el("div.filter-box", {}, this.filters, this.bars), this.holder);
  }

  async load() {
    const asked = get(runUrl(this.run, "/steps"));
    if (this.item === "last" || this.item === null) this.steps = (await asked).steps; // else the table need not wait for it
    else asked.then(({ steps }) => { this.steps = steps; this.drawHead(); }, () => {});
    this.drawHead();
    this.drawFilters();
    this.drawTable();
  }

  get step() {
    if (this.item === "all") return null;
    const last = this.steps.at(-1)?.step ?? null;
    return this.item === "last" || this.item === null ? last : Number(this.item);
  }

  hash(step) {
    return runHash(this.run, `/step/${step}`) + query({ ...this.params, show: this.params.show === "groups" ? "groups" : "" });
  }

  go(delta) {
    const at = this.steps.findIndex((s) => s.step === this.step) + delta;
    if (this.steps[at]) location.hash = this.hash(this.steps[at].step);
  }

  drawHead() {
    const step = this.step, facts = this.steps.find((s) => s.step === step);
    this.heading.textContent = step === null ? (this.item === "all" ? "All steps" : "No step yet") : step === 0 ? "Rollouts without a step" : `Step ${step}`;
    this.sums.textContent = facts
      ? `${count(facts.num_groups, "group")} · ${count(facts.num_rollouts, "rollout")} · mean reward ${num(facts.reward_mean)} · ${count(facts.num_zero_spread, "group")} without spread · ${num(facts.num_truncated)} truncated · ${num(facts.num_failed)} failed · lag up to ${num(facts.lag_max)}`
      : this.steps.length ? `${stored ? "Of " : ""}${count(this.steps.reduce((n, s) => n + s.num_rollouts, 0), "rollout")} in ${count(this.steps.length, "step")}${stored ? ", those in this file" : ""}` : "\u00a0";
    const at = this.steps.findIndex((s) => s.step === step);
    const slider = el("input", { type: "range", min: 0, max: Math.max(0, this.steps.length - 1), "aria-label": "Step", value: Math.max(0, at), onchange: () => { location.hash = this.hash(this.steps[Number(slider.value)].step); } });
    fill(this.picker, el("button.icon", { type: "button", title: "Previous step ([)", "aria-label": "Previous step", onclick: () => this.go(-1) }, "‹"), slider,
      el("button.icon", { type: "button", title: "Next step (])", "aria-label": "Next step", onclick: () => this.go(1) }, "›"),
      link(this.hash(this.item === "all" ? "last" : "all"), { class: "button" }, this.item === "all" ? "Last step" : "All steps"));
  }

  drawFilters() {
    const p = this.params;
    const search = el("input", { type: "search", placeholder: "Search in text  /", "aria-label": "Search in text", value: p.text || "", oninput: debounced(250, () => this.set({ text: search.value })) });
    const stops = el("select", { "aria-label": "Stop reason", onchange: () => this.set({ stop: stops.value }) }, STOPS.map((s) => el("option", { value: s, selected: s === (p.stop || "") }, s || "any stop")));
    const task = p.task ? el("button.chip.on", { type: "button", onclick: () => this.set({ task: "" }, true) }, `task ${p.task}  ×`) : null;
    const range = p.reward_min !== undefined && p.reward_min !== "" ? el("button.chip.on", { type: "button", onclick: () => this.set({ reward_min: "", reward_max: "" }) }, `reward ${num(Number(p.reward_min))} to ${num(Number(p.reward_max))}  ×`) : null;
    fill(this.filters, el("div.filter-row", {}, segmented("Show", [["rollouts", "Rollouts"], ["groups", "Groups"]], p.show, (show) => this.set({ show, sort: "" }, true)), search, stops),
      el("div.filter-row", {}, FLAGS.map(([key, text]) => el(`button.chip${p[key] ? ".on" : ""}`, { type: "button", "aria-pressed": String(Boolean(p[key])), onclick: () => this.set({ [key]: p[key] ? "" : "1" }) }, text)), task, range, this.total));
  }

  set(change, all = false) {
    Object.assign(this.params, change);
    for (const [k, v] of Object.entries(this.params)) if (v === "" || v === undefined) delete this.params[k];
    remember({ ...this.params, show: this.params.show === "groups" ? "groups" : "" });
    if (!("text" in change) || all) this.drawFilters(); // the search field keeps its focus
    this.drawTable();
  }

  asked() {
    const { show, ...filters } = this.params;
    return { step: this.step ?? "", ...filters };
  }

  drawTable() {
    const isGroups = this.params.show === "groups";
    const onSort = (key) => this.set({ sort: this.params.sort === `-${key}` ? key : `-${key}` });
    const common = { sort: this.params.sort, onSort, onTotal: (n) => { this.total.textContent = count(n, isGroups ? "group" : "rollout"); } };
    this.table = isGroups
      ? new VirtualTable({ ...common, label: "Groups", columns: this.groupColumns(), href: (g) => runHash(this.run, `/group/${encodeURIComponent(g.group)}`), emptyText: "No group matches the filters.",
        fetchPage: async (offset, limit) => { const a = await get(runUrl(this.run, "/groups"), { ...this.asked(), offset, limit }); return { total: a.total, rows: a.groups }; } })
      : new VirtualTable({ ...common, label: "Rollouts", columns: this.rolloutColumns(), href: (r) => runHash(this.run, `/rollout/${encodeURIComponent(r.id)}`), emptyText: "No rollout matches the filters.",
        fetchPage: async (offset, limit) => { const a = await get(runUrl(this.run, "/rollouts"), { ...this.asked(), offset, limit }); this.drawBars(a.histogram); return { total: a.total, rows: a.rollouts }; } });
    if (isGroups) get(runUrl(this.run, "/rollouts"), { ...this.asked(), limit: 1, sort: "" }).then((a) => this.drawBars(a.histogram), () => {});
    fill(this.holder, this.table.node);
  }

  drawBars(data) {
    const key = JSON.stringify(data);
    if (!data || key === this.lastBars) return;
    this.lastBars = key;
    const p = this.params, chosen = p.reward_min !== undefined && p.reward_min !== "" ? [Number(p.reward_min), Number(p.reward_max)] : null;
    fill(this.bars, el("div.muted", {}, "Rewards: click a bar to filter"), histogram(data, { chosen, onBin: (low, high, isChosen) => this.set(isChosen || (chosen && data.counts.length === 1) ? { reward_min: "", reward_max: "" } : { reward_min: low, reward_max: high }) }));
  }

  async refresh() {
    const before = this.step;
    this.steps = (await get(runUrl(this.run, "/steps"))).steps;
    this.drawHead();
    if (this.step !== before) this.drawTable();
    else await this.table.reload();
  }

  rolloutColumns() {
    const step = this.step === null ? [{ title: "Step", width: "64px", className: "n", cell: (r) => num(r.step) }] : [];
    return [
      { title: "Reward", width: "72px", className: "n", sort: "reward", cell: (r) => reward(r.reward) }, ...step,
      { title: "Task", width: "minmax(110px, 0.9fr)", className: "mono", cell: (r) => named(r.task) },
      { title: "Turns", width: "52px", className: "n", cell: (r) => num(r.turns) },
      { title: "Tokens", width: "66px", className: "n", sort: "tokens", cell: (r) => num(r.tokens) },
      { title: "Stop", width: "184px", cell: (r) => [el("span", {}, r.stop || "–"), flags(r)] },
      { title: "Lag", width: "40px", className: "n", cell: (r) => num(r.lag) },
      { title: "Time", width: "76px", className: "n", sort: "time", cell: (r) => (r.started_ns && r.ended_ns > r.started_ns ? seconds((r.ended_ns - r.started_ns) / 1e9) : "–") },
      { title: "Prompt", width: "minmax(120px, 1.6fr)", className: "preview", cell: (r) => r.task_preview || "" },
      { title: "End of the reply", width: "minmax(120px, 1.6fr)", cell: (r) => r.preview || "" },
    ];
  }

  groupColumns() {
    const step = this.step === null ? [{ title: "Step", width: "64px", className: "n", cell: (g) => num(g.step) }] : [];
    return [
      { title: "Spread", width: "84px", className: "n", sort: "spread", cell: (g) => num(g.spread) }, ...step,
      { title: "Rewards", width: "minmax(200px, 1fr)", sort: "reward", cell: (g) => el("span.cells", {}, g.rewards.map((r) => cell(r, isBest(r, g.rewards)))) },
      { title: "Mean", width: "72px", className: "n", cell: (g) => num(g.rewards.reduce((a, b) => a + b, 0) / g.rewards.length) },
      { title: "Task", width: "minmax(90px, 0.5fr)", className: "mono", cell: (g) => named(g.task) },
      { title: "Prompt", width: "minmax(160px, 2fr)", className: "preview", cell: (g) => g.preview || "" },
    ];
  }
}

/** The best of rewards that differ: drawn solid, so that a group is read at a glance even if all are negative. */
export function isBest(r, rewards) {
  return r === Math.max(...rewards) && r > Math.min(...rewards);
}

/** A small square per reward, with its sign written into it. */
export function cell(r, best = false) {
  const kind = r === null || r === undefined ? "none" : r > 0 ? "positive" : r < 0 ? "negative" : "zero";
  return el(`span.cell.${kind}${best ? ".best" : ""}`, { title: `reward ${num(r, 6)}` }, r === null || r === undefined ? "?" : r > 0 ? "+" : r < 0 ? "−" : "0");
}

export function flags(r) {
  return [
    r.failure ? el("span.flag.bad", { title: typeof r.failure === "string" ? r.failure : JSON.stringify(r.failure) }, "failed") : null,
    r.truncated ? el("span.flag", { title: "cut off before the end" }, "cut") : null,
    r.parse_errors ? el("span.flag", { title: `${r.parse_errors} replies could not be read as an action` }, "parse") : null,
  ];
}
