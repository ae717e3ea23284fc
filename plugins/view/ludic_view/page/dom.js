// Builds elements and formats values. Model output is hostile: text only ever becomes a text node, nothing is parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

/** el("div.card", {onclick, css: {width: "3px"}, title}, "text", child, [children], null) */
export function el(tag, props = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  return filled(document.createElement(name || "div"), classes, props, children);
}

export function svg(tag, props = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  return filled(document.createElementNS(SVG, name), classes, props, children);
}

function filled(node, classes, props, children) {
  if (classes.length) node.classList.add(...classes);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "css") Object.assign(node.style, value); // CSSOM: the policy forbids style attributes
    else if (key === "class") node.classList.add(...value.split(" ").filter(Boolean));
    else if (key === "data") Object.assign(node.dataset, value);
    else if (key === "value") node.value = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

// --- states ---

export function loading(what = "Loading") {
  return el("div.state", { role: "status" }, el("div.spinner", { "aria-hidden": "true" }), el("p", {}, `${what} …`));
}

export function empty(title, detail) {
  return el("div.state", {}, el("div.glyph", { "aria-hidden": "true" }, "∅"), el("h2", {}, title), detail ? el("p", {}, detail) : null);
}

export function failed(error, retry) {
  return el("div.state.error", { role: "alert" }, el("div.glyph", { "aria-hidden": "true" }, "!"), el("h2", {}, "This could not be shown"),
    el("p", {}, error.message || String(error)), retry ? el("button.button", { onclick: retry }, "Try again") : null);
}

// --- values ---

export function num(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (typeof x !== "number") return String(x);
  if (x === 0) return "0"; // and not −0
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return minus(x.toLocaleString("en-US"));
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return minus(x.toExponential(1).replace("e+", "e"));
  return minus(String(Number(x.toPrecision(size >= 100 ? Math.max(digits, 4) : digits))));
}

export function signed(x, digits = 3) {
  return typeof x === "number" && x > 0 ? `+${num(x, digits)}` : num(x, digits);
}

function minus(text) {
  return text.replaceAll("-", "−");
}

/** A name that is cut before its end where there is no room: names that begin alike still differ. */
export function named(name) {
  const text = String(name ?? "–");
  return el("span.named", { title: text }, el("span", {}, text.slice(0, -10)), el("span", {}, text.slice(-10)));
}

export function count(n, one, many = `${one}s`) {
  return `${num(n)} ${n === 1 ? one : many}`;
}

export function seconds(s) {
  if (s === null || s === undefined || Number.isNaN(s)) return "–";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 90) return `${num(s)} s`;
  if (s < 5400) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
}

export function ago(unix) {
  if (!unix) return "–";
  const s = Math.max(0, Date.now() / 1000 - unix);
  if (s < 60) return "just now";
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  return new Date(unix * 1000).toISOString().slice(0, 10);
}

// --- small parts that several views show ---

/** A reward with its sign as a mark as well as a colour. */
export function reward(x, extra = {}) {
  const kind = x === null || x === undefined ? "none" : x > 0 ? "positive" : x < 0 ? "negative" : "zero";
  return el(`span.reward.${kind}`, { title: `reward ${num(x, 6)}`, ...extra }, signed(x));
}

export function link(href, props = {}, ...children) {
  return el("a", { href, ...props }, ...children);
}

/** One choice of several, as a row of buttons. */
export function segmented(label, choices, chosen, choose) {
  return el("div.segmented", { role: "group", "aria-label": label }, choices.map(([value, text, title]) =>
    el("button", { type: "button", "aria-pressed": String(value === chosen), title, onclick: () => choose(value) }, text)));
}

export function facts(pairs) {
  return el("dl.facts", {}, pairs.filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

export function debounced(ms, call) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...args), ms);
  };
}

/** Lines of JSON, for values that no view draws. */
export function json(value) {
  return el("pre.json", { tabindex: "0" }, JSON.stringify(value, null, 2));
}

/** A text as it is; in a fixed width where its columns matter: boards, tables, code. */
export function prose(text) {
  const hasColumns = /(^|\n)( {2,}|\t)\S|\S {3,}\S|[\u2500-\u257f]|```/.test(text);
  return el(`div.text${hasColumns ? ".fixed" : ""}`, {}, text);
}

/** The text of a message's content, which may be a list of parts. */
export function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => (typeof part === "string" ? part : pictureOf(part) ? "[picture]" : part?.text ?? JSON.stringify(part))).join("\n");
  return JSON.stringify(content, null, 2);
}

/** The data URL of a part that is a picture, else null. */
function pictureOf(part) {
  const url = part?.type === "image_url" ? part.image_url?.url : null;
  return typeof url === "string" && /^data:image\/(png|jpeg);base64,/.test(url) ? url : null;
}

/** A message's content as nodes: its texts, and its pictures in their places. */
export function contentOf(content) {
  if (!Array.isArray(content)) return prose(textOf(content));
  return content.map((part) => (pictureOf(part) ? el("img.picture", { src: pictureOf(part), alt: "picture in the prompt" }) : prose(textOf([part]))));
}
