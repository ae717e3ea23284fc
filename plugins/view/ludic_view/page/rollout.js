// One rollout: turns with rewards and credit, messages or exact tokens, every value of a token.

import { contentOf, count, el, facts, fill, json, link, num, prose, reward, seconds, segmented, signed, textOf } from "./dom.js";
import { get, remember, runHash, runUrl } from "./data.js";
import { COLORINGS, legend, painter, rangeOf } from "./colors.js";
import { prepared } from "./chart.js";
import { cell, flags, isBest } from "./step.js";

export async function rolloutView({ run, item, params }) {
  const rollout = await get(runUrl(run, `/rollouts/${encodeURIComponent(item)}`), { context: 1 });
  const view = new RolloutView(run, rollout, params);
  return {
    node: view.node, up: rollout.group ? runHash(run, `/group/${encodeURIComponent(rollout.group)}`) : runHash(run, `/step/${rollout.step}`),
    shown: () => view.drawStrips(), move: (d) => view.moveTurn(d), leave: () => view.leave(),
    keys: { "[": () => view.sibling(-1), "]": () => view.sibling(1), c: () => view.nextColor(), v: () => view.set({ view: view.params.view === "tokens" ? "messages" : "tokens" }) },
  };
}

class RolloutView {
  constructor(run, rollout, params) {
    Object.assign(this, { run, rollout, siblings: [] });
    const usual = rollout.has_trainer === false ? "logprob" : "advantage";
    this.params = { view: "messages", color: usual, ...params };
    if (!COLORINGS[this.params.color]) this.params.color = usual;
    this.calls = rollout.turns.flatMap((t) => t.steps).filter((s) => s.kind === "call" && s.tokens);
    this.body = el("div.turns");
    this.switches = el("div.panel");
    this.key = el("div");
    this.inspector = el("div.panel.inspector", { "aria-live": "polite" });
    this.family = el("div.family");
    this.strips = [];
    this.body.addEventListener("pointerover", (e) => this.inspect(e.target.closest(".tok")));
    this.body.addEventListener("focusin", (e) => this.inspect(e.target.closest(".tok")));
    this.body.addEventListener("keydown", (e) => this.tokenKey(e));
    this.resized = new ResizeObserver(() => this.drawStrips());
    this.node = el("section", {}, this.head(), el("div.with-aside", {}, this.body, el("aside", {}, this.switches, this.inspector, this.about())));
    this.draw();
    this.loadSiblings();
  }

  leave() {
    this.resized.disconnect();
  }

  // --- head and side ---

  head() {
    const r = this.rollout;
    return el("div.title", {}, el("div", {}, el("h1", {}, reward(r.reward, { class: "big" }), " ", r.task === null || r.task === undefined ? "rollout" : link(runHash(this.run, `/task/${encodeURIComponent(r.task)}`), { title: "This task over all updates" }, String(r.task))),
      el("p.muted", {}, link(runHash(this.run, `/step/${r.step}`), {}, `step ${num(r.step)}`), r.group ? [" · ", link(runHash(this.run, `/group/${encodeURIComponent(r.group)}`), {}, "group")] : null,
        ` · ${count(r.turns.length, "turn")} · ${count(r.tokens, "token")} · ${r.stop || "–"} `, flags({ ...r, turns: 0 }))), this.family);
  }

  async loadSiblings() {
    if (!this.rollout.group) return;
    try {
      this.siblings = (await get(runUrl(this.run, `/groups/${encodeURIComponent(this.rollout.group)}`))).cards;
    } catch {
      return; // an exported file may hold one rollout of a group
    }
    fill(this.family, el("span.muted", {}, "Siblings"), el("span.cells", {}, this.siblings.map((c) => link(this.hash(c.id), { class: c.id === this.rollout.id ? "here" : "", "aria-label": `sibling, reward ${num(c.reward)}`, "aria-current": c.id === this.rollout.id ? "true" : null }, cell(c.reward, isBest(c.reward, this.siblings.map((s) => s.reward)))))));
  }

  hash(id) {
    const p = this.params;
    return runHash(this.run, `/rollout/${encodeURIComponent(id)}?view=${p.view}&color=${p.color}`);
  }

  sibling(delta) {
    const at = this.siblings.findIndex((c) => c.id === this.rollout.id) + delta;
    if (this.siblings[at]) location.hash = this.hash(this.siblings[at].id);
  }

  about() {
    const r = this.rollout;
    return el("div.panel", {}, el("h3", {}, "About"), facts([
      ["id", el("span.mono", {}, r.id)], r.env ? ["env", r.env] : null, r.agent ? ["agent", r.agent] : null, r.thread ? ["thread", String(r.thread)] : null,
      r.versions ? ["versions", [...new Set(r.versions)].join(" to ")] : null, ["lag", num(r.lag)], r.started_ns && r.ended_ns ? ["took", seconds((r.ended_ns - r.started_ns) / 1e9)] : null,
      r.failure ? ["failure", typeof r.failure === "string" ? r.failure : JSON.stringify(r.failure)] : null]),
    r.failure_details?.traceback ? el("details", {}, el("summary", {}, "traceback"), el("pre.json", { tabindex: "0" }, r.failure_details.traceback)) : null,
    el("details", {}, el("summary", {}, "meta"), json(r.meta)));
  }

  set(change) {
    const scroll = window.scrollY;
    Object.assign(this.params, change);
    remember(this.params);
    this.draw();
    this.drawStrips();
    window.scrollTo(0, scroll);
  }

  nextColor() {
    const names = Object.keys(COLORINGS);
    this.set({ color: names[(names.indexOf(this.params.color) + 1) % names.length], view: "tokens" });
  }

  draw() {
    const p = this.params, coloring = COLORINGS[p.color];
    this.range = rangeOf(coloring, this.calls.map((c) => c.tokens));
    this.paint = painter(coloring, this.range);
    const values = coloring.kind === "kinds" ? this.calls.flatMap((c) => c.tokens.id.map((_, i) => coloring.value(c.tokens, i))) : [];
    fill(this.switches, segmented("Show", [["messages", "Messages"], ["tokens", "Exact tokens"]], p.view, (view) => this.set({ view })),
      el("h3", {}, "Colour tokens by"), el("div.palette", { role: "group", "aria-label": "Colour tokens by" }, Object.entries(COLORINGS).map(([name, c]) =>
        el("button", { type: "button", "aria-pressed": String(name === p.color), title: c.about, onclick: () => this.set({ color: name, view: "tokens" }) }, c.label))),
      legend(coloring, this.range, values));
    this.strips = [];
    this.resized.disconnect();
    fill(this.body, this.rail(), this.rollout.turns.map((turn) => this.turn(turn)));
    this.inspect(null);
  }

  // --- turns ---

  rail() {
    const turns = this.rollout.turns;
    if (turns.length < 2) return null;
    const most = Math.max(1e-9, ...turns.map((t) => Math.abs(t.reward || 0)), ...turns.map((t) => Math.abs(t.credit || 0)));
    const bar = (value, kind) => el(`span.bar.${kind}.${value < 0 ? "negative" : "positive"}`, { css: { height: `${Math.max(value ? 3 : 1, (Math.abs(value || 0) / most) * 26)}px` } });
    return el("nav.rail", { "aria-label": "Turns" }, turns.map((t) => el("button", { type: "button", title: `turn ${t.number + 1}: reward ${num(t.reward)}, credit ${num(t.credit)}`, onclick: () => this.goTurn(t.number) }, el("span.bars", {}, bar(t.reward, "reward-bar"), bar(t.credit, "credit-bar")), el("span", {}, String(t.number + 1)))),
      el("span.muted.small", {}, "rewards (filled) and credit (outlined) by turn"));
  }

  goTurn(number) {
    const node = this.body.querySelector(`[data-turn="${number}"]`);
    node?.scrollIntoView({ block: "start" });
    node?.focus({ preventScroll: true });
  }

  moveTurn(delta) {
    const at = Number(document.activeElement?.closest?.("[data-turn]")?.dataset.turn ?? (delta > 0 ? -1 : 0)) + delta;
    if (at >= 0 && at < this.rollout.turns.length) this.goTurn(at);
  }

  turn(turn) {
    const first = turn.steps.find((s) => s.kind === "call");
    return el("article.turn", { tabindex: "-1", data: { turn: turn.number } },
      el("header", {}, el("h2", {}, `Turn ${turn.number + 1}`), el("span.pair", {}, "reward ", reward(turn.reward)), turn.credit === null || turn.credit === undefined ? null : el("span.pair", {}, "credit ", el(`span.reward.${turn.credit > 0 ? "positive" : turn.credit < 0 ? "negative" : "zero"}`, {}, signed(turn.credit))),
        first ? el("span.muted.small", {}, [`${num(first.prompt_tokens)} prompt tokens`, first.tokens ? `${num(first.tokens.id.length)} sampled` : null, first.finish_reason].filter(Boolean).join(" · ")) : null,
        first?.rewrites_history ? el("span.flag", { title: "The prompt of this call does not continue the one before it" }, "new context") : null),
      turn.steps.map((s) => (s.kind === "call" ? this.call(s) : this.env(s))));
  }

  call(step) {
    const isTokens = this.params.view === "tokens" && step.tokens;
    const texts = step.context?.text ?? (step === this.calls[0] ? this.rollout.prompt?.text : null);
    const context = isTokens && texts ? this.contextTokens(texts) : (step.messages_new || []).map((m) => message(m));
    const reply = isTokens ? el("div.message.assistant", {}, el("div.role", {}, "assistant · exact tokens"), this.strip(step), this.tokens(step))
      : el("div.message.assistant", {}, el("div.role", {}, "assistant"), prose(step.action || ""));
    return [context, reply, this.tools(step), step.reward || hasKeys(step.reward_components) ? this.outcome(step) : null];
  }

  contextTokens(texts) {
    if (!texts.length) return null;
    return el("details.context-tokens", { open: texts.length < 400 }, el("summary", {}, `${count(texts.length, "token")} of context`), el("div.tokens.plain", {}, texts.map((t) => el("span.tok", {}, shown(t)))));
  }

  tools(step) {
    const calls = step.tool_calls || [], results = step.tool_results || [];
    if (!calls.length && !results.length) return null;
    return el("div.tools", {}, calls.map((c, i) => {
      const made = c.function || c, result = results[i];
      return el("div.tool", {}, el("div.role", {}, "tool call"), el("div.tool-call", {}, el("strong.mono", {}, String(made.name ?? "?")), el("pre", { tabindex: "0" }, typeof made.arguments === "string" ? made.arguments : JSON.stringify(made.arguments, null, 2))),
        result === undefined ? null : [el("div.role", {}, "result"), el("pre.result", { tabindex: "0" }, textOf(result.content ?? result))]);
    }), results.slice(calls.length).map((r) => el("div.tool", {}, el("div.role", {}, "result"), el("pre.result", { tabindex: "0" }, textOf(r.content ?? r)))));
  }

  env(step) {
    return el("div.env", {}, el("div.role", {}, "environment", step.terminated ? " · ended the episode" : "", step.truncated ? " · truncated" : ""), step.obs ? contentOf(step.obs) : null, this.outcome(step));
  }

  outcome(step) {
    return el("div.outcome", {}, el("span.pair", {}, "reward ", reward(step.reward)), Object.entries(step.reward_components || {}).map(([name, v]) => el("span.pair.muted", {}, `${name} `, reward(v))),
      hasKeys(step.info) ? el("details", {}, el("summary", {}, `info: ${Object.entries(step.info).slice(0, 3).map(([k, v]) => `${k} ${short(v)}`).join(", ")}`), json(step.info)) : null);
  }

  // --- tokens ---

  tokens(step) {
    const coloring = COLORINGS[this.params.color], number = String(this.calls.indexOf(step));
    const box = el("div.tokens", { role: "group", "aria-label": "Sampled tokens: arrow keys move" });
    step.tokens.id.forEach((id, i) => {
      const color = this.paint(coloring.value(step.tokens, i)), node = document.createElement("span");
      node.className = color.mark ? `tok ${color.mark}` : "tok";
      node.setAttribute("data-call", number);
      node.setAttribute("data-i", i);
      if (color.background) node.style.backgroundColor = color.background;
      if (color.ink) node.style.color = color.ink;
      node.textContent = shown(step.tokens.text?.[i] ?? `⟨${id}⟩`);
      box.append(node);
    });
    if (number === "0" && box.firstChild) box.firstChild.tabIndex = 0;
    return box;
  }

  /** All tokens of a call in one line; a click goes there. */
  strip(step) {
    const canvas = el("canvas.strip", { "aria-hidden": "true", title: "all tokens of this call: click to go there", onclick: (e) => this.goToken(step, Math.floor((e.offsetX / canvas.clientWidth) * step.tokens.id.length)) });
    this.strips.push([canvas, step]);
    this.resized.observe(canvas);
    return canvas;
  }

  drawStrips() {
    const coloring = COLORINGS[this.params.color];
    for (const [canvas, step] of this.strips) {
      if (!canvas.clientWidth) continue;
      const { g, width, height } = prepared(canvas), n = step.tokens.id.length;
      for (let i = 0; i < n; i++) {
        const color = this.paint(coloring.value(step.tokens, i));
        g.fillStyle = color.background || { trained: "rgba(60,120,220,.55)", clipped: "rgba(230,120,20,.9)" }[color.mark] || "transparent";
        g.fillRect((i / n) * width, 0, Math.max(1, width / n), height);
      }
    }
  }

  goToken(step, i) {
    const node = this.tokenAt(this.calls.indexOf(step), i);
    if (!node) return;
    node.tabIndex = -1;
    node.scrollIntoView({ block: "center" });
    node.focus({ preventScroll: true });
  }

  tokenAt(call, i) {
    return this.body.querySelector(`.tok[data-call="${call}"][data-i="${i}"]`);
  }

  tokenKey(event) {
    const at = event.target.closest?.(".tok[data-i]");
    if (!at || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const delta = event.key === "ArrowRight" ? 1 : -1, call = Number(at.dataset.call), i = Number(at.dataset.i) + delta;
    const next = this.tokenAt(call, i) ?? this.tokenAt(call + delta, delta > 0 ? 0 : this.calls[call + delta]?.tokens.id.length - 1);
    if (next) { at.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    event.preventDefault();
  }

  inspect(node) {
    if (node && !node.dataset.i) return;
    const t = node ? this.calls[Number(node.dataset.call)].tokens : null, i = node ? Number(node.dataset.i) : 0;
    if (node) { this.marked?.classList.remove("now"); node.classList.add("now"); this.marked = node; }
    const at = (column) => (t && column ? column[i] : null);
    const p = at(t?.logprob), trainer = at(t?.trainer_logprob);
    fill(this.inspector, el("h3", {}, "Token"), el("div.token-text", {}, t ? JSON.stringify(t.text?.[i] ?? "").slice(1, -1).replaceAll(" ", "␣") || " " : "point at a token"), facts([
      ["place", t ? `${num(i + 1)} of ${num(t.id.length)} in call ${Number(node.dataset.call) + 1}` : "–"], ["id", t ? String(t.id[i]) : "–"],
      ["advantage", signed(at(t?.advantage))], ["push", signed(at(t?.gradient))], ["probability", p === null || p === undefined ? "–" : `${num(100 * Math.exp(p))} %`], ["log-prob, sampler", num(p, 4)], ["log-prob, trainer", num(trainer, 4)],
      ["mismatch", p === null || trainer === null || p === undefined || trainer === undefined ? "–" : signed(trainer - p)], ["ratio", num(at(t?.ratio), 4)], ["entropy", num(at(t?.entropy))],
      ["version", num(at(t?.version))], ["trained", t ? (at(t.mask) === null || at(t.mask) === undefined ? "–" : at(t.mask) ? "yes" : "no") : "–"], ["clipped", t && at(t.clipped) !== null && at(t.clipped) !== undefined ? (at(t.clipped) ? "yes" : "no") : "–"]]));
  }
}

/** A line break is seen as a mark and still breaks the line. */
function shown(text) {
  return text.replace(/\n/g, "↵\n");
}

function message(m) {
  const long = textOf(m.content).length > 3000;
  const body = [contentOf(m.content), (m.tool_calls || []).map((c) => el("pre.tool-call", {}, JSON.stringify(c.function || c, null, 2)))];
  const role = String(m.role || "message");
  return el(`div.message.${["system", "user", "assistant", "tool"].includes(role) ? role : "other"}`, {}, el("div.role", {}, role, m.name ? ` · ${m.name}` : ""), long ? el("details", {}, el("summary", {}, `${num(textOf(m.content).length)} characters: ${textOf(m.content).slice(0, 160)} …`), body) : body);
}

const hasKeys = (value) => value !== null && typeof value === "object" && Object.keys(value).length > 0;
const short = (value) => { const text = typeof value === "string" ? value : JSON.stringify(value) ?? ""; return text.length > 40 ? `${text.slice(0, 38)}…` : text; };
