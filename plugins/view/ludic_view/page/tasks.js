// Tasks: all of them, and one over all updates.

import { count, el, empty, fill, json, link, named, num, prose, reward, segmented, signed, svg, textOf } from "./dom.js";
import { get, remember, runHash, runUrl } from "./data.js";
import { LineChart } from "./chart.js";
import { VirtualTable } from "./table.js";
import { cell, isBest } from "./step.js";

const SORTS = [["task", "Name"], ["reward_mean", "Hardest"], ["-gain", "Most gained"], ["gain", "Most lost"], ["-num_failed", "Most failed"], ["-step_last", "Latest"]];

export async function tasksView({ run, params }) {
  const holder = el("div.table-holder"), controls = el("div.controls"), total = el("p.muted", { role: "status" });
  let table = null, sort = params.sort || "task";
  const draw = () => {
    fill(controls, segmented("Order", SORTS, sort, (value) => { sort = value; remember({ sort }); draw(); }));
    table = new VirtualTable({
      label: "Tasks", href: (t) => runHash(run, `/task/${encodeURIComponent(t.task)}`), emptyText: "No rollout names its task.", onTotal: (n) => { total.textContent = count(n, "task"); },
      fetchPage: async (offset, limit) => { const a = await get(runUrl(run, "/tasks"), { sort, offset, limit }); return { total: a.total, rows: a.tasks }; },
      columns: [
        { title: "Task", width: "minmax(120px, 1fr)", className: "mono", cell: (t) => named(t.task) },
        { title: "First", width: "84px", className: "n", cell: (t) => reward(t.reward_first) },
        { title: "Last", width: "84px", className: "n", cell: (t) => reward(t.reward_last) },
        { title: "Change", width: "96px", className: "n", cell: (t) => t.gain === null ? "–" : change(t.gain) },
        { title: "Trend", width: "84px", cell: (t) => trend(t.steps, t.rewards) },
        { title: "Mean", width: "72px", className: "n", cell: (t) => num(t.reward_mean) },
        { title: "Rollouts", width: "84px", className: "n", cell: (t) => num(t.num_rollouts) },
        { title: "Failed", width: "72px", className: "n", cell: (t) => num(t.num_failed) },
        { title: "Updates", width: "84px", className: "n", cell: (t) => num(t.steps.length) },
        { title: "Last seen", width: "84px", className: "n", cell: (t) => `step ${num(t.step_last)}` },
        { title: "Prompt", width: "minmax(160px, 3fr)", className: "preview", cell: (t) => t.preview || "" },
      ],
    });
    fill(holder, table.node);
  };
  draw();
  return { node: el("section.fills", {}, el("div.title", {}, el("div", {}, el("h1", {}, "Tasks"), total), controls), holder), up: runHash(run, "/metrics"), move: (d) => table.move(d), open: () => table.open(), refresh: () => table.reload() };
}

function change(x) {
  const mark = x > 1e-9 ? "▲" : x < -1e-9 ? "▼" : "=";
  return el(`span.change.${x > 1e-9 ? "positive" : x < -1e-9 ? "negative" : "zero"}`, {}, `${mark} ${signed(x)}`);
}

/** The mean reward of each update that had the task, as a small curve. */
function trend(steps, rewards) {
  const points = steps.map((step, i) => [step, rewards[i]]).filter(([, r]) => r !== null);
  if (points.length < 2) return el("span.muted", {}, "–");
  const low = Math.min(...points.map(([, r]) => r)), high = Math.max(...points.map(([, r]) => r)), [from, to] = [points[0][0], points.at(-1)[0]];
  const at = ([step, r]) => `${(1 + 70 * (step - from) / (to - from)).toFixed(1)},${(high > low ? 19 - 18 * (r - low) / (high - low) : 10).toFixed(1)}`;
  return svg("svg.trend", { viewBox: "0 0 72 20", role: "img", "aria-label": `mean reward per update, from ${num(points[0][1])} to ${num(points.at(-1)[1])}` }, svg("polyline", { points: points.map(at).join(" ") }));
}

export async function taskView({ run, item }) {
  const url = runUrl(run, `/tasks/${encodeURIComponent(item)}`);
  const node = el("section"), attempts = el("div.columns"), prompt = el("div");
  const chart = new LineChart({ title: "mean reward of this task", onStep: (step) => { location.hash = runHash(run, `/step/${step}?task=${encodeURIComponent(item)}`); } });
  const rows = el("div.task-steps");
  let known = [];
  const draw = async () => {
    const { by_step: steps } = await get(url);
    if (!steps.length) { fill(node, empty("No rollout of this task", item)); return; }
    const mean = (rewards) => rewards.reduce((a, b) => a + b, 0) / rewards.length;
    chart.set([{ name: item, steps: steps.map((s) => s.step), values: steps.map((s) => mean(s.rewards)) }]);
    fill(rows, steps.toReversed().map((s) => el("div.task-step", {}, link(runHash(run, `/step/${s.step}?task=${encodeURIComponent(item)}`), { class: "n" }, `step ${num(s.step)}`), el("span.cells", {}, s.rewards.map((r, i) => link(runHash(run, `/rollout/${encodeURIComponent(s.rollouts[i])}`), { "data-nav": true, "aria-label": `step ${s.step}, reward ${num(r)}` }, cell(r, isBest(r, s.rewards))))), el("span.muted", {}, `mean ${num(mean(s.rewards))}`))));
    const [first, last] = [steps[0], steps.at(-1)];
    const at = (s, choose) => s.rollouts[s.rewards.indexOf(choose(...s.rewards))];
    const wanted = [[first.rollouts[0], "First attempt"], [at(last, Math.min), "Latest update, worst"], [at(last, Math.max), "Latest update, best"]].filter(([id], i, all) => all.findIndex(([other]) => other === id) === i);
    if (known.join() !== wanted.map(([id]) => id).join()) {
      known = wanted.map(([id]) => id);
      const shown = await Promise.all(wanted.map(([id, title]) => attempt(run, id, title)));
      fill(attempts, shown.map((a) => a.node));
      fill(prompt, prose(shown[0].prompt));
    }
  };
  await draw();
  const all = known.length ? [el("div.title", {}, el("div", {}, el("h1", {}, item), el("p.muted", {}, "One task over all updates. A square is a rollout: click it."))), el("div.task-top", {}, chart.node, rows), el("h2", {}, "The task"), el("div.message.user", {}, prompt), el("h2", {}, "Then and now"), attempts] : [...node.childNodes];
  fill(node, all);
  return { node, up: runHash(run, "/tasks"), refresh: draw, shown: () => chart.draw() };
}

async function attempt(run, id, title) {
  const head = (r) => link(runHash(run, `/rollout/${encodeURIComponent(id)}`), { class: "column-head", "data-nav": true }, el("strong", {}, title), r ? reward(r.reward) : null);
  try {
    const r = await get(runUrl(run, `/rollouts/${encodeURIComponent(id)}`));
    const steps = r.turns.flatMap((t) => t.steps), info = steps.findLast((s) => s.kind === "env")?.info;
    const asked = steps.find((s) => s.kind === "call")?.messages_new?.findLast((m) => m.role === "user")?.content;
    const texts = steps.filter((s) => s.kind === "call").map((s) => s.action || "");
    const node = el("article.column", {}, head(r), el("div.muted.small", {}, `step ${num(r.step)} · ${count(r.tokens, "token")} · ${r.stop || "–"}`), el("div.text", {}, texts.map((text, i) => [i ? el("hr") : null, text])), info && Object.keys(info).length ? json(info) : null);
    return { node, prompt: textOf(asked) };
  } catch (error) {
    return { node: el("article.column", {}, head(null), el("p.muted", {}, error.message)), prompt: "" };
  }
}
