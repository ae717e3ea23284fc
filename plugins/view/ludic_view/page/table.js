// A table of any length: only the rows in sight exist. Rows are fetched in pages as they come into sight.

import { el, fill, num } from "./dom.js";

const ROW = 36, PAGE = 100;

export class VirtualTable {
  /** columns: [{title, width, cell(row), className, sort}]; fetchPage(offset, limit) -> {total, rows}; href(row) */
  constructor({ label, columns, fetchPage, href, sort = null, onSort = null, onTotal = null, emptyText = "Nothing matches." }) {
    Object.assign(this, { columns, fetchPage, href, onTotal, emptyText });
    this.rows = new Map();
    this.pages = new Map();
    this.shown = new Map();
    this.total = null;
    this.at = 0;
    this.generation = 0;
    this.spacer = el("div.spacer");
    this.window = el("div.window");
    this.note = el("div.note", { role: "status" });
    this.body = el("div.rows", { role: "rowgroup", tabindex: "0", "aria-label": label, onscroll: () => this.schedule(), onkeydown: (e) => this.key(e) }, this.spacer, this.window, this.note);
    const template = columns.map((c) => c.width || "1fr").join(" ");
    this.head = el("div.row.head", { role: "row", css: { gridTemplateColumns: template } }, columns.map((c) => el(`div${c.className ? `.${c.className}` : ""}`, { role: "columnheader" },
      c.sort && onSort ? el("button.sort", { type: "button", onclick: () => onSort(c.sort) }, c.title, el("span", { "aria-hidden": "true" }, sort === c.sort ? " ↑" : sort === `-${c.sort}` ? " ↓" : "")) : c.title)));
    this.template = template;
    this.node = el("div.table", { role: "table", "aria-label": label }, this.head, this.body);
    new ResizeObserver(() => this.schedule()).observe(this.body);
    this.reload();
  }

  /** Reads again what is in sight; the old rows stay until the new ones are there, so nothing jumps. */
  async reload() {
    const generation = ++this.generation;
    const first = Math.floor(this.body.scrollTop / ROW / PAGE) * PAGE;
    const old = this.rows;
    try {
      const answer = await this.fetchPage(first, PAGE);
      if (generation !== this.generation) return;
      this.rows = new Map();
      this.pages = new Map([[first, true]]);
      this.accept(first, answer);
    } catch (error) {
      if (error.name === "AbortError" || generation !== this.generation) return;
      if (!old.size) this.note.textContent = error.message;
    }
  }

  accept(offset, { total, rows }) {
    this.shown = new Map();
    rows.forEach((row, i) => this.rows.set(offset + i, row));
    const isNew = total !== this.total;
    this.total = total;
    this.spacer.style.height = `${total * ROW}px`;
    this.note.textContent = total ? "" : this.emptyText;
    this.node.setAttribute("aria-rowcount", String(total));
    this.at = Math.min(this.at, Math.max(0, total - 1));
    if (isNew && this.onTotal) this.onTotal(total);
    this.draw();
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  draw() {
    if (!this.total) { fill(this.window); return; }
    const first = Math.max(0, Math.floor(this.body.scrollTop / ROW) - 5);
    const last = Math.min(this.total, Math.ceil((this.body.scrollTop + this.body.clientHeight) / ROW) + 5);
    for (let page = Math.floor(first / PAGE) * PAGE; page < last; page += PAGE) this.load(page);
    this.head.style.paddingRight = `${18 + this.body.offsetWidth - this.body.clientWidth}px`; // the width of the scroll bar
    const shown = new Map();
    for (let i = first; i < last; i++) {
      const row = this.rows.get(i), old = this.shown.get(i); // a row that is still in sight is kept
      shown.set(i, old && old.row === row && old.isAt === (i === this.at) ? old : { row, isAt: i === this.at, node: this.row(i) });
    }
    this.shown = shown;
    this.window.style.transform = `translateY(${first * ROW}px)`;
    this.put([...shown.values()].map((one) => one.node));
  }

  /** Makes these the children of the window and moves only those that are not in their place. */
  put(nodes) {
    const wanted = new Set(nodes);
    for (const child of [...this.window.children]) if (!wanted.has(child)) child.remove();
    let next = null;
    for (const node of nodes.reverse()) {
      if (node.parentNode !== this.window || node.nextSibling !== next) this.window.insertBefore(node, next);
      next = node;
    }
  }

  async load(offset) {
    if (this.pages.has(offset)) return;
    this.pages.set(offset, true);
    const generation = this.generation;
    try {
      const answer = await this.fetchPage(offset, PAGE);
      if (generation === this.generation) this.accept(offset, answer);
    } catch (error) {
      if (generation !== this.generation) return;
      this.pages.delete(offset);
      if (error.name !== "AbortError") this.note.textContent = error.message;
    }
  }

  row(i) {
    const row = this.rows.get(i), chosen = i === this.at ? ".at" : "";
    if (!row) return el(`div.row.pending${chosen}`, { role: "row", css: { gridTemplateColumns: this.template } }, el("div", { role: "cell" }, num(i + 1)));
    return el(`a.row${chosen}`, { role: "row", href: this.href(row), tabindex: "-1", "aria-rowindex": String(i + 1), css: { gridTemplateColumns: this.template } },
      this.columns.map((c) => el(`div${c.className ? `.${c.className}` : ""}`, { role: "cell" }, c.cell(row))));
  }

  // --- keyboard ---

  key(event) {
    const jumps = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity };
    if (event.key in jumps) this.move(jumps[event.key]);
    else if (event.key === "Enter" && event.target === this.body) this.open();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  move(delta) {
    if (!this.total) return;
    this.at = Math.max(0, Math.min(this.total - 1, this.at + delta));
    const top = this.at * ROW, view = this.body;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + ROW > view.scrollTop + view.clientHeight) view.scrollTop = top + ROW - view.clientHeight;
    if (document.activeElement !== view) view.focus({ preventScroll: true });
    this.draw();
  }

  open() {
    const row = this.rows.get(this.at);
    if (row) location.hash = this.href(row);
  }
}
