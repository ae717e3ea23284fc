// The shell of the page: routes in the hash (every view has a permalink), the bar on top, keys, theme, live updates.

import { el, fill, failed, link, loading } from "./dom.js";
import { abandon, listen, runHash, stored } from "./data.js";
import { compareView, metricsView, runsView } from "./runs.js";
import { stepView } from "./step.js";
import { groupView } from "./group.js";
import { rolloutView } from "./rollout.js";
import { taskView, tasksView } from "./tasks.js";
import { healthView, timeView } from "./time.js";

const VIEWS = { metrics: metricsView, step: stepView, group: groupView, rollout: rolloutView, task: taskView, tasks: tasksView, time: timeView, health: healthView };
const TABS = [["metrics", "Metrics"], ["step", "Steps"], ["tasks", "Tasks"], ["time", "Time"], ["health", "Health"]];
const PART_OF = { group: "step", rollout: "step", task: "tasks" };
const KEYS = [
  ["j  k", "next, previous row"], ["Enter", "open"], ["Esc", "one level up"], ["/", "search"], ["[  ]", "previous, next step or sibling"],
  ["← →", "previous, next token or point"], ["c", "colour tokens by the next value"], ["v", "messages or exact tokens"],
  ["1 … 5", "metrics, steps, tasks, time, health"], ["g", "all runs"], ["t", "light or dark"], ["?", "this help"],
];

const main = document.getElementById("main");
const top = document.getElementById("top");
const live = el("span.live", { title: "not connected" });
let view = null; // {refresh?, leave?, up?, move?, open?, keys?: {key: action}}
let route = null;
let turn = 0;
let heard = { run: null, stop: () => {} };

// --- routes ---

function parse() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const words = path.split("/").filter(Boolean).map(decodeURIComponent);
  const params = Object.fromEntries(new URLSearchParams(search));
  if (words[0] === "run") return { name: words[2] || "metrics", run: words[1], item: words[3] ?? null, params };
  return { name: words[0] === "compare" ? "compare" : "runs", run: null, item: null, params };
}

async function show() {
  if (stored && !location.hash) location.replace(stored.start);
  const mine = ++turn, next = parse(), isNew = !route || next.name !== route.name || next.run !== route.run || next.item !== route.item;
  view?.leave?.();
  view = null;
  abandon();
  route = next;
  follow(next.run);
  bar();
  document.title = [next.item, next.name, next.run, "ludic view"].filter(Boolean).join(" · ");
  const timer = isNew ? setTimeout(() => { if (mine === turn) fill(main, loading()); }, 150) : 0; // a quick answer shows no spinner
  try {
    const make = next.run === null ? (next.name === "compare" ? compareView : runsView) : VIEWS[next.name];
    if (!make) throw new Error(`There is no view called "${next.name}".`);
    const made = await make(next);
    if (mine !== turn) { made.leave?.(); return; }
    view = made;
    main.className = `view-${next.name}`;
    fill(main, made.node);
    if (isNew) window.scrollTo(0, 0);
    made.shown?.();
  } catch (error) {
    if (mine === turn && error.name !== "AbortError") fill(main, failed(error, show));
  } finally {
    clearTimeout(timer);
  }
}

// --- live ---

/** At most one refresh at a time, and rarer where it takes long: a server that indexes a large run has better things to do. */
const refresh = { isBusy: false, isWanted: false };

async function refreshView() {
  refresh.isWanted = true;
  if (refresh.isBusy) return;
  refresh.isBusy = true;
  while (refresh.isWanted) {
    refresh.isWanted = false;
    const start = performance.now();
    await Promise.resolve(view?.refresh?.()).catch(() => {}); // the next event tries again
    const took = performance.now() - start;
    await new Promise((done) => setTimeout(done, Math.max(150, 3 * took)));
  }
  refresh.isBusy = false;
}

function follow(run) {
  if (heard.run === run) return;
  heard.stop();
  live.className = "live";
  heard = { run, stop: run === null ? () => {} : listen(run, refreshView, (isUp) => {
    live.className = `live ${isUp ? "up" : "down"}`;
    live.title = isUp ? "live: new data appear by themselves" : "the connection is lost; trying again";
  }) };
}

// --- the bar ---

function bar() {
  const { run, name, item } = route;
  const tab = PART_OF[name] || name;
  const crumbs = run === null ? [] : [el("span.sep", {}, "/"), link(runHash(run, "/metrics"), { class: "run" }, run)];
  if (item !== null && name !== "step") crumbs.push(el("span.sep", {}, "/"), el("span.crumb", {}, `${name} ${item.length > 24 ? `${item.slice(0, 22)}…` : item}`));
  fill(top,
    el("div.bar", {}, link("#/runs", { class: "brand", title: "All runs" }, el("span.logo", { "aria-hidden": "true" }), "ludic"), el("nav.crumbs", { "aria-label": "Where you are" }, crumbs),
      run !== null && !stored ? live : null, stored ? el("span.badge", {}, "exported file") : null,
      el("button.icon", { type: "button", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: toggleTheme }, "◐"),
      el("button.icon", { type: "button", title: "Keys (?)", "aria-label": "Keys", onclick: help }, "?")),
    run === null ? null : el("nav.tabs", { "aria-label": "Views" }, TABS.map(([key, text], i) =>
      link(tabHash(key), { "aria-current": key === tab ? "page" : null, title: `${text} (${i + 1})` }, text))));
}

function tabHash(key) {
  return runHash(route.run, key === "step" ? "/step/last" : `/${key}`);
}

function toggleTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try {
    localStorage.setItem("ludic-theme", root.dataset.theme);
  } catch {
    // a file:// page may have no storage
  }
  show();
}

function help() {
  const dialog = el("dialog.help", { onclose: () => dialog.remove(), onclick: (e) => { if (e.target === dialog) dialog.close(); } }, el("h2", {}, "Keys"),
    el("dl", {}, KEYS.map(([key, text]) => el("div", {}, el("dt", {}, key.split(/\s+/).map((k) => (k === "…" ? k : el("kbd", {}, k)))), el("dd", {}, text)))),
    el("button.button", { type: "button", onclick: () => dialog.close() }, "Close"));
  document.body.append(dialog);
  dialog.showModal();
}

// --- keys ---

function move(delta) {
  if (view?.move) { view.move(delta); return; }
  const stops = [...main.querySelectorAll("[data-nav]")];
  const at = stops.indexOf(document.activeElement);
  const next = stops[Math.max(0, Math.min(stops.length - 1, at < 0 ? (delta > 0 ? 0 : stops.length - 1) : at + delta))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function up() {
  if (view?.up) location.hash = view.up;
  else if (route.run !== null) location.hash = route.name === "metrics" ? "#/runs" : runHash(route.run, "/metrics");
  else location.hash = "#/runs";
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.matches("input, textarea, select");
  if (typing) {
    if (event.key === "Escape") { event.target.blur(); event.preventDefault(); }
    return;
  }
  const tab = TABS[Number(event.key) - 1];
  if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "Enter" && view?.open && !event.target.closest("a, button, summary, [role=button]")) view.open();
  else if (event.key === "Escape") up();
  else if (event.key === "/") main.querySelector("input[type=search]")?.focus();
  else if (event.key === "?") help();
  else if (event.key === "t") toggleTheme();
  else if (event.key === "g") location.hash = "#/runs";
  else if (tab && route.run !== null) location.hash = tabHash(tab[0]);
  else if (view?.keys?.[event.key]) view.keys[event.key]();
  else return;
  event.preventDefault();
});

try {
  const theme = localStorage.getItem("ludic-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // no storage
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
window.addEventListener("hashchange", show);
show();
