// One group: its rollouts side by side, and the tree of the tokens that they share.

import { count, el, empty, fill, link, num, reward, svg } from "./dom.js";
import { get, runHash, runUrl } from "./data.js";
import { flags, isBest } from "./step.js";

const LANE = 34, WIDTH = 1000, LABEL = 120;

export async function groupView({ run, item }) {
  const group = await get(runUrl(run, `/groups/${encodeURIComponent(item)}`));
  const view = new Group(run, group);
  return { node: view.node, up: runHash(run, `/step/${group.step}?show=groups`), move: (d) => view.move(d), open: () => view.open() };
}

class Group {
  constructor(run, group) {
    Object.assign(this, { run, group, at: 0 });
    const rewards = group.cards.map((c) => c.reward), mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
    const nodes = group.tree?.nodes || [];
    this.paths = pathsOf(nodes, group.cards.length);
    const tokens = nodes.reduce((n, node) => n + node.length, 0), without = nodes.reduce((n, node) => n + node.length * node.rollouts.length, 0);
    this.reader = el("div.tree-reader", { role: "status" });
    this.read(null);
    this.columns = group.cards.map((card, i) => this.column(card, i, mean));
    this.node = el("section", {},
      el("div.title", {}, el("div", {}, el("h1", {}, "Group of ", link(runHash(run, `/task/${encodeURIComponent(group.task)}`), { title: "This task over all updates" }, String(group.task ?? "–"))),
        el("p.muted", {}, link(runHash(run, `/step/${group.step}`), {}, `step ${num(group.step)}`), ` · ${count(group.cards.length, "rollout")} · mean reward ${num(mean)}`, rewards.length > 1 && new Set(rewards).size === 1 ? " · equal rewards: this group teaches nothing" : "",
          without ? ` · ${num(tokens)} different tokens instead of ${num(without)} (${num(without / tokens)}× shared)` : ""))),
      el("h2", {}, "Tree of shared tokens"), nodes.length ? [el("div.tree-box", {}, this.drawing(nodes)), this.reader] : empty("No tokens", "These rollouts have no token record."),
      el("h2", {}, "Side by side"), el("p.muted", {}, this.difference()), el("div.columns", {}, this.columns));
  }

  difference() {
    const d = this.group.first_difference;
    if (!d) return this.group.cards.length === 1 ? "The group has one rollout." : "All replies are equal.";
    return `The replies differ from token ${num(d.token + 1)} of call ${num(d.call + 1)} on. ◆ marks where a reply leaves the others.`;
  }

  // --- tree ---

  drawing(nodes) {
    const children = new Map(nodes.map((n) => [n.id, []])), roots = [];
    for (const n of nodes) (n.parent === null || n.parent === undefined ? roots : children.get(n.parent)).push(n);
    const place = placed(nodes), ends = new Map();
    let lane = 0;
    const height = (n) => {
      const below = children.get(n.id).map(height);
      for (const i of n.ends) { ends.set(i, lane); below.push(lane); lane += 1; }
      if (!below.length) { below.push(lane); lane += 1; }
      n.y = (below[0] + below.at(-1)) / 2;
      return n.y;
    };
    roots.forEach(height);
    const y = (at) => 24 + at * LANE, most = Math.max(1, ...nodes.map((n) => n.rollouts.length));
    const edges = [], boxes = [], marks = [];
    for (const n of nodes) {
      const [x0, x1] = [place(n.start), place(n.start + n.length)], thick = 5 + 11 * (n.rollouts.length / most);
      for (const child of children.get(n.id)) {
        const cx = place(child.start), bend = Math.min(26, Math.max(10, (place(child.start + child.length) - cx) / 2));
        edges.push(svg("path.edge", { d: `M ${x1} ${y(n.y)} C ${x1 + bend} ${y(n.y)}, ${cx} ${y(child.y)}, ${cx + bend} ${y(child.y)}` }));
      }
      const text = `${count(n.length, "token")}, ${count(n.rollouts.length, "rollout")}: ${n.text.slice(0, 200)}`;
      const shift = n.parent === null || n.parent === undefined ? 0 : Math.min(26, Math.max(10, (x1 - x0) / 2));
      boxes.push(svg(`g.node${n.is_action ? ".action" : ".context"}`, { tabindex: "0", role: "img", "aria-label": text, onpointerenter: () => this.read(n), onfocus: () => this.read(n), onclick: () => this.read(n) },
        svg("rect", { x: x0 + shift, y: y(n.y) - thick / 2, width: Math.max(3, x1 - x0 - shift), height: thick, rx: Math.min(4, thick / 2) }),
        svg("text.words", { x: x0 + shift, y: y(n.y) - thick / 2 - 2.5 }, excerpt(n.text, (x1 - x0 - shift) / 5))));
      for (const i of n.ends) {
        const at = ends.get(i), card = this.group.cards[i];
        if (at !== n.y) edges.push(svg("path.edge", { d: `M ${x1} ${y(n.y)} L ${WIDTH - LABEL} ${y(at)}` }));
        else edges.push(svg("path.edge.rest", { d: `M ${x1} ${y(at)} L ${WIDTH - LABEL} ${y(at)}` }));
        const kind = card.reward > 0 ? "positive" : card.reward < 0 ? "negative" : "zero";
        marks.push(svg("a", { href: runHash(this.run, `/rollout/${encodeURIComponent(card.id)}`), "aria-label": `rollout ${i + 1}, reward ${num(card.reward)}` },
          svg(`rect.end.${kind}${isBest(card.reward, this.group.cards.map((c) => c.reward)) ? ".best" : ""}`, { x: WIDTH - LABEL + 4, y: y(at) - 11, width: LABEL - 8, height: 22, rx: 5 }), svg("text", { x: WIDTH - LABEL + 12, y: y(at) + 4 }, `#${i + 1}`), svg("text", { x: WIDTH - 12, y: y(at) + 4, "text-anchor": "end" }, `${card.reward > 0 ? "+" : ""}${num(card.reward)}`)));
      }
    }
    return svg("svg.tree", { viewBox: `0 0 ${WIDTH} ${Math.max(1, lane) * LANE + 8}`, role: "group", "aria-label": "Tree of shared tokens" }, edges, boxes, marks);
  }

  read(n) {
    if (!n) fill(this.reader, el("span.muted", {}, "Point at a branch, or reach it with Tab, to read its text. A branch is as thick as the number of rollouts that share it."));
    else fill(this.reader, el("div.muted", {}, `${n.is_action ? "Sampled" : "Context"} · tokens ${num(n.start)} to ${num(n.start + n.length)} · shared by ${n.rollouts.map((i) => `#${i + 1}`).join(" ")}`), el("div.text", {}, n.text, n.is_cut ? " …" : ""));
  }

  // --- columns ---

  column(card, i, mean) {
    const path = this.paths[i], total = this.group.cards.length;
    const parts = path.map((n, k) => {
      const isShared = n.rollouts.length > 1, isBranch = k > 0 && n.rollouts.length < path[k - 1].rollouts.length;
      if (n.rollouts.length === total && total > 1) return el("details.shared", {}, el("summary", {}, `${count(n.length, "token")} shared by all`), el("div.text", {}, n.text));
      return [isBranch ? el("span.leaves", { title: `differs from ${count(path[k - 1].rollouts.length - n.rollouts.length, "sibling")} from token ${n.start} on` }, "◆") : null, el(`span.part${n.is_action ? "" : ".context"}${isShared ? ".common" : ""}`, {}, n.text, n.is_cut ? " …" : "")];
    });
    return el("article.column", {},
      link(runHash(this.run, `/rollout/${encodeURIComponent(card.id)}`), { class: "column-head", "data-nav": true }, el("strong", {}, `#${i + 1}`), reward(card.reward), el("span.muted", { title: "reward − mean of the group" }, `${card.reward - mean >= 0 ? "+" : "−"}${num(Math.abs(card.reward - mean))} to the mean`), flags(card)),
      el("div.muted.small", {}, `${count(card.turns, "turn")} · ${count(card.tokens, "token")} · ${card.stop || "–"} · v${[...new Set(card.versions || [])].join("–")}`),
      el("div.text", {}, parts.length ? parts : el("span.muted", {}, card.preview || "no tokens recorded")));
  }

  move(delta) {
    const heads = this.columns.map((c) => c.querySelector("a"));
    const now = heads.indexOf(document.activeElement);
    this.at = Math.max(0, Math.min(heads.length - 1, now < 0 ? 0 : now + delta));
    heads[this.at]?.focus();
  }

  open() {
    const card = this.group.cards[this.at];
    if (card) location.hash = runHash(this.run, `/rollout/${encodeURIComponent(card.id)}`);
  }
}

/** As much of the text as fits above its branch. */
function excerpt(text, room) {
  const line = text.trim().replace(/\s+/g, " ");
  return room < 4 ? "" : line.length <= room ? line : `${line.slice(0, Math.floor(room) - 1)}…`;
}

function pathsOf(nodes, total) {
  const byRollout = Array.from({ length: total }, () => []);
  for (const n of nodes) for (const i of n.rollouts) byRollout[i]?.push(n);
  return byRollout.map((path) => path.sort((a, b) => a.start - b.start));
}

/** From a token's position to x. Stretches between branchings grow with the square root of their length: a long prompt does not
 * squeeze the replies. */
function placed(nodes) {
  const stops = [...new Set(nodes.flatMap((n) => [n.start, n.start + n.length]))].sort((a, b) => a - b);
  const xs = [0];
  for (let i = 1; i < stops.length; i++) xs.push(xs[i - 1] + 2 + Math.sqrt(stops[i] - stops[i - 1]));
  const scale = (WIDTH - LABEL - 14) / (xs.at(-1) || 1), at = new Map(stops.map((s, i) => [s, 4 + xs[i] * scale]));
  return (position) => at.get(position);
}
