// Colour scales that colour-blind people can read, in light and dark: blue–orange for signed values, violet–green–yellow for
// sizes, Okabe and Ito's set for kinds. A sign or a class is never shown by colour alone: negative tokens are underlined with
// dots, positive ones with a line.

import { el, num, signed } from "./dom.js";

const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const BLUE = { light: [31, 99, 201], dark: [86, 156, 255] };
const ORANGE = { light: [222, 110, 8], dark: [255, 152, 56] };
const KINDS = { light: ["#0072b2", "#d55e00", "#009e73", "#b0588c", "#8a6d00", "#3a86c8", "#555b66"], dark: ["#56b4e9", "#ff9f43", "#2fd0a0", "#e69fcb", "#f0e442", "#8ec5ff", "#b8bec9"] };

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function kindColor(index) {
  const colors = KINDS[isDark() ? "dark" : "light"];
  return colors[((index % colors.length) + colors.length) % colors.length];
}

const rgba = ([r, g, b], alpha = 1) => `rgba(${Math.round(r)}, ${Math.round(g)}, ${Math.round(b)}, ${alpha.toFixed(3)})`;

/** Blue above zero, orange below; t in [-1, 1]. */
export function diverging(t) {
  const strength = Math.min(1, Math.abs(t));
  const color = (t >= 0 ? BLUE : ORANGE)[isDark() ? "dark" : "light"];
  return { background: rgba(color, strength === 0 ? 0 : 0.08 + 0.47 * strength), ink: "" };
}

/** Fades in from the page's background; t in [0, 1]. */
export function sequential(t) {
  const at = Math.min(1, Math.max(0, t));
  const place = (isDark() ? 0.15 + 0.85 * at : 1 - 0.95 * at) * (VIRIDIS.length - 1);
  const i = Math.min(VIRIDIS.length - 2, Math.floor(place));
  const mixed = VIRIDIS[i].map((c, k) => c + (VIRIDIS[i + 1][k] - c) * (place - i));
  const alpha = Math.min(0.92, at * 3);
  const bright = (0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2]) / 255;
  return { background: rgba(mixed, alpha), ink: alpha < 0.45 ? "" : bright > 0.55 ? "#111" : "#fff" };
}

const logRatio = (t, i) => (present(t.trainer_logprob, i) && present(t.logprob, i) ? t.trainer_logprob[i] - t.logprob[i] : null);
const present = (column, i) => column && column[i] !== null && column[i] !== undefined;
const column = (name) => (t, i) => (present(t[name], i) ? t[name][i] : null);

/** What tokens can be coloured by: how to read the value, and what it means. */
export const COLORINGS = {
  advantage: { label: "Advantage", kind: "diverging", value: column("advantage"), about: "The weight of the token in the loss: blue makes it more likely, orange less." },
  gradient: { label: "Push", kind: "diverging", value: column("gradient"), about: "What the update did to the token's log-prob: the advantage after clipping, masks and corrections." },
  logprob: { label: "Log-prob", kind: "sequential", value: (t, i) => (present(t.logprob, i) ? -t.logprob[i] : null), show: (v) => num(-v), cap: 6, about: "How surprising the token was to the sampler: −log p." },
  entropy: { label: "Entropy", kind: "sequential", value: column("entropy"), about: "How undecided the policy was before this token, in nats." },
  ratio: { label: "Ratio", kind: "diverging", value: (t, i) => (present(t.ratio, i) ? Math.log(t.ratio[i]) : null), show: (v) => num(Math.exp(v)), floor: 0.02, about: "Policy ÷ sampler at the update, on a log scale; 1 has no colour." },
  mismatch: { label: "Mismatch", kind: "sequential", value: (t, i) => (logRatio(t, i) === null ? null : Math.abs(logRatio(t, i))), floor: 0.05, about: "|log-prob of the trainer − of the sampler| for the same token." },
  version: { label: "Version", kind: "kinds", value: column("version"), about: "Which weights sampled the token." },
  mask: { label: "Mask", kind: "mask", value: (t, i) => (present(t.mask, i) ? t.mask[i] + (present(t.clipped, i) ? t.clipped[i] : 0) : null), about: "Trained, trained but clipped, or not trained." },
  none: { label: "Plain", kind: "none", value: () => null, about: "No colour." },
};

/** The range of a colouring over several calls: the 98th percentile of |value|, so that one outlier does not wash out the rest. */
export function rangeOf(coloring, calls) {
  const values = [];
  for (const tokens of calls) for (let i = 0; i < tokens.id.length; i++) {
    const v = coloring.value(tokens, i);
    if (v !== null && Number.isFinite(v)) values.push(Math.abs(v));
  }
  if (!values.length) return null;
  values.sort((a, b) => a - b);
  const most = values[Math.min(values.length - 1, Math.floor(values.length * 0.98))];
  return Math.max(coloring.floor || 0.01, Math.min(most, coloring.cap || Infinity));
}

/** From a value to background, ink and class, in some hundred shades that are computed once: a rollout may have 30,000 tokens. */
export function painter(coloring, range) {
  const known = new Map(), isScale = coloring.kind === "diverging" || coloring.kind === "sequential";
  return (value) => {
    const shade = isScale && value !== null && range ? Math.round(Math.max(-1, Math.min(1, value / range)) * 64) : value;
    if (!known.has(shade)) known.set(shade, tokenColor(coloring, isScale && shade !== null && range ? (shade / 64) * range : shade, range));
    return known.get(shade);
  };
}

/** Background, ink and class of one token. */
function tokenColor(coloring, value, range) {
  if (coloring.kind === "none") return { background: "", ink: "", mark: "" };
  if (value === null || range === null) return { background: "", ink: "", mark: "unknown" };
  if (coloring.kind === "diverging") return { ...diverging(value / range), mark: Math.abs(value) < 1e-9 ? "" : value > 0 ? "plus" : "minus" };
  if (coloring.kind === "sequential") return { ...sequential(value / range), mark: "" };
  if (coloring.kind === "kinds") return { background: `color-mix(in srgb, ${kindColor(value)} 30%, transparent)`, ink: "", mark: "" };
  return { background: "", ink: "", mark: ["untrained", "trained", "clipped"][value] || "" };
}

export function legend(coloring, range, values) {
  const swatch = (color, cls = "") => el(`span.swatch${cls ? `.${cls}` : ""}`, { css: { backgroundColor: color.background || "" } });
  const show = coloring.show || num;
  let row = [];
  if (coloring.kind === "none") row = [];
  else if (range === null) row = [el("span.muted", {}, "not recorded: train with --save-tokens all")];
  else if (coloring.kind === "diverging") row = [el("span", {}, coloring.show ? show(-range) : signed(-range)), ...[-1, -0.6, -0.25, 0, 0.25, 0.6, 1].map((t) => swatch(diverging(t), t < 0 ? "minus" : t > 0 ? "plus" : "")), el("span", {}, coloring.show ? show(range) : signed(range))];
  else if (coloring.kind === "sequential") row = [el("span", {}, show(0)), ...[0.05, 0.2, 0.4, 0.6, 0.8, 1].map((t) => swatch(sequential(t))), el("span", {}, `${show(range)}${coloring.cap ? " or less" : " or more"}`)];
  else if (coloring.kind === "kinds") row = [...new Set(values)].filter((v) => v !== null).sort((a, b) => a - b).slice(0, 7).flatMap((v) => [swatch(tokenColor(coloring, v, 1)), el("span", {}, `v${v}`)]);
  else row = ["trained", "clipped", "untrained"].flatMap((name) => [swatch({}, name), el("span", {}, name)]);
  return el("div.legend", {}, el("div.scale", {}, row), el("p.muted", {}, coloring.about));
}
