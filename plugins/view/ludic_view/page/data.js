// Where the page's data come from: the server's JSON API, or the answers inside an exported file.

const embedded = document.getElementById("answers");

/** The answers of an exported file by path; null if a server answers. */
export const stored = embedded ? JSON.parse(embedded.textContent) : null;

export const runUrl = (run, rest = "") => `api/runs/${encodeURIComponent(run)}${rest}`;
export const runHash = (run, rest = "") => `#/run/${encodeURIComponent(run)}${rest}`;

export function query(params) {
  const given = Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== "" && v !== false);
  return given.length ? `?${new URLSearchParams(given.map(([k, v]) => [k, v === true ? "1" : String(v)]))}` : "";
}

/** Puts a view's settings into the address, so that it can be sent as a link; the view stays as it is. */
export function remember(params) {
  history.replaceState(null, "", location.hash.split("?")[0] + query(params));
}

let leaving = new AbortController();

/** Gives up what the view that is left still waits for: a browser has few connections, and the next view needs them. */
export function abandon() {
  leaving.abort();
  leaving = new AbortController();
}

export async function get(path, params = {}) {
  if (stored) return fromStored(path, params);
  let answer;
  try {
    answer = await fetch(path + query(params), { signal: leaving.signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `ludic view` still running?");
  }
  const body = await answer.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    return {};
  });
  if (!answer.ok) throw new Error(body.error?.message || `The server answered ${answer.status}.`);
  return body;
}

/** Calls back when the run's files change. Returns how to stop. */
export function listen(run, onEvent, onState) {
  if (stored) return () => {};
  const source = new EventSource(runUrl(run, "/events"));
  source.onopen = () => onState(true);
  source.onerror = () => onState(false);
  source.onmessage = (event) => {
    try {
      onEvent(JSON.parse(event.data));
    } catch {
      // a line that is not JSON tells nothing
    }
  };
  return () => source.close();
}

// --- an exported file: the few questions that have parameters are answered here, over the cards ---

function fromStored(path, params) {
  if (path.endsWith("/rollouts")) return rolloutsOf(stored[path].rollouts, params);
  if (path.endsWith("/groups")) return groupsOf(stored[path].groups, params);
  const answer = stored[path];
  if (answer) return answer;
  throw new Error("This is not in the exported file. Open the run with `ludic view`.");
}

function rolloutsOf(cards, p) {
  const text = (p.text || "").toLowerCase();
  const spreads = new Map();
  for (const c of cards) spreads.set(c.group, (spreads.get(c.group) || new Set()).add(c.reward));
  const chosen = cards.filter((c) =>
    (!p.step || c.step === Number(p.step)) && (!p.group || c.group === p.group) && (!p.task || c.task === p.task) &&
    (!p.stop || c.stop === p.stop) && (!p.failed || c.failure) && (!p.parse_error || c.parse_errors) &&
    (!p.zero_spread || spreads.get(c.group).size === 1) && (!text || `${c.preview} ${c.task}`.toLowerCase().includes(text)) &&
    (p.reward_min === undefined || p.reward_min === "" || c.reward >= Number(p.reward_min)) &&
    (p.reward_max === undefined || p.reward_max === "" || c.reward <= Number(p.reward_max)));
  const key = { reward: "reward", tokens: "tokens", time: "started_ns" }[(p.sort || "order").replace("-", "")];
  if (key) chosen.sort((a, b) => (String(p.sort).startsWith("-") ? b[key] - a[key] : a[key] - b[key]));
  const offset = Number(p.offset || 0);
  return { total: chosen.length, rollouts: chosen.slice(offset, offset + Number(p.limit || 100)), histogram: histogramOf(chosen.map((c) => c.reward)) };
}

function groupsOf(groups, p) {
  const chosen = groups.filter((g) => !p.step || g.step === Number(p.step));
  if (p.sort) chosen.sort((a, b) => (p.sort === "-spread" ? b.spread - a.spread : a.spread - b.spread));
  return { total: chosen.length, groups: chosen.slice(Number(p.offset || 0)) };
}

function histogramOf(values) {
  if (!values.length) return { edges: [], counts: [] };
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) return { edges: [low, high], counts: [values.length] };
  const counts = Array(10).fill(0);
  for (const v of values) counts[Math.min(9, Math.floor(((v - low) / (high - low)) * 10))] += 1;
  return { edges: counts.map((_, i) => low + ((high - low) * i) / 10).concat(high), counts };
}
