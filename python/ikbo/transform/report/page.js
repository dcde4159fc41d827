"use strict";
// The page: what is drawn, picked, found and listed.

const spec = JSON.parse(document.getElementById("spec").textContent);
const byId = (id) => document.getElementById(id);
const rowOf = new Map(spec.rows.map((row) => [row.name, row]));
const SIDES = { before: spec.before, after: spec.after };
const RATIOS = [1, 10, 70, 1000], MANY = 150, COSTLIEST = 20;
const open = new Set();
let picked = new Set(), hits = [], hit = -1;

const sizes = () => [Number(byId("users").value), Number(byId("candidates").value)];
const cost = (node) => evaluate(node[byId("measure").value], ...sizes());
const views = Object.fromEntries(Object.keys(SIDES).map((side) =>
  [side, new View(byId(side), (box) => pick(side, box))]));

function shortOp(op) {
  const parts = op.split(".");
  return (parts[0] === "aten" ? "" : parts[0] + ".") + (parts[1] ?? "");
}

function describe(box) {
  box.costs = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
  for (const node of box.nodes) box.costs[node.kind] += cost(node);
  box.cost = KINDS.reduce((sum, kind) => sum + box.costs[kind], 0);
  const [node] = box.nodes;
  const unit = byId("measure").value === "flops" ? "FLOP" : "B";
  const amount = box.cost ? `${short(box.cost)}${box.cost < 1e3 ? " " : ""}${unit}` : "";
  const kinds = new Set(box.nodes.map((each) => each.kind));
  box.kind = kinds.size === 1 ? node.kind : "";
  if (!box.cost) for (const kind of kinds) box.costs[kind] = 1;
  box.isBlocked = box.nodes.some((each) => rowOf.get(each.row)?.blocked.length);
  box.label = box.module ?? (node.op === "input" ? node.name : shortOp(node.op));
  box.sub = box.module ? `${box.nodes.length} operators ${amount}` : amount || node.shape;
  box.note = box.module ? `module ${box.module}` : `${node.name} ${node.op} ${node.shape}`;
}

function draw() {
  for (const [side, nodes] of Object.entries(SIDES)) {
    const boxes = boxesOf(nodes, open);
    boxes.forEach(describe);
    views[side].draw(boxes);
    const total = nodes.reduce((sum, node) => sum + cost(node), 0);
    const unit = byId("measure").value === "flops" ? "FLOP" : "byte";
    const text = `${nodes.length} operators and inputs, ${short(total)}${unit}`;
    byId(side).querySelector("small").textContent = text;
  }
  mark();
}

function redraw() {
  draw();
  for (const view of Object.values(views)) view.fit();
}

// Picking

const rowsOf = (box) => box.nodes.map((node) => node.row || node.name);

function mark() {
  for (const view of Object.values(views)) {
    view.mark((box) => rowsOf(box).some((row) => picked.has(row)));
  }
}

function pick(side, box) {
  if (box.module) {
    open.add(box.module);
    return redraw();
  }
  picked = new Set(rowsOf(box));
  mark();
  const other = side === "before" ? views.after : views.before;
  const counterpart = other.boxes.find((each) => rowsOf(each).some((row) => picked.has(row)));
  if (counterpart) other.centre(counterpart);
  show(box.nodes[0]);
}

function show(node) {
  const row = rowOf.get(node.row), items = [];
  const add = (name, value) => value && items.push([name, value]);
  add("operator", node.op);
  add("shape", node.shape);
  add("computed from", { user: "users", candidate: "candidates", mixed: "both",
    constant: "no input" }[node.kind]);
  add("module", node.module);
  const change = (what) => {
    const [was, is] = ["before", "after"].map((when) => row[`${what}_${when}`]);
    const at = (text) => short(evaluate(text, ...sizes()));
    return `${was} (${at(was)}) to ${is} (${at(is)})`;
  };
  if (row) {
    add("source", row.source);
    add("runs now at", row.batch.split("+").filter(Boolean).map((symbol) =>
      `${symbol} (1 to ${symbol === "U" ? spec.max_users : spec.max_candidates})`).join(", "));
    add("done by", row.emitted.join(", "));
    for (const kernel of row.kernels) {
      const range = `U ${kernel.users.join(" to ")}, B ${kernel.candidates.join(" to ")}`;
      add(`kernel of ${kernel.op}`, `${kernel.kernel}: ${range}`);
    }
    add("FLOPs", change("flops"));
    add("bytes", change("bytes"));
    row.blocked.forEach((why, i) => { add("blocked", why); add("what to change", row.advice[i]); });
  }
  const list = document.createElement("dl");
  for (const [name, value] of items) {
    list.appendChild(document.createElement("dt")).textContent = name;
    list.appendChild(document.createElement("dd")).textContent = value;
  }
  const title = document.createElement("h2");
  title.textContent = node.name;
  byId("details").replaceChildren(title, list, ...closers(node.module));
}

// Buttons that close the modules around a picked operator.
function closers(module) {
  return prefixes(module).reverse().map((path) => {
    const button = document.createElement("button");
    button.textContent = `close ${path}`;
    button.onclick = () => {
      for (const other of [...open]) {
        if (other === path || other.startsWith(path + ".")) open.delete(other);
      }
      redraw();
    };
    return button;
  });
}

// Finding

function textOf(node) {
  return [node.name, node.op, node.module, rowOf.get(node.row)?.source].join(" ").toLowerCase();
}

function search(isNext) {
  const wanted = byId("search").value.trim().toLowerCase();
  const all = Object.values(SIDES).flat();
  const found = wanted ? all.filter((node) => textOf(node).includes(wanted)) : [];
  if (found.length && found.length <= MANY) {
    const before = open.size;
    for (const node of found) for (const path of prefixes(node.module)) open.add(path);
    if (open.size > before) draw();
  }
  const names = new Set(found);
  hits = [];
  for (const view of Object.values(views)) {
    view.svg.classList.toggle("searching", Boolean(wanted));
    for (const box of view.boxes) {
      const isHit = box.nodes.some((node) => names.has(node));
      box.group.classList.toggle("match", isHit);
      if (isHit) hits.push([view, box]);
    }
  }
  hit = isNext ? (hit + 1) % Math.max(hits.length, 1) : 0;
  if (hits.length) hits[hit][0].centre(hits[hit][1]);
  byId("found").textContent = wanted ? `${found.length} found` : "";
}

// Tables

function fill(table, head, lines) {
  table.replaceChildren();
  const add = (parent, tag, { text, kind }) => {
    const cell = parent.appendChild(document.createElement(tag));
    cell.textContent = text;
    if (kind) cell.className = kind;
  };
  const top = table.createTHead().insertRow();
  head.forEach((cell) => add(top, "th", cell));
  const body = table.createTBody();
  for (const line of lines) {
    const row = body.insertRow();
    line.forEach((cell, i) => add(row, "td", { kind: head[i].kind, text: cell }));
  }
}

const COSTS = ["flops_before", "flops_after", "bytes_before", "bytes_after"];
const AMOUNTS = ["FLOP before", "after", "bytes before", "after"];
const numbers = AMOUNTS.map((text) => ({ text, kind: "number" }));
const total = (field, at) => spec.rows.reduce((sum, row) => sum + evaluate(row[field], ...at), 0);

function tables() {
  const at = RATIOS.map((ratio) => {
    const users = Math.max(1, Math.min(spec.max_users, Math.floor(spec.max_candidates / ratio), 8));
    return [users, users * ratio];
  });
  fill(byId("totals").querySelector("table"),
    [...["ratio", "U", "B"].map((text) => ({ text, kind: "number" })), ...numbers],
    at.map((pair, i) => [RATIOS[i], ...pair, ...COSTS.map((field) => short(total(field, pair)))]));
  const now = sizes(), least = Object.fromEntries(COSTS.map((f) => [f, total(f, now) / 100]));
  const weigh = (row) => Math.max(...COSTS.map((f) =>
    least[f] ? evaluate(row[f], ...now) / least[f] : 0));
  const shown = [...spec.rows].sort((a, b) => weigh(b) - weigh(a)).filter((row, i) =>
    byId("all").checked || row.blocked.length || i < COSTLIEST || weigh(row) >= 1);
  fill(byId("rows").querySelector("table"),
    [{ text: "operator" }, { text: "source" }, { text: "at" }, ...numbers, { text: "kernels" },
      { text: "blocked", kind: "why" }, { text: "what to change", kind: "change" }],
    shown.map((row) => [row.name, row.source, row.batch || "ahead of time",
      ...COSTS.map((field) => short(evaluate(row[field], ...now))),
      [...new Set(row.kernels.map((kernel) => kernel.kernel))].join(", "),
      row.blocked.join("; "), row.advice.join(" ")]));
}

// Start

function start() {
  byId("variants").textContent = spec.variants.map(({ form, users, candidates }) =>
    `${form} for U ${users.join(" to ")}, B ${candidates.join(" to ")}`).join("; ") +
    (spec.measured.length ? `; as measured at ${spec.measured.length} sizes` : "");
  byId("users").value = spec.num_users;
  byId("users").max = spec.max_users;
  byId("candidates").value = spec.num_candidates;
  byId("candidates").max = spec.max_candidates;
  const all = Object.values(SIDES).flat();
  const deepest = Math.max(0, ...all.map((node) => prefixes(node.module).length));
  let depth = deepest;
  const count = (level) => Math.max(...Object.values(SIDES).map((nodes) =>
    boxesOf(nodes, openedTo(nodes, level)).length));
  while (depth > 0 && count(depth) > MANY) depth--;
  for (let level = 0; level <= deepest; level++) {
    const text = level === deepest ? "all open" : level ? `${level} level${level > 1 ? "s" : ""} open` : "all closed";
    byId("depth").append(new Option(text, level, false, level === depth));
  }
  const setDepth = () => {
    open.clear();
    for (const path of openedTo(all, Number(byId("depth").value))) open.add(path);
    redraw();
  };
  byId("depth").onchange = setDepth;
  for (const id of ["users", "candidates", "measure"]) {
    byId(id).onchange = () => { draw(); tables(); };
  }
  byId("search").oninput = () => search(false);
  byId("search").onkeydown = (event) => { if (event.key === "Enter") search(true); };
  byId("all").onchange = tables;
  setDepth();
  tables();
}

start();
